"""A feeder reads its share of every step's microbatches and injects them into stage 0.

The rule: which microbatches are its own, and which samples they hold, are functions of the plan,
the step and the manifest. It reads ahead, and injects only what the current step needs.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import trio

from protocol.errors import RemoteProtocolError
from protocol.messages import Backward, Commit, Fence, Forward, Microbatch, Resume
from protocol.records import Member, PlanBody, Training
from protocol.signing import PeerId
from swarm.core.dataorder import Turns, sample_ids
from swarm.core.model import ModelShape
from swarm.core.routing import Router, credit_windows
from swarm.core.settlement import needs_of
from swarm.core.step import replicas_of
from swarm.errors import DataError
from swarm.peer.links import Links
from swarm.ports import Buffer, DataSource

log = logging.getLogger(__name__)

READ_AHEAD = 2


@dataclass(frozen=True, slots=True)
class _Read:
    """A microbatch in memory, not yet injected."""

    mb: Microbatch
    inputs: Buffer
    targets: Buffer
    weight: int


class Feeder:
    """What one feeder does in one epoch."""

    def __init__(
        self,
        *,
        body: PlanBody,
        me: Member,
        fence: Fence,
        training: Training,
        shape: ModelShape,
        source: DataSource,
        links: Links,
        on_trouble: Callable[[str], None],
    ) -> None:
        self._on_trouble = on_trouble
        self._number = [feeder.member for feeder in body.feeders].index(me)
        shares = [feeder.share for feeder in body.feeders]
        self._turns = Turns(shares, training.microbatches_per_step)
        self._me = me.peer
        self._fence = fence
        self._training = training
        self._tensors = (shape.input, shape.target)
        self._source = source
        self._links = links
        self._router = Router(
            replicas_of(body, 0),
            body.wiring[0][self._number],
            credit_windows(body, 0)[self._number],
            phase=self._number / len(body.feeders),
        )
        self._needs: dict[int, bytes] = {}
        """Indices that the first step misses, with the stages that lack them."""
        self._resumed = trio.Event()
        self._step = self._first = -1
        self._end = training.steps
        """The first step that is not for this plan."""
        self._moved = trio.Event()
        self._sent_to: dict[Microbatch, PeerId] = {}

    def resume(self, message: Resume) -> None:
        """Begin with the step in hand, at the indices that it misses.

        Raises RemoteProtocolError if they are none of a step's."""
        if self._resumed.is_set():
            return
        try:
            needs = needs_of(message.stages, self._training.microbatches_per_step)
        except ValueError as error:
            raise RemoteProtocolError(f"Resume: {error}") from error
        self._turns.resume(message.step, needs)
        size = (len(message.stages) + 7) // 8
        self._needs = {index: mask.to_bytes(size, "little") for index, mask in needs.items()}
        self._step = self._first = message.step
        self._resumed.set()

    def commit(self, message: Commit) -> None:
        """The step is done everywhere: go on with the next."""
        if message.step == self._step and message.totals.verdict != "halt":
            self._step += 1
            self._wake()

    def end_before(self, step: int) -> None:
        """Another plan begins with `step`: what was fed by this one would be lost there."""
        self._end = min(self._end, step)

    def backward(self, sender: PeerId, message: Backward) -> None:
        """A microbatch has come back: its credit is free.

        Raises RemoteProtocolError if it was not sent to `sender`."""
        if self._sent_to.get(message.microbatch) != sender or message.tensors:
            raise RemoteProtocolError(f"mb={message.microbatch}: was not fed to {sender}")
        del self._sent_to[message.microbatch]
        self._router.give_back(sender, message.microbatch.step)
        self._wake()

    async def run(self) -> None:
        """Feed until the run's last step, or until cancelled."""
        await self._resumed.wait()
        send, receive = trio.open_memory_channel[_Read](READ_AHEAD)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._read, send)
            async for read in receive:
                target = await self._credit(read.mb.step)
                self._inject(read, target)

    async def _read(self, send: trio.MemorySendChannel[_Read]) -> None:
        async with send:
            for step in range(self._first, self._training.steps):
                for index in self._turns.indices_of(step, self._number):
                    try:
                        read = await self._read_one(Microbatch(step, index))
                    except DataError as error:
                        self._on_trouble(f"feeder {self._me}: mb={step}/{index}: {error.what}")
                        return
                    await send.send(read)

    async def _read_one(self, mb: Microbatch) -> _Read:
        ids = sample_ids(
            self._training.seed,
            mb.step,
            mb.index,
            microbatches=self._training.microbatches_per_step,
            microbatch_size=self._training.microbatch_size,
            samples=len(self._source),
        )
        return _Read(mb, *await self._source.microbatch(ids))

    async def _credit(self, step: int) -> PeerId:
        """Wait until `step` is in hand and stage 0 has room for one more."""
        while True:
            fits = step == self._step and step < self._end
            target = self._router.choose(step) if fits else None
            if target is not None:
                return target
            self._moved = trio.Event()
            await self._moved.wait()

    def _inject(self, read: _Read, target: PeerId) -> None:
        log.debug("inject mb=%s to=%s", read.mb, target)
        self._sent_to[read.mb] = target
        message = Forward(
            fence=self._fence,
            microbatch=read.mb,
            weight=read.weight,
            path=(self._me,),
            tensors=self._tensors,
            needs=self._needs[read.mb.index] if read.mb.step == self._first else b"",
        )
        self._links.post(target, message, (read.inputs, read.targets))

    def _wake(self) -> None:
        self._moved.set()
