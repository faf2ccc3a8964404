from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.core.dataorder import Turns, feeder_of, permuted, sample_ids

SHARES = st.lists(st.integers(1, 40), min_size=1, max_size=6)


def stream(seed: int, *, microbatches: int, size: int, samples: int, steps: int) -> list[int]:
    return [
        sample
        for step in range(steps)
        for index in range(microbatches)
        for sample in sample_ids(
            seed, step, index, microbatches=microbatches, microbatch_size=size, samples=samples
        )
    ]


@given(st.integers(0, 2**53), st.integers(1, 200), st.integers(1, 5), st.integers(1, 7), st.data())
def test_every_pass_visits_every_sample_once(seed, samples, microbatches, size, data):
    passes = data.draw(st.integers(1, 3))
    steps = -(-samples * passes // (microbatches * size))
    ids = stream(seed, microbatches=microbatches, size=size, samples=samples, steps=steps)
    for turn in range(passes):
        assert sorted(ids[turn * samples : (turn + 1) * samples]) == list(range(samples))


@given(st.integers(1, 3000), st.text(max_size=5))
def test_permuted_is_a_permutation(size, key):
    assert sorted(permuted(place, size, key) for place in range(size)) == list(range(size))


@given(st.integers(1, 2**53), st.data())
def test_large_spaces_need_no_memory(samples, data):
    place = data.draw(st.integers(0, samples - 1))
    other = data.draw(st.integers(0, samples - 1))
    images = permuted(place, samples, "key"), permuted(other, samples, "key")
    assert all(0 <= image < samples for image in images)
    assert (images[0] == images[1]) == (place == other)


def test_passes_and_seeds_have_orders_of_their_own():
    ids = stream(1, microbatches=2, size=50, samples=100, steps=2)
    other = stream(2, microbatches=2, size=50, samples=100, steps=1)
    assert ids[:100] != ids[100:]
    assert ids[:100] != other
    assert ids[:100] != sorted(ids[:100])


def test_the_order_is_well_mixed():
    """Over many keys each place goes to each sample about equally often: a chi-square test.

    64 cells with 4000 draws each; the mean of the statistic is 63, its deviation 11.2, so
    that 63 + 6 * 11.2 = 130 is beyond six deviations in each of the places.
    """
    for place in (0, 7):
        counts = Counter(permuted(place, 64, f"{seed}/0") for seed in range(4000))
        expected = 4000 / 64
        assert sum((counts[each] - expected) ** 2 / expected for each in range(64)) < 130


def test_an_index_beyond_the_step_is_refused():
    with pytest.raises(ValueError, match="index 4"):
        sample_ids(0, 0, 4, microbatches=4, microbatch_size=1, samples=9)
    with pytest.raises(ValueError, match="place 9"):
        permuted(9, 9, "key")


@given(SHARES, st.integers(0, 10**6), st.integers(1, 300))
def test_in_each_step_a_feeder_gets_its_share_or_nearly(shares, step, microbatches):
    """Before time t a feeder has had share * t turns and all have had total * t, the one give
    or take 1/2, the other give or take len(shares) / 2; a step is the difference of two."""
    counts = Counter(feeder_of(step, index, shares) for index in range(microbatches))
    for feeder, share in enumerate(shares):
        part = share / sum(shares)
        assert abs(counts[feeder] - microbatches * part) <= 1 + len(shares) * part + 1


@given(st.integers(1, 12), st.integers(0, 1000), st.integers(1, 100))
def test_equal_feeders_differ_by_one_at_most(feeders, step, microbatches):
    counts = Counter(feeder_of(step, index, [5] * feeders) for index in range(microbatches))
    assert {counts[feeder] for feeder in range(feeders)} <= {
        microbatches // feeders,
        -(-microbatches // feeders),
    }


@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=5), st.integers(0, 50), st.integers(0, 500)
)
def test_remainders_alternate_until_shares_are_exact(shares, first, index):
    total = sum(shares)
    counts = Counter(feeder_of(step, index, shares) for step in range(first, first + total))
    assert counts == dict(enumerate(shares))


def test_two_feeders_take_turns():
    assert [feeder_of(0, index, [1, 1]) for index in range(4)] == [0, 1, 0, 1]
    assert [feeder_of(step, 0, [1, 1]) for step in range(4)] == [0, 1, 0, 1]


def test_shares_without_a_common_divisor_may_be_huge():
    shares = [2**53, 2**53 - 1, 1]
    assert {feeder_of(3, index, shares) for index in range(1000)} == {0, 1}


@given(SHARES, st.integers(0, 50), st.dictionaries(st.integers(0, 199), st.integers(1, 3)))
def test_of_a_step_in_hand_what_is_missing_is_dealt_evenly(shares, step, needs):
    """Each index once; of those that the same stages lack every feeder gets its share or nearly."""
    turns = Turns(shares, 200)
    turns.resume(step, needs)
    feeders = range(len(shares))
    dealt = {feeder: turns.indices_of(step, feeder) for feeder in feeders}
    assert sorted(index for indices in dealt.values() for index in indices) == sorted(needs)
    for feeder, indices in dealt.items():
        assert all(turns.feeder_of(step, index) == feeder for index in indices)
    for kind in set(needs.values()):
        alike = [index for index in needs if needs[index] == kind]
        for feeder in feeders:
            part = len(alike) * shares[feeder] / sum(shares)
            got = sum(needs[index] == kind for index in dealt[feeder])
            assert abs(got - part) <= 2 + len(shares)
    assert all(turns.feeder_of(step, index) is None for index in range(200) if index not in needs)


def test_feeders_of_one_share_get_as_much_of_what_is_missing():
    """What one of four feeders would have to feed alone is dealt to all of them."""
    turns = Turns([1] * 4, 400)
    own = [index for index in range(400) if feeder_of(7, index, [1] * 4) == 2]
    turns.resume(7, dict.fromkeys(own, 1))
    assert [len(turns.indices_of(7, feeder)) for feeder in range(4)] == [25] * 4


def test_steps_that_are_not_in_hand_are_dealt_as_ever():
    turns = Turns([2, 1], 30)
    turns.resume(3, {4: 1})
    assert [turns.feeder_of(4, index) for index in range(30)] == [
        feeder_of(4, index, [2, 1]) for index in range(30)
    ]
    assert turns.indices_of(3, turns.feeder_of(3, 4)) == [4]
