"""The worker thread: order, errors, cancellation, priority, and an event loop that is free."""

import math
import os
import threading
import time
from typing import Any

import pytest
import torch
import trio
import trio.testing

from protocol.messages import Microbatch, Totals
from swarm.adapters.processors import available_processors
from swarm.adapters.torch_executor import NICENESS, ThreadedExecutor, make_executor
from swarm.adapters.torch_stage import TorchStage
from swarm.core.ledger import DoubleCount
from swarm.core.reduction import buckets
from tests.adapters.torch_swarm import GPT, Swarm, sample_ids, source_of

TOTALS = Totals(28, 1.0, (), "apply", None)


def test_a_step_gives_what_the_stage_gives_without_a_thread() -> None:
    stages = [(0, 2), (2, 4)]
    source = source_of(GPT)

    async def main() -> list[bytes]:
        low, high = make_executor(GPT), make_executor(GPT)
        profile = await low.profile()
        roots = [await low.build(stages, 0), await high.build(stages, 1)]
        assert len(set(map(len, roots))) == 1
        for index in range(5):
            inputs, targets, weight = source.microbatch(sample_ids(0, index))
            mb = Microbatch(0, index)
            hidden = (await low.forward(mb, inputs)).tensor
            assert hidden is not None
            gradient = (await high.turn(mb, hidden, targets, weight)).gradient
            assert gradient is not None
            assert (await low.backward(mb, gradient, weight)).tensor is None
        assert low.ledger.bitmap == high.ledger.bitmap == b"\x1f"
        assert low.compute_seconds > 0
        for bucket in buckets(profile.shape, stages):
            users = [(low, high)[stage] for stage in bucket.stages]
            parts = [await one.part(bucket.index, 0, bucket.elements) for one in users]
            shard = await users[0].reduce(bucket.index, 0, bucket.elements, parts)
            for one in users[1:]:
                await one.gather(bucket.index, 0, bucket.elements, shard)
        norms = [*await low.square_norms(), *await high.square_norms()]
        totals = Totals(low.ledger.weight, sum(norms), (), "apply", None)
        for one in (low, high):
            await one.commit(0, totals)
        assert len(low.ledger) == 0
        states = [bytes(await low.layer_state(0)), bytes(await high.layer_state(3))]
        await low.aclose()
        await high.aclose()
        return states

    found = trio.run(main)
    swarm = Swarm.start(GPT, (2,), [1, 1])
    swarm.commit(0, swarm.step(source, 0))
    (low,), (high,) = swarm.replicas
    assert found == [bytes(low.layer_state(0)), bytes(high.layer_state(3))]


class Slow(TorchStage):
    """A stage whose `flag` takes as long as the test wants."""

    def __init__(self) -> None:
        super().__init__(GPT)
        self.build([(0, 4)], 0)
        self.begun, self.go = threading.Event(), threading.Event()
        self.threads: list[int] = []
        self.order: list[int] = []
        self.niceness = 0

    def flag(self, mb: Microbatch, layer: str, weight: int, accumulate: bool = True) -> None:
        self.begun.set()
        assert self.go.wait(10)
        self.threads.append(threading.get_ident())
        self.order.append(mb.index)
        self.niceness = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        super().flag(mb, layer, weight, accumulate)


def test_the_loop_runs_while_a_task_computes_and_tasks_keep_their_order() -> None:
    stage = Slow()

    async def main() -> None:
        executor = ThreadedExecutor(stage)
        finished: list[int] = []

        async def flag(index: int) -> None:
            await executor.flag(Microbatch(0, index), "embed", 1)
            finished.append(index)

        async with trio.open_nursery() as nursery:
            for index in (3, 1, 2):
                nursery.start_soon(flag, index)
                await trio.testing.wait_all_tasks_blocked()
            assert await trio.to_thread.run_sync(stage.begun.wait, 10)
            assert finished == [] and len(executor.ledger) == 0
            stage.go.set()
        assert stage.order == [3, 1, 2] and sorted(finished) == [1, 2, 3]
        assert len(executor.ledger) == 3
        await executor.aclose()

    trio.run(main)
    assert len(set(stage.threads)) == 1 and threading.get_ident() not in stage.threads


def test_it_is_told_for_how_long_a_task_has_been_running() -> None:
    stage = Slow()

    async def main() -> None:
        executor = ThreadedExecutor(stage)
        assert executor.task_seconds == 0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(executor.flag, Microbatch(0, 0), "embed", 1)
            assert await trio.to_thread.run_sync(stage.begun.wait, 10)
            before, begun = executor.task_seconds, trio.current_time()
            while trio.current_time() - begun < 0.01:
                await trio.lowlevel.checkpoint()
            assert 0 < before < before + 0.01 <= executor.task_seconds
            assert executor.compute_seconds == 0
            stage.go.set()
        assert executor.task_seconds == 0
        assert executor.compute_seconds >= 0.01
        await executor.aclose()

    trio.run(main)


