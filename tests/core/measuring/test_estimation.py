"""Estimators: what a train of chunks, a writer and an executor say."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.records import GUESS_SPREAD
from swarm.core.measuring.estimation import (
    FILLING_BYTES,
    PROBE_BYTES,
    STEADY_BYTES,
    Average,
    Probing,
    Slowdown,
    Writers,
    train_rate,
)

CHUNK = 30_000
COUNTS = st.sampled_from([8, 12, 16, 32])
RATES = st.floats(1e4, 1e9)

# --- averages ------------------------------------------------------------------------------------


@given(st.lists(st.floats(1.0, 1e6), min_size=1, max_size=20))
def test_an_average_lies_among_what_was_measured(values: list[float]) -> None:
    average = Average()
    for value in values:
        average.take(value)
    assert min(values) * 0.999 <= average.value <= max(values) * 1.001
    assert average.spread > 0


def test_equal_measurements_make_it_sure_and_unequal_ones_do_not() -> None:
    sure, unsure = Average(), Average()
    for number in range(20):
        sure.take(100.0)
        unsure.take(50.0 if number % 2 else 200.0)
    assert sure.value == pytest.approx(100.0)
    assert sure.spread < 0.06 < 0.2 < unsure.spread


def test_it_follows_a_change() -> None:
    average = Average()
    for value in [100.0] * 10 + [10.0] * 10:
        average.take(value)
    assert average.value == pytest.approx(10.0, rel=0.1)


def test_a_lower_bound_raises_and_never_lowers() -> None:
    average = Average()
    average.take(100.0)
    average.bound(50.0)
    assert average.value == 100.0
    average.bound(200.0)
    assert average.value == 200.0 and average.spread >= 0.5
    assert average.spread < GUESS_SPREAD  # it was measured, and is more


@given(st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=20), st.floats(0, 1e3))
def test_what_was_measured_is_no_guess_however_noisy(values: list[float], spread: float) -> None:
    average = Average()
    for value in values:
        average.take(value, spread)
        assert average.spread < GUESS_SPREAD
    average.bound(1e10)
    assert average.spread < GUESS_SPREAD


def test_what_is_measured_takes_the_place_of_a_lower_bound() -> None:
    average = Average()
    average.bound(10.0)
    assert average.value == 10.0 and average.spread >= GUESS_SPREAD
    average.bound(20.0)
    assert average.value == 20.0 and average.spread >= GUESS_SPREAD
    average.take(400.0)
    assert average.value == 400.0 and average.spread < 0.5
    average.bound(500.0)
    average.take(480.0)  # the bound was right, and the measurement is noisy
    assert 480.0 <= average.value <= 500.0


# --- trains --------------------------------------------------------------------------------------


def steady(count: int, rate: float) -> list[float]:
    return [number * CHUNK / rate for number in range(count)]


@given(COUNTS, RATES)
def test_a_steady_train(count: int, rate: float) -> None:
    found = train_rate(steady(count, rate), CHUNK)
    assert found is not None
    assert found.bytes_per_second == pytest.approx(rate, rel=1e-6)
    assert found.spread < 0.05


@given(COUNTS, RATES)
def test_a_token_bucket_lets_the_first_chunks_through_at_once(count: int, rate: float) -> None:
    burst = count // 4
    arrivals = [max(0, number - burst) * CHUNK / rate for number in range(count)]
    found = train_rate(arrivals, CHUNK)
    assert found is not None and found.bytes_per_second == pytest.approx(rate, rel=0.01)


@given(st.sampled_from([16, 32]), RATES, st.data())
def test_one_pause_of_the_sender(count: int, rate: float, data: st.DataObject) -> None:
    at = data.draw(st.integers(1, count - 1))
    seconds = data.draw(st.floats(0, 100)) * CHUNK / rate
    arrivals = [t + (seconds if n >= at else 0.0) for n, t in enumerate(steady(count, rate))]
    found = train_rate(arrivals, CHUNK)
    assert found is not None
    assert found.bytes_per_second == pytest.approx(rate, rel=0.1)


@given(st.sampled_from([16, 32]), RATES, st.data())
def test_one_nap_of_the_reader(count: int, rate: float, data: st.DataObject) -> None:
    """What came meanwhile is there all at once: then it is as if it had not slept."""
    at = data.draw(st.integers(0, count - 1))
    length = data.draw(st.integers(1, count // 4))
    times = steady(count, rate)
    awake = times[min(at + length, count - 1)]
    arrivals = [max(t, awake) if at <= n < at + length else t for n, t in enumerate(times)]
    found = train_rate(arrivals, CHUNK)
    assert found is not None
    assert found.bytes_per_second == pytest.approx(rate, rel=0.1)


@given(st.lists(st.floats(0, 1e9), max_size=32))
def test_whatever_times_are_said(times: list[float]) -> None:
    """They come from another peer."""
    for arrivals in (times, sorted(times)):
        found = train_rate(arrivals, CHUNK)
        assert found is None or found.bytes_per_second > 0


def test_too_few_or_impossible_times_say_nothing() -> None:
    assert train_rate([], CHUNK) is None
    assert train_rate([0.0, 1.0, 2.0], CHUNK) is None
    assert train_rate([0.0, 2.0, 1.0, 3.0, 4.0], CHUNK) is None
    assert train_rate([0.0] * 12, CHUNK) is None


# --- a probe -------------------------------------------------------------------------------------


def probe(rate: float, burst_bytes: int = 0) -> Probing:
    """Return a whole probe of a link that carries `rate` after `burst_bytes`."""
    probing = Probing()
    while (train := probing.next_train()) is not None:
        chunks, size = train
        ends = [max(0.0, (number + 1) * size - burst_bytes) / rate for number in range(chunks)]
        probing.arrived([end - ends[0] for end in ends], ends[-1])
    return probing


@settings(max_examples=60)
@given(st.floats(5e4, 25e6), st.sampled_from([0, 32 * 1024]))
def test_a_probe_is_good_and_bounded(rate: float, burst_bytes: int) -> None:
    probing = probe(rate, burst_bytes)
    assert probing.rate is not None
    assert probing.rate.bytes_per_second == pytest.approx(rate, rel=0.1)
    assert probing.sent_bytes <= PROBE_BYTES < 2_000_000


def test_slow_links_need_fewer_bytes() -> None:
    sent = [probe(rate).sent_bytes for rate in (1e5, 1.25e6, 25e6)]
    assert sent[0] <= 60_000 < sent[1] <= 200_000 < sent[2]


def test_a_connection_that_still_learns_its_speed() -> None:
    """Each train comes twice as fast as the one before: the last counts, and says that it may be
    too low."""
    probing, rate = Probing(), 1e6
    while (train := probing.next_train()) is not None:
        chunks, size = train
        rate *= 2
        arrivals = [number * size / rate for number in range(chunks)]
        probing.arrived(arrivals, arrivals[-1])
    assert probing.rate is not None
    assert probing.rate.bytes_per_second == pytest.approx(rate)
    assert probing.rate.spread > 0.3


def test_a_receiver_that_slept_through_a_train_says_nothing() -> None:
    probing = Probing()
    train = probing.next_train()
    assert train is not None
    probing.arrived([0.001 * number / train[0] for number in range(train[0])], 0.5)
    assert probing.rate is None


@given(st.lists(st.lists(st.floats(0, 1e9), max_size=32), max_size=10))
def test_whatever_is_answered_a_probe_ends(answers: list[list[float]]) -> None:
    probing, trains = Probing(), 0
    while probing.next_train() is not None:
        trains += 1
        if trains <= len(answers):
            answer = sorted(answers[trains - 1])
            probing.arrived(answer, answer[-1] if answer else 0.0)
    assert trains < 10 and probing.sent_bytes <= PROBE_BYTES


# --- writers -------------------------------------------------------------------------------------


def write(writers: Writers, peer: str, rate: float, now: float, frames: int, size: int) -> float:
    """Write frames back to back as fast as a link takes them, after a full buffer; return when."""
    writers.begin(peer, now)
    written = 0
    for _ in range(frames):
        written += size
        now = max(now, (written - FILLING_BYTES) / rate)
        writers.wrote(peer, size, now)
    return now


@given(st.floats(1e5, 1e9), st.sampled_from([64 * 1024, 256 * 1024, 2**20]))
def test_a_writer_that_is_never_idle_is_as_fast_as_the_link(rate: float, size: int) -> None:
    writers = Writers()
    write(writers, "a", rate, 0.0, 8 * STEADY_BYTES // size, size)
    assert len(writers.seen) >= 2
    for transfer in writers.seen:
        assert transfer.peer == "a" and transfer.is_alone
        assert transfer.bytes_per_second == pytest.approx(rate, rel=0.01)


def test_frames_with_pauses_between_say_nothing() -> None:
    writers = Writers()
    for number in range(100):
        writers.begin("a", float(number))
        writers.wrote("a", 300_000, number + 1e-6)  # into a buffer
        writers.pause("a")
    assert not writers.seen


def test_who_writes_beside_another_is_not_alone() -> None:
    writers = Writers()
    writers.begin("a", 0.0)
    write(writers, "b", 1e6, 0.0, 16, 256 * 1024)
    assert writers.seen and not any(transfer.is_alone for transfer in writers.seen)


def test_a_frame_of_many_windows_does_not_count_as_one_windows_bytes() -> None:
    writers = Writers()
    writers.begin("a", 0.0)
    writers.wrote("a", 10_000_000, 100.0)
    assert writers.sent_bytes == pytest.approx(1_000_000)


# --- slowdown ------------------------------------------------------------------------------------


@given(st.floats(0.1, 10), st.floats(1e-3, 10))
def test_slowdown_is_real_by_profiled_seconds(factor: float, profiled: float) -> None:
    slowdown = Slowdown()
    for _ in range(10):
        slowdown.take(2 * factor * profiled, 2, profiled)
    assert slowdown.average.value == pytest.approx(factor)


def test_no_profile_no_slowdown() -> None:
    slowdown = Slowdown()
    slowdown.take(1.0, 100, 0.0)
    assert slowdown.average.value == 0


def test_what_comes_in_no_time_says_nothing() -> None:
    """Whoever answers a probe may write what it likes."""
    assert train_rate([n * 5e-324 for n in range(64)], CHUNK) is None
    assert train_rate([n * 1e-12 for n in range(64)], CHUNK) is None
    probing = Probing()
    chunks, _ = probing.next_train() or (0, 0)
    probing.arrived([n * 5e-324 for n in range(chunks)], 0.0)
    assert probing.rate is None
