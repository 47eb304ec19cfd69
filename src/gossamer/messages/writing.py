"""From a payload to what travels: :func:`encode` for a socket or a file, :func:`freeze` within a process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgpack
import torch
from torch import Tensor

from gossamer.messages.format import (
    CODED,
    CODES,
    DTYPES,
    MAX_DEPTH,
    MAX_DIMENSIONS,
    MAX_ITEMS,
    MAX_TENSORS,
    MODEL,
    PARAMETERS,
    PART,
    SHAPES,
    TENSOR,
    model_fault,
    part_fault,
)
from gossamer.messages.reading import Reader
from gossamer.messages.tags import Coded, Model, Part, Payload

_ACCEPTED = (
    "None, bool, int, float, str, bytes, a dense torch tensor, Part, Model, and lists and dicts of these"
)


@dataclass(frozen=True, eq=False)
class Encoded:
    """A payload as it travels.

    Args:
        structure: everything but the tensors' contents (msgpack).
        buffers: the tensors in the structure's order, contiguous, on the CPU; they may share memory with the
            payload's.
    """

    structure: bytes
    buffers: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of structure and buffers."""
        return len(self.structure) + sum(buffer.nbytes for buffer in self.buffers)


def encode(payload: Payload) -> Encoded:
    """The wire form of a payload; tensors that are contiguous and on the CPU are not copied.

    Raises:
        TypeError: for an object that can't travel; the message has its path inside the payload.
        ValueError: for an int beyond 64 bits, a part that contradicts itself, or a payload beyond the limits
            on depth, values and tensors.
    """
    bare = type(payload) is Model and type(payload.buffers) is Tensor and payload.buffers.shape == (0,)
    alone = payload.parameters if bare else payload
    if _is_plain(alone):
        buffer = alone if alone.is_contiguous() and not alone.requires_grad else _plain(alone).contiguous()
        return Encoded(_structure_of_one(alone.dtype, alone.shape, alone is not payload), (buffer,))
    structure, tensors = structure_of(payload)
    buffers = tuple(_plain(tensor).cpu().contiguous() for tensor in tensors)
    # Read as the receiver will, so that an index out of range is an error here, not a lost connection there.
    Reader(structure, buffers).whole()
    return Encoded(structure, buffers)


def _is_plain(payload: Payload) -> bool:
    return (
        type(payload) is Tensor
        and payload.device.type == "cpu"
        and payload.layout is torch.strided
        and payload.dtype in CODES
        and not payload.is_conj()
        and not payload.is_neg()
    )


@lru_cache(maxsize=1024)
def _structure_of_one(dtype: torch.dtype, shape: torch.Size, is_model: bool) -> bytes:
    """The structure of a payload that is one tensor, or a model without buffers: by far the most frequent ones."""
    tensor = torch.empty(shape, dtype=dtype)
    structure, _ = structure_of(Model(tensor) if is_model else tensor)
    return structure


def freeze(payload: Payload, keep: Callable[[Tensor], bool]) -> Payload:
    """What the receiver would get: containers copied (tuples as lists), tensors detached and cloned.

    The clones are contiguous and on their tensor's device.

    Args:
        payload: what is sent.
        keep: whether a tensor can't change any more and may be handed over as it is.

    Raises:
        TypeError, ValueError: as for :func:`encode`.
    """

    if type(payload) is Tensor and keep(payload):
        return payload

    def tensor(item: Tensor) -> Tensor:
        return item if keep(item) else _plain(item).clone(memory_format=torch.contiguous_format)

    def part(item: Part, values: Tensor, where: Tensor) -> Part:
        return Part(values, where, item.size)

    # What a codec has made is nobody else's: it need not be copied.
    return _Walk(tensor, part, Model, lambda coded, content: coded).value(payload, ())


def structure_of(payload: Payload) -> tuple[bytes, list[Tensor]]:
    """A payload's structure, and its tensors as they are: nothing is copied, whatever device they are on."""
    tensors: list[Tensor] = []

    def tensor(item: Tensor) -> msgpack.ExtType:
        tensors.append(item)
        return msgpack.ExtType(TENSOR, SHAPES[item.dim()].pack(CODES[item.dtype], *item.shape))

    def part(item: Part, *inner: msgpack.ExtType) -> msgpack.ExtType:
        return msgpack.ExtType(PART, b"".join(map(msgpack.packb, (*inner, item.size))))

    def model(parameters: msgpack.ExtType, buffers: msgpack.ExtType | None = None) -> msgpack.ExtType:
        if buffers is not None:
            return msgpack.ExtType(MODEL, msgpack.packb(parameters) + msgpack.packb(buffers))
        if parameters.code == TENSOR:
            return msgpack.ExtType(PARAMETERS, parameters.data)
        return msgpack.ExtType(MODEL, msgpack.packb(parameters))

    def coded(item: Coded, content: Any) -> msgpack.ExtType:
        return msgpack.ExtType(CODED, msgpack.packb(content))

    return msgpack.packb(_Walk(tensor, part, model, coded).value(payload, ())), tensors


