"""Whole simulated swarms of shipped daemons."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import trio

from protocol.messages import BY_NUMBER
from protocol.records import PlanBody
from protocol.signing import PeerId
from swarm.core import drafting
from swarm.core.model import Profile
from swarm.core.roles import Roles
from swarm.core.scheduling.planning import candidates_of, members_of, version_before
from swarm.core.verification import JOIN_REQUEST_EPOCHS
from swarm.peer.control import Control
from swarm.simulation.executor import SimExecutor
from swarm.simulation.fakes import SimCheckpoints
from swarm.simulation.network import Weather
from swarm.simulation.physics import Physics, integer_training
from swarm.simulation.process import Process
from swarm.simulation.scenarios import STROKES, draw_storm, run_storm
from swarm.simulation.trace import SimulationFailure
from swarm.simulation.world import Options, World

PRINT_TRACE = """
import sys
from swarm.simulation.scenarios import run_seed
from swarm.simulation.trace import SimulationFailure
try:
    print(*run_seed(int(sys.argv[1]), whole_trace=True).trace, sep="\\n")
except SimulationFailure as failure:
    print(*failure.lines, sep="\\n")
"""
ROOT = Path(__file__).parents[2]


def options(**changes: object) -> Options:
    physics = Physics(integer_training(steps=3, microbatches=4), tied=True)
    return Options(**({"physics": physics, "peers": 4, "stages": 2} | changes))  # type: ignore[arg-type]


async def undisturbed(world: World) -> None:
    for peer in world.peers:
        world.start(peer.number)
    await world.ended(60)


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_a_quiet_swarm_ends_with_the_weights_of_the_plain_loop(stages: int) -> None:
    outcome = World(stages, options(stages=stages)).run(undisturbed)
    assert outcome.epochs >= 2
    assert outcome.virtual_seconds < 30


@pytest.mark.parametrize("seed", range(4))
def test_a_planned_change_costs_no_work(seed: int) -> None:
    """The council grows by plans of their own while the swarm trains: no microbatch is computed
    twice, since the change waits for a step's end and nothing is fed beyond it. Steps are longer
    than a decision takes."""
    computed: list[str] = []
    world = World(seed, options(peers=6, stages=3, speeds=(0.5,) * 6))
    world.on_point = lambda process, point: computed.append(point)
    outcome = world.run(undisturbed)
    assert outcome.epochs >= 3
    training = world.options.physics.training
    assert computed.count("after turn") == training.steps * training.microbatches_per_step
    assert computed.count("before forward") == 2 * computed.count("after turn")


class Counting(World):
    """Counts what its daemons send, by kind."""

    sent: Counter[str]

    def frame(
        self, sending: bool, process: Process, other: PeerId, number: int, header: bytes
    ) -> None:
        if sending:
            self.sent[BY_NUMBER[number].__name__] += 1
        super().frame(sending, process, other, number, header)


def test_of_many_each_is_told_of_a_plan_once() -> None:
    """Some hear of it by others first, and some are heard at the old one: it is on its way."""
    many = 16
    physics = Physics(integer_training(steps=500, microbatches=8))
    world = Counting(1, options(physics=physics, peers=many, speeds=(0.1,) * many))
    world.sent = Counter()

    async def one_dies(world: World) -> None:
        assert isinstance(world, Counting)
        for peer in world.peers:
            world.start(peer.number)
        await trio.sleep(60)
        before = world.newest_epoch()
        world.sent.clear()
        world.kill(many - 1)
        await trio.sleep(40)
        assert world.newest_epoch() == before + 1
        assert world.sent["Certified"] == many - 2
        assert world.sent["GetChain"] == 0

    world.run(one_dies)


def test_while_nothing_is_new_improvements_are_seldom_thought_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps of minutes, in which the leader's council says every second how it is."""
    thoughts: list[float] = []
    think = drafting.follow_aims

    def counted(roles: Roles) -> None:
        thoughts.append(trio.current_time())
        think(roles)

    async def quiet(world: World) -> None:
        for peer in world.peers:
            world.start(peer.number)
        await trio.sleep(700)

    monkeypatch.setattr(drafting, "follow_aims", counted)
    physics = Physics(integer_training(steps=500, microbatches=8))
    World(1, options(physics=physics, peers=4, speeds=(0.001,) * 4)).run(quiet)
    late = [at for at in thoughts if at > 400]
    assert 5 <= len(late) <= 40


