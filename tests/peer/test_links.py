"""Links between two peers over real TLS: order, requests, ends."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import trio
import trio.testing

from protocol.connection import Received
from protocol.errors import RemoteProtocolError
from protocol.messages import (
    Backward,
    Certified,
    Fence,
    Forward,
    GatherShard,
    GetChain,
    GetManifest,
    ManifestAnswer,
    Message,
    Microbatch,
    Ping,
)
from protocol.records import CertifiedPlan, Generation, PeerRecord, TensorSpec
from protocol.signing import Identity, PeerId
from swarm.adapters.tls import Limits, TlsTransport
from swarm.errors import NobodyListens, PeerError, PeerUnreachable
from swarm.peer.link import Answer
from swarm.peer.links import Links

RUN = b"r" * 32
KEY = b"k" * 32
FENCE = Fence(Generation(), 1, 1)
TENSOR = TensorSpec("float32", (2, 3))
BYTES = memoryview(bytes(range(24)))


@dataclass
class End:
    """One peer with its links; it keeps what it hears and answers what it is asked."""

    identity: Identity
    folder: Path
    refuse: type[Message] | None = None
    handshake_seconds: float = 5.0
    boot: int = 1
    address: str = ""

    def __post_init__(self) -> None:
        self.heard_send, self.heard = trio.open_memory_channel[tuple[PeerId, Received]](1000)
        self.ends_send, self.ends = trio.open_memory_channel[tuple[PeerId, str]](100)
        self.opened_links: list[tuple[PeerId, int]] = []
        self.undelivered_send, self.undelivered = trio.open_memory_channel[
            tuple[PeerError, list[Message]]
        ](100)
        limits = Limits(handshake_seconds=self.handshake_seconds)
        transport = TlsTransport(self.identity, KEY, self.folder, limits=limits)
        self.links = Links(
            transport=transport, me=self.identity.peer, run=RUN, boot=self.boot, receiver=self
        )

    def check_payload(self, peer: PeerId, message: Message) -> None:
        if self.refuse is not None and isinstance(message, self.refuse):
            raise RemoteProtocolError("these tensors are not wanted")

    async def handle(self, peer: PeerId, boot: int, received: Received, answer: Answer) -> None:
        match received.message:
            case GetManifest(id=number):
                answer(ManifestAnswer(id=number, manifest=b"m"), ())
            case Ping(number=666):
                raise RemoteProtocolError("666 is not a number")
            case GetChain():
                pass  # never answered
            case _:
                await self.heard_send.send((peer, received))

    def opened(self, peer: PeerId, boot: int) -> None:
        self.opened_links.append((peer, boot))

    def lost(self, peer: PeerId, reason: str) -> None:
        self.ends_send.send_nowait((peer, reason))

    def unreachable(self, fault: PeerError, waiting: Sequence[Message]) -> None:
        self.undelivered_send.send_nowait((fault, list(waiting)))

    async def run(self, task_status: trio.TaskStatus[None]) -> None:
        def started(address: str) -> None:
            self.address = address
            task_status.started()

        await self.links.run(started=started)


@dataclass
class Pair:
    one: End
    other: End


def between(tmp_path: Path, scenario: Callable[[Pair], Awaitable[None]], **changes: object) -> None:
    async def main() -> None:
        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                one, other = (
                    End(Identity.from_seed(bytes([n]) * 32), tmp_path, **changes)  # type: ignore[arg-type]
                    for n in (1, 2)
                )
                for end in (one, other):
                    await nursery.start(end.run)
                one.links.know(other.identity.peer, (other.address,))
                await scenario(Pair(one, other))
                nursery.cancel_scope.cancel()

    trio.run(main)


def forward(index: int, tensors: Sequence[TensorSpec] = (TENSOR,)) -> Forward:
    return Forward(
        fence=FENCE, microbatch=Microbatch(0, index), weight=1, path=(), tensors=tuple(tensors)
    )


def test_what_waits_is_sent_by_rank_and_then_in_order(tmp_path: Path) -> None:
    async def scenario(pair: Pair) -> None:
        peer = pair.other.identity.peer
        gather = GatherShard(fence=FENCE, step=0, bucket=0, shard=0, tensors=(TENSOR,))
        backward = Backward(fence=FENCE, microbatch=Microbatch(0, 0), path=(), tensors=(TENSOR,))
        certified = Certified(plan=CertifiedPlan(b"h", b"b", None))
        # All of it is said before the connection is open, so all of it waits together.
        for message in (gather, forward(0), forward(1), backward):
            pair.one.links.post(peer, message, (BYTES,))
        pair.one.links.post(peer, certified)
        heard = [(await pair.other.heard.receive())[1] for _ in range(5)]
        assert [each.message for each in heard] == [
            certified,
            backward,
            forward(0),
            forward(1),
            gather,
        ]
        assert all(each.payload == BYTES for each in heard[1:])

    between(tmp_path, scenario)


def test_both_use_the_connection_that_one_has_opened(tmp_path: Path) -> None:
    async def scenario(pair: Pair) -> None:
        pair.one.links.post(pair.other.identity.peer, Ping(number=1))
        sender, received = await pair.other.heard.receive()
        assert sender == pair.one.identity.peer and received.message == Ping(number=1)
        # It has never been told where the first one lives.
        pair.other.links.post(sender, Ping(number=2))
        assert (await pair.one.heard.receive())[1].message == Ping(number=2)

    between(tmp_path, scenario)


def test_a_peer_hears_itself(tmp_path: Path) -> None:
    async def scenario(pair: Pair) -> None:
        me = pair.one.identity.peer
        pair.one.links.post(me, forward(0, (TENSOR, TENSOR)), (BYTES, BYTES))
        sender, received = await pair.one.heard.receive()
        assert sender == me and bytes(received.payload) == bytes(BYTES) * 2

    between(tmp_path, scenario)


def test_requests_are_answered_on_their_own_link(tmp_path: Path) -> None:
    async def scenario(pair: Pair) -> None:
        for _ in range(3):
            received = await pair.one.links.request(
                pair.other.identity.peer, lambda number: GetManifest(id=number)
            )
            assert isinstance(received.message, ManifestAnswer)
            assert received.message.manifest == b"m"

    between(tmp_path, scenario)


def test_a_request_ends_with_its_link(tmp_path: Path) -> None:
    async def scenario(pair: Pair) -> None:
        peer = pair.other.identity.peer
        assert await pair.one.links.reach(peer) == peer

        async def ask() -> None:
            with pytest.raises(PeerUnreachable, match="no answer to GetChain"):
                await pair.one.links.request(
                    peer, lambda number: GetChain(id=number, generation=Generation(), epoch=0)
                )

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await trio.testing.wait_all_tasks_blocked(0.05)
            await pair.other.links.say_goodbye()

    between(tmp_path, scenario)


def test_a_fault_is_told_to_who_made_it_and_ends_the_link(tmp_path: Path) -> None:
    async def scenario(pair: Pair) -> None:
        peer = pair.other.identity.peer
        pair.one.links.post(peer, Ping(number=666))
        assert await pair.one.ends.receive() == (peer, "666 is not a number")
        assert await pair.other.ends.receive() == (
            pair.one.identity.peer,
            "666 is not a number",
        )
        # The next word opens a new one.
        pair.one.links.post(peer, Ping(number=1))
        assert (await pair.other.heard.receive())[1].message == Ping(number=1)

    between(tmp_path, scenario)


def test_tensors_that_are_not_wanted_end_the_link_before_they_come(tmp_path: Path) -> None:
    async def scenario(pair: Pair) -> None:
        peer = pair.other.identity.peer
        pair.one.links.post(peer, forward(0), (BYTES,))
        assert (await pair.one.ends.receive())[1] == "these tensors are not wanted"

    between(tmp_path, scenario, refuse=Forward)


def test_what_was_meant_for_a_peer_that_cannot_be_dialled_is_given_back(tmp_path: Path) -> None:
    async def scenario(pair: Pair) -> None:
        stranger = Identity.from_seed(b"3" * 32).peer

        async def undelivered(*numbers: int) -> PeerError:
            for number in numbers:
                pair.one.links.post(stranger, Ping(number=number))
            fault, waiting = await pair.one.undelivered.receive()
            assert waiting == [Ping(number=number) for number in numbers]
            assert fault.peer == stranger
            return fault

        fault = await undelivered(1)
        assert fault.reason == "no address is known" and not isinstance(fault, NobodyListens)
        # Somebody lives there, but another: it is not known to be gone.
        pair.one.links.know(stranger, (pair.other.address,))
        fault = await undelivered(2, 3)
        assert "another peer answered" in fault.reason and not isinstance(fault, NobodyListens)
        nobody = await free_address()
        pair.one.links.know(stranger, (nobody,))
        fault = await undelivered(4, 5)
        assert isinstance(fault, NobodyListens) and fault.reason.startswith(nobody)
        # One place where somebody listens is enough to doubt that it is gone.
        pair.one.links.know(stranger, (nobody, pair.other.address))
        fault = await undelivered(6)
        assert nobody in fault.reason and pair.other.address in fault.reason
        assert not isinstance(fault, NobodyListens)
        with pytest.raises(trio.WouldBlock):
            pair.one.ends.receive_nowait()  # no link has ended: there was none

    between(tmp_path, scenario)


def test_a_request_to_where_nobody_listens_says_so(tmp_path: Path) -> None:
    async def scenario(pair: Pair) -> None:
        peer = pair.other.identity.peer
        pair.one.links.know(peer, (await free_address(),))
        with pytest.raises(NobodyListens):
            await pair.one.links.request(peer, lambda number: GetManifest(id=number))
        with pytest.raises(NobodyListens):
            await pair.one.links.reach(peer)

    between(tmp_path, scenario)


def test_both_sides_are_told_of_every_link_with_the_others_boot(tmp_path: Path) -> None:
    async def scenario(pair: Pair) -> None:
        one, other = pair.one, pair.other
        one.links.post(other.identity.peer, Ping(number=1))
        await other.heard.receive()
        assert one.opened_links == [(other.identity.peer, 7)]
        assert other.opened_links == [(one.identity.peer, 7)]
        one.links.post(other.identity.peer, forward(0), (BYTES,))  # on the bulk connection
        await other.heard.receive()
        assert one.opened_links == [(other.identity.peer, 7)] * 2

    between(tmp_path, scenario, boot=7)


def test_what_is_said_goes_to_the_newest_start_of_a_peer(tmp_path: Path) -> None:
    """Also while the link to an older one, whose machine has vanished, is still open."""

    async def scenario(pair: Pair) -> None:
        one, other = pair.one, pair.other
        async with trio.open_nursery() as nursery:
            again = End(other.identity, tmp_path, boot=2)
            await nursery.start(again.run)
            for start in (other, again):
                start.links.know(one.identity.peer, (one.address,))
                start.links.post(one.identity.peer, Ping(number=start.boot))
                await one.heard.receive()
            one.links.post(other.identity.peer, Ping(number=3))
            assert (await again.heard.receive())[1].message == Ping(number=3)
            nursery.cancel_scope.cancel()

    between(tmp_path, scenario)


async def free_address() -> str:
    """Return an address at which nobody listens."""
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener:
        return f"127.0.0.1:{listener.socket.getsockname()[1]}"


def test_only_a_newer_record_moves_a_peer(tmp_path: Path) -> None:
    async def scenario(pair: Pair) -> None:
        def record(boot: int, sequence: int, address: str) -> PeerRecord:
            return PeerRecord(RUN, "somebody", boot, (address,), (), sequence)

        links = pair.one.links
        for boot, sequence, address, now in (
            (1, 2, "a:1", "a:1"),
            (1, 1, "b:1", "a:1"),
            (2, 1, "c:1", "c:1"),
            (1, 9, "d:1", "c:1"),
        ):
            links.know_record(record(boot, sequence, address))
            assert links.address_of("somebody") == now
        await trio.lowlevel.checkpoint()

    between(tmp_path, scenario)


def test_traffic_is_counted_by_kind_on_both_sides(tmp_path: Path) -> None:
    async def scenario(pair: Pair) -> None:
        pair.one.links.post(pair.other.identity.peer, forward(0), (BYTES,))
        _, received = await pair.other.heard.receive()
        (count,) = pair.other.links.traffic.snapshot()
        assert (count.kind, count.sent_bytes) == ("Forward", 0)
        assert count.received_bytes == received.frame_bytes > len(BYTES)

    between(tmp_path, scenario)


def test_a_dial_that_fails_is_no_loss_where_the_other_side_has_dialled_meanwhile(
    tmp_path: Path,
) -> None:
    async def scenario(pair: Pair) -> None:
        (silent,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        async with silent:
            peer = pair.other.identity.peer
            pair.one.links.know(peer, (f"127.0.0.1:{silent.socket.getsockname()[1]}",))
            pair.one.links.post(peer, Ping(number=1))
            async with await silent.accept() as dialled:
                pair.other.links.know(pair.one.identity.peer, (pair.one.address,))
                pair.other.links.post(pair.one.identity.peer, Ping(number=2))
                assert (await pair.one.heard.receive())[1].message == Ping(number=2)
                assert (await pair.other.heard.receive())[1].message == Ping(number=1)
                while await dialled.receive_some(65536):
                    pass  # until the dial has given up
                await trio.testing.wait_all_tasks_blocked(0.05)
                with pytest.raises(trio.WouldBlock):
                    pair.one.undelivered.receive_nowait()
                with pytest.raises(trio.WouldBlock):
                    pair.one.ends.receive_nowait()

    between(tmp_path, scenario, handshake_seconds=1.0)
