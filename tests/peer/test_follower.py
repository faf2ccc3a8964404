"""A standby follows its stage: it fetches, catches up, and begins anew after a gap."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
import trio
import trio.testing

from protocol.messages import Commit, Fence, Resume, Settlement, Totals
from protocol.records import (
    JOIN_REQUEST_PURPOSE,
    Generation,
    Member,
    PlanBody,
    StagePlan,
    StandbyPlan,
    TensorSpec,
    sign_record,
)
from swarm.core.holding import Holding
from swarm.peer.follower import Follower
from swarm.simulation.physics import Physics, integer_training
from tests.core.plans import body, record, request
from tests.peer.ends import HASH, RANGES, RUN, STAGE, Giver, totals_of, with_givers

PHYSICS = Physics(integer_training(steps=9, microbatches=2), layers=3)
OTHER_PHYSICS = Physics(PHYSICS.training, layers=3, elements=4)
SKIPPING = Physics(
    integer_training(steps=9, microbatches=2), layers=3, nonfinite=frozenset({(1, 0, 2)})
)
FENCE = Fence(Generation(), 1, 1)
QUIET_SECONDS = 0.05


@dataclass
class Standby:
    """A follower, and the group that it follows."""

    me: Giver
    givers: Sequence[Giver]
    follower: Follower
    versions: list[int] = field(default_factory=list)
    """What it has held, one after the other."""
    moved: trio.Event = field(default_factory=trio.Event)

    def on_step(self) -> None:
        self.versions.append(self.follower.version)
        self.moved.set()

    async def until(self, version: int) -> None:
        """Wait until it holds a version, and the same state as the group."""
        while self.follower.version != version:
            self.moved = trio.Event()
            await self.moved.wait()

    def resume(
        self,
        step: int,
        totals: Totals | None = None,
        *,
        donors: tuple[str, ...] = (),
        prepared: tuple[str, ...] = (),
    ) -> None:
        settlement = Settlement(HASH, b"\x03", donors, prepared, None, ())
        resume = Resume(fence=FENCE, step=step, totals=totals, stages=(settlement,) * 2)
        self.follower.resume(resume)

    async def commit(self, step: int, *, tell: bool = True) -> Totals:
        """Let the group commit a step, and the standby hear of it."""
        totals = totals_of(self.me.physics, step)
        for each in self.givers:
            await each.commit(totals)
        if tell:
            self.tell(step, totals)
        return totals

    def tell(self, step: int, totals: Totals) -> None:
        self.follower.commit(Commit(fence=FENCE, step=step, totals=totals))

    def check_equal(self) -> None:
        """Its state is the group's."""
        group, mine = self.givers[-1].holding, self.follower.holding
        assert group is not None and mine is not None
        assert (mine.version, mine.state_hash) == (group.version, group.state_hash)
        assert self.me.executor.version == group.version


def plan_of(givers: Sequence[Giver], me: Giver, others: Sequence[str]) -> PlanBody:
    """Return a plan in which `givers` host the stage that `me` follows, and `others` the other."""
    found = body([[each.me for each in givers], list(others)])
    stages = tuple(
        StagePlan(first, last, stage.replicas, stage.shares, TensorSpec("float32", (8,)))
        for (first, last), stage in zip(RANGES, found.stages, strict=True)
    )
    own = me.identity
    return msgspec.structs.replace(
        found,
        members=(record(own, RUN),),
        requests=(sign_record(own, JOIN_REQUEST_PURPOSE, request(own, RUN, seconds=(1.0,) * 3)),),
        stages=stages,
        standby=(StandbyPlan(Member(me.me, 1), STAGE),),
    )


def follow(
    tmp_path: Path,
    scenario: Callable[[Standby], Awaitable[None]],
    *,
    physics: Physics = PHYSICS,
    holding: Holding | None = None,
    is_leaver: bool = False,
    begins_at: int = -1,
    others: Sequence[str] = ("elsewhere",),
) -> None:
    """Run `scenario` with a standby behind two replicas that hold version 0."""

    async def main(me: Giver, givers: list[Giver]) -> None:
        if holding is not None:
            await me.hold()
        follower = Follower(
            stage=STAGE,
            body=plan_of(givers, me, others),
            shape=physics.shape,
            lineage=0,
            holding=holding,
            executor=me.executor,
            links=me.links,
            is_leaver=is_leaver,
            on_step=lambda: standby.on_step(),
            begins_at=begins_at,
        )
        standby = Standby(me, givers, follower)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(follower.run)
            await scenario(standby)
            nursery.cancel_scope.cancel()

    with_givers(tmp_path, main, 2, physics)


