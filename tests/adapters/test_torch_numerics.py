"""Fixed point, norms, seeds, and bytes."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.records import TensorSpec
from swarm.adapters.torch_batches import decode, encode
from swarm.adapters.torch_gradients import Gradients
from swarm.adapters.torch_numerics import (
    CHUNK_ELEMENTS,
    FixedPoint,
    Floating,
    Record,
    scaled,
    seed_of,
    square_norm,
)
from swarm.core.reduction import Bucket, Slot

CPU = torch.device("cpu")
LARGEST = 2.0**19
floats = st.floats(-LARGEST, LARGEST, width=32, exclude_min=True, exclude_max=True)


@given(st.lists(floats, min_size=1, max_size=8), st.permutations(range(8)))
def test_fixed_point_sums_are_the_same_in_every_order(
    values: list[float], order: list[int]
) -> None:
    form = FixedPoint(40, 8)
    one, other = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    for value in values:
        form.add(one, torch.tensor([value]))
    for index in order:
        if index < len(values):
            form.add(other, torch.tensor([values[index]]))
    exact = sum(round(Fraction(value) * 2**40) for value in values)
    assert one.item() == other.item() == exact
    assert form.to_float64(one).item() == float(Fraction(exact, 2**40))


def test_a_gradient_is_rounded_to_the_nearest_multiple_halves_to_even() -> None:
    total = torch.zeros(6, dtype=torch.int64)
    values = torch.tensor([0.75, -0.75, 0.5, 1.5, -2.5, 3.25]) * 2.0**-40
    FixedPoint(40, 1).add(total, values)
    assert total.tolist() == [1, -1, 0, 2, -2, 3]


@given(st.integers(16, 48), st.integers(1, 65536), st.integers(1, 4))
def test_no_sum_within_the_bound_can_wrap(bits: int, microbatches: int, uses: int) -> None:
    bound = FixedPoint(bits, microbatches).bound(uses)
    assert round(bound * 2**bits) * microbatches * uses <= 2**62
    assert 2 * round(bound * 2**bits) * microbatches * uses > 2**62 or bound >= 2.0 ** (61 - bits)


def test_the_bound_of_an_untied_tensor_is_that_of_the_design() -> None:
    for microbatches in (1, 2, 5, 8, 9):
        expected = 2.0 ** (62 - 40 - math.ceil(math.log2(microbatches)))
        assert FixedPoint(40, microbatches).bound(1) == expected


@pytest.mark.parametrize("elements", [1, 1023, CHUNK_ELEMENTS, 2 * CHUNK_ELEMENTS + 17])
def test_chunks_do_not_show(elements: int) -> None:
    form = FixedPoint(40, 4)
    values = torch.randn(elements, generator=torch.Generator().manual_seed(1))
    total = torch.zeros(elements, dtype=torch.int64)
    form.add(total, values)
    form.add(total, values)
    assert torch.equal(total, 2 * (values.double() * 2**40).round().long())
    like = torch.empty(1, elements, dtype=torch.float32)
    assert torch.equal(scaled(total, form, 0.5, like)[0], form.to_float64(total).mul(0.5).float())
    exact = math.fsum(x * x for x in form.to_float64(total).tolist())
    assert square_norm(total, form) == pytest.approx(exact, rel=1e-14)


def test_norms_do_not_depend_on_threads() -> None:
    values = torch.randn(300_001, generator=torch.Generator().manual_seed(1))
    threads = torch.get_num_threads()
    try:
        norms = []
        for count in (1, 2):
            torch.set_num_threads(count)
            norms.append(square_norm(values, Floating()))
    finally:
        torch.set_num_threads(threads)
    assert norms[0] == norms[1] > 0


def test_a_norm_that_is_not_finite_is_infinite() -> None:
    for bad in (math.nan, math.inf, -math.inf):
        assert square_norm(torch.tensor([1.0, bad]), Floating()) == math.inf


@given(st.floats(width=32), st.floats(0.5, 2.0**100, width=32))
def test_a_record_lets_pass_what_is_strictly_within_the_bound(value: float, bound: float) -> None:
    record = Record()
    record.see(0, "layer", torch.tensor([0.0, value]), bound)
    assert record.first_bad() == ("" if abs(value) < bound else "layer")
    assert record.first_bad() == ""


def test_a_record_names_the_layer_of_the_lowest_order() -> None:
    record = Record()
    record.see(2, "later", torch.tensor([math.inf]))
    record.see(1, "earlier", torch.tensor([math.nan]))
    record.see(0, "good", torch.tensor([1.0]))
    record.see(-1, "empty", torch.tensor([]))
    assert record.first_bad() == "earlier"


def test_seeds_are_hashes_of_all_their_parts() -> None:
    seeds = {seed_of(a, b, c, d) for a in (0, 1) for b in (0, 1) for c in (0, 1) for d in (0, 1)}
    assert len(seeds) == 16
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seed_of(1, "2") != seed_of("1", 2) != seed_of(12)


DTYPES = ["float32", "float64", "float16", "bfloat16", "int64", "int32", "uint8", "bool"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3, 2)])
def test_bytes_there_and_back(dtype: str, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(math.prod(shape)).reshape(shape).to(getattr(torch, dtype))
    data = encode(tensor)
    assert (data.format, data.contiguous, data.nbytes) == ("B", True, tensor.nbytes)
    back = decode(memoryview(bytes(data)), TensorSpec(dtype, shape), CPU)  # type: ignore[arg-type]
    assert back.dtype == tensor.dtype and torch.equal(back, tensor)


def test_encoding_is_a_view_and_decoding_is_not() -> None:
    tensor = torch.zeros(4, dtype=torch.int64)
    data = encode(tensor)
    tensor[1] = 7
    assert np.frombuffer(data, dtype=np.int64)[1] == 7
    back = decode(data, TensorSpec("int64", (4,)), CPU)
    tensor[1] = 8
    assert back[1] == 7


@settings(max_examples=25)
@given(st.lists(st.integers(-(2**40), 2**40), min_size=6, max_size=6), st.integers(0, 6), st.data())
def test_shards_make_the_sum(values: list[int], cut: int, data: st.DataObject) -> None:
    bucket = Bucket(0, (0,), (Slot("a", 0, 2), Slot("b", 2, 6)))
    owner = Gradients([bucket], 0, FixedPoint(40, 4), CPU)
    other = Gradients([bucket], 0, FixedPoint(40, 4), CPU)
    array = np.array(values)
    for start, stop in ((0, cut), (cut, 6)):
        part = memoryview(array[start:stop].tobytes())
        shard = owner.reduce(0, start, stop, [part, None, part])
        other.gather(0, start, stop, memoryview(bytes(shard)))
    assert owner.square_norms() == other.square_norms()
    like = {"a": torch.zeros(2), "b": torch.zeros(2, 2)}
    updates = other.updates(0.5, like)
    assert updates["b"].shape == (2, 2)
    expected = torch.from_numpy(array).double().mul(2.0**-40).float()
    assert torch.equal(torch.cat([updates["a"], updates["b"].view(-1)]), expected)
    assert not any(bytes(owner.part(0, 0, 6)))
    owner.advance()
    with pytest.raises(RuntimeError, match="reduced up to 0 of 6"):
        owner.square_norms()