def test_voters_far_from_each_other_are_patient() -> None:
    """Round trips of 0.8 s: an election of at least ten of them, where 2 s are else enough."""
    patience: list[float] = []

    async def listened(world: World) -> None:
        for peer in world.peers:
            world.start(peer.number)
        await world.ended(200)
        await trio.sleep(15)  # each plan's leader is elected anew
        for peer in world.peers:
            assert peer.daemon is not None
            agreement = peer.daemon.control.agreement
            if agreement.is_voter and agreement.leader not in (None, peer.identity.peer):
                patience.append(agreement.deadline - trio.current_time())

    World(1, options(weather=Weather(0.4, 0.0))).run(listened)
    assert len(patience) >= 2
    assert min(patience) > 6.0  # the leader was heard less than 2 s ago


def test_a_voter_that_still_measures_keeps_the_leader_in_office(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a council of three one is dead, and another has started again and measures for long."""
    physics = Physics(integer_training(steps=2000, microbatches=4))
    measure, led = SimExecutor.profile, list[bool]()
    slow = False

    async def slowly(self: SimExecutor) -> Profile:
        if slow:
            await trio.sleep(60)
        return await measure(self)

    async def voters_gone(world: World) -> None:
        nonlocal slow
        for number in range(3):
            world.start(number)
        leader = await once_led(world)
        while len(world.council()) < 3:  # noqa: ASYNC110 - seconds are virtual
            await trio.sleep(0.5)
        leader = await once_led(world)
        council = [
            each for each in world.council() if world.peers[each].daemon.control is not leader
        ]  # type: ignore[union-attr]
        world.kill(council[0])
        world.kill(council[1])
        slow = True
        world.start(council[1])
        await trio.sleep(10)
        for _ in range(80):
            await trio.sleep(0.5)
            led.append(leader.is_leader)

    monkeypatch.setattr(SimExecutor, "profile", slowly)
    World(1, options(physics=physics, peers=3)).run(voters_gone)
    assert sum(led) > 0.9 * len(led)


@pytest.mark.parametrize("restarts", [True, False])
def test_a_request_that_a_leader_took_in_long_ago_stops_no_repair(restarts: bool) -> None:
    """It is of a start that is over, or of an epoch too long ago: nobody would agree to it."""
    physics = Physics(integer_training(steps=200, microbatches=4, checkpoint_every=1))
    left_out: list[bool] = []

    async def taken_in_again(world: World) -> None:
        for number in range(6):
            world.start(number)
        leader = await once_led(world)
        plan = leader.plan
        others = [
            each for each in (1, 2, 3, 4, 5) if world.peers[each].identity.peer != leader.me.peer
        ]
        old = candidates_of(plan.body)[world.peers[others[0]].identity.peer]
        world.kill(others[0])
        if restarts:
            world.start(others[0])
        too_old = old.request.epoch + JOIN_REQUEST_EPOCHS
        while leader.plan.header.epoch <= too_old:  # noqa: ASYNC110 - seconds are virtual
            await trio.sleep(1)
        if restarts:
            world.kill(others[0])
        leader = await once_led(world)
        leader.leading.take_in(old)
        dead = world.peers[others[1]].identity.peer
        world.kill(others[1])
        await trio.sleep(15)
        left_out.append(dead not in {each.peer for each in members_of(leader.plan.body)})

    World(1, options(physics=physics, peers=6)).run(taken_in_again)
    assert left_out == [True]


def test_who_dies_during_a_rollback_does_not_undo_more_than_the_rollback() -> None:
    """The swarm starts again from its checkpoint. Nobody holds that version yet when another peer
    is lost: nevertheless the swarm goes on from it."""
    physics = Physics(integer_training(steps=60, microbatches=4, checkpoint_every=10))
    world = World(2, options(physics=physics))

    def newest(lineage: int) -> PlanBody | None:
        header, body = world._newest() or (None, None)
        return body if header is not None and header.lineage == lineage else None

    async def lost_again(world: World) -> None:
        for number in range(4):
            world.start(number)
        while (body := newest(0)) is None or body.completed is None:  # noqa: ASYNC110
            await trio.sleep(0.1)
        for number in range(4):
            world.kill(number)
        for number in range(4):
            world.start(number)
        while newest(1) is None:  # noqa: ASYNC110 - seconds are virtual
            await trio.sleep(0.01)
        group = next(group for group in world.hosts() if len(group) > 1)
        world.kill(group[-1])
        await world.ended(100)

    world.run(lost_again)
    rollbacks = [each for each in world.invariants._headers.values() if each.lineage == 1]
    assert len(rollbacks) > 2
    assert min(version_before(each) for each in rollbacks) >= 10


@pytest.mark.parametrize("seed", [3, 4])
def test_no_plan_overtakes_a_repair(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has not written a version dies, so that all who are left have written it, while
    another is busy for two seconds: it gets to the repair, and not to what follows that only."""
    physics = Physics(integer_training(steps=40, microbatches=6, checkpoint_every=2))
    world = World(seed, options(physics=physics, peers=5))
    victim = -1
    write = SimCheckpoints.write

    async def slowly(self: SimCheckpoints, *what: object) -> object:
        if self._process.number == victim:
            await trio.sleep_forever()
        return await write(self, *what)  # type: ignore[arg-type]

    async def busy(world: World) -> None:
        nonlocal victim
        for number in range(5):
            world.start(number)
        await trio.sleep(6)
        hosts = world.hosts()
        victim = next(group for group in hosts if len(group) > 1)[-1]
        executor = next(
            world.peers[each].executor
            for group in hosts
            for each in group
            if each not in (victim, hosts[0][0])
        )
        assert executor is not None
        await trio.sleep(1)
        executor.hang()
        world.kill(victim)
        await trio.sleep(2)
        executor.go_on()
        await world.ended(60)

    monkeypatch.setattr(SimCheckpoints, "write", slowly)
    world.run(busy)


async def once_led(world: World) -> Control:
    """Return the control of the leader, once there is one of a plan with stages."""
    while True:
        await trio.sleep(1)
        for peer in world.peers:
            control = peer.daemon.control if peer.daemon is not None else None
            if control is not None and control.is_leader and control.plan.body.stages:
                return control


def test_a_step_with_a_flag_is_skipped() -> None:
    physics = Physics(
        integer_training(steps=3, microbatches=4), nonfinite=frozenset({(1, 2, 3), (1, 0, 0)})
    )
    World(1, options(physics=physics)).run(undisturbed)


def test_wrong_weights_are_noticed_and_the_failure_tells_how_to_replay_it() -> None:
    async def sabotage(world: World) -> None:
        for peer in world.peers:
            world.start(peer.number)
        await trio.sleep(0.05)
        executor = world.peers[2].executor
        assert executor is not None
        stage = executor._stage
        enter = stage._enter

        def enter_only(mb, weight, accumulate, **more):  # type: ignore[no-untyped-def]
            if mb.index == 1:  # a ledger that claims what the accumulator does not have
                stage._sums = {key: [0] * len(old) for key, old in stage._sums.items()}
            enter(mb, weight, accumulate, **more)

        stage._enter = enter_only  # type: ignore[method-assign]
        await world.ended(60)

    with pytest.raises(SimulationFailure) as caught:
        World(1, options(replay="this command")).run(sabotage)
    assert caught.value.what.startswith("seed 1: A5: p2.1 commits step")
    assert "lacks" in caught.value.what
    assert "replay: this command" in str(caught.value)


def test_a_killed_daemon_says_and_saves_nothing_more() -> None:
    async def scenario(world: World) -> None:
        for peer in world.peers:
            world.start(peer.number)
        await trio.sleep(1)
        process = world.peers[1].process
        assert process is not None
        world.kill(1)
        world.note("from now on")
        await process.ended.wait()
        await trio.sleep(5)

    outcome = World(1, options(whole_trace=True)).run(scenario)
    after = outcome.trace[
        next(i for i, line in enumerate(outcome.trace) if "from now on" in line) :
    ]
    assert len(after) > 100
    assert [line for line in after if " p1.1 " in line] == []


@pytest.mark.parametrize("kind", STROKES)
def test_every_kind_of_fault_is_survived(kind: str) -> None:
    storm = draw_storm(1, (kind,))
    assert {fault.kind for fault in storm.faults} == {kind}
    run_storm(1, storm)


@pytest.mark.parametrize("seed", [0, 1])
def test_the_same_seed_gives_the_same_trace_byte_for_byte(seed: int) -> None:
    """In fresh interpreters whose sets of strings are in different orders."""
    traces = [
        subprocess.run(
            [sys.executable, "-c", PRINT_TRACE, str(seed)],
            cwd=ROOT,
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            check=True,
            capture_output=True,
        ).stdout
        for hash_seed in ("1", "2")
    ]
    assert len(traces[0]) > 10_000
    assert traces[0] == traces[1]
