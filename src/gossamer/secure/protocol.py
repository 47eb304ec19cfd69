"""The protocol of secure aggregation: a node learns the weighted sum of its in-neighbours' models, and
nothing else.

Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017. Every
receiver i plays the role of the paper's server, and its senders j, the in-neighbours, play that of the users.
Before training in round r, or only once if the graph is static and no node can be lost::

    keys      j -> i   the public key c_j
    roster    i -> j   rank, weight W_ik and public key of each sender k of i

The words replace the model, where fix() returns fixed-point numbers and PRG_jk is a stream whose key is
derived from c_j, c_k, i and r::

    words     j -> i   y_j = fix(W_ij x_j) + sum_{k > j} PRG_jk - sum_{k < j} PRG_jk    mod 2^ring_bits

The masks cancel in sum_j y_j. If a sender is lost, they do not, and the receiver keeps its own model in that
round (``drop_outs: skip``). With ``drop_outs: recover``, every sender draws two secrets for each receiver and
round: a for a key pair s, from which the masks are then derived, and b for a mask of its own. It gives its
co-senders shares of both (Shamir); more than half of the shares determine a secret::

    keys      j -> i   also the public key s_j
    shares    j -> i   for each k: its shares of a_j and b_j, which only k can open
    relay     i -> k   for each j: these shares
    words     j -> i   y_j = fix(W_ij x_j) + PRG(b_j) + sum_{k > j} PRG_jk - sum_{k < j} PRG_jk
    survivors i -> j   the ranks whose words have arrived
    unmask    j -> i   its share of b_k for each survivor k, and of a_k for each of the others

A node reveals its shares only once, for one secret of each sender, and more than half of the senders have to
do so. No receiver can therefore uncover both secrets, and the words of a sender that was declared lost stay
masked by its b, even if they arrive later. Keys c are signed (:meth:`gossamer.node.host.Host.sign`). A
sender checks its own row of the roster, and shares can be opened only by a node with the same roster, so the
keys s are authentic too.

All words end with some masked zeros. Their sum shows whether the masks have cancelled, so a sum of words that
do not belong together is never mixed.

In a simulation, secrets are drawn from the experiment's seed: two equal runs have equal masks, which are secret only
within the simulation.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from gossamer.messages import encode
from gossamer.messages.tags import Message, Model, Part, Payload, PrivateTag
from gossamer.secure import masking
from gossamer.secure.masking import SECRET_BYTES, SHARE_BYTES, IntegerRing, KeyPair

if TYPE_CHECKING:
    from gossamer.node import Node
    from gossamer.node.host import Host
    from gossamer.node.setup import Setup

TAG = "~secure"
_SIGNED = {4: torch.int32, 8: torch.int64}
CHECKED = 4
"""Number of masked zeros at the end of the words."""
MIN_NODES = 2
"""Minimum number of senders of a receiver. The sum of a single model would reveal it."""


def _tag(*parts: str | int) -> PrivateTag:
    return PrivateTag((TAG, *parts))


def threshold(senders: int) -> int:
    """The number of senders that can uncover another sender's secret: more than half, so that a receiver can't
    find two disjoint groups."""
    return senders // 2 + 1


@dataclass
class _SenderState:
    """A sender's state for one receiver's sum, until it has helped to unmask it.

    Attributes:
        bound: absolute values below it can be summed without overflow.
        senders: all senders on the roster, ascending.
        keys: the key of the mask shared with each other sender.
        context: the digest of its roster. Shares can be opened only by a node with the same roster.
        sealing: the key that seals shares between this node and each other sender.
        sent: whether words were sent to this receiver.
        own: b, the secret of its own mask; empty without one.
        shares: its shares of a and b from each sender that gave some, including itself."""

    round: int
    weight: float
    bound: float
    senders: Sequence[int]
    keys: dict[int, bytes]
    context: bytes
    sealing: dict[int, bytes] = field(default_factory=dict)
    sent: bool = False
    own: bytes = b""
    shares: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)


@dataclass
class _ReceiverState:
    """A receiver's state for the sum of its current round: the weights and public keys s of the roster, and
    the senders that agreed on masks."""

    senders: Sequence[int] = ()
    weights: Mapping[int, float] = field(default_factory=dict)
    public: Mapping[int, bytes] = field(default_factory=dict)


class MaskingProtocol:
    """One node's role in the sums of its neighbours and in its own sum.

    Keys and secrets exist only here and in messages, never in checkpoints. A restarted node gets new ones."""

    def __init__(self, setup: Setup, node: Node, host: Host) -> None:
        experiment = setup.experiment
        settings, gather = experiment.secure_aggregation, experiment.gather
        assert settings is not None
        self._settings, self._codec, self._node, self._host = settings, experiment.codec, node, host
        self._recovers = settings.drop_outs == "recover"
        # A sender waits for a receiver, while that receiver waits for its senders.
        self._wait_s = gather.timeout_s and 2 * gather.timeout_s
        nobody_lost = gather.timeout_s is None and gather.lost_peer == "fail" and not experiment.has_faults
        self._agrees_once = setup.topology.static_weights and nobody_lost and not self._recovers
        # Integer buffers are not shared: counters would reach the bound.
        shared = [np.arange(span.start, span.stop) for span in setup.layout.buffers if not span.integer]
        self._buffers = torch.from_numpy(np.concatenate([np.empty(0, np.int64), *shared]))
        self._ring = IntegerRing(settings.ring_bits, settings.fraction_bits)
        self._key = KeyPair(node.secret(SECRET_BYTES))
        self._signature = host.sign(_signed(self._key.public))
        self._agreed: dict[bytes, bytes] = {}  # shared secrets, by the other node's verified public key
        self._rosters: dict[int, Any] | None = None  # rosters by receiver, if they are valid for all rounds
        self._given: dict[int, _SenderState] = {}  # by receiver
        self._wanted = _ReceiverState()
        self._length: int | None = None  # length of the words that this node has sent
        checks = {
            "keys": self._keys_fit,
            "roster": self._roster_fits,
            "shares": self._shares_fit,
            "relay": self._relay_fits,
            "unmask": self._unmask_fits,
        }
        for name, check in checks.items():
            node.expect(_tag(name), check=check)
        node.expect((), check=self._words_fit)

    # --- what peers may send

    def _words_fit(self, message: Message) -> bool:
        """Whether these are words of the ring: as many as this node sends, or none."""
        words = _words(message.payload, self._ring.dtype)
        return len(words) in (0, self._length) or self._length is None

    def _keys_fit(self, message: Message) -> bool:
        """Whether these are a sender's keys. ValueError for keys that its co-senders would refuse."""
        key, signature, other = message.payload
        self._agree(message.source, key, signature)
        return bool(self._key.agree(other)) if self._recovers else other == b""

    def _roster_fits(self, message: Message) -> bool:
        """Whether this is None, or a row for each sender: rank, weight and keys."""
        return message.payload is None or all(
            [type(value) for value in row] == [int, float, bytes, bytes, bytes] for row in message.payload
        )

    def _shares_fit(self, message: Message) -> bool:
        """Whether these are sealed messages for each co-sender, or none if the sender has not agreed on
        masks."""
        others = self._wanted.public.keys() - {message.source}
        return message.payload is None or _are_bytes(message.payload, others)

    def _relay_fits(self, message: Message) -> bool:
        """Whether this is None, or the messages that co-senders have sealed for this node."""
        others = {*self._given[message.source].senders} - {self._node.rank}
        shares = message.payload
        return shares is None or (shares.keys() <= others and _are_bytes(shares, shares))

    def _unmask_fits(self, message: Message) -> bool:
        """Whether this is a share of one secret of each sender."""
        return _are_bytes(message.payload, {*self._wanted.senders}, SHARE_BYTES)

    # --- before a round

    async def begin_round(self, r: int) -> None:
        """Agree on masks with the co-senders of each receiver of this round, and relay messages between this
        node's own senders."""
        node = self._node
        if self._rosters is not None:
            for to, roster in self._rosters.items():
                self._join(to, r, roster, b"", None)
            return
        inward, outward = await node.neighbors(r, "in"), await node.neighbors(r, "out")
        secrets, pairs = {}, {}
        for to in outward if self._recovers else ():
            secrets[to] = node.secret(SECRET_BYTES), node.secret(SECRET_BYTES)
            pairs[to] = KeyPair(secrets[to][0])
        public = {to: pairs[to].public if pairs else b"" for to in outward}
        for to in outward:
            node.send(to, [self._key.public, self._signature, public[to]], _tag("keys", r))
        node.broadcast(inward, await self._roster(inward, r), _tag("roster", r))
        rosters = await node.gather(outward, _tag("roster", r), timeout=self._wait_s)
        joined = {}
        for to, roster in rosters.items():
            try:
                if self._join(to, r, roster, public[to], pairs.get(to)):
                    joined[to] = roster
            except ValueError as error:  # the roster is inconsistent with this node's knowledge
                node._mailbox.refuse(to, _tag("roster", r), str(error))
        if not self._recovers:
            self._rosters = joined if self._agrees_once else None
            return
        for to in joined:
            node.send(to, self._shares(to, *secrets[to]), _tag("shares", r))
        await self._relay(r)
        relayed = await node.gather(joined, _tag("relay", r), timeout=self._wait_s)
        for to in joined:
            if not (relayed.get(to) and self._open(to, relayed[to])):
                del self._given[to]

    async def _roster(self, inward: Sequence[int], r: int) -> list[Payload] | None:
        """The roster for the senders: rank, weight and keys of each of them. None if there are too few, or if
        a weight is 0, because the sum would then hide fewer models than it has senders."""
        self._wanted = _ReceiverState()
        keys = await self._node.gather(inward, _tag("keys", r))
        weights = self._node.mixing_weights(r)
        if len(keys) < MIN_NODES or min(weights[rank] for rank in keys) <= 0:
            return None
        self._wanted = _ReceiverState(tuple(keys), weights, {rank: sent[2] for rank, sent in keys.items()})
        return [[rank, weights[rank], *sent] for rank, sent in keys.items()]

    def _join(self, to: int, r: int, roster: Any, public: bytes, pair: KeyPair | None) -> bool:
        """Agree with the others on a receiver's roster. Returns whether this node is on it. ValueError for a
        roster that is inconsistent with this node's knowledge."""
        rank, rows = self._node.rank, {row[0]: row for row in roster or ()}
        if rank not in rows:
            return False
        weights = {sender: row[1] for sender, row in rows.items()}
        known = set(range(self._node.size)) - {to}
        fits = MIN_NODES <= len(rows) == len(roster) and rows.keys() <= known
        if not (fits and all(0 < weight <= 1 for weight in weights.values())):
            raise ValueError(
                f"the roster of node {to} has the weights {weights}; accepted: {MIN_NODES} or more, above 0 and at most 1"
            )
        if rows[rank][2:] != [self._key.public, self._signature, public]:
            raise ValueError(f"the roster of node {to} has other keys of node {rank} than its own")
        bound = self._ring.bound / max(1.0, math.fsum(weights.values()))
        context = b"" if pair is None else hashlib.sha256(encode(roster).structure).digest()
        given = _SenderState(r, weights[rank], bound, sorted(weights), {}, context)
        for sender, _, key, signature, other in roster:
            if sender != rank:
                common = self._agree(sender, key, signature)
                if pair is not None:
                    given.sealing[sender] = masking.derive(common, "shares", to, r)
                    common = pair.agree(other)
                given.keys[sender] = masking.derive(common, "mask", to, r)
        self._given[to] = given
        return True

    def _agree(self, rank: int, public: bytes, signature: bytes) -> bytes:
        """The secret shared with a node. Its key is verified once."""
        if public not in self._agreed:
            if not self._host.verify(rank, _signed(public), signature):
                raise ValueError(f"a key without the signature of node {rank}")
            self._agreed[public] = self._key.agree(public)
        return self._agreed[public]

    # --- shares of secrets, with drop_outs: recover

    def _shares(self, to: int, a: bytes, b: bytes) -> dict[int, bytes]:
        """Shares of this node's two secrets, sealed for each co-sender; it keeps its own."""
        given, rank = self._given[to], self._node.rank
        given.own = b
        count = len(given.senders)
        shares = zip(*(masking.split(secret, threshold(count), count) for secret in (a, b)), strict=True)
        by_rank = dict(zip(given.senders, shares, strict=True))
        given.shares[rank] = by_rank.pop(rank)
        return {
            peer: masking.seal(given.sealing[peer], of_a + of_b, rank, given.context)
            for peer, (of_a, of_b) in by_rank.items()
        }

    async def _relay(self, r: int) -> None:
        """Relay to each sender the messages that the others have sealed for it."""
        senders = self._wanted.senders
        shares = await self._node.gather(senders, _tag("shares", r))
        sealed = {rank: messages for rank, messages in shares.items() if messages}
        enough = len(sealed) >= threshold(len(senders))
        self._wanted.senders = tuple(sealed) if enough else ()
        for rank in senders:
            others = {other: messages[rank] for other, messages in sealed.items() if other != rank}
            self._node.send(rank, others if enough and rank in sealed else None, _tag("relay", r))

    def _open(self, to: int, relayed: Any) -> bool:
        """Keep the others' shares. Masks are shared only with senders whose shares have arrived. False if a
        share can't be opened, which may be the fault of its sender or of the receiver."""
        given = self._given[to]
        for rank, sealed in relayed.items():
            try:
                opened = masking.unseal(given.sealing[rank], sealed, rank, given.context)
            except ValueError:
                return False
            if len(opened) != 2 * SHARE_BYTES:
                return False
            given.shares[rank] = opened[:SHARE_BYTES], opened[SHARE_BYTES:]
        given.keys = {rank: given.keys[rank] for rank in relayed}
        return True

    # --- a model

    def mask(self, receivers: Sequence[int], model: Payload) -> dict[int, Tensor]:
        """The message to each receiver that replaces a model: words, signed integers [n] of ``ring_bits``, or
        none for a receiver without a sum in this round. ValueError for anything but a model, since it would
        be sent unmasked."""
        if not isinstance(model, Model):
            kind = type(model).__name__
            raise ValueError(f"secure_aggregation: node {self._node.rank} sends a {kind}; accepted: a Model")
        buffers = model.buffers[self._buffers] if len(model.buffers) else model.buffers
        sent = (vector.numpy(force=True) for vector in (self._encoded(model)[0], buffers))
        values = np.concatenate([*sent, np.zeros(CHECKED)])
        self._length = len(values)
        largest = float(np.abs(values).max(initial=0))
        fixed: dict[float, Any] = {}
        words = {to: self._masked(to, values, largest, fixed) for to in receivers}
        return {to: torch.from_numpy(vector.view(f"i{vector.itemsize}")) for to, vector in words.items()}

    def _masked(self, to: int, values: Any, largest: float, fixed: dict[float, Any]) -> Any:
        """Words for one receiver. ``fixed`` caches the fixed-point numbers by weight, since many receivers
        share them."""
        given = self._given.get(to)
        if given is None or given.round != self._node.round:
            return np.empty(0, self._ring.dtype)
        if given.sent:
            raise ValueError(f"secure_aggregation: a second model for node {to} in a round; accepted: one")
        given.sent = True
        if not largest < given.bound:
            raise ValueError(
                f"secure_aggregation: a model with the value {largest:g}; accepted: values below {given.bound:g}, for"
                f" ring_bits {self._settings.ring_bits} and fraction_bits {self._settings.fraction_bits}"
            )
        if given.weight not in fixed:
            fixed[given.weight] = self._ring.fix(values, given.weight)
        words = fixed[given.weight].copy()
        if self._settings.masked:
            if given.own:
                words += self._ring.stream(masking.derive(given.own, "own"), len(words))
            self._add_masks(words, self._node.rank, given.keys)
        return words

    def _add_masks(self, words: Any, sender: int, keys: Mapping[int, bytes]) -> None:
        """Add the masks that a sender shares with others."""
        for rank, key in keys.items():
            if rank > sender:
                words += self._ring.stream(key, len(words))
            else:
                words -= self._ring.stream(key, len(words))

    def _encoded(self, model: Model) -> list[Any]:
        """The encoded parameters, followed by everything else that decoding needs, which is the same at all
        nodes."""
        if self._codec is None:
            return [model.parameters]
        encoded: list[Any] = self._codec.encode(self._node, model.parameters, self._node.round)
        return encoded

    # --- a sum

    async def unmask(
        self, inbox: Mapping[int, Payload], weights: Mapping[int, float]
    ) -> tuple[dict[int, Model], dict[int, float]]:
        """An inbox and weights with which :func:`~gossamer.learning.mixing.combine` gives the same result:
        the mean of the received models, under the lowest rank and with their total weight. The inbox is empty
        if there is no sum."""
        agreed = self._wanted.weights
        if agreed and agreed != weights:
            raise ValueError(f"secure_aggregation: weights {dict(weights)}; accepted: node.mixing_weights(r)")
        total, arrived = await self._sum(inbox)
        self._node.record(summed_models=len(arrived))
        weight = math.fsum(weights[rank] for rank in arrived)
        if weight == 0:
            return {}, dict(weights)
        first = arrived[0]
        absent = {rank: value for rank, value in weights.items() if rank not in arrived}
        return {first: self._model(self._ring.number(total) / weight, first)}, {first: weight, **absent}

    async def _sum(self, inbox: Mapping[int, Payload]) -> tuple[Any, Sequence[int]]:
        """The unmasked sum of the received words, and their senders, which are empty if the sum can't be
        recovered."""
        wanted, node = self._wanted, self._node
        arrived = tuple(rank for rank in sorted(inbox) if rank in wanted.senders and len(inbox[rank]))
        total = self._ring.sum([_words(inbox[rank], self._ring.dtype) for rank in arrived])
        if self._recovers:
            needed = max(MIN_NODES, threshold(len(wanted.public)))
            if len(arrived) < needed:
                return total, ()
            node.broadcast(arrived, list(arrived), _tag("survivors", node.round))
            answers = await node.gather(arrived, _tag("unmask", node.round))
            if len(answers) < needed:
                return total, ()
            if self._settings.masked:
                try:
                    self._remove_masks(total, arrived, answers)
                except ValueError:  # a share is wrong, but it is unknown which
                    return total, ()
        elif arrived != wanted.senders:
            return total, ()
        cancelled = not total[-CHECKED:].any()
        return total[:-CHECKED], arrived if cancelled else ()

    def _remove_masks(self, total: Any, arrived: Sequence[int], answers: Mapping[int, Payload]) -> None:
        """Subtract the survivors' own masks, and those that they share with lost senders."""
        wanted, r = self._wanted, self._node.round
        positions = {rank: position for position, rank in enumerate(sorted(wanted.public))}
        givers = list(answers)[: threshold(len(positions))]

        def secret(rank: int) -> bytes:
            return masking.join({positions[giver]: answers[giver][rank] for giver in givers})

        for rank in arrived:
            total -= self._ring.stream(masking.derive(secret(rank), "own"), len(total))
        for lost in set(wanted.senders) - set(arrived):
            pair = KeyPair(secret(lost))
            agreed = {rank: pair.agree(wanted.public[rank]) for rank in arrived}
            keys = {rank: masking.derive(key, "mask", self._node.rank, r) for rank, key in agreed.items()}
            self._add_masks(total, lost, keys)  # the masks that the lost sender would have added

    def _model(self, mean: Any, rank: int) -> Model:
        """The model in a mean of sent values."""
        node, current = self._node, self._node.parameters
        sent, *rest = self._encoded(node.model)
        values = torch.from_numpy(mean).to(current.device, torch.float32)
        parameters: Any = values[: len(sent)]
        if self._codec is not None:
            parameters = self._codec.decode(node, rank, [parameters, *rest], lambda: current)
        if isinstance(parameters, Part):
            parameters = Part(parameters.values, parameters.where.to(current.device), parameters.size)
        else:
            parameters = node.store(parameters)
        buffers = values[len(sent) :]
        if len(buffers):
            buffers = node.buffers.index_copy(0, self._buffers.to(current.device), buffers)
        return Model(parameters, buffers)

    # --- requests of receivers, which may arrive at any time

    def handle(self, message: Message) -> bool:
        """Answer a receiver's request to unmask its sum. Returns whether the message was such a request."""
        if message.tag[:2] != (TAG, "survivors"):
            return False
        to, survivors = message.source, message.payload
        given = self._given.get(to)
        if given is None or message.tag[2:] != (given.round,):
            return True  # already answered, or a round in which this node took no part
        del self._given[to]  # it answers once
        named = {*survivors}
        enough = len(named) >= threshold(len(given.senders))
        if not (enough and self._node.rank in named and named <= given.shares.keys()):
            raise ValueError(
                f"node {to} names the survivors {survivors}, of the senders {list(given.senders)}"
            )
        shares = {rank: given.shares[rank][rank in named] for rank in sorted(given.shares)}
        self._node.send(to, shares, _tag("unmask", given.round))
        return True


def _signed(public: bytes) -> bytes:
    return b"gossamer/secure-aggregation/key" + public


def _are_bytes(payload: Any, ranks: Collection[int], length: int | None = None) -> bool:
    """Whether this is a dict with exactly these keys, whose values are bytes, of this length if one is given."""
    return payload.keys() == set(ranks) and all(
        type(value) is bytes and length in (None, len(value)) for value in payload.values()
    )


def _words(payload: Payload, dtype: Any) -> Any:
    signed = _SIGNED[dtype.itemsize]
    if not isinstance(payload, Tensor) or payload.dim() != 1 or payload.dtype != signed:
        raise ValueError(f"got a {type(payload).__name__}; accepted: a vector of {signed}")
    return payload.numpy(force=True).view(dtype)
