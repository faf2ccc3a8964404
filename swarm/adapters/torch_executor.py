"""The thread in which a stage computes, so that the event loop never waits for it.

The rule: one task at a time, in the order of the calls, and a task that was called is finished:
a caller that is cancelled meanwhile still gets the result.
"""

import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar, cast

import outcome
import trio

from protocol.messages import Microbatch, Totals
from protocol.records import Training
from swarm.adapters.processors import stretch_of
from swarm.adapters.torch_stage import TorchStage
from swarm.core.ledger import Ledger
from swarm.core.model import Profile
from swarm.ports import Buffer, Outcome, StageExecutor, Turn

NICENESS = 10
"""Added to the thread's: heartbeats are then late by milliseconds only. 19 is worse."""

P = ParamSpec("P")
R = TypeVar("R")

_generator_lock = threading.Lock()
"""torch's default generator is one per process: two executors must not draw at once."""


def make_executor(training: Training, device: str = "cpu") -> StageExecutor:
    """Return a stage's executor on its own thread. Raises ConfigError, ModelError."""
    return ThreadedExecutor(TorchStage(training, device))


@dataclass(slots=True)
class _Task:
    call: Callable[[], Any]
    token: trio.lowlevel.TrioToken
    done: trio.Event
    result: outcome.Outcome[Any] | None = None


