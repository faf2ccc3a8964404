"""Reduce-scatter and gather of one replica's gradients, step by step.

Every replica sends its part of each shard to the shard's owner; the owner adds the parts in
plan order and sends the sum to everyone who uses the bucket. The rule: accumulators are read,
never written, so a reduction can be done again.
"""

import logging
import math
from dataclasses import dataclass
from functools import cached_property

import numpy
import trio

from protocol.errors import RemoteProtocolError
from protocol.messages import GatherShard, ReduceShard
from protocol.records import TensorSpec
from protocol.signing import PeerId
from swarm.core.model import ModelShape
from swarm.core.reduction import Bucket, buckets, shard_bounds
from swarm.core.step import Role, ranges_of_stages, replicas_of
from swarm.peer.link import MIN_BYTES_PER_SECOND
from swarm.peer.replica import Replica
from swarm.ports import Buffer

log = logging.getLogger(__name__)

NO_TENSORS: tuple[TensorSpec, ...] = ()


@dataclass(frozen=True, slots=True)
class Shard:
    """One owner's range of elements of one bucket."""

    bucket: int
    number: int
    owner: PeerId
    start: int
    stop: int
    contributors: tuple[PeerId, ...]
    """In plan order: the order of summation."""

    @property
    def elements(self) -> int:
        """Return the number of elements."""
        return self.stop - self.start