def test_a_standby_fetches_the_state_and_follows_step_by_step(tmp_path: Path) -> None:
    async def scenario(standby: Standby) -> None:
        assert not standby.follower.is_ready
        standby.resume(0)
        await standby.moved.wait()
        assert standby.follower.is_ready
        for step in range(4):
            await standby.commit(step)
            await standby.until(step + 1)
            standby.check_equal()
        assert standby.versions == [0, 1, 2, 3, 4]
        assert standby.follower.is_ready
        for each in standby.givers:
            states = [asked.version for asked in each.listed if asked.kind == "state"]
            assert states == [0]
        # One replica gives each gradient, in turn.
        gradients = [
            [asked.version for asked in each.listed if asked.kind == "gradient"]
            for each in standby.givers
        ]
        assert sorted(gradients) == [[0, 2], [1, 3]]

    follow(tmp_path, scenario)


def test_a_standby_begins_at_the_step_in_hand(tmp_path: Path) -> None:
    async def scenario(standby: Standby) -> None:
        for step in range(2):
            await standby.commit(step, tell=False)
        standby.resume(2)
        await standby.until(2)
        await standby.commit(2)
        await standby.until(3)
        standby.check_equal()
        assert standby.versions == [2, 3]

    follow(tmp_path, scenario)


def test_after_a_gap_a_standby_begins_anew(tmp_path: Path) -> None:
    """Of the steps that it hears of late, the group keeps only the last one's gradient."""

    async def scenario(standby: Standby) -> None:
        standby.resume(0)
        await standby.moved.wait()
        missed = [await standby.commit(step, tell=False) for step in range(3)]
        for step, totals in enumerate(missed):
            standby.tell(step, totals)
        await standby.until(3)
        standby.check_equal()
        assert standby.versions == [0, 3]
        await standby.commit(3)
        await standby.until(4)
        standby.check_equal()
        assert standby.versions == [0, 3, 4]

    follow(tmp_path, scenario)


def test_of_many_steps_that_have_passed_only_the_last_gradient_is_asked_for(
    tmp_path: Path,
) -> None:
    """The group does not wait for who follows it, and what piles up meanwhile is bounded."""

    async def scenario(standby: Standby) -> None:
        standby.resume(0)
        await standby.moved.wait()
        totals = totals_of(PHYSICS, 0)
        for step in range(20_000):
            standby.tell(step, totals)
        await trio.testing.wait_all_tasks_blocked(QUIET_SECONDS)
        gradients = [
            asked.version
            for each in standby.givers
            for asked in each.listed
            if asked.kind == "gradient"
        ]
        assert gradients == [19_999] * 2

    follow(tmp_path, scenario)


def test_what_one_replica_cannot_give_another_gives(tmp_path: Path) -> None:
    async def scenario(standby: Standby) -> None:
        standby.resume(0)
        await standby.moved.wait()
        standby.givers[0].scope.cancel()
        for step in range(2):  # in turn it begins with either of them
            await standby.commit(step)
            await standby.until(step + 1)
            standby.check_equal()
        assert standby.versions == [0, 1, 2]
        # By their gradients, and not by fetching the state again.
        kinds = [(each.kind, each.version) for each in standby.givers[1].listed]
        assert kinds == [("state", 0), ("gradient", 0), ("gradient", 1)]

    follow(tmp_path, scenario)


def test_a_state_that_does_not_fit_is_asked_of_another_replica(tmp_path: Path) -> None:
    async def scenario(standby: Standby) -> None:
        odd = standby.givers[0]
        odd.use(OTHER_PHYSICS)
        await odd.hold()
        standby.resume(0)
        await standby.moved.wait()
        standby.check_equal()
        # Its gradients do not fit either: the other's do, and else it begins anew.
        for step in range(3):
            for each in standby.givers:
                await each.commit(totals_of(each.physics, step))
            standby.tell(step, totals_of(PHYSICS, step))
            await standby.until(step + 1)
            standby.check_equal()

    follow(tmp_path, scenario)


def test_a_skipped_step_needs_no_gradient(tmp_path: Path) -> None:
    async def scenario(standby: Standby) -> None:
        standby.resume(0)
        await standby.moved.wait()
        assert [(await standby.commit(step)).verdict for step in range(3)][1] == "skip"
        await standby.until(3)
        standby.check_equal()

    follow(tmp_path, scenario, physics=SKIPPING)


