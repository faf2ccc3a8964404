"""The modelled network: order, time, cuts, resets and deaths."""

import statistics

import pytest
import trio

from protocol.codec import encode
from protocol.messages import TABLE, Certified, Ping
from protocol.records import CertifiedPlan
from swarm.errors import PeerRefused, PeerUnreachable
from swarm.ports import ByteStream
from swarm.simulation.network import (
    DIAL_SECONDS,
    KEEPALIVE_SECONDS,
    SimNetwork,
    SimTransport,
    Weather,
)
from swarm.simulation.streams import WINDOW_BYTES
from tests.simulation.sim import LATENCY, Frames, Hosts, address, process, with_hosts


async def read(stream: ByteStream, size: int) -> bytes:
    """Return exactly so many bytes, or fewer where the stream ends."""
    found = b""
    while len(found) < size:
        data = await stream.receive_some(size - len(found))
        if not data:
            break
        found += data
    return found


def test_bytes_arrive_in_order_in_spite_of_jitter() -> None:
    async def scenario(hosts: Hosts) -> None:
        mine, theirs = await hosts.connect()
        sent = b"".join(b"%05d" % number for number in range(500))

        async def write() -> None:
            for start in range(0, len(sent), 7):
                await mine.send_all(sent[start : start + 7])
                await trio.sleep(0.001)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(write)
            assert await read(theirs, len(sent)) == sent

    with_hosts(scenario, Weather(0.05, 0.2, 1e6))


def test_latency_and_bandwidth_take_their_time() -> None:
    async def scenario(hosts: Hosts) -> None:
        mine, theirs = await hosts.connect()
        began = trio.current_time()
        await mine.send_all(bytes(2000))
        assert trio.current_time() == began
        await read(theirs, 2000)
        assert trio.current_time() - began == pytest.approx(LATENCY + 2.0)

    with_hosts(scenario, Weather(LATENCY, 0.0, 1000.0))


def test_a_writer_waits_for_the_reader_when_the_window_is_full() -> None:
    async def scenario(hosts: Hosts) -> None:
        mine, theirs = await hosts.connect()
        with trio.move_on_after(100) as impatience:
            await mine.send_all(bytes(WINDOW_BYTES + 1))
        assert impatience.cancelled_caught
        async with trio.open_nursery() as nursery:
            nursery.start_soon(mine.send_all, bytes(10))
            assert len(await read(theirs, WINDOW_BYTES + 10)) == WINDOW_BYTES + 10

    with_hosts(scenario)


