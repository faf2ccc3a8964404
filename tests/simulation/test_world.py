"""Whole simulated swarms of shipped daemons."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import trio

from swarm.simulation.network import Weather
from swarm.simulation.physics import Physics, integer_training
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
    twice, since the change waits for a step's end and nothing is fed beyond it."""
    computed: list[str] = []
    world = World(seed, options(peers=6, stages=3))
    world.on_point = lambda process, point: computed.append(point)
    outcome = world.run(undisturbed)
    assert outcome.epochs >= 3
    training = world.options.physics.training
    assert computed.count("after turn") == training.steps * training.microbatches_per_step
    assert computed.count("before forward") == 2 * computed.count("after turn")


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
