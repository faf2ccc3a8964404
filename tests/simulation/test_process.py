"""Seeded scheduling, and processes that stop and die."""

import trio
from trio.testing import MockClock

from swarm.simulation.process import running, seeded_scheduler
from tests.simulation.sim import process, run


def _order_of_tasks(seed: str) -> list[int]:
    order: list[int] = []

    async def note(number: int) -> None:
        for _ in range(5):
            await trio.lowlevel.checkpoint()
            order.append(number)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for number in range(10):
                nursery.start_soon(note, number)

    run(main, seed)
    return order


def test_tasks_run_in_an_order_that_follows_from_the_seed() -> None:
    assert _order_of_tasks("a") == _order_of_tasks("a")
    assert _order_of_tasks("a") != _order_of_tasks("b")


def test_an_event_wakes_its_waiters_in_an_order_that_follows_from_the_seed() -> None:
    """trio keeps them in a set, ordered by their addresses in memory."""

    def order(ballast: int) -> list[int]:
        found: list[int] = []
        kept = [object() for _ in range(ballast)]

        async def main() -> None:
            event = trio.Event()

            async def wait(number: int) -> None:
                await event.wait()
                found.append(number)

            async with trio.open_nursery() as nursery:
                for number in range(20):
                    kept.extend(object() for _ in range(ballast))
                    nursery.start_soon(wait, number)
                await trio.sleep(1)
                event.set()

        run(main, "a")
        return found

    assert order(0) == order(1000) == order(12345)


def test_trio_is_left_as_it_was() -> None:
    module = trio._core._run
    before = (module._r, module._ALLOW_DETERMINISTIC_SCHEDULING)
    with seeded_scheduler("a"):
        assert module._r is not before[0]
    assert (module._r, module._ALLOW_DETERMINISTIC_SCHEDULING) == before


def test_a_frozen_process_does_nothing_until_it_goes_on() -> None:
    ticks: dict[int, list[float]] = {0: [], 1: []}

    async def main() -> None:
        processes = [process(0), process(1)]

        async def tick(number: int) -> None:
            running.set(processes[number])
            with processes[number].scope:
                while True:
                    await trio.sleep(1)
                    ticks[number].append(trio.current_time())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(tick, 0)
            nursery.start_soon(tick, 1)
            await trio.sleep(1.5)
            processes[0].freeze()
            await trio.sleep(3)
            processes[0].thaw()
            await trio.sleep(2)
            nursery.cancel_scope.cancel()

    run(main)
    assert ticks[1] == [1, 2, 3, 4, 5, 6]
    # The timer that ran out at 2 fires as soon as it goes on.
    assert ticks[0] == [1, 4.5, 5.5]


def test_a_frozen_process_can_be_killed() -> None:
    async def main() -> None:
        victim = process(0)
        calls = []
        victim.on_death.append(lambda: calls.append("dead"))

        async def live() -> None:
            running.set(victim)
            with victim.scope:
                await trio.sleep_forever()
            victim.ended.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(live)
            await trio.sleep(1)
            victim.freeze()
            await trio.sleep(1)
            victim.die()
            await victim.ended.wait()
            assert calls == ["dead"] and victim.dead and not victim.frozen

    run(main)


def test_tasks_that_run_on_while_time_stands_still_are_told() -> None:
    async def main() -> None:
        with trio.CancelScope() as scope:
            found.append(scope)
            while True:
                await trio.lowlevel.checkpoint()

    found: list[trio.CancelScope] = []
    told: list[str] = []

    def livelocked(tasks: str) -> None:
        told.append(tasks)
        found[0].cancel()

    with seeded_scheduler("a", livelocked):
        trio.run(main, clock=MockClock(autojump_threshold=0))
    assert len(told) == 1 and "main" in told[0]