def test_a_plan_of_many_goes_in_one_piece_and_the_next_one_waits_until_it_is_read() -> None:
    body = bytes(range(256)) * (2 * WINDOW_BYTES // 256)
    frame = encode(Certified(plan=CertifiedPlan(b"header", body, None)))

    async def scenario(hosts: Hosts) -> None:
        mine, theirs = await hosts.connect()
        await mine.send_all(frame)
        with trio.move_on_after(100) as impatience:
            await mine.send_all(frame)
        assert impatience.cancelled_caught
        assert await read(theirs, len(frame)) == frame
        async with trio.open_nursery() as nursery:
            nursery.start_soon(mine.send_all, frame)
            pieces = [await theirs.receive_some(WINDOW_BYTES)]
            while sum(map(len, pieces)) < len(frame):
                pieces.append(await theirs.receive_some(WINDOW_BYTES))
            assert b"".join(pieces) == frame
            assert max(map(len, pieces)) > WINDOW_BYTES

    with_hosts(scenario)


def test_what_a_noisy_transfer_takes_is_right_on_average() -> None:
    network = SimNetwork("noise", Frames(), noise=0.05)
    sizes = [network.hindered(1e6) for _ in range(4000)]
    assert statistics.mean(sizes) == pytest.approx(1e6, rel=0.005)
    assert statistics.stdev(sizes) == pytest.approx(0.05e6, rel=0.1)
    assert SimNetwork("calm", Frames()).hindered(1e6) == 1e6


def test_a_one_way_cut_stalls_one_direction_and_loses_nothing() -> None:
    async def scenario(hosts: Hosts) -> None:
        mine, theirs = await hosts.connect()
        await mine.send_all(b"early")
        await trio.sleep(2 * LATENCY)
        hosts.network.cut(0, 1)
        await mine.send_all(b"late")
        await theirs.send_all(b"answer")
        assert await read(theirs, 5) == b"early"
        assert await read(mine, 6) == b"answer"
        with trio.move_on_after(3) as impatience:
            await theirs.receive_some(4)
        assert impatience.cancelled_caught
        hosts.network.heal(0, 1)
        assert await read(theirs, 4) == b"late"

    with_hosts(scenario)


def test_a_cut_that_lasts_breaks_streams_on_both_sides() -> None:
    async def scenario(hosts: Hosts) -> None:
        mine, theirs = await hosts.connect()
        began = trio.current_time()
        hosts.network.cut(1, 0)
        for stream in (mine, theirs):
            with pytest.raises(PeerUnreachable, match="timed out"):
                await stream.receive_some(1)
        assert trio.current_time() - began == pytest.approx(KEEPALIVE_SECONDS)

    with_hosts(scenario)


def test_a_dial_across_a_cut_gives_up_after_its_deadline() -> None:
    async def scenario(hosts: Hosts) -> None:
        hosts.network.cut(1, 0)
        began = trio.current_time()
        with pytest.raises(PeerUnreachable, match="no answer within"):
            await hosts.connect()
        assert trio.current_time() - began == pytest.approx(DIAL_SECONDS)
        hosts.network.heal(1, 0)
        await hosts.connect()

    with_hosts(scenario)


def test_a_reset_delivers_a_prefix_and_then_fails_on_both_sides() -> None:
    async def scenario(hosts: Hosts) -> None:
        mine, theirs = await hosts.connect()
        assert hosts.network.reset(0, 1, 3) == 1
        await mine.send_all(b"abcdef")
        assert await read(theirs, 3) == b"abc"
        with pytest.raises(PeerUnreachable, match="connection reset"):
            await theirs.receive_some(1)
        with pytest.raises(PeerUnreachable, match="connection reset"):
            await mine.receive_some(1)
        with pytest.raises(PeerUnreachable, match="connection reset"):
            await mine.send_all(b"g")

    with_hosts(scenario)


def test_a_killed_process_is_hung_up_after_what_it_had_said() -> None:
    async def scenario(hosts: Hosts) -> None:
        mine, theirs = await hosts.connect()
        await theirs.send_all(b"last words")
        hosts.processes[1].die()
        hosts.network.hang_up(hosts.processes[1])
        with pytest.raises(PeerUnreachable, match="closed here"):
            await theirs.send_all(b"from the grave")
        assert await read(mine, 100) == b"last words"
        with pytest.raises(PeerUnreachable, match="connection reset"):
            await mine.send_all(b"are you there?")
        with pytest.raises(PeerUnreachable, match="refused"):
            await hosts.connect()

    with_hosts(scenario)


def test_a_host_without_power_is_only_silent() -> None:
    async def scenario(hosts: Hosts) -> None:
        mine, theirs = await hosts.connect()
        began = trio.current_time()
        hosts.processes[1].die(silent=True)
        hosts.network.unplug(hosts.processes[1])
        await mine.send_all(b"are you there?")
        with pytest.raises(PeerUnreachable, match="timed out"):
            await mine.receive_some(1)
        assert trio.current_time() - began == pytest.approx(KEEPALIVE_SECONDS)
        with pytest.raises(PeerUnreachable, match="no answer within"):
            await hosts.connect()
        with pytest.raises(PeerUnreachable, match="closed here"):
            await theirs.send_all(b"from the grave")

    with_hosts(scenario)


def test_who_closes_ends_the_other_side_after_what_is_on_its_way() -> None:
    async def scenario(hosts: Hosts) -> None:
        mine, theirs = await hosts.connect()
        await mine.send_all(b"bye")
        await mine.aclose()
        assert await read(theirs, 100) == b"bye"
        with pytest.raises(PeerUnreachable, match="closed here"):
            await mine.receive_some(1)

    with_hosts(scenario)


def test_another_peer_than_expected_is_refused_and_nobody_is_unreachable() -> None:
    async def scenario(hosts: Hosts) -> None:
        transport = SimTransport(hosts.network, hosts.processes[0], address(0))
        with pytest.raises(PeerRefused):
            await transport.dial(address(1), process(7).peer)
        for nobody in ("sim-9:1", "sim-1:2", "elsewhere:1"):
            with pytest.raises(PeerUnreachable, match="refused"):
                await transport.dial(nobody, None)

    with_hosts(scenario)


def test_frames_are_seen_when_sent_and_when_read_whole() -> None:
    async def scenario(hosts: Hosts) -> None:
        mine, theirs = await hosts.connect()
        frame = encode(Ping(number=5))
        await mine.send_all(frame[:3])
        await mine.send_all(frame[3:] + frame)
        number, header = TABLE[Ping].number, frame[16:]
        assert hosts.frames.seen == [(True, "p0.1", number, header)] * 2
        await read(theirs, len(frame) + 1)
        assert hosts.frames.seen[2:] == [(False, "p1.1", number, header)]
        await read(theirs, len(frame) - 1)
        assert hosts.frames.seen[3:] == [(False, "p1.1", number, header)]

    with_hosts(scenario)
