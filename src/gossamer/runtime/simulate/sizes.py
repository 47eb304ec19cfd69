"""How large messages are on the wire, and that what is in them doesn't change on the way."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

from torch import Tensor

from gossamer.errors import RunFailed
from gossamer.messages import encode, freeze, wire_bytes
from gossamer.messages.tags import Message, Model, Payload

REMEMBERED_SIZES = 1000


class Sizes:
    """Bytes of messages; of the same tag, dtype and shape, all tensors have the same size."""

    def __init__(self) -> None:
        self._known: dict[Hashable, int] = {}

    def of(self, payload: Payload, tag: tuple[str | int, ...]) -> tuple[int, tuple[tuple[Tensor, int], ...]]:
        """Bytes on the wire, and the tensors that must not change any more."""
        vector = payload.parameters if type(payload) is Model and not payload.buffers.shape[0] else payload
        if type(vector) is Tensor and vector.is_contiguous():
            kind = (
                tag,
                vector.dtype,
                vector.shape,
            )  # a tensor and a model of only this tensor take as many bytes
            size = self._known.get(kind)
            if size is None:
                if len(self._known) > REMEMBERED_SIZES:
                    self._known.clear()
                size = self._known[kind] = wire_bytes(tag, encode(payload))
            return size, ((vector, vector._version),)
        encoded = encode(payload)
        return wire_bytes(tag, encoded), tuple((tensor, tensor._version) for tensor in encoded.buffers)


def check_unchanged(message: Message) -> None:
    """Fail where a tensor was written after its message was sent.

    Raises:
        RunFailed: naming the sender and the message.
    """
    if not message.unchanged():
        raise RunFailed(
            f"node {message.source}: a vector of message {message.tag} was modified in place after it was sent; what"
            " is in the store or in a message is immutable: compute a new vector",
            node=message.source,
        )


def own_copy(message: Message) -> Message:
    """A receiver's own message: containers are copied, tensors are shared and must not be written."""
    payload = message.payload
    if not isinstance(payload, dict | list):
        return message
    return replace(message, payload=freeze(payload, lambda tensor: True))
