"""What a peer holds: equal hashes mean equal histories."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from protocol.messages import Account, Totals
from swarm.core.holding import Holding, state_hash_after
from swarm.core.ledger import bitmap_of
from tests.core.steps import ACCOUNT, HASH, TOTALS, held

HOLDING = Holding(0, 1, 2, 3, HASH, None, ACCOUNT)
totals = st.builds(
    Totals,
    st.integers(0, 3),
    st.sampled_from([0.0, 1.0, 1.0000000000000002]),
    st.just(()),
    st.sampled_from(["apply", "skip"]),
    st.none() | st.sampled_from([0.5, 0.25]),
)


def test_a_commit_makes_the_next_version_and_ends_the_account() -> None:
    after = HOLDING.after(TOTALS)
    assert after == Holding(0, 1, 2, 4, state_hash_after(HASH, 3, TOTALS), TOTALS, None)
    assert after.range == HOLDING.range == (1, 2)
    assert len(after.state_hash) == 32


@given(st.lists(totals, max_size=4), st.lists(totals, max_size=4))
def test_hashes_are_equal_where_all_totals_since_the_first_weights_are(
    one: list[Totals], other: list[Totals]
) -> None:
    hashes = []
    for history in (one, other):
        holding = Holding(0, 0, 1, 0, HASH)
        for each in history:
            holding = holding.after(each)
        assert holding.version == len(history)
        hashes.append(holding.state_hash)
    assert (hashes[0] == hashes[1]) == (one == other)


def test_the_same_totals_after_another_step_or_other_weights_are_another_history() -> None:
    found = {
        state_hash_after(state, step, TOTALS) for state in (HASH, b"i" * 32) for step in (3, 4)
    }
    assert len(found) == 4
    other = msgspec.structs.replace(TOTALS, square_norm=2.0000000000000004)
    assert state_hash_after(HASH, 3, other) != state_hash_after(HASH, 3, TOTALS)


def test_an_account_is_reported_only_with_the_whole_reduced_gradient() -> None:
    bitmap = bitmap_of([0, 2], 4)
    assert HOLDING.reported(bitmap, prepared=True) == held(1, 3, indices=[0, 2], prepared=ACCOUNT)
    assert HOLDING.reported(bitmap, prepared=False) == held(1, 3, indices=[0, 2])
    committed = HOLDING.after(TOTALS).reported(bitmap_of((), 4), prepared=True)
    assert (committed.prepared, committed.totals) == (None, TOTALS)
    assert isinstance(HOLDING.account, Account)