class Reducer:
    """One replica's reductions in one epoch."""

    def __init__(self, replica: Replica) -> None:
        self._role = replica.role
        self._me = replica.role.me.peer
        self._executor = replica.executor
        self._links = replica.links
        self._step = replica.step
        self._perform = replica.perform
        exact = replica.training.execution.determinism == "exact"
        self._dtype: str = "int64" if exact else "float32"
        self._shards = shards_of(replica.role, replica.shape)
        self._parts: dict[tuple[int, int, int], dict[PeerId, Buffer | None]] = {}
        self._gathered: set[tuple[int, int]] = set()
        self._is_open = False
        """A reduction has begun, and not all sums are here."""
        self._arrived: set[tuple[type, int, int, int, PeerId]] = set()
        self._arrived_from = 0
        """Of which steps there may be something in it."""
        # Bounded by what may arrive: one part per shard and sender, one sum per shard.
        self._events_send, self._events = trio.open_memory_channel[
            tuple[PeerId, GatherShard | ReduceShard | None, Buffer]
        ](math.inf)

    def begin(self) -> None:
        """Start reducing the step in hand."""
        self._is_open = True
        self._events_send.send_nowait((self._me, None, memoryview(b"")))

    # --- who is waited for --------------------------------------------------------------------

    @property
    def without_parts(self) -> tuple[PeerId, ...]:
        """Return who has not sent its parts of what this replica sums up, sorted."""
        if not self._is_open:
            return ()
        step, found = self._step.version, set[PeerId]()
        for (bucket, number), shard in self._shards.items():
            if shard.owner == self._me and (bucket, number) not in self._gathered:
                parts = self._parts.get((step, bucket, number), {})
                found |= set(shard.contributors) - parts.keys()
        return tuple(sorted(found - {self._me}))

    @property
    def without_sums(self) -> tuple[PeerId, ...]:
        """Return who has not sent its sums, sorted."""
        if not self._is_open:
            return ()
        owners = {s.owner for key, s in self._shards.items() if key not in self._gathered}
        return tuple(sorted(owners - {self._me}))

    @cached_property
    def transfer_seconds(self) -> float:
        """Return how long parts and sums may be on their way, at the lowest rate that a link may
        have."""
        item = numpy.dtype(self._dtype).itemsize
        size = 2 * item * sum(shard.elements for shard in self._shards.values())
        return size / MIN_BYTES_PER_SECOND

    # --- what arrives -------------------------------------------------------------------------

    def check_payload(self, message: ReduceShard | GatherShard) -> None:
        """Raise RemoteProtocolError unless the message carries a shard of this stage."""
        shard = self._shards.get((message.bucket, message.shard))
        name = f"{type(message).__name__} {message.bucket}/{message.shard} of step {message.step}"
        if shard is None:
            raise RemoteProtocolError(f"{name}: stage {self._role.stage} has no such shard")
        wanted = TensorSpec(self._dtype, (shard.elements,))  # type: ignore[arg-type]
        empty = isinstance(message, ReduceShard) and message.tensors == NO_TENSORS
        if message.tensors != (wanted,) and not empty:
            raise RemoteProtocolError(f"{name}: carries {message.tensors}, not {wanted}")

    def reduce_shard(self, sender: PeerId, message: ReduceShard, payload: Buffer) -> None:
        """Take in a part. Raises RemoteProtocolError if `sender` may not contribute it."""
        self.check_payload(message)
        shard = self._shards[message.bucket, message.shard]
        if shard.owner != self._me or sender not in shard.contributors:
            raise RemoteProtocolError(f"{sender} contributes to a shard of {shard.owner}")
        if not self._step.version <= message.step <= self._step.version + 1:
            raise RemoteProtocolError(
                f"a part of step {message.step} arrives at version {self._step.version}"
            )
        self._only_once(sender, message)
        self._events_send.send_nowait((sender, message, payload))

    def gather_shard(self, sender: PeerId, message: GatherShard, payload: Buffer) -> None:
        """Take in an owner's sum. Raises RemoteProtocolError if it is not the owner's."""
        self.check_payload(message)
        shard = self._shards[message.bucket, message.shard]
        if shard.owner != sender or message.step != self._step.version:
            raise RemoteProtocolError(
                f"{sender} sends the sum of a shard of {shard.owner}, step {message.step}, "
                f"at version {self._step.version}"
            )
        self._only_once(sender, message)
        self._events_send.send_nowait((sender, message, payload))

    def _only_once(self, sender: PeerId, message: ReduceShard | GatherShard) -> None:
        name = (type(message), message.step, message.bucket, message.shard, sender)
        if name in self._arrived:
            raise RemoteProtocolError(
                f"{sender} sends {type(message).__name__} {message.bucket}/{message.shard} of step "
                f"{message.step} twice"
            )
        if self._arrived_from != self._step.version:
            self._arrived_from = self._step.version
            self._arrived = {each for each in self._arrived if each[1] >= self._arrived_from}
        self._arrived.add(name)

    # --- what is done ------------------------------------------------------------------------

    async def run(self) -> None:
        """Reduce whenever asked to, until cancelled."""
        async for sender, message, payload in self._events:
            match message:
                case None:
                    await self._contribute()
                case ReduceShard():
                    part = payload if message.tensors else None
                    await self._take_part(sender, message.step, message, part)
                case GatherShard():
                    shard = self._shards[message.bucket, message.shard]
                    await self._executor.gather(shard.bucket, shard.start, shard.stop, payload)
                    await self._mark(shard)

    async def _contribute(self) -> None:
        step = self._step.version
        await self._executor.begin_reduction()
        self._gathered.clear()
        log.debug("reduction step=%d stage=%d", step, self._role.stage)
        ledger = self._executor.ledger
        has_part = len(ledger) > len(ledger.flags)
        for key in sorted(self._shards):
            shard = self._shards[key]
            part: Buffer | None = None
            if has_part:
                part = await self._executor.part(shard.bucket, shard.start, shard.stop)
            message = ReduceShard(
                fence=self._role.fence,
                step=step,
                bucket=shard.bucket,
                shard=shard.number,
                tensors=() if part is None else (self._spec(shard),),
            )
            if shard.owner == self._me:
                await self._take_part(self._me, step, message, part)
            else:
                self._links.post(shard.owner, message, () if part is None else (part,))
        if not self._shards:  # a stage without parameters has nothing to wait for
            await self._prepare()

    async def _take_part(
        self, sender: PeerId, step: int, message: ReduceShard, part: Buffer | None
    ) -> None:
        shard = self._shards[message.bucket, message.shard]
        parts = self._parts.setdefault((step, shard.bucket, shard.number), {})
        parts[sender] = part
        if len(parts) < len(shard.contributors):  # each is of one of them, and comes once
            return
        del self._parts[step, shard.bucket, shard.number]
        total = await self._executor.reduce(
            shard.bucket, shard.start, shard.stop, [parts[peer] for peer in shard.contributors]
        )
        gather = GatherShard(
            fence=self._role.fence,
            step=step,
            bucket=shard.bucket,
            shard=shard.number,
            tensors=(self._spec(shard),),
        )
        for peer in shard.contributors:
            if peer != self._me:
                self._links.post(peer, gather, (total,))
        await self._mark(shard)

    async def _mark(self, shard: Shard) -> None:
        self._gathered.add((shard.bucket, shard.number))
        if len(self._gathered) == len(self._shards):
            self._gathered.clear()
            await self._prepare()

    async def _prepare(self) -> None:
        self._is_open = False
        self._perform(self._step.reduced(await self._executor.square_norms()))

    def _spec(self, shard: Shard) -> TensorSpec:
        return TensorSpec(self._dtype, (shard.elements,))  # type: ignore[arg-type]


def shards_of(role: Role, shape: ModelShape) -> dict[tuple[int, int], Shard]:
    """Return the non-empty shards of all buckets that this replica's stage uses."""
    body = role.body
    found = {}
    for bucket in buckets(shape, ranges_of_stages(body)):
        if role.stage in bucket.stages:
            for shard in _shards_of_bucket(role, bucket):
                found[shard.bucket, shard.number] = shard
    return found


def _shards_of_bucket(role: Role, bucket: Bucket) -> list[Shard]:
    owner_stage = role.body.stages[bucket.stages[0]]
    contributors = tuple(peer for stage in bucket.stages for peer in replicas_of(role.body, stage))
    bounds = shard_bounds(bucket.elements, owner_stage.shares)
    return [
        Shard(bucket.index, number, member.peer, start, stop, contributors)
        for number, (member, (start, stop)) in enumerate(
            zip(owner_stage.replicas, bounds, strict=True)
        )
        if start < stop
    ]
