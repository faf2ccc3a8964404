"""A leader that proposes what is not good is refused by the voters, and replaced."""

from collections.abc import Callable, Mapping

import msgspec
import pytest
import trio

from protocol.records import Member, PlanBody, Signed, StandbyPlan
from protocol.signing import PeerId
from swarm.core.agreement import Agreement
from swarm.core.ballots import Draft
from swarm.core.scheduling.planning import candidates_of, plan_of, problem_for
from swarm.core.voting import Effect, Refused
from swarm.peer.control import Control
from swarm.peer.leading import Leading
from swarm.simulation.network import Weather
from swarm.simulation.physics import Physics, integer_training
from swarm.simulation.world import Options, World

replace = msgspec.structs.replace
Told = Mapping[PeerId, Signed]
Bad = Callable[[PlanBody, int, Told], PlanBody]
"""Makes a bad plan of the newest one, other than the ones with smaller numbers."""
SETTLED_SECONDS = 25.0
PATIENCE_SECONDS = 20.0


def poor(body: PlanBody, number: int, told: Told) -> PlanBody:
    """All but one of every stage stand by, without need."""
    hosts = [list(stage.replicas[:1]) for stage in body.stages]
    standby = [
        StandbyPlan(member, stage, f"not needed, said {number} times")
        for stage, each in enumerate(body.stages)
        for member in each.replicas[1:]
    ]
    return roles(body, hosts, standby, told)


def infeasible(body: PlanBody, number: int, told: Told) -> PlanBody:
    """Somebody hosts a stage that it has never held: each time somebody else."""
    hosts = [list(stage.replicas) for stage in body.stages]
    mover = hosts[0].pop(number % len(hosts[0]))
    hosts[1].append(mover)
    return roles(body, hosts, [], told)


def lying(body: PlanBody, number: int, told: Told) -> PlanBody:
    """It promises more than the model says, every time more."""
    return replace(
        body,
        step_seconds=body.step_seconds / (2 + number),
        reason="twice as fast",
    )


def roles(
    body: PlanBody, hosts: list[list[Member]], standby: list[StandbyPlan], told: Told
) -> PlanBody:
    """Return a plan with these roles whose claims are true."""
    candidates = list(candidates_of(body).values())
    training = integer_training(steps=4000, microbatches=6)
    problem = problem_for(training, candidates, told, before=body)
    ranges = [(stage.first, stage.last) for stage in body.stages]
    return plan_of(problem, candidates, ranges, hosts, standby, programs=False)


@pytest.mark.parametrize(
    ("bad", "reason"), [(poor, "quality: "), (infeasible, "moves: "), (lying, "step_seconds: ")]
)
def test_a_bad_leader_is_refused_with_the_reason_and_replaced(
    bad: Bad, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals: list[str] = []
    perform = Control._perform

    def note(self: Control, effects: list[Effect]) -> None:
        refusals.extend(each.reason for each in effects if isinstance(each, Refused))
        perform(self, effects)

    monkeypatch.setattr(Control, "_perform", note)
    leaders: list[int] = []

    async def scenario(world: World) -> None:
        for peer in world.peers:
            world.start(peer.number)
        await trio.sleep(SETTLED_SECONDS)
        assert len(world.council()) >= 3
        [culprit] = [n for n in range(6) if control(world, n).is_leader]
        leaders.append(culprit)
        refusals.clear()
        spoil(control(world, culprit), bad)
        epoch = world.newest_epoch()
        await trio.sleep(PATIENCE_SECONDS)
        leaders.extend(n for n in range(6) if control(world, n).is_leader)
        assert world.newest_epoch() == epoch  # nothing of it was decided

    settled_world().run(scenario)
    culprit, *later = leaders
    assert later and culprit not in later
    assert len(refusals) >= 3
    assert all(each.startswith(reason) for each in refusals), set(refusals)


def settled_world() -> World:
    physics = Physics(integer_training(steps=4000, microbatches=6), layers=6)
    options = Options(physics, peers=6, weather=Weather(0.002, 0.0), speeds=(0.1,) * 6)
    return World(1, options)


def control(world: World, number: int) -> Control:
    daemon = world.peers[number].daemon
    assert daemon is not None
    return daemon.control


def spoil(control: Control, bad: Bad) -> None:
    """Let this peer draft what is bad, and find it good."""
    leading: Leading = control.leading
    agreement: Agreement = control.agreement
    drafts = 0

    def draft(now: float) -> tuple[Draft, tuple[Signed, ...]]:
        nonlocal drafts
        drafts += 1
        header, body = agreement.newest.header, agreement.newest.body
        told = leading._roster.estimates
        evidence = tuple(told[each.signer] for each in body.members if each.signer in told)
        made = replace(bad(body, drafts, told), reason=f"draft {drafts}")
        return (
            Draft(made, "planned", leading.version + 1, header.lineage, header.council),
            evidence,
        )

    leading.draft = draft  # type: ignore[method-assign]
    control._judge = lambda header, body, evidence: ""  # type: ignore[method-assign]
