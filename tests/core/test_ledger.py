"""An index enters once; what a ledger says depends on its entries and on nothing else."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.messages import Flag
from swarm.core.ledger import DoubleCount, Ledger, bitmap_of, indices_of

sizes = st.integers(1, 70)


@st.composite
def index_sets(draw: st.DrawFn) -> tuple[int, set[int]]:
    size = draw(sizes)
    return size, draw(st.sets(st.integers(0, size - 1)))


@given(index_sets())
def test_bitmaps_there_and_back(case: tuple[int, set[int]]) -> None:
    size, indices = case
    bitmap = bitmap_of(indices, size)
    assert len(bitmap) == math.ceil(size / 8)
    assert indices_of(bitmap, size) == tuple(sorted(indices))


def test_a_bitmap_of_another_size_or_with_bits_beyond_is_refused() -> None:
    with pytest.raises(ValueError, match="2 bytes for 8"):
        indices_of(b"\0\0", 8)
    with pytest.raises(ValueError, match="index 5 of 5"):
        indices_of(b"\x20", 5)
    assert indices_of(b"\x10", 5) == (4,)


@given(st.permutations(range(12)), st.lists(st.floats(-1e6, 1e6), min_size=12, max_size=12))
def test_order_does_not_show(order: list[int], losses: list[float]) -> None:
    one, other = Ledger(12), Ledger(12)
    for ledger, indices in ((one, list(range(12))), (other, order)):
        for index in indices:
            ledger.add(index, index + 1, loss_sum=losses[index], nonfinite="loss" * (index == 3))
    assert one.bitmap == other.bitmap == b"\xff\x0f"
    assert one.weight == other.weight == 78
    assert one.loss_sum == other.loss_sum == math.fsum(losses[:3] + losses[4:])
    assert one.flags == other.flags == (Flag(3, "loss"),)


def test_an_index_enters_once_and_only_if_there_is_such_an_index() -> None:
    ledger = Ledger(3)
    ledger.add(1, 5, loss_sum=2.0)
    for nonfinite in ("", "head"):
        with pytest.raises(DoubleCount):
            ledger.add(1, 7, loss_sum=3.0, nonfinite=nonfinite)
    for index in (-1, 3):
        with pytest.raises(ValueError, match="is not in 0..2"):
            ledger.add(index, 1)
    assert 1 in ledger and 0 not in ledger
    assert (len(ledger), ledger.weight, ledger.loss_sum, ledger.flags) == (1, 5, 2.0, ())


def test_clearing_empties_it_and_a_copy_is_another_ledger() -> None:
    ledger = Ledger(3)
    ledger.add(0, 2, loss_sum=1.0)
    ledger.add(2, 2, nonfinite="embed")
    copy = ledger.copy()
    ledger.clear()
    assert (len(ledger), ledger.weight, ledger.bitmap, ledger.flags) == (0, 0, b"\0", ())
    assert (len(copy), copy.weight, copy.loss_sum) == (2, 4, 1.0)
    assert (copy.bitmap, copy.flags, copy.microbatches) == (b"\x05", (Flag(2, "embed"),), 3)
    ledger.add(0, 1)


def test_a_copy_does_not_change_with_the_ledger() -> None:
    """A Report is made of a copy: what is computed after it does not count."""
    ledger = Ledger(4)
    ledger.add(1, 3, loss_sum=0.5)
    ledger.add(2, 5, nonfinite="layer")
    copy = ledger.copy()
    assert (copy.bitmap, copy.weight, copy.loss_sum, copy.flags) == (
        ledger.bitmap,
        8,
        0.5,
        (Flag(2, "layer"),),
    )
    ledger.clear()
    copy.add(0, 1)
    assert (len(copy), len(ledger)) == (3, 0)
