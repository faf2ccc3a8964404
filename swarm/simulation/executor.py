"""A stage executor that computes with integers and takes virtual time (`ports.StageExecutor`).

The rule: one task at a time, in the order of the calls, and a task that was called is finished,
unless its process dies.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import ParamSpec, TypeVar

import trio

from protocol.messages import Microbatch, Totals
from swarm.core.ledger import Ledger
from swarm.core.model import Profile
from swarm.ports import Buffer, Outcome, Turn
from swarm.simulation.physics import BACKWARD_SECONDS, FORWARD_SECONDS, Physics, Reference
from swarm.simulation.process import Process
from swarm.simulation.stage import SimStage

P = ParamSpec("P")
R = TypeVar("R")

QUICK_SECONDS = 0.0005
"""Of a task that only copies or adds."""


class SimExecutor:
    """One process's executor."""

    def __init__(
        self,
        physics: Physics,
        reference: Reference,
        process: Process,
        violate: Callable[[str, str], None],
        speed: float = 1.0,
    ) -> None:
        """`violate(rule, text)` is called for what must not be; `speed` divides the cost."""
        self._stage = SimStage(physics, reference, process.name, violate, speed)
        self._process = process
        self._speed = speed
        self._turn = trio.Event()
        self._turn.set()
        self._began: float | None = None
        self._compute_seconds = 0.0
        self._hung: trio.Event | None = None
        process.on_death.append(self.go_on)

    # --- faults --------------------------------------------------------------------------

    def hang(self) -> None:
        """Let the task in hand, or else the next one, not end before `go_on`."""
        if self._hung is None:
            self._hung = trio.Event()

    def go_on(self) -> None:
        """Let it end."""
        if self._hung is not None:
            self._hung.set()
            self._hung = None

    # --- what can be seen of it ----------------------------------------------------------

    @property
    def ledger(self) -> Ledger:
        """Return a copy of the ledger of the step in hand."""
        return self._stage.ledger.copy()

    @property
    def version(self) -> int:
        """Return the version that is held."""
        return self._stage.version

    @property
    def compute_seconds(self) -> float:
        """Return virtual seconds of finished tasks."""
        return self._compute_seconds

    @property
    def task_seconds(self) -> float:
        """Return for how long the running task has been running; 0 while there is none."""
        return trio.current_time() - self._began if self._began is not None else 0.0

    # --- the port ---

    async def profile(self) -> Profile:
        """Return the profile of a peer of this speed."""
        return await self._task(0.1, self._stage.profile)

    async def build(self, stages: Sequence[tuple[int, int]], stage: int) -> bytes:
        """Hold the layers of a stage at version 0."""
        return await self._task(QUICK_SECONDS, self._stage.build, stages, stage)

    async def load(
        self,
        stages: Sequence[tuple[int, int]],
        stage: int,
        version: int,
        layers: Mapping[int, Buffer],
    ) -> None:
        """Hold the layers of a stage as they were at `version`."""
        await self._task(QUICK_SECONDS, self._stage.load, stages, stage, version, layers)

    async def snapshot(self, version: int) -> dict[int, Buffer] | None:
        """Return the state of every held layer; None if another version is held."""
        return await self._task(QUICK_SECONDS, self._stage.snapshot, version)

    async def layer_state(self, layer: int) -> Buffer:
        """Return a held layer's weights as they are exported."""
        return await self._task(QUICK_SECONDS, self._stage.layer_state, layer)

    async def settle(self) -> bool:
        """Drop activations; return whether the reduced gradient in hand is whole."""
        return await self._task(QUICK_SECONDS, self._stage.settle)

    async def discard(self) -> None:
        """Empty accumulator and ledger."""
        await self._task(QUICK_SECONDS, self._stage.discard)

    async def gradient(self, step: int) -> dict[int, Buffer] | None:
        """Return the reduced gradient of a step by bucket, if it is here and whole."""
        return await self._task(QUICK_SECONDS, self._stage.gradient, step)

    async def load_gradient(self, step: int, buckets: Mapping[int, Buffer]) -> None:
        """Take the reduced gradient of the step in hand."""
        await self._task(QUICK_SECONDS, self._stage.load_gradient, step, buckets)

    # --- microbatches ----------------------------------------------------------------------

    async def forward(self, mb: Microbatch, inputs: Buffer, keep: bool = True) -> Outcome:
        """Run the layers."""
        return await self._task(
            FORWARD_SECONDS * self._stage.layer_count, self._stage.forward, mb, inputs, keep
        )

    async def backward(
        self, mb: Microbatch, gradient: Buffer, weight: int, accumulate: bool = True
    ) -> Outcome:
        """Differentiate, accumulate, enter the index into the ledger."""
        return await self._task(
            BACKWARD_SECONDS * self._stage.layer_count,
            self._stage.backward,
            mb,
            gradient,
            weight,
            accumulate,
        )

    async def turn(
        self,
        mb: Microbatch,
        inputs: Buffer,
        targets: Buffer,
        weight: int,
        accumulate: bool = True,
    ) -> Turn:
        """Forward, loss and backward of the last stage."""
        return await self._task(
            (FORWARD_SECONDS + BACKWARD_SECONDS) * self._stage.layer_count,
            self._stage.turn,
            mb,
            inputs,
            targets,
            weight,
            accumulate,
        )

    async def flag(self, mb: Microbatch, layer: str, weight: int, accumulate: bool = True) -> None:
        """Enter a non-finite microbatch."""
        await self._task(QUICK_SECONDS, self._stage.flag, mb, layer, weight, accumulate)

    # --- the end of a step -----------------------------------------------------------------

    async def part(self, bucket: int, start: int, stop: int) -> Buffer:
        """Return a part of an accumulator."""
        return await self._task(QUICK_SECONDS, self._stage.part, bucket, start, stop)

    async def begin_reduction(self) -> None:
        """Forget what has been reduced of the step in hand."""
        await self._task(QUICK_SECONDS, self._stage.begin_reduction)

    async def reduce(
        self, bucket: int, start: int, stop: int, parts: Sequence[Buffer | None]
    ) -> Buffer:
        """Sum parts into the reduced gradient."""
        return await self._task(QUICK_SECONDS, self._stage.reduce, bucket, start, stop, parts)

    async def gather(self, bucket: int, start: int, stop: int, shard: Buffer) -> None:
        """Put an owner's sum into the reduced gradient."""
        await self._task(QUICK_SECONDS, self._stage.gather, bucket, start, stop, shard)

    async def square_norms(self) -> tuple[float, ...]:
        """Return the squared norms that this stage counts. Raises RuntimeError."""
        return await self._task(QUICK_SECONDS, self._stage.square_norms)

    async def commit(self, step: int, totals: Totals) -> None:
        """Apply or skip the step, and compare with the plain loop."""
        await self._task(QUICK_SECONDS, self._stage.commit, step, totals)

    async def aclose(self) -> None:
        """Wait for the running task."""
        await self._task(0.0, lambda: None)

    # --- inside ---

    async def _task(
        self, seconds: float, method: Callable[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Call `method` when all that were called before are done, after its virtual cost.

        Who is cancelled meanwhile still gets the result; a dead process never does."""
        mine, before = trio.Event(), self._turn
        self._turn = mine
        try:
            with trio.CancelScope(shield=True):
                await before.wait()
                if not self._process.dead:
                    self._began = trio.current_time()
                    await trio.sleep(seconds / self._speed)
                    if self._hung is not None:
                        await self._hung.wait()
            if not self._process.reach(f"before {method.__name__}"):
                await trio.sleep_forever()
            self._compute_seconds += seconds / self._speed
            result = method(*args, **kwargs)
            if not self._process.reach(f"after {method.__name__}"):
                await trio.sleep_forever()
            return result
        finally:
            self._began = None
            mine.set()
