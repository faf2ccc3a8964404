"""What assignments cost by the daemon's cost model, many at once: what the grid search minimises.

The rule: an estimate of `Prediction.step_seconds` that looks at groups and at pairs of consecutive
groups alone, so that what changed can be evaluated alone; what is chosen by it is priced exactly
afterwards. For given cuts it is made of

- of each group, M times its seconds per microbatch (what its replicas can compute, send and receive
  together), at least those of a *reference*, and the part of its reduction that nothing hides, at
  least that of the reference; a power mean counts, which is near the greatest;
- of each boundary, the way over it if everybody uses its nearest partner, the mean compute of the
  group after it, and M times the seconds by which its links are slower than both groups and the
  reference; the sum counts. Moving states counts by a share of the whole step.

The reference says what is not worth a price: slowest stage and longest reduction may be different
groups, so the sum of both is exact only where one of them is the reference's.

What does not fit costs INFEASIBLE and more. Peers may be bundled to *units* that take part
together (nearness.py), so that thousands are searched like a hundred; a unit does what its peers do
together, over links that are all like their mean.

Shapes: S stages, U units and one more that stands for nobody, W places, B candidates.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from swarm.core.scheduling.bounds import Group
from swarm.core.scheduling.grid import EMPTY, Floats, Ints
from swarm.core.scheduling.nearness import FAR_SECONDS
from swarm.core.scheduling.problem import Problem
from swarm.core.scheduling.starts import Groups, Range
from swarm.core.scheduling.wiring import edge_seconds, stage_limits

INFEASIBLE = 1e15
"""Seconds beyond these count what does not fit."""
SHARPNESS = 8
"""Of the mean that stands for the greatest: groups that are nearly as dear count as well, so that a
search is rewarded for what makes them cheaper before they are the dearest."""


@dataclass(frozen=True)
class Reference:
    """What is known of an assignment nearby; see above."""

    microbatch_seconds: float
    reduction_seconds: float
    hidden_seconds: tuple[float, ...]
    """By stage: for so long a reduction is hidden by the backward of the stages before."""
    step_seconds: float


class Units:
    """Bundles of peers, and what the links between them are on average; on the diagonal, within."""

    def __init__(self, problem: Problem, groups: Sequence[Group]) -> None:
        self.groups = list(groups)
        self.members = np.array([peer for unit in groups for peer in unit])
        self.sizes = np.array([len(unit) for unit in groups])
        self.starts = np.cumsum(self.sizes) - self.sizes
        pairs = np.ix_(self.members, self.members)
        with np.errstate(divide="ignore"):
            slow = np.minimum(1 / problem.bandwidth[pairs], FAR_SECONDS)
        self.slow = self._mean(slow)
        """Seconds for a byte."""
        self.latency = self._mean(problem.latency[pairs])

    def _mean(self, values: Floats) -> Floats:
        sums = np.add.reduceat(np.add.reduceat(values, self.starts, axis=0), self.starts, axis=1)
        made: Floats = sums / (self.sizes[:, None] * self.sizes)
        return made


class Estimate:
    """The objective (swarm.core.scheduling.grid) of one problem, its cuts and its units."""

    def __init__(
        self,
        problem: Problem,
        ranges: Sequence[Range],
        units: "Units",
        reference: "Reference",
    ) -> None:
        self._problem, self._ranges = problem, list(ranges)
        self._units = units
        self._side = len(units.groups) + 1
        self._microbatches = problem.terms.microbatches_per_step
        self._reference = reference
        self._hidden = np.array(reference.hidden_seconds)
        self._members = self._summed(np.ones(len(problem.peers)))
        self._rates, self._work, self._misfit, self._extras = self._by_stage(reference.step_seconds)
        self._ways, self._capacities = self._by_boundary()
        self._set_up_reductions()

    # --- the objective --------------------------------------------------------------------------

    def group_costs(self, stages: Ints, peers: Ints) -> Floats:
        """Return (B,): steady state and reduction of groups (W, B); see grid.py."""
        places = stages * self._side + peers + (peers == EMPTY) * self._side
        rates = self._rates.take(places).sum(axis=0)
        members = self._members.take(peers).sum(axis=0)
        terms = self._problem.terms
        over = self._misfit.take(places).sum(axis=0)
        over += np.maximum(terms.min_replicas - members, 0)
        over += np.maximum(members - self._problem.replica_limit, 0)
        reduction = self._reductions(stages, peers, members) - self._hidden[stages]
        seconds = np.maximum(1 / np.maximum(rates, 1e-12), self._reference.microbatch_seconds)
        made = self._microbatches * seconds
        made += np.maximum(reduction, self._reference.reduction_seconds)
        if len(self._ranges) == 1:
            made += self._sums(places, rates)
        return np.asarray(np.where(over > 0, INFEASIBLE * (1 + over), made))

    def boundary_costs(self, boundaries: Ints, before: Ints, after: Ints) -> Floats:
        """Return (B,): ways, compute and slow links; see grid.py."""
        side = self._side
        senders = boundaries * side + before + (before == EMPTY) * side
        receivers = (boundaries + 1) * side + after + (after == EMPTY) * side
        pairs = senders[:, None] * side + (receivers - (boundaries + 1) * side)
        capacities, ways = self._capacities.take(pairs), self._ways.take(pairs)
        sending, receiving = self._rates.take(senders), self._rates.take(receivers)
        sent = np.minimum(capacities.sum(axis=1), sending)
        received = np.minimum(capacities.sum(axis=0), receiving)
        all_sent, all_received = sent.sum(axis=0), received.sum(axis=0)
        carried = np.maximum(np.minimum(all_sent, all_received), 1e-12)
        capable = np.maximum(np.minimum(sending.sum(axis=0), receiving.sum(axis=0)), 1e-12)
        slower = 1 / carried - np.maximum(1 / capable, self._reference.microbatch_seconds)
        way = np.maximum(
            (ways.min(axis=1) * sent).sum(axis=0) / np.maximum(all_sent, 1e-12),
            (ways.min(axis=0) * received).sum(axis=0) / np.maximum(all_received, 1e-12),
        )
        made = way + self._microbatches * np.maximum(slower, 0.0)
        made += self._sums(receivers, receiving.sum(axis=0))
        first = np.where(boundaries == 0, self._sums(senders, sending.sum(axis=0)), 0.0)
        return np.asarray(np.minimum(made + first, INFEASIBLE))

    def total(self, groups: Floats, boundaries: Floats) -> Floats:
        """Return (B,): estimated seconds per step."""
        greatest = np.maximum(groups.max(axis=0), 1e-300)
        mean = ((groups / greatest) ** SHARPNESS).mean(axis=0) ** (1 / SHARPNESS)
        return np.asarray(greatest * mean + boundaries.sum(axis=0))

    def distances(self) -> Floats:
        """Return how far units are from each other, (U, U), both ways: where a search looks."""
        middle = self._ways[len(self._ways) // 2, :-1, :-1]
        if len(self._ranges) == 1:
            middle = self._latency[:-1, :-1]
        return np.minimum(middle + middle.T, FAR_SECONDS)

    # --- parts -----------------------------------------------------------------------------------

    def _sums(self, places: Ints, rates: Floats) -> Floats:
        """Return (B,): what adds up over stages: mean compute and way from the feeders, moving."""
        work = self._work.take(places).sum(axis=0) / np.maximum(rates, 1e-12)
        return np.asarray(work + self._extras.take(places).sum(axis=0))

    def _summed(self, values: Floats) -> Floats:
        """Return (..., U + 1) from (..., n): sums over units; nobody has 0."""
        made = np.add.reduceat(values[..., self._units.members], self._units.starts, axis=-1)
        return np.concatenate([made, np.zeros((*made.shape[:-1], 1))], axis=-1)

    def _by_stage(self, step_seconds: float) -> tuple[Floats, Floats, Floats, Floats]:
        """Return rates, rates times seconds of a microbatch, excess of memory and seconds of
        moving, (S, U + 1) each."""
        problem, stages = self._problem, len(self._ranges)
        rates = np.stack([stage_limits(problem, *layers) for layers in self._ranges])
        seconds = np.array([problem.seconds(*layers) for layers in self._ranges])
        compute = seconds[:, None] / problem.speed
        compute[0] += feeding_seconds(problem)
        needed = np.array(
            [problem.memory_bytes(*layers, s, stages) for s, layers in enumerate(self._ranges)]
        )
        misfit = np.maximum(needed[:, None] / np.maximum(problem.memory, 1.0) - 1.0, 0.0)
        misfit = np.where(needed[:, None] > problem.memory, misfit, 0.0)
        fetching = problem.lacking[1]
        moved = np.stack([fetching[:, last] - fetching[:, first] for first, last in self._ranges])
        share = step_seconds / (len(problem.peers) * problem.horizon_seconds)
        return (
            self._summed(rates),
            self._summed(rates * compute),
            self._summed(misfit),
            self._summed(moved * share),
        )

    def _by_boundary(self) -> tuple[Floats, Floats]:
        """Return ways, and microbatches per second there and back, (S - 1, U + 1, U + 1)."""
        problem, units = self._problem, self._units
        boundaries = max(len(self._ranges) - 1, 1)
        ways = np.full((boundaries, self._side, self._side), INFEASIBLE)
        capacities = np.zeros((boundaries, self._side, self._side))
        pairs = units.sizes[:, None] * units.sizes
        for number, (first, _) in enumerate(self._ranges[1:]):
            there, back = problem.forward_bytes(first), problem.backward_bytes(first)
            slow = there * units.slow + back * units.slow.T
            ways[number, :-1, :-1] = np.minimum(units.latency + units.latency.T + slow, INFEASIBLE)
            longest = np.maximum(there * units.slow, back * units.slow.T)
            capacities[number, :-1, :-1] = pairs / np.maximum(longest, 1e-12)
        return ways, capacities

    def _set_up_reductions(self) -> None:
        """Keep bytes of each stage; widths (U + 1,); slowness of links and latency of pairs."""
        problem = self._problem
        sizes = [problem.parameter_bytes(*layers) for layers in self._ranges]
        self._sizes = np.array(sizes) * problem.terms.reduction_ratio
        self._widths = self._summed(np.minimum(problem.uplink, problem.downlink))
        up, down = self._summed(problem.uplink), self._summed(problem.downlink)
        self._up, self._down = 1 / np.maximum(up, 1e-12), 1 / np.maximum(down, 1e-12)
        self._up[-1] = self._down[-1] = 0.0
        self._slow, self._latency = np.zeros((2, self._side, self._side))
        self._slow[:-1, :-1] = self._units.slow
        self._latency[:-1, :-1] = self._units.latency

    def _reductions(self, stages: Ints, peers: Ints, members: Floats) -> Floats:
        """Return (B,): seconds of the reduction, shards by the narrower of up- and downlink."""
        widths = self._widths.take(peers)
        shares = widths / np.maximum(widths.sum(axis=0), 1e-12)
        each = self._members.take(peers)
        others = np.maximum(members - 1, 0)
        up, down = self._up.take(peers), self._down.take(peers)
        scatter = np.maximum((each - shares) * up, others * shares * down).max(axis=0)
        gather = np.maximum(others * shares * up, (each - shares) * down).max(axis=0)
        pairs = peers[:, None] * self._side + peers + (peers == EMPTY) * self._side
        pairs += (peers == EMPTY)[:, None] * self._side * self._side
        owned = shares / np.maximum(each, 1)
        slow = self._slow.take(pairs)  # from the first to the second
        scatter = np.maximum(scatter, (slow.max(axis=0) * owned).max(axis=0))
        gather = np.maximum(gather, (slow.max(axis=1) * owned).max(axis=0))
        made = self._sizes[stages] * (scatter + gather)
        made += 2 * self._latency.take(pairs).max(axis=(0, 1))
        return np.where(members > 1, made, 0.0)


def feeding_seconds(problem: Problem) -> Floats:
    """Return the shortest way from whoever holds the data to each peer, (n,)."""
    holders = problem.data_holders
    made = np.zeros(len(problem.peers))
    others = [i for i, peer in enumerate(problem.peers) if not peer.has_data]
    if others:
        made[others] = edge_seconds(problem, 0, holders, others).min(axis=0)
    return np.minimum(made, INFEASIBLE)


# --- peers and grids -----------------------------------------------------------------------------


def grids_of(starts: Sequence[Groups], units: Sequence[Group], width: int) -> list[Ints]:
    """Return grids of one shape (rows, width) in which each unit is where most of its peers are.

    Below the stages is the bench, with a row to spare; to it go the last of more than `width`."""
    rows = [_rows_of(groups, units, width) for groups in starts]
    benches = max(-(-len(bench) // width) for _, bench in rows) + 1
    made: list[Ints] = []
    for stages, bench in rows:
        grid = np.full((len(stages) + benches, width), EMPTY, np.intp)
        for stage, row in enumerate(stages):
            grid[stage, : len(row)] = row
        grid[len(stages) :].ravel()[: len(bench)] = bench
        made.append(grid)
    return made


def _rows_of(
    groups: Groups, units: Sequence[Group], width: int
) -> tuple[list[list[int]], list[int]]:
    place = {peer: stage for stage, group in enumerate(groups) for peer in group}
    rows: list[list[int]] = [[] for _ in groups]
    bench: list[int] = []
    for number, unit in enumerate(units):
        stages = [place.get(peer, len(groups)) for peer in unit]
        stage = max(sorted(set(stages)), key=stages.count)
        full = stage == len(groups) or len(rows[stage]) >= width
        (bench if full else rows[stage]).append(number)
    return rows, bench


def groups_of(grid: Ints, stages: int, units: Sequence[Group]) -> Groups:
    """Return the groups of a grid's stages."""
    return tuple(
        tuple(sorted(peer for unit in row if unit != EMPTY for peer in units[unit]))
        for row in grid[:stages].tolist()
    )
