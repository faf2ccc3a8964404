"""A stage executor that computes with integers and takes virtual time (`ports.StageExecutor`).

The rule: one task at a time, in the order of the calls, and a task that was called is finished,
unless its process dies.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import trio
from msgspec.structs import replace

from protocol.messages import Microbatch, Totals
from swarm.core.ledger import Ledger
from swarm.core.model import Profile
from swarm.ports import Buffer, Outcome, Turn
from swarm.simulation.physics import MEMORY_BYTES, Physics
from swarm.simulation.process import Process
from swarm.simulation.reference import Reference
from swarm.simulation.stage import SimStage

P = ParamSpec("P")
R = TypeVar("R")

QUICK_SECONDS = 0.0005
"""Of a task that only copies or adds."""
PROFILE_SECONDS = 0.1
PROFILE_ROUNDS = 5
"""How often every layer is measured, where the model has costs."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What computes, and who is told what it has done."""

    speed: float = 1.0
    memory_bytes: int = MEMORY_BYTES
    checked: bool = True
    """Whether all that is computed is compared with the plain loop's."""
    pace: Callable[[], float] = lambda: 1.0
    """Drawn for every task of microbatches, and every profile: what it takes longer than usual."""
    worked: Callable[[float], None] = lambda seconds: None
    """Told of every task of a microbatch that has ended: its seconds at speed 1."""
    committed: Callable[[int], None] = lambda step: None
    """Told of every step that was applied or skipped."""


class SimExecutor:
    """One process's executor."""

    def __init__(
        self,
        physics: Physics,
        reference: Reference,
        process: Process,
        violate: Callable[[str, str], None],
        machine: Machine = Machine(),
    ) -> None:
        """`violate(rule, text)` is called for what must not be."""
        profile_seconds = PROFILE_SECONDS
        if physics.costs is not None:
            every = range(physics.layers)
            passes = physics.forward_seconds(0, len(every)) + physics.backward_seconds(
                0, len(every)
            )
            profile_seconds = max(PROFILE_SECONDS, PROFILE_ROUNDS * passes)
        self._profile_seconds = profile_seconds
        self._stage = SimStage(
            physics,
            reference,
            process.name,
            violate,
            machine.speed,
            memory_bytes=machine.memory_bytes,
            checked=machine.checked,
        )
        self._process = process
        self._machine = machine
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
        made = await self._task(self._profile_seconds, self._stage.profile)
        pace = self._machine.pace
        layers = [
            replace(
                layer,
                forward_seconds=layer.forward_seconds * pace(),
                backward_seconds=layer.backward_seconds * pace(),
            )
            for layer in made.layers
        ]
        return dataclasses.replace(made, layers=tuple(layers))

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
        seconds = self._stage.forward_seconds
        made = await self._paced(seconds, self._stage.forward, mb, inputs, keep)
        self._machine.worked(seconds)
        return made

    async def backward(
        self, mb: Microbatch, gradient: Buffer, weight: int, accumulate: bool = True
    ) -> Outcome:
        """Differentiate, accumulate, enter the index into the ledger."""
        seconds = self._stage.backward_seconds
        made = await self._paced(seconds, self._stage.backward, mb, gradient, weight, accumulate)
        self._machine.worked(seconds)
        return made

    async def turn(
        self,
        mb: Microbatch,
        inputs: Buffer,
        targets: Buffer,
        weight: int,
        accumulate: bool = True,
    ) -> Turn:
        """Forward, loss and backward of the last stage."""
        seconds = self._stage.forward_seconds + self._stage.backward_seconds
        made = await self._paced(seconds, self._stage.turn, mb, inputs, targets, weight, accumulate)
        self._machine.worked(seconds)
        return made

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
        seconds = QUICK_SECONDS + self._stage.update_seconds
        await self._task(seconds, self._stage.commit, step, totals)
        if totals.verdict != "halt":
            self._machine.committed(step)

    async def aclose(self) -> None:
        """Wait for the running task."""
        await self._task(0.0, lambda: None)

    # --- inside ---

    async def _paced(
        self, seconds: float, method: Callable[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Call `method` as a task that takes as long as this machine needs for it now."""
        return await self._task(seconds * self._machine.pace(), method, *args, **kwargs)

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
                    await trio.sleep(seconds / self._machine.speed)
                    if self._hung is not None:
                        await self._hung.wait()
            if not self._process.reach(f"before {method.__name__}"):
                await trio.sleep_forever()
            self._compute_seconds += seconds / self._machine.speed
            result = method(*args, **kwargs)
            if not self._process.reach(f"after {method.__name__}"):
                await trio.sleep_forever()
            return result
        finally:
            self._began = None
            mine.set()
