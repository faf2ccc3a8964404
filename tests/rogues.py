"""A real daemon, and beside it a member of its swarm that a test drives by hand.

The rogue has a real identity, real TLS and real links; only its words are the test's own.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import trio

from protocol.connection import Received
from protocol.messages import (
    Backward,
    Certified,
    Fence,
    Forward,
    Join,
    JoinAnswer,
    Message,
    Microbatch,
    Ping,
    Pong,
    Report,
    Resume,
    Settlement,
)
from protocol.records import (
    JOIN_REQUEST_PURPOSE,
    PEER_RECORD_PURPOSE,
    JoinRequest,
    PeerRecord,
    PlanBody,
    PlanHeader,
    TensorSpec,
    Training,
    decode_record,
    sign_record,
)
from protocol.signing import Identity, PeerId
from swarm.adapters.datasets import open_source
from swarm.adapters.disk import Home
from swarm.adapters.tls import TlsTransport
from swarm.adapters.torch_stage import TorchStage
from swarm.config import PeerSettings, parse_training
from swarm.core.ledger import bitmap_of, indices_of
from swarm.core.model import Profile
from swarm.errors import PeerError
from swarm.homes import Overrides, create_home
from swarm.node import Node
from swarm.peer.link import Answer
from swarm.peer.links import Links
from tests.processes.swarms import GPT, manifest

DEADLINE_SECONDS = 60
BOOT = 1


@dataclass(frozen=True)
class Heard:
    """A message that the rogue has received."""

    message: Message
    payload: memoryview


class Rogue:
    """A peer that says what it is told to say, and keeps what it hears.

    It answers pings, so that nobody takes it for dead, and never consents to vote: the founder
    stays a council of one. Hosting stage 0, it is the step coordinator of every plan."""

    def __init__(self, identity: Identity, training: Training, home: Home, folder: Path) -> None:
        self.identity = identity
        self.training = training
        self.run_id = home.run_id()
        self.transport = TlsTransport(identity, home.swarm_key(), folder)
        self.links = Links(
            transport=self.transport,
            me=identity.peer,
            run=self.run_id,
            boot=BOOT,
            receiver=self,
        )
        self.stage = TorchStage(training)
        self.profile: Profile = self.stage.profile()
        self._heard_send, self._heard = trio.open_memory_channel[Heard](10_000)
        self._ended_send, self._ended = trio.open_memory_channel[str](100)
        self.address = ""
        self.body: PlanBody | None = None
        self.fence: Fence | None = None
        self._plans: dict[int, Certified] = {}
        self._reports: dict[int, Report] = {}
        self._news = trio.Event()

    # links.Receiver

    def check_payload(self, peer: PeerId, message: Message) -> None:
        """Take everything."""

    async def handle(self, peer: PeerId, boot: int, received: Received, answer: Answer) -> None:
        match received.message:
            case Ping(number=number):
                self.links.post(peer, Pong(number=number))
            case Certified() as certified:
                self._plans[decode_record(certified.plan.header, PlanHeader).epoch] = certified
            case Report() as report:
                self._reports[report.fence.epoch] = report
        self._news.set()
        await self._heard_send.send(Heard(received.message, received.payload))

    def opened(self, peer: PeerId, boot: int) -> None:
        """Nothing waits for it."""

    def lost(self, peer: PeerId, reason: str) -> None:
        self._ended_send.send_nowait(reason)

    def unreachable(self, fault: PeerError, waiting: Sequence[Message]) -> None:
        raise AssertionError(f"the daemon is gone: {fault}, with {waiting} on the way")

    # what a test lets it do

    async def hear(self, *kinds: type[Message]) -> Heard:
        """Return the next message of one of these kinds; others are dropped."""
        while True:
            heard = await self._heard.receive()
            if isinstance(heard.message, kinds):
                return heard

    async def link_end(self) -> str:
        """Wait until a link ends; return why."""
        return await self._ended.receive()

    async def join(self, victim: PeerId, **changes: object) -> JoinAnswer:
        """Ask to become a member; `changes` are told instead of the truth."""
        told: dict[str, object] = {
            "run": self.run_id,
            "peer": self.identity.peer,
            "boot": BOOT,
            "epoch": 0,
            "device": "cpu",
            "layers": self.profile.layers,
            "memory_bytes": self.profile.memory_bytes,
            "numerics": self.profile.numerics,
            "data_digest": open_source(self.training, Path()).digest(),
        }
        request = JoinRequest(**(told | changes))  # type: ignore[arg-type]
        record = PeerRecord(self.run_id, self.identity.peer, BOOT, (self.address,), (), 1)
        signed = sign_record(self.identity, JOIN_REQUEST_PURPOSE, request)
        where = sign_record(self.identity, PEER_RECORD_PURPOSE, record)
        received = await self.links.request(
            victim, lambda number: Join(id=number, record=where, request=signed)
        )
        assert isinstance(received.message, JoinAnswer)
        return received.message

    async def take_role(self, victim: PeerId) -> None:
        """Join, and bring the plan that follows to the point where work begins."""
        answer = await self.join(victim)
        assert answer.refusal == ""
        await self.resume(victim, 1)

    async def go_on(self, victim: PeerId) -> None:
        """A link has ended, and with it frames between two workers: bring the repair that
        follows to the point where work begins."""
        assert self.fence is not None
        self.links.post(victim, Ping(number=0))  # a link, on which it can be heard again
        await self.resume(victim, self.fence.epoch + 1)

    async def resume(self, victim: PeerId, epoch: int) -> None:
        """Wait for the plan of `epoch` and the victim's Report; let the first step go on."""
        while epoch not in self._plans or epoch not in self._reports:
            self._news = trio.Event()
            await self._news.wait()
        plan = self._plans[epoch].plan
        header = decode_record(plan.header, PlanHeader)
        self.body = decode_record(plan.body, PlanBody)
        self.fence = Fence(header.generation, header.epoch, BOOT)
        assert header.council == (victim,)
        assert self.body.stages[0].replicas[0].peer == self.identity.peer
        self.links.post(victim, self.resume_message(victim))

    def resume_message(self, victim: PeerId) -> Resume:
        """Return the Resume that follows from the victim's Report."""
        assert self.fence is not None
        count = self.training.microbatches_per_step
        (held,) = self._reports[self.fence.epoch].held
        entered = indices_of(held.bitmap, count)
        lacking = [index for index in range(count) if index not in entered]
        mine = Settlement(
            bytes(32), bitmap_of(range(count), count), (self.identity.peer,), (), None, ()
        )
        of_victim = Settlement(held.state_hash, bitmap_of(lacking, count), (victim,), (), None, ())
        return Resume(fence=self.fence, step=0, totals=None, stages=(mine, of_victim))

    def forward(
        self, index: int, tensors: tuple[TensorSpec, ...] | None = None, *, step: int = 0
    ) -> Forward:
        """Return a Forward from stage 0 to stage 1 of microbatch `step`/`index`."""
        assert self.body is not None and self.fence is not None
        return Forward(
            fence=self.fence,
            microbatch=Microbatch(step, index),
            weight=self.profile.shape.target.elements,
            path=(self.identity.peer, self.identity.peer),
            tensors=tensors or (self.body.stages[0].output, self.profile.shape.target),
        )

    def zeros(self, message: Forward) -> list[memoryview]:
        """Return tensors of zeros for a Forward."""
        return [memoryview(bytes(spec.nbytes)) for spec in message.tensors]

    async def works_on(self, victim: PeerId, index: int) -> Backward:
        """Send a good microbatch and return its gradient: the victim is alive and well."""
        message = self.forward(index)
        self.links.post(victim, message, self.zeros(message))
        backward = (await self.hear(Backward)).message
        assert isinstance(backward, Backward)
        assert backward.microbatch == message.microbatch
        return backward


