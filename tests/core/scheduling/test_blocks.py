"""Where searches begin: every peer once, near peers together, matchings and orders exact."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import PCG64, Generator

from swarm.core.scheduling.blocks import arranged, block_starts, bottleneck_matching, shortest_path
from swarm.core.scheduling.grid import EMPTY, Floats

whole = st.integers(0, 9).map(float) | st.just(float("inf"))


@st.composite
def squares(draw: st.DrawFn, most: int) -> Floats:
    size = draw(st.integers(1, most))
    values = draw(st.lists(whole, min_size=size * size, max_size=size * size))
    return np.array(values).reshape(size, size)


def link_seconds(peers: int, seed: int) -> Floats:
    seconds = Generator(PCG64(seed)).random((peers, peers))
    np.fill_diagonal(seconds, 0.0)
    return seconds


@settings(deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(any), st.integers(0, 99))
def test_starts_hold_every_peer_once_in_rows_of_the_sizes_given(
    sizes: list[int], seed: int
) -> None:
    starts = block_starts(link_seconds(sum(sizes), seed), sizes)
    assert starts
    for grid in starts:
        assert grid.shape == (len(sizes), max(sizes))
        assert sorted(grid[grid != EMPTY].tolist()) == list(range(sum(sizes)))
        for row, size in zip(grid, sizes, strict=True):
            assert (row[:size] != EMPTY).all() and (row[size:] == EMPTY).all()
    assert len({grid.tobytes() for grid in starts}) == len(starts)


def test_near_peers_make_a_row_in_one_start_and_a_column_in_another() -> None:
    place = np.array([0, 1, 2, 3] * 4)  # 16 peers in four places, dealt out
    seconds = np.where(place[:, None] == place, 1.0, 9.0)
    np.fill_diagonal(seconds, 0.0)
    starts = [place[grid] for grid in block_starts(seconds, [4] * 4)]
    assert any((grid == grid[:, :1]).all() for grid in starts)
    assert any((grid == grid[:1]).all() for grid in starts)


def test_peers_without_links_are_started_with_too() -> None:
    assert block_starts(np.full((4, 4), np.inf), [2, 2])
    assert [grid.tolist() for grid in block_starts(np.zeros((1, 1)), [1])] == [[[0]]]


def test_sizes_must_be_those_of_the_peers() -> None:
    with pytest.raises(ValueError, match="rows of 3 places for 4 peers"):
        block_starts(np.ones((4, 4)), [2, 1])


@settings(max_examples=200, deadline=None)
@given(squares(most=5))
def test_no_matching_has_a_better_worst_cost(costs: Floats) -> None:
    worst, columns = bottleneck_matching(costs)
    rows = np.arange(len(costs))
    assert sorted(columns.tolist()) == rows.tolist()
    assert costs[rows, columns].max() == worst
    every = np.array(list(itertools.permutations(range(len(costs)))))
    of_each = costs[rows, every]
    assert worst == of_each.max(axis=1).min()
    assert of_each[of_each.max(axis=1) == worst].sum(axis=1).min() == costs[rows, columns].sum()


@settings(max_examples=200, deadline=None)
@given(squares(most=5))
def test_no_order_of_the_stages_is_shorter(costs: Floats) -> None:
    path = shortest_path(costs)
    assert sorted(path) == list(range(len(costs)))
    every = np.array(list(itertools.permutations(range(len(costs)))))
    lengths = costs[every[:, :-1], every[:, 1:]].sum(axis=1)
    assert costs[path[:-1], path[1:]].sum() == lengths.min()


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 14), st.integers(1, 4), st.integers(0, 99))
def test_arranging_keeps_groups_and_lengthens_no_pipeline(
    stages: int, width: int, seed: int
) -> None:
    seconds = link_seconds(stages * width, seed)
    grid = Generator(PCG64(seed)).permutation(stages * width).reshape(stages, width)
    better = arranged(grid, seconds)

    def length(rows: np.ndarray) -> float:
        return float(seconds[rows[:-1], rows[1:]].max(axis=1).sum())

    assert sorted(map(sorted, better.tolist())) == sorted(map(sorted, grid.tolist()))
    assert length(better) <= length(grid) + 1e-12
