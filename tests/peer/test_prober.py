"""Daemons that measure: whole ones, on the modelled network."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio

from protocol.messages import Measured, Probe, ProbeAnswer, Traffic
from protocol.records import (
    ESTIMATES_PURPOSE,
    Estimates,
    TensorSpec,
    decode_record,
    open_signed,
    sign_record,
)
from swarm.core.measuring.estimation import PROBE_BYTES
from swarm.daemon import Daemon
from swarm.peer.probed import HOURLY_BYTES, SERVE_SECONDS
from swarm.peer.prober import AGAIN_SECONDS
from swarm.simulation.network import Weather
from swarm.simulation.physics import Physics, integer_training
from swarm.simulation.world import Options, World

MEGABIT = 1e6 / 8
QUIET = Weather(0.005, 0.001, 50 * MEGABIT)


def idle(peers: int, weather: Weather = QUIET, **more: Any) -> World:
    """Return a swarm that waits for one more peer before it trains."""
    physics = Physics(integer_training(steps=1000, microbatches=4))
    options = Options(physics, peers=peers, wait_for_peers=peers + 1, weather=weather, **more)
    return World(1, options)


def working(peers: int, weather: Weather = QUIET, **more: Any) -> World:
    """Return a swarm that trains for long."""
    physics = Physics(integer_training(steps=100_000, microbatches=4))
    return World(1, Options(physics, peers=peers, weather=weather, **more))


def daemon(world: World, number: int) -> Daemon:
    found = world.peers[number].daemon
    assert found is not None
    return found


def names(world: World) -> list[str]:
    return [peer.identity.peer for peer in world.peers]


def traffic(who: Daemon, kind: type) -> Traffic:
    found = [each for each in who._links.traffic.snapshot() if each.kind == kind.__name__]
    return found[0] if found else Traffic(kind.__name__, 0, 0)


def after(world: World, seconds: float, look: Callable[[World], Awaitable[None] | None]) -> None:
    """Start everybody; look at them after a while."""

    async def scenario(world: World) -> None:
        for peer in world.peers:
            world.start(peer.number)
        await trio.sleep(seconds)
        waits = look(world)
        if waits is not None:
            await waits

    world.run(scenario)


# --- how well ----------------------------------------------------------------------------------


@pytest.mark.parametrize("jitter", [0.0, 0.001, 0.005])
@pytest.mark.parametrize("megabits", [1, 10, 50, 200])
def test_a_link_of_a_known_rate(megabits: int, jitter: float) -> None:
    def look(world: World) -> None:
        for own, other in ((0, 1), (1, 0)):
            prober = daemon(world, own).prober
            way = prober.ways[names(world)[other]]
            assert way.bandwidth.value == pytest.approx(megabits * MEGABIT, rel=0.15)
            # Of some round trips the shortest counts.
            assert 0.0049 < way.latency.value < 0.0055 + jitter / 2
            assert 0 < traffic(daemon(world, own), Probe).sent_bytes < 2_000_000

    after(idle(2, Weather(0.005, jitter, megabits * MEGABIT)), 30, look)


def test_everybody_measures_the_way_to_everybody_once() -> None:
    def look(world: World) -> None:
        for number, peer in enumerate(names(world)):
            ways = daemon(world, number).prober.ways
            assert [*ways] == sorted({*names(world)} - {peer})
            for way in ways.values():
                assert way.bandwidth.value == pytest.approx(QUIET.bytes_per_second, rel=0.15)
            assert traffic(daemon(world, number), Probe).sent_bytes < 5 * PROBE_BYTES
        sent = traffic(daemon(world, 0), Probe).sent_bytes
        assert daemon(world, 0).prober._next_partner() is None
        way = next(iter(daemon(world, 0).prober._ways.values()))
        assert way.measured_at + AGAIN_SECONDS > trio.current_time() + 3000 and sent > 0

    after(idle(6), 120, look)


def test_how_fast_a_peer_computes() -> None:
    """It is as fast as its profile says: the simulated executor takes what it has measured."""

    def look(world: World) -> None:
        for number in range(3):
            slowdown = daemon(world, number).prober.slowdown
            assert slowdown.value == pytest.approx(1.0, rel=0.1)

    after(working(3, speeds=(1.0, 0.5, 2.0)), 40, look)


def test_what_is_on_its_way_does_not_make_a_peer_look_slow() -> None:
    """At any moment, also after a repair, what counts has taken what was measured before joining:
    forwards whose gradients have not come back are no whole microbatches."""
    physics = Physics(integer_training(steps=100_000, microbatches=60))
    seen = 0

    async def scenario(world: World) -> None:
        nonlocal seen
        for number in range(4):
            world.start(number)
        for moment in range(400):
            await trio.sleep(0.05)
            if moment == 200:
                world.kill(3)
            for number in range(3):
                work = daemon(world, number)._work_done()
                if work is not None and work.microbatches:
                    expected = work.microbatches * work.profiled_seconds
                    assert work.compute_seconds == pytest.approx(expected, rel=1e-6)
                    seen += 1

    World(1, Options(physics, peers=4, stages=2)).run(scenario)
    assert seen > 100


# --- who is left alone -------------------------------------------------------------------------


def test_who_trains_is_not_probed() -> None:
    async def look(world: World) -> None:
        before = [traffic(daemon(world, number), Probe) for number in range(3)]
        await trio.sleep(60)
        asked = 0
        for number in range(3):
            assert daemon(world, number)._is_training()
            asked += traffic(daemon(world, number), Probe).sent_bytes
        assert asked == sum(each.sent_bytes for each in before)
        # Whoever asks is told that it is busy.
        answers = traffic(daemon(world, 0), ProbeAnswer).sent_bytes
        daemon(world, 1)._links.post(names(world)[0], Probe(number=1))
        await trio.sleep(1)
        assert traffic(daemon(world, 0), ProbeAnswer).sent_bytes > answers
        assert not daemon(world, 0)._probed.is_serving

    after(working(3), 20, look)


def test_one_at_a_time() -> None:
    """While one peer is served another is told to come again, and what it sends is not measured."""

    async def look(world: World) -> None:
        target = names(world)[0]
        probed = daemon(world, 0)._probed
        one, other = (daemon(world, number)._links for number in (1, 2))
        one.post(target, Probe(number=1001))
        await trio.sleep(0.1)
        assert probed.is_serving
        other.post(target, Probe(number=1001))
        chunk = Probe(number=1002, chunks=2, tensors=(TensorSpec("uint8", (1000,)),))
        other.post(target, chunk, (memoryview(bytes(1000)),))
        await trio.sleep(0.1)
        assert probed._served is not None and probed._served.peer == names(world)[1]
        assert probed._served.arrivals == []
        await trio.sleep(3)
        assert not probed.is_serving

    after(idle(3), 100, look)


def test_there_is_a_budget() -> None:
    async def look(world: World) -> None:
        probed = daemon(world, 0)._probed
        probed._budget.take(HOURLY_BYTES, trio.current_time())
        daemon(world, 1)._links.post(names(world)[0], Probe(number=1001))
        await trio.sleep(0.1)
        assert not probed.is_serving

    after(idle(2), 60, look)


def test_when_the_budget_is_spent_a_train_is_cut_off() -> None:
    async def look(world: World) -> None:
        links, probed = daemon(world, 1)._links, daemon(world, 0)._probed
        links.post(names(world)[0], Probe(number=1001))
        await trio.sleep(0.1)
        assert probed.is_serving
        probed._budget.take(HOURLY_BYTES, trio.current_time())
        links.post(names(world)[0], chunk(1002, chunks=2), (memoryview(bytes(60_000)),))
        await trio.sleep(0.1)
        assert not probed.is_serving

    after(idle(2), 60, look)


def test_whoever_has_probed_waits_for_whoever_was_turned_away() -> None:
    async def look(world: World) -> None:
        probed, asked = daemon(world, 0)._probed, names(world)

        async def grants(number: int) -> bool:
            daemon(world, number)._links.post(asked[0], Probe(number=1001))
            await trio.sleep(0.1)
            return probed.is_serving and probed._last == asked[number]

        assert await grants(1)
        assert not await grants(2)  # one at a time
        await trio.sleep(SERVE_SECONDS)
        assert not await grants(1)
        assert await grants(2)
        await trio.sleep(SERVE_SECONDS)
        assert await grants(1)

    after(idle(3), 100, look)


# --- who must not be trusted -------------------------------------------------------------------


def chunk(number: int, size: int = 60_000, **changes: Any) -> Probe:
    tensors = (TensorSpec("uint8", (size,)),)
    return Probe(**({"number": number, "chunks": 1, "tensors": tensors} | changes))


@pytest.mark.parametrize(
    "message",
    [
        chunk(1, size=70_000),
        chunk(1, chunk=1),
        chunk(1, chunks=0),
        chunk(1, tensors=(TensorSpec("float32", (100,)),)),
        chunk(1, tensors=(TensorSpec("uint8", (10, 10)),)),
        Probe(number=1, chunks=2),
        Probe(number=1, chunks=2, tensors=(TensorSpec("uint8", (0,)),)),
    ],
)
def test_a_chunk_that_is_none_ends_the_link(message: Probe) -> None:
    async def look(world: World) -> None:
        payloads = [memoryview(bytes(spec.nbytes)) for spec in message.tensors]
        links = daemon(world, 1)._links
        before = links._usable((names(world)[0], "bulk"))
        links.post(names(world)[0], message, payloads)
        await trio.sleep(1)
        assert before is not None and before.is_leaving

    after(idle(2), 60, look)


def test_a_flood_that_nobody_asked_for_ends_the_link() -> None:
    async def look(world: World) -> None:
        links = daemon(world, 1)._links
        before = links._usable((names(world)[0], "bulk"))
        for number in range(1, 2 * PROBE_BYTES // 60_000 + 3):
            links.post(names(world)[0], chunk(5000 + number), (memoryview(bytes(60_000)),))
        await trio.sleep(5)
        assert before is not None and before.is_leaving

    after(idle(2), 60, look)


def test_a_train_that_was_broken_off_is_answered_and_no_fault() -> None:
    async def look(world: World) -> None:
        links = daemon(world, 1)._links
        before = links._usable((names(world)[0], "bulk"))
        links.post(names(world)[0], Probe(number=900))
        for place in (0, 2, 3):
            message = chunk(901, size=1000, chunk=place, chunks=4)
            links.post(names(world)[0], message, (memoryview(bytes(1000)),))
        await trio.sleep(1)
        assert before is not None and not before.is_leaving
        assert daemon(world, 0)._probed._served is None

    after(idle(2), 60, look)


def test_answers_that_nobody_asked_for_change_nothing() -> None:
    async def look(world: World) -> None:
        before = daemon(world, 0).prober.estimates()
        answer = ProbeAnswer(number=3, arrivals=tuple(float(n) for n in range(32)))
        daemon(world, 1)._links.post(names(world)[0], answer)
        await trio.sleep(1)
        after = daemon(world, 0).prober.estimates()
        assert [x.bandwidth for x in after.links] == [x.bandwidth for x in before.links]

    after(idle(2), 60, look)


# --- what is told ------------------------------------------------------------------------------


def test_the_leader_knows_what_all_have_measured() -> None:
    def look(world: World) -> None:
        known = daemon(world, 0).control.roster.estimates
        assert [*known] == sorted(names(world))
        for peer, signed in known.items():
            told = open_signed(signed, ESTIMATES_PURPOSE, Estimates)
            assert told.peer == peer and told.boot == 1
            assert {link.peer for link in told.links} == {*names(world)} - {peer}
            assert all(link.bandwidth > 0 and link.latency_seconds > 0 for link in told.links)

    after(idle(4), 90, look)


def test_the_council_knows_it_while_the_swarm_trains() -> None:
    def look(world: World) -> None:
        for number in world.council():
            known = daemon(world, number).control.roster.estimates
            assert [*known] == sorted(names(world))

    after(working(5), 60, look)


def test_they_are_told_now_and_then() -> None:
    def look(world: World) -> None:
        told = decode_record(
            daemon(world, 0).control.roster.estimates[names(world)[1]].payload, Estimates
        )
        assert told.sequence < 30  # in ten minutes

    after(idle(3), 600, look)


def test_nobody_speaks_for_another() -> None:
    async def look(world: World) -> None:
        control, links = daemon(world, 0).control, daemon(world, 1)._links
        victim = names(world)[2]
        before = control.roster.estimates[victim]
        told = decode_record(before.payload, Estimates)
        forged = sign_record(world.peers[1].identity, ESTIMATES_PURPOSE, told)
        link = links._usable((names(world)[0], "bulk"))
        links.post(names(world)[0], Measured(estimates=forged))
        await trio.sleep(1)
        assert control.roster.estimates[victim] == before
        assert link is not None and link.is_leaving

    after(idle(3), 60, look)


def test_what_a_peer_without_work_finds_replaces_the_profile() -> None:
    world = idle(2)

    def look(_: World) -> None:
        prober = daemon(world, 1).prober
        prober.retimed(4.0)
        prober.retimed(0.25)
        assert prober.estimates().slowdown == 0.25

    after(world, 5.0, look)
