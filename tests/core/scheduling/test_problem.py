"""Problems: what is refused, what they say about themselves, and their text form."""

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.core.scheduling.problem import (
    Assignment,
    Holding,
    Layer,
    Links,
    Problem,
    Standby,
    Terms,
    check_assignment,
    problem_from_json,
    problem_to_json,
)
from tests.core.problems import assignment_of, plain_problem, random_problem


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6))
def test_a_problem_survives_its_text(seed: int) -> None:
    problem = random_problem(seed)
    assert problem_from_json(problem_to_json(problem)) == problem


def test_the_text_may_say_what_peers_do_now() -> None:
    problem = plain_problem([1, 2, 3])
    current = assignment_of(problem, [2], [[0], [1]])
    problem = replace(problem, current=current, holdings=(Holding(0, 0, 2), Holding(1, 2, 4, 1)))
    assert problem_from_json(problem_to_json(problem)) == problem


def _with(problem: Problem, path: list[Any], value: Any) -> bytes:
    tree = msgspec.json.decode(problem_to_json(problem))
    at = tree
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return msgspec.json.encode(tree)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (["layers"], [], "0 layers and 3 peers make no schedule"),
        (["peers", 0, "id"], "zzz", "not in order of id"),
        (["peers", 1, "id"], "peer000", "not in order of id"),
        (["peers", 1, "speed"], 0, "'peer001': speed is 0"),
        (["peers", 1, "uplink"], -1, "'peer001': uplink is -1"),
        (["peers", 1, "memory_bytes"], "much", r"peers\[1\].memory_bytes"),
        (["layers", 2, "forward_seconds"], -1, r"layers\[2\].forward_seconds is -1"),
        (["links", "bandwidth"], [[1.0]], "links.bandwidth is not 3 rows of 3"),
        (["links", "latency_seconds", 0, 2], -1, r"latency_seconds\[0\]\[2\] is -1"),
        (["terms", "microbatches_per_step"], 0, "microbatches_per_step is 0"),
        (["terms", "cuts"], [4], r"cuts \[4\] do not cut 4 layers"),
        (["terms", "cuts"], [2, 2], r"cuts \[2, 2\] do not cut"),
        (["terms", "forward_ratio"], -1, "forward_ratio is -1"),
        (["terms", "stages"], 5, "terms.stages is 5, not 0 to 4"),
        (["terms", "min_replicas"], 0, "min_replicas is 0"),
        (["horizon_seconds"], 0, "horizon_seconds is 0"),
        (["holdings"], [{"peer": 3, "first": 0, "last": 1}], "names no peer"),
        (["holdings"], [{"peer": 0, "first": 0, "last": 1, "lag": -1}], "ahead of the newest"),
    ],
)
def test_what_makes_no_sense_is_refused_with_its_place(
    path: list[Any], value: Any, said: str
) -> None:
    text = _with(plain_problem([1, 1, 1]), path, value)
    with pytest.raises(ValueError, match=said):
        problem_from_json(text)


def test_numbers_that_are_none_are_refused() -> None:
    problem = plain_problem([1, 1])
    for wrong in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="forward_seconds is"):
            replace(problem, layers=(Layer(wrong, 1, 1, 1), *problem.layers))
    with pytest.raises(ValueError, match="max_replicas 1 < min_replicas 2"):
        replace(problem, terms=Terms(1, min_replicas=2, max_replicas=1))
    with pytest.raises(ValueError, match=r"cuts \[1\] do not make 3 stages"):
        replace(problem, terms=Terms(1, stages=3, cuts=(1,)))
    with pytest.raises(ValueError, match="stages is 3, not 0 to 2"):
        replace(problem, terms=Terms(1, stages=3, max_stages=2))


def test_links_are_compared_and_hashed_by_what_they_hold() -> None:
    one = Links([[0, 1], [2, 0]], [[0.0, 0.5], [-0.0, 0]])
    two = Links(np.array([[7.0, 1], [2, 9]]), np.array([[0, 0.5], [0, 0]]))
    assert one == two and hash(one) == hash(two)  # the diagonal does not matter
    assert one != Links([[0, 1], [3, 0]], one.latency_seconds)
    with pytest.raises(ValueError, match="read-only"):
        one.bandwidth[0, 1] = 3.0


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6))
def test_equal_problems_are_one_key(seed: int) -> None:
    problem, again = random_problem(seed), random_problem(seed)
    assert hash(problem) == hash(again) and problem == again
    other = replace(problem, horizon_seconds=problem.horizon_seconds + 1)
    assert {problem: 1, other: 2}[again] == 1