def test_a_replica_made_from_anothers_state_follows_it() -> None:
    stages, source = [(0, 4)], source_of(GPT)

    async def main() -> None:
        donor, late = make_executor(GPT), make_executor(GPT)
        await donor.build(stages, 0)
        await donor.turn(Microbatch(0, 0), *source.microbatch(sample_ids(0, 0)))
        snapshot = await donor.snapshot(0)
        assert snapshot is not None and await donor.snapshot(1) is None
        await late.load(stages, 0, 0, snapshot)
        await late.turn(Microbatch(0, 0), *source.microbatch(sample_ids(0, 0)), accumulate=False)
        assert len(donor.ledger) == 1 and len(late.ledger) == 0
        elements = sum(slot.stop - slot.start for slot in bucket.slots)
        await donor.begin_reduction()
        await donor.reduce(0, 0, elements, [await donor.part(0, 0, elements)])
        assert await donor.settle() and not await late.settle()
        gradient = await donor.gradient(0)
        assert gradient is not None
        await late.load_gradient(0, gradient)
        assert await late.square_norms() == await donor.square_norms()
        await donor.discard()
        assert len(donor.ledger) == 0
        for one in (donor, late):
            await one.commit(0, TOTALS)
        found, expected = await late.snapshot(1), await donor.snapshot(1)
        assert found == expected != snapshot
        for one in (donor, late):
            await one.aclose()

    surveyed = TorchStage(GPT)
    (bucket,) = buckets(surveyed.profile().shape, stages)
    trio.run(main)


def test_a_cancelled_caller_gets_its_result_and_the_task_is_done_once() -> None:
    stage = Slow()

    async def main() -> None:
        executor = ThreadedExecutor(stage)
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(executor.flag, Microbatch(0, 0), "embed", 1)
                await trio.to_thread.run_sync(stage.begun.wait, 10)
                scope.cancel()
                stage.go.set()
        assert len(executor.ledger) == 1
        with pytest.raises(DoubleCount):
            await executor.flag(Microbatch(0, 0), "embed", 1)
        await executor.flag(Microbatch(0, 1), "embed", 1)
        assert len(executor.ledger) == 2
        await executor.aclose()
        await executor.aclose()
        with pytest.raises(trio.ClosedResourceError):
            await executor.profile()

    trio.run(main)


def test_closing_finishes_what_was_called() -> None:
    stage = Slow()

    async def main() -> None:
        executor = ThreadedExecutor(stage)
        async with trio.open_nursery() as nursery:
            for index in range(3):
                nursery.start_soon(executor.flag, Microbatch(0, index), "embed", 1)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(executor.aclose)
            await trio.testing.wait_all_tasks_blocked()
            stage.go.set()
        assert len(executor.ledger) == 3

    trio.run(main)


def test_errors_are_the_callers_and_the_thread_goes_on() -> None:
    async def main() -> None:
        executor = ThreadedExecutor(TorchStage(GPT))
        with pytest.raises(ValueError, match="no stage has been built"):
            await executor.part(0, 0, 1)
        await executor.build([(0, 4)], 0)
        with pytest.raises(ValueError, match="commit of step 1 at version 0"):
            await executor.commit(1, TOTALS)
        with pytest.raises(RuntimeError, match="bucket 0 is reduced up to 0"):
            await executor.commit(0, TOTALS)
        assert (await executor.layer_state(0)).nbytes > 0
        await executor.aclose()

    trio.run(main)


def test_the_thread_is_nicer_and_has_its_own_settings() -> None:
    stage = Slow()
    stage.go.set()
    before = os.getpriority(os.PRIO_PROCESS, 0)
    seen: dict[str, Any] = {}

    def look() -> tuple[float, ...]:
        stage._settings.apply()
        seen.update(threads=torch.get_num_threads(), grad=torch.is_grad_enabled())
        return ()

    async def main() -> None:
        executor = ThreadedExecutor(stage)
        await executor.flag(Microbatch(0, 0), "embed", 1)
        stage.square_norms = look  # type: ignore[method-assign]
        with torch.no_grad():
            await executor.square_norms()
        await executor.aclose()

    trio.run(main)
    assert stage.niceness == min(19, before + NICENESS)
    assert os.getpriority(os.PRIO_PROCESS, 0) == before
    assert seen == {"threads": 1, "grad": True}


class Busy(TorchStage):
    """A stage whose `flag` uses a processor for as long as the test wants."""

    def flag(self, mb: Microbatch, layer: str, weight: int, accumulate: bool = True) -> None:
        began = time.thread_time()
        while time.thread_time() < began + 0.02:
            pass


def test_a_task_takes_at_least_its_processor_time_by_what_may_be_used() -> None:
    """With eight times as many threads as there are processors: eight times as long."""
    threads = math.ceil(8 * available_processors())

    async def main() -> float:
        executor = ThreadedExecutor(Busy(GPT, threads=threads))
        await executor.flag(Microbatch(0, 0), "embed", 1)
        await executor.aclose()
        return executor.compute_seconds

    assert trio.run(main) >= 8 * 0.02
