"""Other rules by which peers get their stages, to compare ours with.

- `none`: a newcomer goes to the stage with the fewest peers; nobody is moved.
- `swarm`: every T seconds the least loaded peer of the least loaded stage moves to the most loaded
  one; loads are queue lengths. By the description in "SWARM Parallelism" (arXiv 2301.11913), which
  reports T = 300 s, and 60 s in its best row.
- `petals`: a newcomer takes the stage with the least throughput, the sum of its peers'. Each peer
  reconsiders at random times, two minutes apart at most: it takes itself out, takes the best stage,
  lets all others do the same until nobody moves, and moves if the least throughput was below 0.75
  of what it is then. By the description of Petals' block selection (bigscience-workshop/petals);
  its blocks are our stages here, since stages do not change within a run.

The rule: everything else is the shipped daemon's, so that only the choice of stages differs. A
decision stands until the next plan, however often it is asked for.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import trio

from protocol.records import Member
from protocol.signing import PeerId
from swarm.core.roles import Placing, Roles, go, let_stand_by, place_of
from swarm.core.scheduling.rebalance import stage_seconds

SWARM_SECONDS = 60.0
PETALS_MEAN_SECONDS = 60.0
PETALS_BALANCE = 0.75
MOST_ROUNDS = 20
"""After so many rounds of moves, simulated moves of others are taken to have ended."""


def rule_named(name: str, seed: str) -> Placing | None:
    """Return the rule of one peer; None for ours."""
    makers: dict[str, Callable[[], Placing | None]] = {
        "ours": lambda: None,
        "none": lambda: take_smallest,
        "swarm": SwarmRule,
        "petals": lambda: PetalsRule(random.Random(seed)),
    }
    return makers[name]()


def take_smallest(roles: Roles) -> None:
    """Newcomers follow the smallest group; nobody moves."""
    let_stand_by(roles, roles.idle())


@dataclass
class SwarmRule:
    """The least loaded peer of the least loaded stage moves to the most loaded stage."""

    _epoch: int = -1
    _due: float = 0.0
    _moves: dict[PeerId, int] = field(default_factory=dict)
    _decided: bool = False

    def __call__(self, roles: Roles) -> None:
        """Newcomers go to the most loaded stage; every `SWARM_SECONDS` one peer moves there."""
        now = trio.current_time()
        if roles.situation.header.epoch != self._epoch:
            if self._decided or self._epoch < 0:
                self._due = now + SWARM_SECONDS
            self._epoch, self._moves, self._decided = roles.situation.header.epoch, {}, False
        loads = self._loads(roles)
        most = max(range(len(loads)), key=lambda stage: (loads[stage], -stage))
        for member in roles.idle():
            fitting = roles.fits(member, most)
            go(roles, member, most) if fitting else let_stand_by(roles, [member])
        if now >= self._due and not self._decided:
            self._decided = True
            least = min(range(len(loads)), key=lambda stage: (loads[stage], stage))
            group = roles.groups[least]
            if least != most and len(group) > 1:
                mover = min(group, key=lambda member: (_queue(roles, member), member.peer))
                if roles.fits(mover, most):
                    self._moves[mover.peer] = most
        _follow(roles, self._moves)

    def _loads(self, roles: Roles) -> list[float]:
        return [
            sum(_queue(roles, member) for member in group) / max(1, len(group))
            for group in roles.groups
        ]


@dataclass
class PetalsRule:
    """Each peer goes where the throughput is least, if that is worth it."""

    rng: random.Random
    _epoch: int = -1
    _due: dict[PeerId, float] = field(default_factory=dict)
    _moves: dict[PeerId, int] = field(default_factory=dict)

    def __call__(self, roles: Roles) -> None:
        """Newcomers go to the weakest stage; whose time has come reconsiders."""
        now = trio.current_time()
        if roles.situation.header.epoch != self._epoch:
            self._epoch, self._moves = roles.situation.header.epoch, {}
        for member in roles.idle():
            stage = self._weakest(roles, member, _stages_of(roles))
            if stage is None:
                let_stand_by(roles, [member])
            else:
                go(roles, member, stage)
        for member in [each.member for each in roles.candidates]:
            due = self._due.setdefault(member.peer, self._next(now))
            if now >= due:
                self._due[member.peer] = self._next(now)
                self._reconsider(roles, member)
        _follow(roles, self._moves)

    def _next(self, now: float) -> float:
        return now + self.rng.uniform(0.0, 2 * PETALS_MEAN_SECONDS)

    def _reconsider(self, roles: Roles, member: Member) -> None:
        places = _stages_of(roles)
        here = places.get(member.peer)
        if here is None or roles.groups[here] == [member]:
            return
        before = min(_throughputs(roles, places))
        alone = {peer: stage for peer, stage in places.items() if peer != member.peer}
        best = self._weakest(roles, member, alone)
        if best is None or best == here:
            return
        after = {**alone, member.peer: best}
        for _ in range(MOST_ROUNDS):
            settled = dict(after)
            for other in [each.member for each in roles.candidates]:
                if other.peer not in after:
                    continue
                rest = {peer: stage for peer, stage in after.items() if peer != other.peer}
                chosen = self._weakest(roles, other, rest)
                if chosen is not None:
                    after[other.peer] = chosen
            if after == settled:
                break
        expected = min(_throughputs(roles, after))
        if expected > 0 and before / expected < PETALS_BALANCE:
            self._moves[member.peer] = best

    def _weakest(self, roles: Roles, member: Member, places: dict[PeerId, int]) -> int | None:
        """Return the stage with the least throughput that fits into a member's memory."""
        rates = _throughputs(roles, places)
        fitting = [stage for stage in range(len(rates)) if roles.fits(member, stage)]
        return min(fitting, key=lambda stage: (rates[stage], stage), default=None)


def _follow(roles: Roles, moves: dict[PeerId, int]) -> None:
    for peer, stage in sorted(moves.items()):
        if peer in roles.members:
            go(roles, roles.members[peer].member, stage)


def _queue(roles: Roles, member: Member) -> int:
    heartbeat = roles.situation.heartbeats.get(member.peer)
    return heartbeat.queue_length if heartbeat is not None else 0


def _stages_of(roles: Roles) -> dict[PeerId, int]:
    """Return where everybody works or stands by."""
    places = {each.member.peer: place_of(roles, each.member) for each in roles.candidates}
    return {peer: stage for peer, stage in places.items() if stage is not None}


def _throughputs(roles: Roles, places: dict[PeerId, int]) -> list[float]:
    """Return microbatches per second of every stage, by what its peers can do."""
    problem = roles.problem
    index = {peer.id: i for i, peer in enumerate(problem.peers)}
    rates = []
    for stage, layers in enumerate(roles.ranges):
        group = [index[peer] for peer, place in places.items() if place == stage]
        rates.append(1.0 / stage_seconds(problem, layers, group) if group else 0.0)
    return rates
