"""The full solve: a good assignment, its wiring, and why some peers stand by.

The rule: the same problem, seed and budget give the same answer on one machine. A candidate is
first bounded (bounds.py); only one whose bound is below the best so far is worth the linear program
that prices it. Nothing is claimed about the optimum; exact.py knows it for small problems.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from swarm.core.bounds import Bounds
from swarm.core.cost import Prediction, predict
from swarm.core.problem import Assignment, Problem, Standby, check_assignment
from swarm.core.rebalance import rebalanced
from swarm.core.regrouping import changed, idle, neighbours, orders
from swarm.core.starts import (
    MANY_PEERS,
    Groups,
    Range,
    Start,
    best_cuts,
    fits,
    stage_counts,
    starts,
)
from swarm.core.wiring import NO_FLOW, Flow
from swarm.errors import NoFeasiblePlan

INFEASIBLE = 1e15
"""Seconds beyond these count what does not fit."""
BETTER = 1 - 1e-9


@dataclass(frozen=True)
class Budget:
    """When the search ends; in work, not in seconds, so that it ends alike everywhere."""

    programs: int
    """Linear programs at most."""
    neighbours: int
    """Candidates that are bounded in one round at most."""
    descents: int
    """Starts from which the search goes downhill."""
    kicks: int
    """Random moves away from the best, each with another descent."""


def budget_for(problem: Problem) -> Budget:
    """Return a budget of about a second for ten peers, and of half a minute for a hundred."""
    if len(problem.peers) <= 12:
        return Budget(programs=600, neighbours=400, descents=6, kicks=24)
    return Budget(programs=150, neighbours=200, descents=3, kicks=4)


@dataclass(frozen=True)
class Solution:
    """An assignment and what it costs."""

    assignment: Assignment
    prediction: Prediction
    bound_seconds: float
    """Lower bound of this assignment's seconds per step."""
    programs: int
    """Linear programs that were solved to find it."""


def solve(problem: Problem, *, seed: int = 0, budget: Budget | None = None) -> Solution:
    """Return the best assignment found.

    Raises NoFeasiblePlan, with the figures, if nobody has the data, or if no assignment was found
    that fits into memory, has replicas enough and lets microbatches through.
    """
    check_solvable(problem)
    search = Search(problem, budget or budget_for(problem), seed)
    begin = [*search.begin(), *map(search.settled, search.best_starts(search.budget.descents))]
    begin = sorted(dict.fromkeys(begin), key=search.price)
    found = [search.descend(start) for start in _diverse(begin, search.budget.descents)]
    best = min(found, default=None, key=lambda each: each[0])
    if best is None:
        raise _nothing_fits(problem)
    for _ in range(search.budget.kicks):
        if search.programs >= search.budget.programs:
            break
        value, start = search.descend(search.kicked(best[1]))
        if value < best[0] * BETTER:
            best = value, start
    if not best[0] < INFEASIBLE:
        raise _nothing_fits(problem)
    return _solution(search, best[1])