class ThreadedExecutor:
    """Runs the methods of a `TorchStage` in one persistent thread (`ports.StageExecutor`).

    Errors of a task are raised in its caller. After `aclose`, calls raise ClosedResourceError.
    """

    def __init__(self, stage: TorchStage) -> None:
        self._stage = stage
        self._stretch = stretch_of(stage.computing_threads)
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._compute_seconds = 0.0
        self._begun: float | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="stage-executor", daemon=True)
        self._thread.start()

    @property
    def ledger(self) -> Ledger:
        """Return the ledger of the step in hand as it is now: a copy."""
        return self._stage.ledger_copy()

    @property
    def compute_seconds(self) -> float:
        """Return seconds that finished tasks have taken; where this process may use a part of a
        processor only, at least those that they would take if one followed the other."""
        return self._compute_seconds

    @property
    def task_seconds(self) -> float:
        """Return for how long the running task has been running; 0 while there is none."""
        begun = self._begun
        return 0.0 if begun is None else time.perf_counter() - begun

    async def profile(self) -> Profile:
        """Measure every layer. Raises ModelError."""
        return await self._call(self._stage.profile)

    async def build(self, stages: Sequence[tuple[int, int]], stage: int) -> bytes:
        """Hold the layers of a stage; return the root hash (32 bytes)."""
        return await self._call(self._stage.build, stages, stage)

    async def load(
        self,
        stages: Sequence[tuple[int, int]],
        stage: int,
        version: int,
        layers: Mapping[int, Buffer],
    ) -> None:
        """Hold the layers of a stage as they were at a version."""
        await self._call(self._stage.load, stages, stage, version, layers)

    async def snapshot(self, version: int) -> dict[int, Buffer] | None:
        """Return a copy of the state of every held layer."""
        return await self._call(self._stage.snapshot, version)

    async def layer_state(self, layer: int) -> Buffer:
        """Return a layer's weights as safetensors bytes."""
        return await self._call(self._stage.layer_state, layer)

    async def settle(self) -> bool:
        """Drop activations; return whether the reduced gradient is whole."""
        return await self._call(self._stage.settle)

    async def discard(self) -> None:
        """Empty accumulator and ledger."""
        await self._call(self._stage.discard)

    async def gradient(self, step: int) -> dict[int, Buffer] | None:
        """Return a copy of a reduced gradient."""
        return await self._call(self._stage.gradient, step)

    async def load_gradient(self, step: int, buckets: Mapping[int, Buffer]) -> None:
        """Take the whole reduced gradient of the step in hand."""
        await self._call(self._stage.load_gradient, step, buckets)

    async def forward(self, mb: Microbatch, inputs: Buffer, keep: bool = True) -> Outcome:
        """Run the layers."""
        return await self._call(self._stage.forward, mb, inputs, keep)

    async def backward(
        self, mb: Microbatch, gradient: Buffer, weight: int, accumulate: bool = True
    ) -> Outcome:
        """Differentiate, accumulate, enter the index into the ledger."""
        return await self._call(self._stage.backward, mb, gradient, weight, accumulate)

    async def turn(
        self,
        mb: Microbatch,
        inputs: Buffer,
        targets: Buffer,
        weight: int,
        accumulate: bool = True,
    ) -> Turn:
        """Forward, loss and backward of the last stage."""
        return await self._call(self._stage.turn, mb, inputs, targets, weight, accumulate)

    async def flag(self, mb: Microbatch, layer: str, weight: int, accumulate: bool = True) -> None:
        """Enter a non-finite microbatch."""
        await self._call(self._stage.flag, mb, layer, weight, accumulate)

    async def part(self, bucket: int, start: int, stop: int) -> Buffer:
        """Return a part of an accumulator."""
        return await self._call(self._stage.part, bucket, start, stop)

    async def begin_reduction(self) -> None:
        """Forget what has been reduced of the step in hand."""
        await self._call(self._stage.begin_reduction)

    async def reduce(
        self, bucket: int, start: int, stop: int, parts: Sequence[Buffer | None]
    ) -> Buffer:
        """Sum parts into the reduced gradient."""
        return await self._call(self._stage.reduce, bucket, start, stop, parts)

    async def gather(self, bucket: int, start: int, stop: int, shard: Buffer) -> None:
        """Put an owner's sum into the reduced gradient."""
        await self._call(self._stage.gather, bucket, start, stop, shard)

    async def square_norms(self) -> tuple[float, ...]:
        """Return the squared norms that this stage counts."""
        return await self._call(self._stage.square_norms)

    async def commit(self, step: int, totals: Totals) -> None:
        """Apply or skip the step."""
        await self._call(self._stage.commit, step, totals)

    async def aclose(self) -> None:
        """Finish what was called and stop the thread. May be called again."""
        if not self._closed:
            last = self._submit(lambda: None)
            self._closed = True
            self._tasks.put(None)
            await _result(last)
        self._thread.join()

    async def _call(self, method: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        if self._closed:
            raise trio.ClosedResourceError("the executor is closed")
        return cast(R, await _result(self._submit(lambda: method(*args, **kwargs))))

    def _submit(self, call: Callable[[], Any]) -> _Task:
        task = _Task(call, trio.lowlevel.current_trio_token(), trio.Event())
        self._tasks.put(task)
        return task

    def _work(self) -> None:
        _lower_priority()
        while (task := self._tasks.get()) is not None:
            with _generator_lock:
                self._begun = begun = time.perf_counter()
                used = time.thread_time()
                task.result = outcome.capture(task.call)
                self._begun = None
                self._compute_seconds += self._lasting(
                    time.perf_counter() - begun, time.thread_time() - used
                )
            try:
                task.token.run_sync_soon(task.done.set)
            except trio.RunFinishedError:
                return  # the loop has crashed: nobody waits
            del task

    def _lasting(self, seconds: float, processor_seconds: float) -> float:
        """Return what a task takes if many follow each other. A quota of processor time lets a
        short one run at full speed, and makes up for it later."""
        return max(seconds, processor_seconds * self._stretch)


async def _result(task: _Task) -> Any:
    with trio.CancelScope(shield=True):
        await task.done.wait()
    assert task.result is not None
    return task.result.unwrap()


def _lower_priority() -> None:
    if sys.platform != "linux":
        return  # a thread has a priority of its own on Linux only
    thread = threading.get_native_id()
    try:
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICENESS)
    except OSError:
        return  # a sandbox may forbid it; then it computes at normal priority
