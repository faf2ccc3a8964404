"""Transfers share pipes as max-min fairness says."""

import math
from collections.abc import Sequence

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.simulation.carriage import Carriage, Pipe
from swarm.simulation.network import SimNetwork
from tests.simulation.sim import Frames, run

Start = tuple[float, tuple[int, ...], float]
"""When, through which pipes, how many bytes."""


def ends(pipes: Sequence[Pipe], starts: Sequence[Start]) -> list[float]:
    """Return when each transfer has ended."""
    found = [math.nan] * len(starts)

    async def main() -> None:
        network = SimNetwork("test", Frames())
        carriage = Carriage(network.after)

        async def carry(number: int, start: Start) -> None:
            at, through, size = start
            gone = trio.Event()
            await trio.sleep(at)
            carriage.start([pipes[each] for each in through], size, gone.set)
            await gone.wait()
            found[number] = trio.current_time()

        async with trio.open_nursery() as nursery:
            for number, start in enumerate(starts):
                nursery.start_soon(carry, number, start)

    run(main)
    return found


def test_one_alone_gets_the_narrowest_pipe() -> None:
    assert ends([Pipe(10.0), Pipe(4.0), Pipe(math.inf)], [(1.0, (0, 1, 2), 8.0)]) == [
        pytest.approx(3.0)
    ]


def test_two_share_and_the_second_goes_on_alone() -> None:
    # 5/s each until 1 s: the first has gone; the other has 5 left, at 10/s
    assert ends([Pipe(10.0)], [(0.0, (0,), 5.0), (0.0, (0,), 10.0)]) == [
        pytest.approx(1.0),
        pytest.approx(1.5),
    ]


def test_who_comes_later_takes_its_share_from_then_on() -> None:
    assert ends([Pipe(10.0)], [(0.0, (0,), 15.0), (1.0, (0,), 5.0)]) == [
        pytest.approx(2.0),
        pytest.approx(2.0),
    ]


def test_what_one_cannot_use_the_others_get() -> None:
    """One of three is held to 1/s by a narrow pipe of its own: the others get 4.5/s each."""
    wide, narrow = Pipe(10.0), Pipe(1.0)
    found = ends([wide, narrow], [(0.0, (0, 1), 2.0), (0.0, (0,), 9.0), (0.0, (0,), 9.0)])
    assert found == [pytest.approx(2.0)] * 3


def test_a_transfer_without_a_limit_takes_no_time() -> None:
    assert ends([Pipe(math.inf)], [(2.0, (0,), 1e12)]) == [pytest.approx(2.0)]


def test_a_stopped_transfer_leaves_its_share_to_others() -> None:
    seconds: list[float] = []

    async def main() -> None:
        network = SimNetwork("test", Frames())
        carriage, pipe, gone = Carriage(network.after), Pipe(10.0), trio.Event()
        first = carriage.start([pipe], 1000.0, lambda: None)
        carriage.start([pipe], 10.0, gone.set)
        await trio.sleep(1.0)
        carriage.stop(first)
        await gone.wait()
        seconds.append(trio.current_time())

    run(main)
    assert seconds == [pytest.approx(1.5)]


def test_nothing_moves_while_the_way_is_closed() -> None:
    seconds: list[float] = []

    async def main() -> None:
        network = SimNetwork("test", Frames())
        carriage, pipe, gone, closed = Carriage(network.after), Pipe(10.0), trio.Event(), [False]
        carriage.start([pipe], 20.0, gone.set, lambda: not closed[0])
        await trio.sleep(1.0)
        for closed[0] in (True, False):
            carriage.touch([pipe])
            await trio.sleep(5.0 if closed[0] else 0.0)
        await gone.wait()
        seconds.append(trio.current_time())

    run(main)
    assert seconds == [pytest.approx(7.0)]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(1.0, 100.0), min_size=1, max_size=5),
    st.lists(
        st.tuples(
            st.floats(0.0, 3.0),
            st.lists(st.integers(0, 4), min_size=1, max_size=3, unique=True),
            st.floats(1.0, 200.0),
        ),
        min_size=1,
        max_size=8,
    ),
)
def test_no_pipe_carries_more_than_it_can_and_all_arrive(
    widths: list[float], drawn: list[tuple[float, list[int], float]]
) -> None:
    starts = [
        (at, tuple(dict.fromkeys(each % len(widths) for each in through)), size)
        for at, through, size in drawn
    ]
    found = ends([Pipe(width) for width in widths], starts)
    for number, (at, through, size) in enumerate(starts):
        alone = size / min(widths[each] for each in through)
        assert found[number] >= at + alone * (1 - 1e-6)
    for pipe, width in enumerate(widths):
        using = [number for number, start in enumerate(starts) if pipe in start[1]]
        if using:
            first, last = min(starts[n][0] for n in using), max(found[n] for n in using)
            carried = sum(starts[n][2] for n in using)
            assert carried <= width * (last - first) * 1.01 + 1e-6
    everything = sum(size / min(widths[e] for e in through) for _, through, size in starts)
    assert max(found) <= max(at for at, _, _ in starts) + everything * 1.01
