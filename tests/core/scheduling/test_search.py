"""The search for assignments: against plain sums, against every assignment, and at the edges."""

import itertools
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import PCG64, Generator

from swarm.core.scheduling.grid import EMPTY, Exchanges, Floats, Ints, Walk, evaluate
from swarm.core.scheduling.neighbours import Neighbours
from swarm.core.scheduling.search import LARGEST_BATCH, Cooling, Found, search

QUICK = Cooling(contenders=4, candidates=2_000)


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


def links(peers: int, seed: int) -> Links:
    seconds = Generator(PCG64(seed)).random((peers, peers)) * 10
    np.fill_diagonal(seconds, 0.0)
    return Links(seconds)


def grid_of(rows: int, width: int, peers: int, seed: int) -> Ints:
    contents = np.full(rows * width, EMPTY, np.intp)
    contents[:peers] = np.arange(peers)
    return Generator(PCG64(seed)).permutation(contents).reshape(rows, width)


def exchanged(grid: Ints, exchanges: Exchanges, number: int) -> Ints:
    """Make one exchange in plain Python."""
    contents = grid.ravel().tolist()
    for one, other in zip(exchanges.ones[:, number], exchanges.others[:, number], strict=True):
        contents[one], contents[other] = contents[other], contents[one]
    return np.array(contents, np.intp).reshape(grid.shape)


@st.composite
def situations(draw: st.DrawFn) -> tuple[Links, int, Ints, Exchanges]:
    """Return an objective, a number of stages, a grid with or without a bench, and candidates."""
    stages, bench, width = (
        draw(st.integers(1, 5)),
        draw(st.integers(0, 2)),
        draw(st.integers(1, 5)),
    )
    peers = draw(st.integers(1, (stages + bench) * width))
    seed = draw(st.integers(0, 2**32))
    objective, grid = links(peers, seed), grid_of(stages + bench, width, peers, seed)
    neighbours = Neighbours(grid.shape, stages, objective.seconds)
    return objective, stages, grid, neighbours.draw(grid.ravel(), 12, Generator(PCG64(seed)))


@settings(max_examples=300, deadline=None)
@given(situations(), st.floats(0, 300))
def test_candidates_cost_what_their_grids_cost(
    situation: tuple[Links, int, Ints, Exchanges], limit: float
) -> None:
    objective, stages, grid, exchanges = situation
    costs = Walk(objective, stages, grid).costs_after(exchanges, np.full(12, limit))
    for number, cost in enumerate(costs):
        plain = objective.plain(stages, exchanged(grid, exchanges, number))
        if abs(plain - limit) > 1e-6:
            assert cost == pytest.approx(plain if plain <= limit else float("inf"))


@settings(max_examples=100, deadline=None)
@given(situations(), st.floats(0, 20))
def test_a_walk_knows_what_its_grid_and_its_best_grid_cost(
    situation: tuple[Links, int, Ints, Exchanges], slack: float
) -> None:
    objective, stages, grid, exchanges = situation
    walk = Walk(objective, stages, grid)
    assert walk.cost == pytest.approx(objective.plain(stages, grid))
    made = walk.advance(exchanges, np.full(12, slack))
    assert 0 <= made <= 12
    assert walk.cost == pytest.approx(objective.plain(stages, walk.grid))
    assert walk.best_cost == pytest.approx(objective.plain(stages, walk.best))
    assert walk.best_cost <= min(walk.cost, evaluate(objective, stages, grid))
    assert sorted(walk.contents.tolist()) == sorted(grid.ravel().tolist())
    if made == 0:
        assert np.array_equal(walk.grid, grid)


def test_exchanges_are_made_in_order_while_each_is_within_its_slack() -> None:
    seconds = np.array([[0.0, 1, 5, 9], [1, 0, 7, 2], [5, 7, 0, 4], [9, 2, 4, 0]])
    objective = Links(seconds)
    grid = np.array([[0], [2], [1], [3]])  # 2 * 5 + 3 * 7 + 4 * 2 = 39
    walk = Walk(objective, 4, grid)
    # rows 0 and 3 would make it 33, which is more than 10 less; rows 1 and 2 39: no change;
    # rows 2 and 3 make it 30; then rows 0 and 1 make it 45, which is no more than 16 above
    ones, others = np.array([[0, 1, 2, 0]]), np.array([[3, 2, 3, 1]])
    exchanges = Exchanges(ones, others, np.concatenate((ones, others)))
    assert walk.cost == 39
    made = walk.advance(exchanges, np.array([-10.0, 5.0, 5.0, 16.0]))
    expected = np.array([[2], [0], [3], [1]])
    assert made == 2 and np.array_equal(walk.grid, expected)
    assert walk.cost == objective.plain(4, expected) == 2 * 5 + 3 * 9 + 4 * 2
    assert walk.best_cost == 30 and np.array_equal(walk.best, [[0], [2], [3], [1]])


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


def test_the_same_arguments_have_the_same_answer() -> None:
    first, again = (run(links(16, 1), 4, 4, 4, 16, seed=5, budget=20_000) for _ in range(2))
    assert np.array_equal(first.grid, again.grid)
    assert (first.cost, first.candidates) == (again.cost, again.candidates)


def test_a_longer_search_finds_nothing_worse() -> None:
    costs = [run(links(16, 1), 4, 4, 4, 16, 5, budget).cost for budget in (0, 500, 5_000, 50_000)]
    assert costs == sorted(costs, reverse=True) and costs[-1] < costs[0]


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
