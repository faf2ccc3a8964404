"""Simulated swarms in trouble: storms of many seeds, and what each kind of trouble leads to."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio

from swarm.simulation.physics import Physics, integer_training
from swarm.simulation.scenarios import run_seed
from swarm.simulation.world import Options, Outcome, World

STEPS = 12
TROUBLE_SECONDS = 2.5
"""After so long training is under way."""


def options(
    *, checkpoint_every: int = 0, max_replicas: int = 0, flags: tuple[Any, ...] = (), **more: Any
) -> Options:
    training = integer_training(
        steps=STEPS, microbatches=4, checkpoint_every=checkpoint_every, max_replicas=max_replicas
    )
    physics = Physics(training, nonfinite=frozenset(flags))
    return Options(**{"physics": physics, "peers": 4, "stages": 2, "whole_trace": True} | more)


def start_all(world: World) -> None:
    for peer in world.peers:
        if not world.is_alive(peer.number):
            world.start(peer.number)


def in_trouble(
    trouble: Callable[[World], Awaitable[None]], within_seconds: float, chosen: Options
) -> Outcome:
    """Let a swarm train, then get into trouble; it has to end its run in time."""

    async def scenario(world: World) -> None:
        start_all(world)
        await trio.sleep(TROUBLE_SECONDS)
        await trouble(world)
        await world.ended(within_seconds)

    return World(1, chosen).run(scenario)


def said(outcome: Outcome, text: str) -> bool:
    return any(text in line for line in outcome.trace)


@pytest.mark.parametrize("seed", range(40))
def test_storms_pass(seed: int) -> None:
    run_seed(seed)


@pytest.mark.parametrize("seed", [1010])
def test_what_storms_have_found_stays_mended(seed: int) -> None:
    """1010: what a stage has flagged itself comes back when its step is over."""
    run_seed(seed)


@pytest.mark.parametrize(
    ("pair", "both"), [((0, 1), True), ((0, 2), False), ((2, 3), True), ((1, 2), False)]
)
def test_two_that_cannot_reach_each_other_are_not_wired_to_each_other(
    pair: tuple[int, int], both: bool
) -> None:
    async def cut(world: World) -> None:
        world.cut([pair[0]], [pair[1]], both=both)

    assert said(in_trouble(cut, 150, options()), "stands by: its links keep failing")


def test_a_stage_whose_hosts_are_all_killed_goes_on_from_the_complete_version() -> None:
    async def kill_stage(world: World) -> None:
        victims = world.hosts()[1]
        for number in victims:
            world.kill(number)
        await trio.sleep(5)
        start_all(world)

    outcome = in_trouble(kill_stage, 90, options(checkpoint_every=2))
    assert said(outcome, "back to version")


def test_a_swarm_that_is_killed_as_a_whole_goes_on_from_the_complete_version() -> None:
    async def kill_all(world: World) -> None:
        for peer in world.peers:
            world.kill(peer.number)
        start_all(world)

    outcome = in_trouble(kill_all, 90, options(checkpoint_every=2))
    assert said(outcome, "back to version")
    assert not said(outcome, "back to version 0")


def test_a_swarm_whose_checkpoints_are_all_damaged_begins_anew() -> None:
    async def spoil(world: World) -> None:
        for peer in world.peers:
            world.kill(peer.number)
            world.damage(peer.number)
        start_all(world)

    outcome = in_trouble(spoil, 180, options(checkpoint_every=2))
    assert said(outcome, "which is complete: back to version 0")


def test_who_comes_back_with_another_stage_on_its_disk_gives_it_to_others() -> None:
    """The first plan deals by the data, a rollback by peer: the disks are not where they were."""

    async def kill_all(world: World) -> None:
        for peer in world.peers:
            world.kill(peer.number)
        for number in (3, 1, 2, 0):
            world.start(number)
            await trio.sleep(4)

    outcome = in_trouble(kill_all, 120, options(checkpoint_every=2, without_data=(1, 2)))
    assert said(outcome, "back to version")


def test_those_who_stand_by_replace_the_dead_at_once() -> None:
    async def kill_stage(world: World) -> None:
        await trio.sleep(0.3)  # into the next step: they have what the last one has changed
        for number in world.hosts()[0]:
            world.kill(number)

    outcome = in_trouble(kill_stage, 30, options(max_replicas=1, peers=6))
    assert said(outcome, "is ready for stage 0")
    assert not said(outcome, "back to version")


def test_who_hangs_in_a_task_for_ever_is_replaced() -> None:
    async def hang(world: World) -> None:
        executor = world.peers[2].executor
        assert executor is not None
        executor.hang()

    assert said(in_trouble(hang, 60, options()), "executor hung")


def test_who_stood_still_for_a_minute_takes_part_again() -> None:
    async def freeze(world: World) -> None:
        world.freeze(1)
        await trio.sleep(60)
        world.thaw(1)

    in_trouble(freeze, 60, options())


def test_a_split_without_a_dht_heals() -> None:
    async def split(world: World) -> None:
        world.board.mood = "dead"
        world.cut([0, 1], [2, 3])
        await trio.sleep(40)
        world.heal([0, 1], [2, 3])

    in_trouble(split, 90, options())


def test_a_flagged_step_is_skipped_whoever_dies() -> None:
    async def kill(world: World) -> None:
        world.kill(3)

    in_trouble(kill, 60, options(flags=((3, 1, 2), (5, 0, 0))))


@pytest.mark.parametrize("number", [0, 1, 3])
def test_whoever_leaves_the_others_go_on_at_once(number: int) -> None:
    async def leave(world: World) -> None:
        world.stop(number)

    in_trouble(leave, 20, options())


def test_the_recovery_key_replaces_a_council_that_has_lost_its_majority() -> None:
    async def lose_council(world: World) -> None:
        council = world.council()
        left = [peer.number for peer in world.peers if peer.number not in council]
        for number in council[: len(council) // 2 + 1]:
            world.kill(number)
        await trio.sleep(20)
        world.recover((left + council)[0] if left else council[-1])

    outcome = in_trouble(lose_council, 120, options(peers=5, checkpoint_every=2))
    assert said(outcome, "recovered by key")
