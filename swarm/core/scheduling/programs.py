"""The linear program whose solution is the wiring.

The rule: solved by HiGHS as it comes; of too many edges, only those that are likely to be used are
variables, and with these nobody is cut off.
"""

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import coo_array

from swarm.core.scheduling.flows import edge_seconds, sources_of, stage_limits
from swarm.core.scheduling.problem import Assignment, Floats, Problem

Whole = NDArray[np.int64]

MOST_EDGES, NEAREST = 20_000, 8
"""Of more edges, the linear program looks at the nearest of each source and target only."""


class Program:
    """Variables: the unit flow of every usable edge, and T, seconds per microbatch."""

    def __init__(self, problem: Problem, assignment: Assignment) -> None:
        self._problem = problem
        self._assignment = assignment
        sources, targets, stages, paths = [], [], [], []
        sizes = [len(assignment.feeders), *map(len, assignment.groups)]
        restricted = sum(a * b for a, b in pairwise(sizes)) > MOST_EDGES
        for stage, group in enumerate(assignment.groups):
            first, last = assignment.ranges[stage]
            senders = np.array(sources_of(assignment, stage))
            receivers = np.array(group)
            ways = edge_seconds(problem, first, sources_of(assignment, stage), group)
            seconds = problem.seconds(first, last) / problem.speed[receivers]
            rows, columns = np.nonzero(_edges(problem, assignment, stage, ways, restricted))
            sources.append(senders[rows])
            targets.append(receivers[columns])
            stages.append(np.full(len(rows), stage))
            paths.append((ways + seconds)[rows, columns])
        self._source = np.concatenate(sources)
        self._target = np.concatenate(targets)
        self._stage = np.concatenate(stages)
        self._path = np.concatenate(paths)

    def solve(self, path_weight: float) -> list[Floats] | None:
        """Return the unit flow by stage, (sources, replicas); None if there is none."""
        edges = len(self._path)
        usage = self._usage()
        scale = self._scale()
        rows, columns, values, count = usage
        upper = coo_array(
            (
                np.concatenate([values / scale, np.full(count, -1.0)]),
                (
                    np.concatenate([rows, np.arange(count)]),
                    np.concatenate([columns, np.full(count, edges)]),
                ),
            ),
            shape=(count, edges + 1),
        ).tocsr()
        equal, right = self._conservation()
        microbatches = self._problem.terms.microbatches_per_step
        costs = np.append(path_weight / microbatches * self._path / scale, 1.0)
        for method in ("highs-ds", "highs-ipm"):
            answer = linprog(
                costs,
                A_ub=upper,
                b_ub=np.zeros(count),
                A_eq=equal,
                b_eq=right,
                bounds=(0, None),
                method=method,
            )
            if answer.status == 0:
                return self._by_stage(answer.x[:edges])
        return None

    def _scale(self) -> float:
        """Return about how many seconds a microbatch takes, so that numbers are about 1."""
        problem, ranges = self._problem, self._assignment.ranges
        rates = [
            float(stage_limits(problem, *layers)[list(group)].sum())
            for layers, group in zip(ranges, self._assignment.groups, strict=True)
        ]
        return 1.0 / min(rates)

    def _by_stage(self, values: Floats) -> list[Floats]:
        made = []
        for stage, group in enumerate(self._assignment.groups):
            here = self._stage == stage
            senders = np.array(sources_of(self._assignment, stage))
            unit = np.zeros((len(senders), len(group)))
            rows = np.searchsorted(senders, self._source[here])
            unit[rows, np.searchsorted(np.array(group), self._target[here])] = values[here]
            made.append(unit)
        return made

    def _usage(self) -> tuple[Whole, Whole, Floats, int]:
        """Return rows, columns and seconds per unit of flow, and the number of resources."""
        problem, count = self._problem, len(self._problem.peers)
        source, target, edges = self._source, self._target, np.arange(len(self._path))
        ranges = self._assignment.ranges
        seconds = np.array([problem.seconds(*each) for each in ranges])[self._stage]
        there = np.array([problem.forward_bytes(first) for first, _ in ranges])[self._stage]
        back = np.array([problem.backward_bytes(first) for first, _ in ranges])[self._stage]
        far = source != target
        there, back = np.where(far, there, 0.0), np.where(far, back, 0.0)
        up, down, link = problem.uplink, problem.downlink, problem.link
        links = 3 * count
        parts = [
            (target, seconds / problem.speed[target]),
            (count + source, there / up[source]),
            (count + target, back / up[target]),
            (2 * count + target, there / down[target]),
            (2 * count + source, back / down[source]),
            (links + source * count + target, there / link[source, target]),
            (links + target * count + source, back / link[target, source]),
        ]
        rows = np.concatenate([row for row, _ in parts])
        values = np.concatenate([value for _, value in parts])
        columns = np.tile(edges, len(parts))
        used = values > 0
        numbers, rows = np.unique(rows[used], return_inverse=True)
        return rows.astype(np.int64), columns[used], values[used], len(numbers)

    def _conservation(self) -> tuple[coo_array, Floats]:
        """One unit leaves the feeders; what comes to a replica goes on."""
        count, edges = len(self._problem.peers), len(self._path)
        stages = len(self._assignment.ranges)
        every = np.arange(edges)
        inner = self._stage < stages - 1
        onward = self._stage > 0
        rows = np.concatenate(
            [
                np.zeros(int((~onward).sum()), dtype=np.int64),
                1 + self._target[inner],
                1 + self._source[onward],
            ]
        )
        columns = np.concatenate([every[~onward], every[inner], every[onward]])
        values = np.concatenate(
            [
                np.ones(int((~onward).sum())),
                np.ones(int(inner.sum())),
                -np.ones(int(onward.sum())),
            ]
        )
        right = np.zeros(count + 1)
        right[0] = 1.0
        return coo_array((values, (rows, columns)), shape=(count + 1, edges + 1)).tocsr(), right


