"""Peers to stages for given cuts: rounds of the search on grids around the best assignment so far.

The rule: the same assignment, generator and number of candidates give the same answer; a round's
finding counts only if it is better by the cost model, with proportional wiring.

Each round searches by an estimate whose reference is the best so far (estimate.py): slower groups
and longer reductions than part of its longest are what it should avoid. Then, of up to MOST_KEPT
peers, the cuts are moved as long as that helps.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from swarm.core.scheduling.bounds import MOST_KEPT
from swarm.core.scheduling.cost import Prediction, hidden_seconds
from swarm.core.scheduling.estimate import (
    INFEASIBLE,
    Estimate,
    Reference,
    Units,
    grids_of,
    groups_of,
)
from swarm.core.scheduling.nearness import bundled
from swarm.core.scheduling.problem import Assignment, Problem
from swarm.core.scheduling.regrouping import near_cuts
from swarm.core.scheduling.search import Cooling, search
from swarm.core.scheduling.starts import Groups, Start, best_cuts

MOST_PLACES = 16
"""Units per stage, on average, at most: a candidate's cost grows with the square."""
FEWEST_UNITS = 32
WIDER = 1.6
"""A stage has room for so many times the average group."""
BEGUN = 2
"""Assignments that a search begins from: the best so far and another of as many stages."""
CONTENDERS, PHASES = 4, 3
COOLING = Cooling(
    contenders=CONTENDERS,
    survivors=1,
    phases=PHASES,
    hot=0.0015,
    cold=0.0003,
    hottest=0.005,
    shuffled=False,
)
"""One tournament around what is known: assignments at random are far from any that fit."""
PARTS = ((0.5, 0.5), (0.75, 0.1), (0.5, 0.7), (0.75, 0.3), (0.5, 0.0))
"""Of the slowest group's seconds and of the longest reduction so far, what a round does not mind; a
round without a gain is followed by the next parts, the last of these by no other round."""


class Placing:
    """Improves assignments of one problem."""

    def __init__(
        self,
        problem: Problem,
        assignment: Callable[[Start], Assignment],
        predicted: Callable[[Start], Prediction | None],
        rng: np.random.Generator,
    ) -> None:
        """`predicted` prices with proportional wiring; None: it does not fit."""
        self._problem, self._assignment, self._predicted = problem, assignment, predicted
        self._rng = rng
        self._alone: Units | None = None

    def price(self, start: Start) -> float:
        """Return seconds per step with proportional wiring; infinite if it does not fit."""
        found = self._predicted(start)
        return found.step_seconds if found else math.inf

    def improved(
        self, start: Start, others: Sequence[Start], *, rounds: int, candidates: int
    ) -> Start:
        """Return the best that some rounds of so many candidates lead to, the start at worst.

        `others` with as many stages are where a search begins, too."""
        best, part = start, 0
        for _ in range(rounds):
            found = min(self._round(best, others, candidates, part), key=self.price)
            if len(self._problem.peers) <= MOST_KEPT:
                found = self._recut(found)
            if self.price(found) < self.price(best):
                best = found
            else:
                part += 1
            if part == len(PARTS):
                break
        return best

    def _recut(self, start: Start) -> Start:
        """Return the same groups with cuts that no move of one of them improves."""
        if self._problem.terms.cuts:
            return start
        while True:
            found = min(near_cuts(start), key=self.price, default=start)
            if not self.price(found) < self.price(start):
                return start
            start = found

    def _round(
        self, start: Start, others: Sequence[Start], candidates: int, part: int
    ) -> Iterator[Start]:
        """Yield what one search finds, with these cuts and with those of its groups."""
        ranges, groups = start
        stages = len(ranges)
        units = self._units_for(stages, groups if part % 2 == 0 else ())
        estimate = Estimate(self._problem, ranges, units, self._reference(start, PARTS[part]))
        count = len(units.groups)
        width = min(math.ceil(WIDER * count / stages) + 1, count)
        begin = [groups, *(each for cut, each in others if len(cut) == stages and each != groups)]
        length = max(1, candidates // (CONTENDERS * PHASES))
        found = search(
            estimate,
            grids_of(begin[:BEGUN], units.groups, width),
            stages,
            estimate.distances(),
            budget=candidates,
            rng=self._rng,
            cooling=replace(COOLING, candidates=length),
        )
        made = groups_of(found.grid, stages, units.groups)
        if found.cost < INFEASIBLE and all(made):
            yield ranges, made
            speeds = [float(self._problem.speed[list(group)].sum()) for group in made]
            yield best_cuts(self._problem, speeds, made), made
        else:
            yield start

    def _units_for(self, stages: int, groups: Groups) -> Units:
        """Return every peer alone if they are few, else bundles of near peers: of the same group,
        so that nothing is lost at first, or without groups of whoever is nearest."""
        most = max(FEWEST_UNITS, MOST_PLACES * stages)
        if len(self._problem.peers) > most:
            return Units(self._problem, bundled(self._problem, most, groups))
        if self._alone is None:
            self._alone = Units(self._problem, [(i,) for i in range(len(self._problem.peers))])
        return self._alone

    def _reference(self, start: Start, parts: tuple[float, float]) -> Reference:
        found = self._predicted(start)
        if found is None or not math.isfinite(found.step_seconds):
            return Reference(0.0, 0.0, (0.0,) * len(start[0]), 0.0)
        hidden = hidden_seconds(self._problem, self._assignment(start), found.flow)
        return Reference(
            parts[0] / found.microbatches_per_second,
            parts[1] * found.reduction_seconds,
            hidden,
            found.step_seconds,
        )
