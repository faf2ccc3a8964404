"""The learning rate at known steps, and what holds for every schedule."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.records import OptimiserSpec
from swarm.core.schedule import learning_rate


def rates(spec: OptimiserSpec, steps: int) -> list[float]:
    return [learning_rate(spec, step, steps) for step in range(steps)]


def test_a_constant_rate_after_its_warm_up() -> None:
    spec = OptimiserSpec(learning_rate=8.0, warmup_steps=4)
    assert rates(spec, 6) == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0]


def test_a_line() -> None:
    spec = OptimiserSpec(learning_rate=8.0, schedule="linear", final_fraction=0.5)
    assert rates(spec, 5) == [8.0, 7.0, 6.0, 5.0, 4.0]


def test_half_a_cosine_wave() -> None:
    spec = OptimiserSpec(learning_rate=8.0, schedule="cosine", warmup_steps=1, final_fraction=0.25)
    assert rates(spec, 6) == pytest.approx([8.0, 8.0, 8 - 6 * 0.1464466094, 5.0, 2.8786796564, 2.0])


specs = st.builds(
    OptimiserSpec,
    learning_rate=st.floats(1e-6, 10),
    schedule=st.sampled_from(["constant", "linear", "cosine"]),
    warmup_steps=st.integers(0, 20),
    final_fraction=st.floats(0, 1),
)


@given(specs, st.integers(1, 40))
def test_rates_rise_in_the_warm_up_and_never_after(spec: OptimiserSpec, steps: int) -> None:
    found = rates(spec, steps)
    warm, rest = found[: spec.warmup_steps], found[spec.warmup_steps :]
    assert warm == sorted(warm)
    assert all(one >= other * (1 - 1e-12) for one, other in itertools.pairwise(rest))
    assert all(0 <= rate <= spec.learning_rate * (1 + 1e-12) for rate in found)
    if spec.warmup_steps < steps:
        assert rest[0] == pytest.approx(spec.learning_rate)
    if spec.schedule != "constant" and steps - 1 > spec.warmup_steps:
        assert rest[-1] == pytest.approx(spec.learning_rate * spec.final_fraction, abs=1e-15)


@given(specs)
def test_a_single_step_has_a_rate_although_it_is_the_last(spec: OptimiserSpec) -> None:
    assert learning_rate(spec, 0, 1) > 0