def test_a_halting_verdict_moves_nothing(tmp_path: Path) -> None:
    async def scenario(standby: Standby) -> None:
        standby.resume(0)
        await standby.moved.wait()
        standby.tell(0, msgspec.structs.replace(totals_of(PHYSICS, 0), verdict="halt"))
        await trio.testing.wait_all_tasks_blocked(QUIET_SECONDS)
        assert (standby.versions, standby.follower.is_ready) == ([0], True)

    follow(tmp_path, scenario)


def test_who_holds_the_state_already_does_not_fetch_it(tmp_path: Path) -> None:
    async def scenario(standby: Standby) -> None:
        standby.resume(0)
        assert standby.follower.is_ready
        await standby.commit(0)
        await standby.until(1)
        standby.check_equal()
        assert standby.versions == [1]

    first, last = RANGES[STAGE]
    follow(tmp_path, scenario, holding=Holding(0, first, last, 0, HASH))


def test_a_leaver_keeps_what_others_may_fetch_until_the_next_commit(tmp_path: Path) -> None:
    async def scenario(standby: Standby) -> None:
        standby.resume(0)
        await trio.testing.wait_all_tasks_blocked(QUIET_SECONDS)
        assert standby.versions == []
        assert not standby.follower.is_ready
        await standby.commit(0)
        await standby.until(1)
        standby.check_equal()

    # It held another stage.
    follow(tmp_path, scenario, holding=Holding(0, 2, 3, 0, HASH), is_leaver=True)


def test_a_leaver_is_free_when_all_of_its_stage_hold_what_it_does(tmp_path: Path) -> None:
    async def scenario(standby: Standby) -> None:
        standby.resume(0, donors=("one", "other", "me"))
        await standby.moved.wait()
        assert standby.versions == [0] and standby.follower.is_ready
        await standby.commit(0)
        await standby.until(1)
        standby.check_equal()

    here = {"holding": Holding(0, 2, 3, 0, HASH), "is_leaver": True}
    follow(tmp_path, scenario, **here, others=("one", "other"))


@pytest.mark.parametrize(
    ("others", "donors", "prepared"),
    [
        (("one", "other"), ("one", "me"), ()),
        (("one", "other"), ("one", "other", "me"), ("me",)),
        (("one",), ("one", "me"), ()),
    ],
    ids=["one lacks the state", "one lacks the gradient", "one has it alone"],
)
def test_a_leaver_keeps_what_its_stage_lacks_or_would_have_once(
    tmp_path: Path, others: tuple[str, ...], donors: tuple[str, ...], prepared: tuple[str, ...]
) -> None:
    async def scenario(standby: Standby) -> None:
        standby.resume(0, donors=donors, prepared=prepared)
        await trio.testing.wait_all_tasks_blocked(QUIET_SECONDS)
        assert standby.versions == [] and not standby.follower.is_ready

    here = {"holding": Holding(0, 2, 3, 0, HASH), "is_leaver": True}
    follow(tmp_path, scenario, **here, others=others)


def test_until_resume_a_standby_does_nothing(tmp_path: Path) -> None:
    async def scenario(standby: Standby) -> None:
        await trio.testing.wait_all_tasks_blocked(QUIET_SECONDS)
        assert standby.versions == []
        assert all(each.listed == [] for each in standby.givers)

    follow(tmp_path, scenario)


def test_who_is_new_fetches_while_its_plan_waits_and_then_follows(tmp_path: Path) -> None:
    """It hears of no commit before its plan's Resume: the gradient of that step is fetched then,
    and not the state again."""

    async def scenario(standby: Standby) -> None:
        await standby.moved.wait()
        assert standby.versions == [0] and standby.follower.is_ready
        totals = await standby.commit(0, tell=False)
        standby.resume(1, totals)
        await standby.until(1)
        assert standby.versions == [0, 1]
        standby.check_equal()

    follow(tmp_path, scenario, begins_at=0)


def test_who_is_new_and_too_late_for_the_gradient_fetches_the_state(tmp_path: Path) -> None:
    async def scenario(standby: Standby) -> None:
        await standby.moved.wait()
        totals = [await standby.commit(step, tell=False) for step in (0, 1)]
        standby.resume(2, totals[1])
        await standby.until(2)
        standby.check_equal()

    follow(tmp_path, scenario, begins_at=0)