def _plain(tensor: Tensor) -> Tensor:
    """The tensor without gradient, and with conjugation and negation carried out, which torch does lazily."""
    return tensor.detach().resolve_conj().resolve_neg()


class _Walk:
    """One pass over a payload: checks every object, and rebuilds it with what is made of its tensors."""

    def __init__(
        self,
        tensor: Callable[[Tensor], Any],
        part: Callable[[Part, Any, Any], Any],
        model: Callable[..., Any],
        coded: Callable[[Coded, Any], Any],
    ) -> None:
        self._make_tensor, self._make_part, self._make_model = tensor, part, model
        self._make_coded = coded
        self._items = 0
        self._tensors = 0

    def value(self, item: Any, path: tuple[str | int, ...]) -> Any:
        self._items += 1
        if self._items > MAX_ITEMS:
            raise ValueError(f"payload: more than {MAX_ITEMS} values; accepted: fewer, or a tensor of them")
        if isinstance(item, Tensor):
            return self._tensor(item, path)
        if item is None or isinstance(item, bool | bytes):
            return item
        # Subclasses (numpy.float64, enumerations) travel as what they are underneath.
        if isinstance(item, float):
            return float(item)
        if isinstance(item, int):
            if not -(2**63) <= item < 2**64:
                raise ValueError(f"{_show(path)}: {item} does not fit into 64 bits")
            return int(item)
        if isinstance(item, str):
            return _text(item, path)
        if isinstance(item, Model):
            return self._model(item, path)
        if isinstance(item, Part):
            return self._part(item, path)
        if isinstance(item, Coded):
            return self._coded(item, path)
        if not isinstance(item, list | tuple | dict):
            raise TypeError(f"{_show(path)}: {type(item).__name__} can't be sent; accepted: {_ACCEPTED}")
        if len(path) >= MAX_DEPTH:
            raise ValueError(f"{_show(path)}: nested deeper than {MAX_DEPTH} levels")
        if isinstance(item, dict):
            return {self._key(key, path): self.value(inner, (*path, key)) for key, inner in item.items()}
        return [self.value(inner, (*path, place)) for place, inner in enumerate(item)]

    def _key(self, key: Any, path: tuple[str | int, ...]) -> str | int:
        # No subclasses here: two keys that differ could become one.
        if type(key) is not str and type(key) is not int:
            raise TypeError(f"{_show(path)}: {type(key).__name__} {key!r} as a key; accepted: str and int")
        if type(key) is int and not -(2**63) <= key < 2**64:
            raise ValueError(f"{_show(path)}: key {key} does not fit into 64 bits")
        return _text(key, path) if type(key) is str else key

    def _tensor(self, item: Tensor, path: tuple[str | int, ...]) -> Any:
        self._tensors += 1
        if self._tensors > MAX_TENSORS:
            raise ValueError(
                f"payload: more than {MAX_TENSORS} tensors; accepted: fewer, joined into larger ones"
            )
        if item.layout is not torch.strided or item.is_meta:
            what = "meta" if item.is_meta else str(item.layout)
            raise TypeError(f"{_show(path)}: a {what} tensor can't be sent; accepted: {_ACCEPTED}")
        if item.dtype not in CODES:
            names = ", ".join(map(str, DTYPES))
            raise TypeError(f"{_show(path)}: a tensor of {item.dtype} can't be sent; accepted: {names}")
        if item.dim() > MAX_DIMENSIONS:
            raise ValueError(
                f"{_show(path)}: a tensor of {item.dim()} dimensions; accepted: at most {MAX_DIMENSIONS}"
            )
        return self._make_tensor(item)

    def _model(self, item: Model, path: tuple[str | int, ...]) -> Any:
        if fault := model_fault(*item):
            raise ValueError(f"{_show(path)}: {fault}")
        vector: Any = item.parameters
        inside = (*path, "parameters")
        if isinstance(vector, Part):
            parameters = self._part(vector, inside)
        elif isinstance(vector, Coded):
            parameters = self._coded(vector, inside)
        else:
            parameters = self._tensor(vector, inside)
        if not item.buffers.shape[0]:
            return self._make_model(parameters)
        return self._make_model(parameters, self._tensor(item.buffers, (*path, "buffers")))

    def _part(self, item: Part, path: tuple[str | int, ...]) -> Any:
        if fault := part_fault(item.values, item.where, item.size):
            raise ValueError(f"{_show(path)}: {fault}")
        values = self._tensor(item.values, (*path, "values"))
        return self._make_part(item, values, self._tensor(item.where, (*path, "where")))

    def _coded(self, item: Coded, path: tuple[str | int, ...]) -> Any:
        return self._make_coded(item, self.value(item.payload, (*path, "payload")))


def _text(item: str, path: tuple[str | int, ...]) -> str:
    if not item.isascii():
        try:
            item.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{_show(path)}: {item!r} has lone surrogates, which UTF-8 can't hold") from None
    return str.__str__(item)


def _show(path: tuple[str | int, ...]) -> str:
    return "payload" + "".join(f"[{key!r}]" for key in path)