def test_memory_is_state_and_what_is_in_flight() -> None:
    problem = plain_problem([1, 1], terms=Terms(10, state_ratio=6))
    # two layers of 100 bytes and 5 kept; the first of two stages holds three microbatches
    assert problem.memory_bytes(0, 2, 0, 2) == 6 * 200 + 3 * 10
    assert problem.memory_bytes(2, 4, 1, 2) == 6 * 200 + 2 * 10


def test_targets_travel_uncompressed_with_activations_and_inputs() -> None:
    terms = Terms(10, input_bytes=7, target_bytes=3, forward_ratio=0.5, backward_ratio=0.25)
    problem = plain_problem([1, 1], terms=terms)
    assert [problem.forward_bytes(cut) for cut in (0, 1)] == [10, 8]
    assert [problem.backward_bytes(cut) for cut in (0, 1)] == [0, 2.5]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"ranges": ((0, 2), (3, 4))}, "do not cover 4 layers"),
        ({"ranges": ((0, 2), (2, 3))}, "do not cover 4 layers"),
        ({"ranges": ((0, 2), (2, 2), (2, 4)), "groups": ((0,), (1,), (2,))}, "do not cover"),
        ({"groups": ((0, 1), ())}, "a stage has no replicas"),
        ({"groups": ((1, 0), (2,))}, r"\[1, 0\] are not ascending"),
        ({"groups": ((0, 1), (1, 2))}, "are not each of 3 once"),
        ({"groups": ((0,), (2,))}, "are not each of 3 once"),
        ({"standby": (Standby(1, ""),)}, "are not each of 3 once"),
        ({"feeders": ()}, "feeders"),
        ({"feeders": (3,)}, "feeders"),
        ({"feeders": (1,)}, "feeder peer001 has no data"),
    ],
)
def test_an_assignment_of_another_form_is_refused(change: dict[str, Any], said: str) -> None:
    problem = plain_problem([1, 1, 1])
    peers = (problem.peers[0], replace(problem.peers[1], has_data=False), problem.peers[2])
    problem = replace(problem, peers=peers)
    good = Assignment(((0, 2), (2, 4)), ((0, 1), (2,)), (0,))
    check_assignment(problem, good)
    with pytest.raises(ValueError, match=said):
        check_assignment(problem, replace(good, **change))


@pytest.mark.parametrize(
    ("terms", "said"),
    [
        (Terms(1, cuts=(1,)), r"cuts \[2\] are not the manifest's \[1\]"),
        (Terms(1, min_replicas=2), "stage 1 has 1 replicas, not 2 to 3"),
        (Terms(1, max_replicas=1), "stage 0 has 2 replicas, not 1 to 1"),
        (Terms(1, max_stages=1), "2 stages are more than 1"),
        (Terms(1, stages=3), "2 stages are not the manifest's 3"),
        (Terms(1, state_ratio=1000), "stage 0 needs 200030 bytes, peer001 has 1000"),
    ],
)
def test_an_assignment_against_the_terms_is_refused(terms: Terms, said: str) -> None:
    problem = plain_problem([1, 1, 1], terms=terms)
    small = replace(problem.peers[1], memory_bytes=1000)
    if terms.state_ratio == 1000:
        problem = replace(problem, peers=(problem.peers[0], small, problem.peers[2]))
    with pytest.raises(ValueError, match=said):
        check_assignment(problem, assignment_of(problem, [2], [[0, 1], [2]]))


def test_what_is_lacking_comes_over_the_best_way() -> None:
    problem = plain_problem([1, 1, 1], layers=3, terms=Terms(1, moved_ratio=3, reduction_ratio=1))
    bandwidth = ((1.0, 1.0, 20.0), (1.0, 1.0, 5.0), (1.0, 1.0, 1.0))
    links = Links(bandwidth, problem.links.latency_seconds)
    holdings = (Holding(0, 0, 2), Holding(1, 1, 2), Holding(2, 1, 2, lag=1))
    problem = replace(problem, links=links, holdings=holdings)
    size, seconds = problem.lacking
    # peer 2: layer 0 whole, from peer 0; layer 1 one version behind; layer 2 is nobody's
    np.testing.assert_allclose(size[2], [0, 300, 400, 400])
    np.testing.assert_allclose(seconds[2], [0, 15, 20, 20])
    np.testing.assert_allclose(size[0], 0)
    np.testing.assert_allclose(size[1], [0, 300, 300, 300])


def test_nothing_is_lacking_where_nobody_holds_anything() -> None:
    assert not plain_problem([1, 1]).lacking[0].any()