def with_rogue(
    tmp_path: Path,
    scenario: Callable[[Node, Rogue], Awaitable[None]],
    text: str = "",
    *,
    wait_for_peers: int = 2,
) -> None:
    """Run `scenario` with a founder that waits for peers and a rogue that sorts before it,
    so that the rogue would feed and host stage 0, and the founder stage 1."""
    training = parse_training(text or manifest(GPT, microbatches=4))
    settings = PeerSettings(wait_for_peers=wait_for_peers, stages=min(2, wait_for_peers))
    create_home(tmp_path / "home", training, settings)

    async def main() -> None:
        with Home.open(tmp_path / "home") as home, trio.fail_after(DEADLINE_SECONDS):
            node = Node(home, Overrides())
            rogue = Rogue(_identity_before(home.identity().peer), training, home, tmp_path)
            async with trio.open_nursery() as nursery:
                ready = trio.Event()
                rogue_ready = trio.Event()
                nursery.start_soon(lambda: node.daemon.run(ready=lambda _: ready.set()))
                nursery.start_soon(lambda: _run_links(rogue, rogue_ready))
                await ready.wait()
                await rogue_ready.wait()
                rogue.links.know(node.daemon.me.peer, (node.daemon.discovery.listen,))
                await _measured(node, rogue)
                await scenario(node, rogue)
                node.daemon.stop()
                nursery.cancel_scope.cancel()
            await node.aclose()

    trio.run(main)


async def _run_links(rogue: Rogue, ready: trio.Event) -> None:
    def started(address: str) -> None:
        rogue.address = address
        ready.set()

    await rogue.links.run(started=started)


async def _measured(node: Node, rogue: Rogue) -> None:
    """Wait until the founder has joined itself: before that it answers "not yet"."""
    while node.daemon.control.leading.references == []:  # noqa: ASYNC110 - it tells nobody
        await trio.sleep(0.01)


def _identity_before(peer: PeerId) -> Identity:
    number = 0
    while True:
        identity = Identity.from_seed(number.to_bytes(32, "big"))
        if identity.peer < peer:
            return identity
        number += 1
