"""Peers with real links over TLS on the loopback, without a daemon."""

import math
import struct
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import trio

from protocol.connection import Received
from protocol.messages import GetListing, GetState, Listing, Message, Microbatch, Reply, Totals
from protocol.signing import Identity, PeerId
from swarm.adapters.tls import TlsTransport
from swarm.core.holding import Holding
from swarm.core.reduction import buckets
from swarm.errors import PeerError
from swarm.peer.donor import Donor
from swarm.peer.link import Answer
from swarm.peer.links import Links
from swarm.ports import Buffer
from swarm.simulation.executor import SimExecutor
from swarm.simulation.fakes import SimCheckpoints, SimDisk
from swarm.simulation.physics import Physics
from swarm.simulation.process import Process
from swarm.simulation.reference import Reference

RUN = b"r" * 32
KEY = b"k" * 32
RANGES = [(0, 2), (2, 3)]
STAGE = 0
HASH = b"h" * 32


@dataclass
class Giver:
    """A peer that gives what its executor and its disk hold, and notes what it is asked for."""

    number: int
    physics: Physics
    folder: Path
    corrupt: bool = False
    """Send other bytes than those that are held."""
    pieces_to_give: int = 1_000_000
    """After so many answers it goes."""
    pause_at: int = -1
    """After so many answers it sets `paused` and waits for `go_on`."""
    claims_bytes: int = 0
    """Say that every piece has so many, if not 0."""
    gives_any_state: bool = False
    """Give what is held, though another state is asked for."""
    asked: list[tuple[int, int]] = field(default_factory=list)
    """Number and offset of what it has given."""
    listed: list[GetListing] = field(default_factory=list)
    """What others have asked what there is of."""
    holding: Holding | None = None
    address: str = ""
    complaints: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.identity = identity = Identity.from_seed(bytes([self.number]) * 32)
        self.me: PeerId = identity.peer
        self.process = Process(self.number, self.me, 1)
        self.checkpoints = SimCheckpoints(SimDisk(), self.process, lambda *_: None)
        self.use(self.physics)
        transport = TlsTransport(identity, KEY, self.folder)
        self.links = Links(transport=transport, me=self.me, run=RUN, boot=1, receiver=self)
        self.scope = trio.CancelScope()
        self.paused, self.go_on = trio.Event(), trio.Event()

    def use(self, physics: Physics) -> None:
        """Begin with another model."""
        self.physics = physics
        self.executor = SimExecutor(
            physics,
            Reference(physics),
            self.process,
            lambda rule, text: self.complaints.append(f"{rule} {text}"),
        )
        self.donor = Donor(self.executor, self.checkpoints, lambda: self.holding)

    # links.Receiver

    def check_payload(self, peer: PeerId, message: Message) -> None:
        """Take everything."""

    async def handle(self, peer: PeerId, boot: int, received: Received, answer: Answer) -> None:
        match received.message:
            case GetListing():
                message = received.message
                self.listed.append(message)
                if self.gives_any_state:
                    message = msgspec.structs.replace(message, state_hash=b"")

                def say(reply: Reply, payloads: Sequence[Buffer]) -> None:
                    if self.claims_bytes and isinstance(reply, Listing):
                        pieces = tuple(
                            msgspec.structs.replace(each, nbytes=self.claims_bytes)
                            for each in reply.pieces
                        )
                        reply = msgspec.structs.replace(reply, pieces=pieces)
                    answer(reply, payloads)

                self.links.start_soon(self.donor.list, message, say)
            case GetState():
                self.links.start_soon(self._give, received.message, answer)
            case _:
                raise AssertionError(received.message)

    def opened(self, peer: PeerId, boot: int) -> None:
        """Nothing waits for it."""

    def lost(self, peer: PeerId, reason: str) -> None:
        """Who waits for an answer notices."""

    def unreachable(self, fault: PeerError, waiting: Sequence[Message]) -> None:
        raise AssertionError(f"only requests are made here: {fault}")

    async def _give(self, message: GetState, answer: Answer) -> None:
        if len(self.asked) >= self.pieces_to_give:
            self.scope.cancel()
            return
        if len(self.asked) == self.pause_at:
            self.paused.set()
            await self.go_on.wait()

        def say(reply: Reply, payloads: Sequence[Buffer]) -> None:
            if payloads:
                self.asked.append((message.number, message.offset))
            if self.corrupt:
                payloads = [memoryview(bytes(255 - byte for byte in each)) for each in payloads]
            answer(reply, payloads)

        await self.donor.piece(message, say)

    # what a test lets it do

    async def hold(self, state_hash: bytes = HASH) -> None:
        """Hold the stage's initial weights."""
        await self.executor.build(RANGES, STAGE)
        first, last = RANGES[STAGE]
        self.holding = Holding(0, first, last, 0, state_hash)

    async def commit(self, totals: Totals) -> None:
        """Commit the next step with the gradient that the plain loop has computed."""
        assert self.holding is not None
        version = self.holding.version
        if totals.verdict == "apply":
            await self.executor.load_gradient(version, gradient_of(self.physics, version))
        await self.executor.commit(version, totals)
        self.holding = self.holding.after(totals)

    async def run(self, task_status: trio.TaskStatus[None]) -> None:
        def started(address: str) -> None:
            self.address = address
            task_status.started()

        with self.scope:
            await self.links.run(started=started)


def gradient_of(physics: Physics, step: int) -> dict[int, Buffer]:
    """Return the stage's reduced gradient of a step, by bucket."""
    sums = Reference(physics).summed(step)
    return {
        bucket.index: memoryview(
            b"".join(
                struct.pack(f"<{slot.stop - slot.start}q", *sums[slot.name])
                for slot in bucket.slots
            )
        )
        for bucket in buckets(physics.shape, RANGES)
        if STAGE in bucket.stages
    }


def totals_of(physics: Physics, step: int) -> Totals:
    """Return the totals of a step, as the plain loop has them."""
    reference = Reference(physics)
    count = physics.training.microbatches_per_step
    passed = [reference.passed(Microbatch(step, index)) for index in range(count)]
    whole = [each for each in passed if each is not None]
    if len(whole) < count:
        return Totals(1, 0.0, (), "skip", None)
    weight = sum(each.weight for each in whole)
    sums = reference.summed(step).values()
    norm = math.fsum(float(sum(value * value for value in values)) for values in sums)
    loss = math.fsum(each.loss_sum for each in whole) / weight
    return Totals(weight, norm, (), "apply", loss)


Scenario = Callable[[Giver, list[Giver]], Awaitable[None]]


def with_givers(
    folder: Path, scenario: Scenario, count: int, physics: Physics, **of_all: object
) -> None:
    """Run `scenario` with a peer that holds nothing and `count` that hold version 0."""

    async def main() -> None:
        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                asker = Giver(100, physics, folder)
                givers = [
                    Giver(number, physics, folder, **of_all)  # type: ignore[arg-type]
                    for number in range(1, count + 1)
                ]
                givers.sort(key=lambda each: each.me)
                for each in (asker, *givers):
                    await nursery.start(each.run)
                for each in givers:
                    await each.hold()
                    asker.links.know(each.me, (each.address,))
                await scenario(asker, givers)
                nursery.cancel_scope.cancel()
        assert [each.complaints for each in (asker, *givers)] == [[] for _ in (asker, *givers)]

    trio.run(main)