def check_solvable(problem: Problem) -> None:
    """Raise NoFeasiblePlan if no search is needed to see that nothing can be found."""
    if not problem.data_holders:
        raise NoFeasiblePlan(
            "no peer has the data", hint="start a peer where the manifest's data can be read"
        )
    if not stage_counts(problem):
        terms = problem.terms
        raise NoFeasiblePlan(
            f"{len(problem.peers)} peers are too few for {len(terms.cuts) + 1} stages of at least "
            f"{terms.min_replicas} replicas",
            hint="wait for more peers, or ask for fewer stages or replicas",
        )


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

    def begin(self) -> list[Start]:
        """Return the best of the starts, settled, and what the peers do now, rebalanced.

        Without a linear program: it is also what the greedy answer is chosen from (greedy.py)."""
        most, rounds = (12, 3) if len(self.problem.peers) <= MANY_PEERS else (1, 1)
        made = [self.settled(start, rounds) for start in self.best_starts(most)]
        current = self.problem.current
        if current is not None and self._counts(current.ranges):
            after, _ = rebalanced(self.problem, current)
            made += [(current.ranges, current.groups), (after.ranges, after.groups)]
        return list(dict.fromkeys(made))

    def best_starts(self, most: int) -> list[Start]:
        """Return the starts of starts.py with the least bounds, some of each number of stages."""
        if not self._starts:
            made = [each for n in stage_counts(self.problem) for each in starts(self.problem, n)]
            self._starts = sorted(dict.fromkeys(made), key=self.bound)
        return _diverse(self._starts, most)

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
        """Let one peer after the other go where the bound is least, and cut anew, until nothing
        changes; without a linear program. O(peers * stages) bounds a round."""
        for _ in range(rounds):
            before = start
            for peer in range(len(self.problem.peers)):
                start = min((start, *self._places_for(start, peer)), key=self.bound)
            if not self.problem.terms.cuts:
                start = min(start, self._recut(start[1]), key=self.bound)
            if start == before:
                break
        return start

    def _places_for(self, start: Start, peer: int) -> list[Start]:
        ranges, groups = start
        here = next((s for s, group in enumerate(groups) if peer in group), len(groups))
        if here < len(groups) and len(groups[here]) == 1:
            return []
        return [
            (ranges, changed(groups, ((here, peer, None), (there, None, peer))))
            for there in range(len(groups) + 1)
            if there != here
        ]

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
        they are too many."""
        around = list(neighbours(self.problem, start))
        reordered = [] if self.problem.terms.cuts else orders(start[1])
        count, most = len(around) + len(reordered), self.budget.neighbours
        chosen = range(count) if count <= most else self._rng.choice(count, most, replace=False)
        return [
            around[i] if i < len(around) else self._recut(reordered[i - len(around)])
            for i in chosen
        ]


def _diverse(begin: Iterable[Start], most: int) -> list[Start]:
    """Return the first of each number of stages, two at most, then the others, in order."""
    counts: dict[int, int] = {}
    first: list[Start] = []
    later: list[Start] = []
    for start in begin:
        stages = len(start[0])
        counts[stages] = counts.get(stages, 0) + 1
        (first if counts[stages] <= 2 else later).append(start)
    return [*first, *later][:most]


# --- the answer ----------------------------------------------------------------------------------


def _solution(search: Search, start: Start) -> Solution:
    problem = search.problem
    assignment = search.assignment(start)
    prediction = predict(problem, assignment)
    standby = tuple(
        Standby(each.peer, _reason(search, start, each.peer, prediction.step_seconds))
        for each in assignment.standby
    )
    assignment, flow = feeding(replace(assignment, standby=standby), prediction.flow)
    check_assignment(problem, assignment)
    return Solution(
        assignment, predict(problem, assignment, flow), search.bound(start), search.programs
    )


def feeding(assignment: Assignment, flow: Flow) -> tuple[Assignment, Flow]:
    """Return both without the feeders that have no share."""
    kept = [i for i, share in enumerate(flow.feeder_shares) if share > NO_FLOW]
    shares = flow.feeder_shares[kept]
    return (
        replace(assignment, feeders=tuple(assignment.feeders[i] for i in kept)),
        Flow(shares / shares.sum(), (flow.wiring[0][kept], *flow.wiring[1:])),
    )


def _reason(search: Search, start: Start, peer: int, seconds: float) -> str:
    """Say why a peer stands by: memory, the limit of replicas, or what a step would take."""
    ranges, groups = start
    fitting = [stage for stage in range(len(ranges)) if fits(search.problem, peer, ranges, stage)]
    if not fitting:
        return "its memory is too small for any stage"
    open_to = [stage for stage in fitting if len(groups[stage]) < search.problem.replica_limit]
    if not open_to:
        return "every stage that it has the memory for has all its replicas"
    options = [(ranges, changed(groups, ((stage, None, peer),))) for stage in open_to]
    best = min(options, key=search.bound)
    stage = open_to[options.index(best)]
    return (
        f"with it in stage {stage} a step would take {search.price(best):.4g} s, "
        f"without it {seconds:.4g} s"
    )


def _nothing_fits(problem: Problem) -> NoFeasiblePlan:
    """Say what is missing, as far as figures show it."""
    terms = problem.terms
    largest = max(layer.parameter_bytes for layer in problem.layers) * terms.state_ratio
    everything = problem.parameter_bytes(0, len(problem.layers)) * terms.state_ratio
    memories = [peer.memory_bytes for peer in problem.peers]
    return NoFeasiblePlan(
        "no assignment was found that fits into memory and lets microbatches through",
        evidence=(
            f"the largest layer's state takes {largest:.0f} bytes, the model's {everything:.0f}",
            f"peers have {min(memories)} to {max(memories)} bytes of memory, "
            f"{sum(memories)} together",
            f"a stage needs {terms.min_replicas} replicas at least, cuts are "
            + (f"{list(terms.cuts)}" if terms.cuts else "free"),
            f"{int((problem.bandwidth == 0).sum())} of "
            f"{len(problem.peers) * (len(problem.peers) - 1)} directed links let nothing through",
        ),
        hint="wait for more or larger peers, or cut the model into more stages",
    )
