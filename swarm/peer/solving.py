"""When a full solve is worth its while, and what becomes of its answer.

The rule: an answer counts only if it repays its own migrations (core/cost.py prices them), by more
than the hysteresis; greedy moves are always at hand and wait for nobody.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from protocol.records import PlanBody
from protocol.signing import PeerId
from swarm.core.scheduling.aims import aims_of, step_seconds
from swarm.core.scheduling.planning import members_of
from swarm.core.scheduling.problem import Assignment, Problem
from swarm.core.scheduling.rebalance import HYSTERESIS
from swarm.core.scheduling.starts import Range, fits
from swarm.core.step import ranges_of_stages

AGAIN_SECONDS = 300.0
"""How soon a problem whose figures alone have changed is solved again,"""
SOON_SECONDS = 30.0
"""and how soon one by which a step of the present plan takes much longer, or shorter, than by the
last one: the first figures of a plan at work often show what profiles did not."""
SECONDS_PER_MEMBER = 0.1
"""So seldom at least is the problem of a large swarm made, to see that: it has a figure a pair."""
MUCH = 1.1


@dataclass(frozen=True, slots=True)
class Question:
    """A problem to solve, and from what a random search starts."""

    problem: Problem
    seed: int


class Solving:
    """What has been asked of the solver and what it has found."""

    def __init__(self) -> None:
        self._roles: tuple[object, ...] | None = None
        self._problem: Problem | None = None
        self._asked_at, self._seconds = 0.0, 0.0
        """When the last question was asked, and what a step took by it."""
        self._look_at = 0.0
        self._answered: tuple[PeerId, ...] = ()
        self._is_busy = False
        self._ranges: tuple[Range, ...] = ()
        """Of the stages that `target` means."""
        self.answer: Assignment | None = None
        """What the solver found last; None if it found nothing."""
        self.target: Mapping[PeerId, int | str] = {}
        """What the best plan that anybody has found makes of each peer (`roles.Situation`)."""

    def is_due(self, roles: tuple[object, ...], now: float) -> bool:
        """Return whether there may be something to solve: `roles` (who is there and does what) are
        new, or figures may have changed since `question` was called last."""
        return not self._is_busy and (roles != self._roles or now >= self._look_at)

    def question(
        self,
        problem: Problem,
        roles: tuple[object, ...],
        seed: int,
        now: float,
        seconds: float = 0.0,
    ) -> Question | None:
        """Return what is to be solved now, if that is a new problem; it is then under way until
        `answered`. By it a step of the present plan, if there is one, takes so many `seconds`."""
        self._look_at = now + max(SOON_SECONDS, SECONDS_PER_MEMBER * len(problem.peers))
        is_other = max(seconds, self._seconds) > MUCH * min(seconds, self._seconds)
        is_late = now >= self._asked_at + AGAIN_SECONDS
        if roles == self._roles and not (is_other or is_late):
            return None
        is_new = roles != self._roles or problem != self._problem
        self._roles, self._problem, self._asked_at = roles, problem, now
        self._seconds, self._is_busy = seconds, is_new
        return Question(problem, seed) if is_new else None

    def answered(self, problem: Problem, assignment: Assignment | None) -> None:
        """The solver has ended, perhaps without an answer."""
        self._is_busy = False
        self._answered = tuple(peer.id for peer in problem.peers)
        self.answer = assignment

    def is_answered(self, peers: Sequence[PeerId]) -> bool:
        """Return whether the solver has ended with a problem of these very peers."""
        return self._answered == tuple(peers)

    def propose(self, problem: Problem, body: PlanBody, assignment: Assignment) -> bool:
        """Aim at an assignment of the members of `body` if it beats what the plan, or the best
        proposal so far, leads to; return whether it does."""
        now = _aims(problem, body)
        if now is None or assignment.ranges != now.ranges:
            return False
        if not _fits(problem, assignment):
            return False
        best = min(step_seconds(problem, now), self._target_seconds(problem, now))
        if not step_seconds(problem, assignment) < best * (1 - HYSTERESIS):
            return False
        reasons = {each.peer: each.reason for each in assignment.standby}
        self._ranges = assignment.ranges
        self.target = {
            problem.peers[peer].id: stage
            for stage, group in enumerate(assignment.groups)
            for peer in group
        } | {problem.peers[peer].id: why for peer, why in reasons.items() if why}
        return True

    def _target_seconds(self, problem: Problem, now: Assignment) -> float:
        """Return what the present target takes, if there is one and it is for these peers."""
        groups: list[list[int]] = [[] for _ in now.groups]
        if self._ranges != now.ranges:
            return float("inf")
        for i, peer in enumerate(problem.peers):
            stage = self.target.get(peer.id)
            if isinstance(stage, int):
                groups[stage].append(i)
        if not all(groups):
            return float("inf")
        made = Assignment(now.ranges, tuple(map(tuple, groups)), now.feeders)
        return step_seconds(problem, made)

    def adopted(self, body: PlanBody) -> None:
        """There is a newer plan: what leads to the target, or has other stages, ends it."""
        if not self.target:
            return
        if self._ranges != tuple(ranges_of_stages(body)):
            self.target = {}
            return
        places = {
            each.peer: number for number, stage in enumerate(body.stages) for each in stage.replicas
        } | {each.member.peer: each.stage for each in body.standby if not each.reason}
        wanted = {p: s for p, s in self.target.items() if isinstance(s, int) and p in places}
        if all(places[peer] == stage for peer, stage in wanted.items()):
            self.target = {}


def seconds_by(problem: Problem, body: PlanBody) -> float:
    """Return how long a step takes by what a plan leads to; 0 if nothing would flow."""
    now = _aims(problem, body)
    return step_seconds(problem, now) if now is not None else 0.0


def _aims(problem: Problem, body: PlanBody) -> Assignment | None:
    """Return what a plan leads to; None if a stage would have nobody, or nobody would feed."""
    aims = aims_of(problem, body, {each: i for i, each in enumerate(members_of(body))})
    return aims if all(aims.groups) and aims.feeders else None


def _fits(problem: Problem, assignment: Assignment) -> bool:
    """Return whether everybody has the memory for its stage: a proposal may be anybody's."""
    ranges = assignment.ranges
    return all(
        fits(problem, peer, ranges, stage)
        for stage, group in enumerate(assignment.groups)
        for peer in group
    )
