"""Who probes whom."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from swarm.core.measuring.partners import ALL_PAIRS, partners

MANY = [f"peer{number}" for number in range(1000)]


def test_in_a_small_swarm_everybody_probes_everybody() -> None:
    peers = MANY[:ALL_PAIRS]
    for peer in peers:
        assert set(partners(peer, peers, "seed", {})) == {*peers} - {peer}


def test_not_all_begin_with_the_same() -> None:
    peers = MANY[:ALL_PAIRS]
    first = Counter(partners(peer, peers, "seed", {})[0] for peer in peers)
    assert max(first.values()) < 8


def test_in_a_large_swarm_each_probes_few_and_is_probed_by_few() -> None:
    chosen = [partners(peer, MANY, "seed", {}) for peer in MANY]
    assert {len(each) for each in chosen} == {10}
    taken = Counter(peer for each in chosen for peer in each)
    assert max(taken.values()) < 30 and len(taken) == len(MANY)


def test_a_few_are_near_and_not_everybody_takes_the_nearest() -> None:
    """All are nearest to the same ones."""
    known = {peer: 0.001 * number for number, peer in enumerate(MANY)}
    chosen = [partners(peer, MANY, "seed", known) for peer in MANY]
    assert {len(each) for each in chosen} == {12}
    near = [peer for each in chosen for peer in each[10:]]
    assert all(known[peer] < 0.02 for peer in near)
    assert len(set(near)) >= 8


@given(st.lists(st.sampled_from(MANY), min_size=40, max_size=80, unique=True))
def test_it_depends_on_who_is_there_and_not_on_their_order(peers: list[str]) -> None:
    me = peers[0]
    chosen = partners(me, peers, "seed", {})
    assert chosen == partners(me, peers[::-1], "seed", {})
    assert me not in chosen and len(set(chosen)) == len(chosen) and {*chosen} <= {*peers}


def test_who_comes_changes_little() -> None:
    before = {peer: partners(peer, MANY[:500], "seed", {}) for peer in MANY[:500]}
    after = {peer: partners(peer, MANY[:501], "seed", {}) for peer in MANY[:500]}
    changed = sum(before[peer] != after[peer] for peer in before)
    assert 0 < changed < 40
