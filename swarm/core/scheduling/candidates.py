"""Candidates for an assignment: where the search begins, what each costs, and steps to better ones.

The rule: whatever is computed of a candidate is kept. A step downhill looks at bounds (bounds.py)
first; only a neighbour whose bound is below the best so far is worth the linear program that prices
it.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from swarm.core.scheduling.bounds import MOST_KEPT, Bounds
from swarm.core.scheduling.cost import Prediction, predict
from swarm.core.scheduling.estimate import INFEASIBLE
from swarm.core.scheduling.nearness import MANY_PEERS, largest_first
from swarm.core.scheduling.placing import Placing
from swarm.core.scheduling.problem import Assignment, Problem, Standby
from swarm.core.scheduling.rebalance import rebalanced
from swarm.core.scheduling.regrouping import (
    changed,
    idle,
    near_cuts,
    neighbours,
    orders,
    other_cuts,
)
from swarm.core.scheduling.starts import (
    Groups,
    Range,
    Start,
    best_cuts,
    fits,
    stage_counts,
    stage_counts_to_try,
    starts,
)
from swarm.core.scheduling.wiring import proportional_flow
from swarm.errors import NoFeasiblePlan

BETTER = 1 - 1e-9
FEWEST_PEERS, FEW_PEERS, SOME_PEERS = 8, 12, 48
"""So many are searched to the last step; so many less; so many with every number of stages."""
MOST_STARTS = 12
LEVEL = 0.005
"""Starts are rebalanced as long as the slowest stage gets faster by this fraction."""
LEAST_PARTS = 48
FINALISTS, FINAL_ROUNDS = 3, 4
"""Numbers of stages that are searched in depth, and how much deeper."""


@dataclass(frozen=True)
class Budget:
    """When the search ends; in work, not in seconds, so that it ends alike everywhere."""

    programs: int
    """Linear programs at most."""
    neighbours: int
    """Candidates that are bounded in one round at most; 0: nothing goes downhill."""
    descents: int
    """Starts from which the search goes downhill."""
    kicks: int
    """Random moves away from the best, each with another descent."""
    candidates: int = 1200
    """What each search on grids tries."""
    rounds: int = 2
    """So many searches for each number of stages at first; for the best, FINAL_ROUNDS as many."""


def budget_for(problem: Problem) -> Budget:
    """Return a budget of a few seconds for ten peers, ten for a hundred, and up to a minute for
    more (24 layers, free cuts, a core of a server; scripts/bench growth)."""
    if len(problem.peers) <= FEWEST_PEERS:
        return Budget(programs=800, neighbours=300, descents=5, kicks=80)
    if len(problem.peers) <= FEW_PEERS:
        return Budget(programs=200, neighbours=150, descents=2, kicks=8, rounds=1)
    if len(problem.peers) <= SOME_PEERS:
        return Budget(programs=150, neighbours=400, descents=3, kicks=4, candidates=4800)
    if len(problem.peers) <= MOST_KEPT:
        return Budget(programs=60, neighbours=100, descents=2, kicks=0, candidates=3200, rounds=4)
    tried = min(3_000, 2_000_000 // len(problem.peers))
    return Budget(programs=4, neighbours=0, descents=2, kicks=0, candidates=tried, rounds=3)


class Search:
    """Local search over (ranges, groups); peers in no group stand by."""

    def __init__(self, problem: Problem, budget: Budget, seed: int = 0) -> None:
        self.problem = problem
        self.budget = budget
        self.programs = 0
        self._rng = np.random.default_rng(seed)
        self._bounds = Bounds(problem)
        self._bounded: dict[Start, float] = {}
        self._priced: dict[Start, float] = {}
        self._starts: list[Start] = []
        self._cuts: dict[Groups, tuple[Range, ...]] = {}
        self._plain: dict[Start, Prediction | None] = {}
        self._placing = Placing(problem, self.assignment, self.plain, self._rng)

    def begin(self) -> list[Start]:
        """Return the best of the starts, settled or (of many peers) rebalanced, and what the peers
        do now, rebalanced.

        Without a linear program: it is also what the greedy answer is chosen from (greedy.py)."""
        many = len(self.problem.peers) > MANY_PEERS
        few = len(self.problem.peers) <= FEWEST_PEERS
        made = self.best_starts(MOST_STARTS if few else MOST_STARTS // 2)
        made = list(map(self._leveled if many else self.settled, made))
        current = self.problem.current
        if current is not None and self._counts(current.ranges):
            after, _ = rebalanced(self.problem, current)
            made += [(current.ranges, current.groups), (after.ranges, after.groups)]
        return list(dict.fromkeys(made))

    def best_starts(self, most: int) -> list[Start]:
        """Return the starts of starts.py with the least bounds, some of each number of stages."""
        if not self._starts:
            counts = stage_counts_to_try(self.problem)
            made = [each for n in counts for each in starts(self.problem, n)]
            self._starts = sorted(dict.fromkeys(made), key=self.bound)
        return diverse(self._starts, most)

    def _leveled(self, start: Start) -> Start:
        """Return the best-bounded of what it is after greedy moves, and of that with the fastest
        replicas of each stage only: 1, 2, 4, ... of them."""
        after, _ = rebalanced(self.problem, self.assignment(start), hysteresis=LEVEL)
        ranges, groups = start[0], after.groups
        made = [(ranges, groups)]
        least = self.problem.terms.min_replicas
        rows = []
        for layers, group in zip(ranges, groups, strict=True):
            order = np.argsort(-self._bounds.limits(layers)[list(group)], kind="stable")
            rows.append([group[i] for i in order.tolist()])
        while least < max(map(len, rows)):
            made.append((ranges, tuple(tuple(sorted(row[:least])) for row in rows)))
            least *= 2
        return min(made, key=self.bound)

    def placed(self, begin: Sequence[Start]) -> list[Start]:
        """Return what the search on grids makes of the best of each number of stages, and of the
        most promising of these."""
        budget = self.budget
        if not budget.candidates:
            return []
        made: dict[int, Start] = {}
        pool = [*begin, *self._starts]
        if len(self.problem.peers) > FEW_PEERS:
            pool.append(self.employed(min(begin, key=self.plain_seconds)))
        for start in sorted(pool, key=self.plain_seconds):
            made.setdefault(len(start[0]), start)
        for stages, start in made.items():
            made[stages] = self._placing.improved(
                start, pool, rounds=budget.rounds, candidates=budget.candidates
            )
        best = min(made, key=lambda count: self.plain_seconds(made[count]))
        around = range(best - 2, best + 3)
        for stages in stage_counts(self.problem):
            some = len(self.problem.peers) > SOME_PEERS
            if stages not in made and (stages in around or not some):
                begun = min(starts(self.problem, stages), key=self.plain_seconds)
                made[stages] = self._placing.improved(
                    begun, (), rounds=budget.rounds, candidates=budget.candidates
                )
        for stages in sorted(made, key=lambda count: self.plain_seconds(made[count]))[:FINALISTS]:
            made[stages] = self._placing.improved(
                made[stages],
                pool,
                rounds=FINAL_ROUNDS * budget.rounds,
                candidates=2 * budget.candidates,
            )
            if len(self.problem.peers) > FEW_PEERS:
                made[stages] = self.employed(made[stages])
        return list(made.values())

    def plain(self, start: Start) -> Prediction | None:
        """Return the prediction with proportional wiring; None of what does not fit."""
        if start not in self._plain:
            fitting = self.bound(start) < INFEASIBLE
            assignment = self.assignment(start)
            flow = proportional_flow(self.problem, assignment) if fitting else None
            self._plain[start] = predict(self.problem, assignment, flow) if flow else None
        return self._plain[start]

    def plain_seconds(self, start: Start) -> float:
        """Return the seconds per step with proportional wiring; as `bound` of what does not fit."""
        found = self.plain(start)
        return found.step_seconds if found else self.bound(start)

    def _counts(self, ranges: Sequence[Range]) -> bool:
        """Whether the terms allow these cuts."""
        cuts, wanted = tuple(first for first, _ in ranges[1:]), self.problem.terms.cuts
        return len(ranges) in stage_counts(self.problem) and cuts == (wanted or cuts)

    def bound(self, start: Start) -> float:
        """Return a lower bound of the seconds per step; above INFEASIBLE what does not fit."""
        found = self._bounded.get(start)
        if found is None:
            over = self._excess(start)
            found = self._bounds.step_seconds(*start) if not over else INFEASIBLE * (1 + over)
            self._bounded[start] = found = min(found, INFEASIBLE * 1e6)
        return found

    def _excess(self, start: Start) -> float:
        """Return by how much stages exceed memories and numbers of replicas, in parts."""
        ranges, groups = start
        problem, stages = self.problem, len(ranges)
        over = 0.0
        for stage, ((first, last), group) in enumerate(zip(ranges, groups, strict=True)):
            needed = problem.memory_bytes(first, last, stage, stages)
            for peer in group:
                memory = problem.peers[peer].memory_bytes
                over += needed / max(memory, 1) - 1 if needed > memory else 0.0
            over += max(0, problem.terms.min_replicas - len(group))
            over += max(0, len(group) - problem.replica_limit)
        return over

    def price(self, start: Start) -> float:
        """Return the seconds per step with the best wiring; as `bound` for what does not fit."""
        found = self._priced.get(start)
        if found is None:
            found = self.bound(start)
            if found < INFEASIBLE:
                self.programs += 1
                try:
                    found = predict(self.problem, self.assignment(start)).step_seconds
                except NoFeasiblePlan:
                    found = INFEASIBLE * 2
            self._priced[start] = found
        return found

    def assignment(self, start: Start) -> Assignment:
        """Return the assignment in which all who hold the data may feed."""
        ranges, groups = start
        standby = tuple(Standby(peer, "") for peer in idle(self.problem, groups))
        return Assignment(ranges, groups, self.problem.data_holders, standby)

    def settled(self, start: Start, rounds: int = 3) -> Start:
        """Let one peer after the other go, or change places with another, where the bound is least,
        and move or redo the cuts, until nothing changes; without a linear program. O(peers * (peers
        + stages)) bounds a round."""
        for _ in range(rounds):
            before = start
            for peer in range(len(self.problem.peers)):
                start = min((start, *self._places_for(start, peer)), key=self.bound)
            if not self.problem.terms.cuts:
                turned = [self._recut(start[1]), self._recut(start[1][::-1])]
                start = min(start, *turned, *near_cuts(start), key=self.bound)
            if start == before:
                break
        return start

    def _places_for(self, start: Start, peer: int) -> list[Start]:
        ranges, groups = start
        idle_too = (*groups, idle(self.problem, groups))
        here = next(s for s, group in enumerate(idle_too) if peer in group)
        others = [(s, each) for s, group in enumerate(idle_too) if s != here for each in group]
        made = [changed(groups, ((here, peer, each), (s, each, peer))) for s, each in others]
        if here == len(groups) or len(groups[here]) > 1:
            made += [
                changed(groups, ((here, peer, None), (there, None, peer)))
                for there in range(len(groups) + 1)
                if there != here
            ]
        return [(ranges, each) for each in made]

    def employed(self, start: Start) -> Start:
        """Let those without work, the fastest first, into the slowest stages that they fit, where
        that helps with proportional wiring: many at once, fewer where that does not help, one by
        one of up to LEAST_PARTS."""
        waiting = list(largest_first(self.problem, idle(self.problem, start[1])))
        size, least = max(1, len(waiting) // 4), max(1, len(waiting) // LEAST_PARTS)
        while waiting:
            added = start
            for peer in waiting[:size]:
                added = self.with_peer(added, peer)[1]
            if self.plain_seconds(added) < self.plain_seconds(start):
                start, waiting = added, waiting[size:]
            elif size <= least:
                waiting = waiting[size:]
                size = 4 * least
            else:
                size //= 2
        return start

    def with_peer(self, start: Start, peer: int) -> tuple[int, Start]:
        """Return the slowest stage that a peer fits and that has room, and what it is with the peer
        there; -1 and what it was if there is none."""
        ranges, groups = start
        limit = self.problem.replica_limit
        rates = {
            stage: float(self._bounds.limits(layers)[list(groups[stage])].sum())
            for stage, layers in enumerate(ranges)
            if len(groups[stage]) < limit and fits(self.problem, peer, ranges, stage)
        }
        if not rates:
            return -1, start
        stage = min(rates, key=lambda number: (rates[number], number))
        return stage, (ranges, changed(groups, ((stage, None, peer),)))

    def descend(self, start: Start) -> tuple[float, Start]:
        """Go to the best-bounded neighbour that is better, until none is or the budget ends."""
        best, value = start, self.price(start)
        while True:
            promising = sorted(
                (bound, number, neighbour)
                for number, neighbour in enumerate(self._sample(best))
                if (bound := self.bound(neighbour)) < value * BETTER
            )
            better = next(
                (
                    (price, neighbour)
                    for _, _, neighbour in promising
                    if (price := self._price_within_budget(neighbour)) < value * BETTER
                ),
                None,
            )
            if better is None:
                return value, best
            value, best = better

    def _price_within_budget(self, start: Start) -> float:
        return self.price(start) if self.programs < self.budget.programs else math.inf

    def kicked(self, start: Start) -> Start:
        """Return a place two to four random moves away, every other time cut anew."""
        for _ in range(int(self._rng.integers(2, 5))):
            around = list(neighbours(self.problem, start))
            if around:
                start = around[int(self._rng.integers(len(around)))]
        if self._rng.random() < 0.5 and not self.problem.terms.cuts:
            return self._recut(start[1])
        return start

    def _recut(self, groups: Groups) -> Start:
        """Return these groups with the cuts of the dynamic program."""
        found = self._cuts.get(groups)
        if found is None:
            speeds = [float(self.problem.speed[list(group)].sum()) for group in groups]
            found = self._cuts[groups] = best_cuts(self.problem, speeds, groups)
        return found, groups

    def _sample(self, start: Start) -> list[Start]:
        """Return the neighbours, and groups in another order cut anew; a random part of them if
        they are too many, but every other cut."""
        free = not self.problem.terms.cuts
        if not self.budget.neighbours:
            return []
        cut = list(other_cuts(*start)) if free else []
        around = list(neighbours(self.problem, start))[len(cut) :]
        reordered = orders(start[1]) if free else []
        count, most = len(around) + len(reordered), self.budget.neighbours
        chosen = range(count) if count <= most else self._rng.choice(count, most, replace=False)
        return cut + [
            around[i] if i < len(around) else self._recut(reordered[i - len(around)])
            for i in chosen
        ]


def diverse(begin: Iterable[Start], most: int) -> list[Start]:
    """Return the first of each number of stages, two at most, then the others, in order."""
    counts: dict[int, int] = {}
    first: list[Start] = []
    later: list[Start] = []
    for start in begin:
        stages = len(start[0])
        counts[stages] = counts.get(stages, 0) + 1
        (first if counts[stages] <= 2 else later).append(start)
    return [*first, *later][:most]
