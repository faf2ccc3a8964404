"""The search for assignments: against plain sums, against every assignment, and at the edges."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import PCG64, Generator

from swarm.core.scheduling.grid import EMPTY, Exchanges, Floats, Ints, Walks, evaluate
from swarm.core.scheduling.neighbours import Neighbours
from swarm.core.scheduling.search import HARD_LEVELS, LARGEST_BATCH, LEVELS, Cooling, Found, search

QUICK = Cooling(contenders=8, survivors=2, candidates=200)


@dataclass(frozen=True)
class Links:
    """Slowest sum of links in a group, slowest link of a boundary; costs differ by stage."""

    seconds: Floats

    def group_costs(self, stages: Ints, peers: Ints) -> Floats:
        sums = self._of(peers[:, None], peers[None]).sum(axis=1).max(axis=0)
        return np.where((peers == EMPTY).all(axis=0), np.inf, sums * (stages + 1))

    def boundary_costs(self, boundaries: Ints, before: Ints, after: Ints) -> Floats:
        return np.asarray(self._of(before, after).max(axis=0) * (boundaries + 2))

    def total(self, groups: Floats, boundaries: Floats) -> Floats:
        return np.asarray(groups.max(axis=0) + boundaries.sum(axis=0))

    def _of(self, ones: Ints, others: Ints) -> Floats:
        return np.where((ones == EMPTY) | (others == EMPTY), 0.0, self.seconds[ones, others])

    def plain(self, stages: int, grid: Ints) -> float:
        """Return the same in plain Python."""
        rows = [[int(peer) for peer in row] for row in grid[:stages]]
        groups = [[peer for peer in row if peer != EMPTY] for row in rows]
        if not all(groups):
            return float("inf")
        exchange = max(
            (number + 1) * max(sum(float(self.seconds[a, b]) for b in group) for a in group)
            for number, group in enumerate(groups)
        )
        worst = (
            (number + 2)
            * max(
                0.0 if EMPTY in (a, b) else float(self.seconds[a, b])
                for a, b in zip(before, after, strict=True)
            )
            for number, (before, after) in enumerate(pairwise(rows))
        )
        return exchange + sum(worst)


@dataclass(frozen=True)
class SoftLinks(Links):
    """The same, eased."""

    softness: float = 0.0

    def group_costs(self, stages: Ints, peers: Ints) -> Floats:
        sums = self._eased(self._of(peers[:, None], peers[None]).sum(axis=1))
        return np.where((peers == EMPTY).all(axis=0), np.inf, sums * (stages + 1))

    def boundary_costs(self, boundaries: Ints, before: Ints, after: Ints) -> Floats:
        return np.asarray(self._eased(self._of(before, after)) * (boundaries + 2))

    def total(self, groups: Floats, boundaries: Floats) -> Floats:
        return np.asarray(self._eased(groups) + boundaries.sum(axis=0))

    def softened(self, softness: float) -> "SoftLinks":
        return replace(self, softness=softness)

    def _eased(self, costs: Floats) -> Floats:
        slowest, share = np.asarray(costs.max(axis=0)), self.softness
        return slowest if not share else (1 - share) * slowest + share * costs.mean(axis=0)


def links(peers: int, seed: int) -> Links:
    seconds = Generator(PCG64(seed)).random((peers, peers)) * 10
    np.fill_diagonal(seconds, 0.0)
    return Links(seconds)


def grid_of(rows: int, width: int, peers: int, seed: int) -> Ints:
    contents = np.full(rows * width, EMPTY, np.intp)
    contents[:peers] = np.arange(peers)
    return Generator(PCG64(seed)).permutation(contents).reshape(rows, width)


def exchanged(grid: Ints, exchanges: Exchanges, number: int) -> Ints:
    """Make one exchange in plain Python; places are counted column by column."""
    contents = grid.T.ravel().tolist()
    for one, other in zip(exchanges.ones[:, number], exchanges.others[:, number], strict=True):
        contents[one], contents[other] = contents[other], contents[one]
    return np.array(contents, np.intp).reshape(grid.T.shape).T


EACH = 6
"""Candidates of each walk."""


@dataclass(frozen=True)
class Situation:
    """An objective, a number of stages, grids with or without a bench."""

    objective: Links
    stages: int
    grids: Ints
    seed: int

    def walks(self) -> Walks:
        return Walks(self.objective, self.stages, self.grids)

    def draws(self, walks: Walks, times: int) -> Iterator[Exchanges]:
        """Yield candidates for what the walks are then."""
        neighbours = Neighbours(self.grids[0].shape, self.stages, self.objective.seconds)
        rng = Generator(PCG64(self.seed))
        for _ in range(times):
            yield neighbours.draw(walks, EACH, rng)


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    stages, bench, width = (
        draw(st.integers(1, 5)),
        draw(st.integers(0, 2)),
        draw(st.integers(1, 5)),
    )
    peers = draw(st.integers(1, (stages + bench) * width))
    seed = draw(st.integers(0, 2**32))
    made = SoftLinks(links(peers, seed).seconds) if draw(st.booleans()) else links(peers, seed)
    grids = [
        grid_of(stages + bench, width, peers, seed + each)
        for each in range(draw(st.integers(1, 3)))
    ]
    return Situation(made, stages, np.stack(grids), seed)


@settings(max_examples=200, deadline=None)
@given(situations(), st.floats(0, 300))
def test_candidates_cost_what_their_grids_cost(situation: Situation, limit: float) -> None:
    walks = situation.walks()
    (exchanges,) = situation.draws(walks, 1)
    costs = walks.costs_after(exchanges, np.full(walks.count * EACH, limit))
    for number, cost in enumerate(costs):
        grid = exchanged(situation.grids[number // EACH], exchanges, number)
        plain = situation.objective.plain(situation.stages, grid)
        if abs(plain - limit) > 1e-6:
            assert cost == pytest.approx(plain if plain <= limit else float("inf"))


@settings(max_examples=100, deadline=None)
@given(situations(), st.floats(0, 20))
def test_walks_know_what_their_grids_and_the_best_of_them_cost(
    situation: Situation, slack: float
) -> None:
    objective, stages = situation.objective, situation.stages
    walks = situation.walks()
    least = [objective.plain(stages, grid) for grid in situation.grids]
    for exchanges in situation.draws(walks, 5):
        before = walks.grids()
        moved = walks.advance(exchanges, np.full(walks.count * EACH, slack))
        grids, best = walks.grids(), walks.best_grids()
        assert moved == sum(not np.array_equal(*pair) for pair in zip(before, grids, strict=True))
        for walk in range(walks.count):
            cost = objective.plain(stages, grids[walk])
            least[walk] = min(least[walk], cost)
            assert walks.costs[walk] == pytest.approx(cost)
            assert walks.best_costs[walk] == pytest.approx(least[walk])
            assert objective.plain(stages, best[walk]) == pytest.approx(least[walk])
            assert np.array_equal(np.sort(grids[walk], None), np.sort(before[walk], None))


@settings(max_examples=50, deadline=None)
@given(situations(), st.floats(0, 0.99))
def test_another_objective_prices_the_same_grids(situation: Situation, softness: float) -> None:
    hard = SoftLinks(situation.objective.seconds)
    walks = Walks(hard, situation.stages, situation.grids)
    for exchanges in situation.draws(walks, 2):
        walks.advance(exchanges, np.full(walks.count * EACH, 5.0))
    costs, grids = walks.costs, walks.grids()
    walks.price(hard.softened(softness))
    fresh = Walks(hard.softened(softness), situation.stages, grids)
    assert np.array_equal(walks.grids(), grids) and np.array_equal(walks.best_grids(), grids)
    assert walks.costs == pytest.approx(fresh.costs)
    # a mean is no greater than what it is the mean of
    assert (fresh.costs <= costs * (1 + 1e-9)).all()
    walks.price(hard)
    assert walks.costs == pytest.approx(costs)


def test_of_each_walk_the_first_within_its_slack_is_made() -> None:
    seconds = np.array([[0.0, 1, 5, 9], [1, 0, 7, 2], [5, 7, 0, 4], [9, 2, 4, 0]])
    objective = Links(seconds)
    grid = np.array([[0], [2], [1], [3]])  # 2 * 5 + 3 * 7 + 4 * 2 = 39
    walks = Walks(objective, 4, np.stack([grid, grid]))
    # rows 0 and 3 would make it 33, which is not 10 less; rows 1 and 2 make it 2 + 21 + 16 = 39:
    # no change; rows 2 and 3 make it 30; rows 0 and 1 make it 10 + 3 + 8 = 21
    ones, others = np.array([[0, 1, 2, 0] * 2]), np.array([[3, 2, 3, 1] * 2])
    exchanges = Exchanges(ones, others, np.concatenate((ones, others)))
    assert walks.costs.tolist() == [39, 39]
    moved = walks.advance(exchanges, np.array([-10.0, 5, 5, 16, -10, 5, -10, 16]))
    assert moved == 2 and walks.costs.tolist() == [30, 21]
    assert walks.grids().tolist() == [[[0], [2], [3], [1]], [[2], [0], [1], [3]]]
    # changes of less than is asked for are not made: the one is 9, the other 18
    again = Exchanges(ones[:, [2, 3]], others[:, [2, 3]], np.concatenate((ones, others))[:, [2, 3]])
    assert walks.advance(again, np.full(2, 20.0), least=np.array([9.5, 17.5])) == 1
    assert walks.costs.tolist() == [30, 39]
    assert walks.best_costs.tolist() == [30, 21]
    assert walks.best_grids().tolist() == [[[0], [2], [3], [1]], [[2], [0], [1], [3]]]


def test_the_choosy_make_what_is_farthest_below_its_limit() -> None:
    seconds = np.array([[0.0, 1, 5, 9], [1, 0, 7, 2], [5, 7, 0, 4], [9, 2, 4, 0]])
    grid = np.array([[0], [2], [1], [3]])  # costs 39
    # rows 2 and 3 make it 30, rows 0 and 1 make it 21
    ones, others = np.array([[2, 0]]), np.array([[3, 1]])
    exchanges = Exchanges(ones, others, np.concatenate((ones, others)))
    for slacks, cost in (
        ([5.0, 5.0], 21),
        ([5.0, -3.0], 21),
        ([5.0, -5.0], 30),
        ([5.0, -20.0], 30),
    ):
        walks = Walks(Links(seconds), 4, grid[None])
        assert walks.advance(exchanges, np.array(slacks), choosy=True) == 1
        assert walks.costs.tolist() == [cost]
    assert grid.tolist() == [[0], [2], [1], [3]]  # what was given is never changed


def test_from_an_impossible_grid_any_possible_one_is_made() -> None:
    start = np.array([[0, 1], [EMPTY, EMPTY], [2, 3]])
    # to exchange the first peer with one of the bench leaves a stage with nobody
    exchanges = Exchanges(np.array([[0, 0]]), np.array([[2, 1]]), np.array([[0, 0], [2, 1]]))
    for choosy in (False, True):
        walks = Walks(links(4, 0), 2, start[None])
        assert walks.costs.tolist() == [np.inf]
        assert walks.advance(exchanges, np.zeros(2), choosy=choosy) == 1
        assert walks.grids().tolist() == [[[EMPTY, 1], [0, EMPTY], [2, 3]]]
        assert np.isfinite(walks.costs).all()


@pytest.mark.parametrize(
    ("rows", "width", "stages", "peers"),
    [(2, 3, 2, 6), (3, 2, 3, 6), (6, 1, 6, 6), (1, 5, 1, 5), (3, 2, 2, 6), (3, 2, 3, 5)],
)
def test_finds_what_trying_every_assignment_finds(
    rows: int, width: int, stages: int, peers: int
) -> None:
    contents = [*range(peers), *[EMPTY] * (rows * width - peers)]
    every = np.array(list(itertools.permutations(contents))).reshape(-1, rows, width)
    for seed in range(3):
        objective = links(peers, seed)
        groups = [
            objective.group_costs(np.full(len(every), stage), every[:, stage].T)
            for stage in range(stages)
        ]
        boundaries = [
            objective.boundary_costs(np.full(len(every), stage), before.T, after.T)
            for stage, (before, after) in enumerate(
                pairwise(every[:, row] for row in range(stages))
            )
        ]
        costs = objective.total(
            np.array(groups), np.array(boundaries).reshape(stages - 1, len(every))
        )
        found = run(objective, rows, width, stages, peers, seed, budget=40_000)
        assert found.cost == pytest.approx(costs.min())
        assert found.cost == pytest.approx(objective.plain(stages, found.grid))


def run(
    objective: Links, rows: int, width: int, stages: int, peers: int, seed: int, budget: int
) -> Found:
    return search(
        objective,
        [grid_of(rows, width, peers, seed)],
        stages,
        objective.seconds,
        budget=budget,
        rng=Generator(PCG64(seed)),
        cooling=QUICK,
    )


@pytest.mark.parametrize("kind", [Links, SoftLinks])
def test_the_same_arguments_have_the_same_answer(kind: type[Links]) -> None:
    objective = kind(links(16, 1).seconds)
    first, again = (run(objective, 4, 4, 4, 16, seed=5, budget=20_000) for _ in range(2))
    assert np.array_equal(first.grid, again.grid)
    assert (first.cost, first.candidates) == (again.cost, again.candidates)
    other = run(objective, 4, 4, 4, 16, seed=6, budget=20_000)
    assert not np.array_equal(first.grid, other.grid)


@pytest.mark.parametrize("kind", [Links, SoftLinks])
def test_a_longer_search_finds_nothing_worse(kind: type[Links]) -> None:
    objective = kind(links(16, 1).seconds)
    costs = [run(objective, 4, 4, 4, 16, 5, budget).cost for budget in (0, 500, 5_000, 50_000)]
    assert costs == sorted(costs, reverse=True) and costs[-1] < costs[0]


@settings(max_examples=30, deadline=None)
@given(situations(), st.integers(0, 3_000))
def test_finds_a_grid_of_the_same_peers_that_is_no_worse_than_any_start(
    situation: Situation, budget: int
) -> None:
    objective, stages, starts = situation.objective, situation.stages, list(situation.grids)
    found = search(
        objective,
        starts,
        stages,
        objective.seconds,
        budget=budget,
        rng=Generator(PCG64(situation.seed)),
        cooling=replace(QUICK, candidates=20),
    )
    assert np.array_equal(np.sort(found.grid, None), np.sort(starts[0], None))
    assert found.cost == pytest.approx(objective.plain(stages, found.grid))
    assert found.cost <= min(objective.plain(stages, start) for start in starts) * (1 + 1e-9)


@dataclass(frozen=True)
class Asked(SoftLinks):
    """Notes how much it was to be eased."""

    asked: list[float] = field(default_factory=list)

    def softened(self, softness: float) -> SoftLinks:
        self.asked.append(softness)
        return SoftLinks(self.seconds).softened(softness)


def softnesses(soft: tuple[float, float], phases: int) -> list[float]:
    objective = Asked(links(12, 4).seconds)
    cooling = Cooling(contenders=4, survivors=2, phases=phases, candidates=400, soft=soft)
    search(
        objective,
        [grid_of(3, 4, 12, 0)],
        3,
        objective.seconds,
        budget=phases * 4 * 400,
        rng=Generator(PCG64(0)),
        cooling=cooling,
    )
    return objective.asked


def test_an_objective_is_eased_less_and_less_and_not_at_the_end_of_a_phase() -> None:
    asked = softnesses((0.8, 0.4), phases=1)
    assert asked[0] == 0.8 and asked == sorted(asked, reverse=True) and asked[-1] > 0
    assert len(asked) == LEVELS - HARD_LEVELS
    twice = softnesses((0.8, 0.4), phases=2)
    assert twice[: len(asked)] == asked and twice[len(asked)] == 0.4
    assert softnesses((0.0, 0.0), phases=2) == []


@pytest.mark.parametrize("budget", [0, 1, 777, 30_000])
def test_tries_no_more_than_its_budget_and_a_batch(budget: int) -> None:
    found = run(links(12, 2), 3, 4, 3, 12, seed=0, budget=budget)
    assert budget <= found.candidates < budget + LARGEST_BATCH
    assert sorted(found.grid.ravel().tolist()) == list(range(12))


def test_ends_when_it_is_told_that_it_is_enough() -> None:
    objective, start = links(12, 3), grid_of(3, 4, 12, 3)
    asked: list[float] = []

    def enough(cost: float) -> bool:
        asked.append(cost)
        return len(asked) == 10

    found = search(
        objective,
        [start],
        3,
        objective.seconds,
        budget=10**9,
        rng=Generator(PCG64(0)),
        enough=enough,
    )
    assert len(asked) == 10 and asked == sorted(asked, reverse=True)
    assert found.cost == pytest.approx(asked[-1])
    first = search(
        objective,
        [start],
        3,
        objective.seconds,
        budget=10**9,
        rng=Generator(PCG64(0)),
        enough=lambda cost: True,
    )
    assert first.candidates == 0 and np.array_equal(first.grid, start)


@pytest.mark.parametrize(
    ("rows", "width", "stages", "peers"),
    [(1, 1, 1, 1), (1, 6, 1, 6), (6, 1, 6, 6), (2, 3, 1, 4), (4, 1, 2, 2)],
)
@pytest.mark.parametrize("seconds", [0.0, 1.0, float("inf")])
def test_equal_and_infinite_links_and_thin_grids_are_searched_too(
    rows: int, width: int, stages: int, peers: int, seconds: float
) -> None:
    equal = np.full((peers, peers), seconds)
    np.fill_diagonal(equal, 0.0)
    objective = Links(equal)
    found = run(objective, rows, width, stages, peers, seed=1, budget=3_000)
    assert found.cost == objective.plain(stages, found.grid)
    assert sorted(found.grid[found.grid != EMPTY].tolist()) == list(range(peers))


def test_finds_the_way_around_links_that_do_not_exist() -> None:
    seconds = np.full((8, 8), np.inf)
    for one in range(8):  # a ring is all there is
        seconds[one, one] = 0.0
        seconds[one, (one + 1) % 8] = seconds[(one + 1) % 8, one] = 1.0
    objective = Links(seconds)
    chain = np.arange(8)[:, None]
    almost = chain[[0, 1, 2, 3, 4, 5, 7, 6]]
    found = search(
        objective, [almost], 8, seconds, budget=50_000, rng=Generator(PCG64(0)), cooling=QUICK
    )
    assert evaluate(objective, 8, almost) == np.inf
    assert found.cost == evaluate(objective, 8, chain) == sum(range(2, 9))


def test_a_peer_that_only_makes_it_slower_ends_on_the_bench() -> None:
    seconds = np.ones((7, 7))
    seconds[3] = seconds[:, 3] = 100.0
    np.fill_diagonal(seconds, 0.0)
    start = np.array([[0, 1], [2, 3], [4, 5], [6, EMPTY]])
    found = search(
        Links(seconds), [start], 3, seconds, budget=20_000, rng=Generator(PCG64(0)), cooling=QUICK
    )
    assert 3 in found.grid[3] and found.cost < 100


@pytest.mark.parametrize(
    ("starts", "stages", "message"),
    [
        ([], 1, "needs a start"),
        ([[[0, 1]]], 1, "each of 3 peers"),
        ([[[0, 1, 1, 2]]], 1, "each of 3 peers"),
        ([[[0, 1, 2]]], 2, "2 stages"),
        ([[[0, 1, 2]]], 0, "0 stages"),
        ([[[0, 1, 2]], [[0], [1], [2]]], 1, "1 stages in a grid of"),
    ],
)
def test_refuses_starts_that_are_no_assignments(
    starts: list[list[list[int]]], stages: int, message: str
) -> None:
    objective = links(3, 0)
    with pytest.raises(ValueError, match=message):
        search(
            objective,
            [np.array(start) for start in starts],
            stages,
            objective.seconds,
            budget=10,
            rng=Generator(PCG64(0)),
        )