def _edges(
    problem: Problem, assignment: Assignment, stage: int, ways: Floats, restricted: bool
) -> NDArray[np.bool_]:
    """Return which edges into a stage are variables, (sources, targets)."""
    usable = np.isfinite(ways)
    if not restricted or min(ways.shape) <= NEAREST:
        return usable
    chosen = np.zeros_like(usable)
    every = np.arange(ways.shape[1])[None, :]
    chosen[np.arange(len(ways))[:, None], np.argpartition(ways, NEAREST, axis=1)[:, :NEAREST]] = 1
    chosen[np.argpartition(ways, NEAREST, axis=0)[:NEAREST], every] = True
    chosen[_chain(problem, assignment, stage)] = True
    return chosen & usable


def _chain(problem: Problem, assignment: Assignment, stage: int) -> tuple[Whole, Whole]:
    """Return edges that carry from all sources to all targets in proportion to their limits.

    Both in order of place, each source sends to the targets that lie at the same part of the whole:
    the north-west corner rule of the transportation problem.
    """
    sources, targets = list(sources_of(assignment, stage)), list(assignment.groups[stage])
    before = assignment.ranges[max(stage - 1, 0)]
    ends = []
    for layers, members in ((before, sources), (assignment.ranges[stage], targets)):
        order = sorted(range(len(members)), key=lambda i: (problem.peers[members[i]].place, i))
        limits = stage_limits(problem, *layers)[members][order]
        ends.append((np.array(order), np.cumsum(limits) / limits.sum()))
    (row_order, rows), (column_order, columns) = ends
    marks = np.concatenate([[0.0], np.sort(np.concatenate([rows, columns]))])
    middles = (marks[:-1] + marks[1:]) / 2
    row = np.minimum(np.searchsorted(rows, middles), len(rows) - 1)
    column = np.minimum(np.searchsorted(columns, middles), len(columns) - 1)
    return row_order[row], column_order[column]
