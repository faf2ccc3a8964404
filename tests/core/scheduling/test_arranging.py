"""What follows from who does what: shares, wiring, windows, and a claim that others can check."""

import math
from dataclasses import replace
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.records import Member, Signed, TensorSpec
from swarm.core.scheduling.arranging import Arrangement, arranged
from swarm.core.scheduling.cost import predict
from swarm.core.scheduling.problem import Assignment, Layer, Problem, Terms
from swarm.core.scheduling.snapshot import assignment_of, flow_of
from swarm.core.scheduling.wiring import Flow
from tests.core.plans import body as plain_body
from tests.core.problems import plain_problem, random_assignment, random_problem, with_links

OUTPUT = TensorSpec("float32", (2,))


def arrange(
    problem: Problem, groups: list[list[int]], *, cuts: list[int], programs: bool = True
) -> Arrangement:
    members = [[Member(problem.peers[i].id, 1) for i in group] for group in groups]
    edges = [0, *cuts, len(problem.layers)]
    return arranged(
        problem,
        list(pairwise(edges)),
        members,
        [each for each in members[0] if problem.peers[int(each.peer[-3:])].has_data],
        [OUTPUT] * len(problem.layers),
        programs=programs,
    )


def test_a_replica_twice_as_fast_gets_twice_as_much() -> None:
    made = arrange(plain_problem([1.0, 2.0, 9.0]), [[0, 1], [2]], cuts=[2])
    assert [feeder.share for feeder in made.feeders] == [32, 64]
    assert made.wiring == (((1.0, 0.0), (0.0, 1.0)), ((1.0,), (1.0,)))


def test_replicas_keep_the_order_of_the_plan() -> None:
    problem = plain_problem([9.0, 1.0, 3.0, 1.0])
    there = arrange(problem, [[0], [3, 1, 2]], cuts=[2], programs=False)
    assert [each.peer[-1] for each in there.stages[1].replicas] == ["3", "1", "2"]
    assert there.wiring[1][0] == pytest.approx((0.2, 0.2, 0.6))


def test_shards_are_as_wide_as_links() -> None:
    """To the last of three replicas links have a tenth of the others' bandwidth: together they have
    110, 110 and 20 MB/s."""
    problem = plain_problem([1.0] * 3)
    wide, narrow = 1e8, 1e7
    problem = with_links(problem, [[0, wide, narrow], [wide, 0, narrow], [narrow, narrow, 0]])
    assert arrange(problem, [[0, 1, 2]], cuts=[]).stages[0].shares == (458, 458, 83)


@pytest.mark.parametrize(("latency", "window"), [(0.0, 6), (3.0, 9), (30.0, 31)])
def test_a_window_covers_what_is_under_way(latency: float, window: int) -> None:
    """Two stages of 6 s per microbatch: one comes every 6 s. From stage 0 to the end and back it
    takes 12 s and four latencies, two of which are the feeder's own machine: 2, 3 or 12 are under
    way, and there is room for two and a half times as many, and one."""
    problem = plain_problem([1.0, 1.0], latency=latency, terms=Terms(64))
    made = arrange(problem, [[0], [1]], cuts=[2])
    assert made.stages[0].window == window


def test_a_window_is_for_the_replica_with_the_largest_share() -> None:
    """Every 2 s one comes, two of three to the one that is twice as fast. On average they take 4 s
    there and 2/3 s at the next stage: 14/9 of its own are under way at the same time."""
    made = arrange(plain_problem([1.0, 2.0, 9.0]), [[0, 1], [2]], cuts=[2])
    assert made.stages[0].window == math.ceil(2.5 * 14 / 9) + 1


def test_a_window_is_no_larger_than_memory_allows() -> None:
    """12 layers' activations fit beside the state, of 2 layers each, so 6 microbatches do."""
    layer = Layer(1.0, 2.0, 100, 10, 50)
    problem = plain_problem([1.0, 1.0], latency=30.0, terms=Terms(64), layer=layer)
    memory = int(6.0 * 200 + 12 * 50)
    small = tuple(replace(peer, memory_bytes=memory) for peer in problem.peers)
    made = arrange(replace(problem, peers=small), [[0], [1]], cuts=[2])
    assert made.stages[0].window == 6


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.booleans())
def test_what_is_claimed_is_what_others_compute_from_what_is_written(
    seed: int, programs: bool
) -> None:
    problem = random_problem(seed)
    drawn = random_assignment(problem, seed)
    feeders = [peer for peer in drawn.groups[0] if problem.peers[peer].has_data]
    if not feeders:
        return
    members = [[Member(problem.peers[i].id, 1) for i in group] for group in drawn.groups]
    made = arranged(
        problem,
        drawn.ranges,
        members,
        [Member(problem.peers[i].id, 1) for i in feeders],
        [OUTPUT] * len(problem.layers),
        programs=programs,
    )
    for matrix in made.wiring:
        assert all(abs(sum(row) - 1) <= 1e-9 for row in matrix)
    assert all(stage.window >= len(made.stages) - k + 1 for k, stage in enumerate(made.stages))
    seconds = predict(problem, *_read_back(problem, made)).kept_seconds
    assert seconds == pytest.approx(made.step_seconds, rel=1e-9)


def _read_back(problem: Problem, made: Arrangement) -> tuple[Assignment, Flow]:
    """What a reader of the plan makes of it; its members are the problem's peers."""
    members = tuple(Signed(b"", peer.id, b"") for peer in problem.peers)
    body = msgspec.structs.replace(
        plain_body([["a"]]),
        members=members,
        stages=made.stages,
        feeders=made.feeders,
        wiring=made.wiring,
    )
    return assignment_of(body), flow_of(body)
