"""One stage of a model: forward, backward, accumulate, reduce, update; in the calling thread.

The rule: whatever can refuse a microbatch is looked at before the accumulator is touched, and a
gradient and its index enter accumulator and ledger in one call.
"""

import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from protocol.messages import Microbatch, Totals
from protocol.records import Training
from swarm.adapters.torch_batches import batch_specs, decode, decode_batch, encode, load_loss
from swarm.adapters.torch_layers import Pass, StageLayers
from swarm.adapters.torch_numerics import Settings
from swarm.adapters.torch_profile import Survey, survey
from swarm.adapters.torch_slicing import SlicedModel, load_model
from swarm.core.ledger import DoubleCount, Ledger
from swarm.core.model import ModelShape, Profile
from swarm.errors import ConfigError
from swarm.ports import Buffer, Outcome, Turn


@dataclass(frozen=True, slots=True)
class _Entry:
    """What a microbatch will put into the ledger, whatever becomes of it."""

    index: int
    weight: int


class TorchStage:
    """What `ports.StageExecutor` says, without its thread: every call is one of its tasks.

    All raise ValueError for bytes, indices or steps that do not fit, without changing anything.
    """

    def __init__(self, training: Training, device: str = "cpu", threads: int | None = None) -> None:
        execution = training.execution
        check_device(device)
        self._training = training
        self._settings = Settings(
            torch.device(device),
            threads if threads is not None else execution.threads,
            execution.determinism == "exact",
            execution.recompute,
            training.seed,
        )
        self._input, self._target = batch_specs(training)
        self._loss = load_loss(training.loss)
        self._model: SlicedModel | None = None
        self._survey: Survey | None = None
        self._held: StageLayers | None = None
        self._passes: dict[Microbatch, Pass] = {}
        self._ledger_lock = threading.Lock()
        self.ledger = Ledger(training.microbatches_per_step)
        self.version = 0

    @property
    def computing_threads(self) -> int:
        """Return how many threads compute at the same time."""
        return self._settings.threads

    # --- before training ----------------------------------------------------------------------

    def layer_names(self) -> tuple[str, ...]:
        """Return the names of the model's layers. Raises ModelError."""
        self._settings.apply()
        return self._load().names

    @property
    def shape(self) -> ModelShape:
        """Return the shape of the whole model, once `profile` or `build` has found it."""
        if self._survey is None:
            raise ValueError("the model has not been surveyed")
        return self._survey.shape

    def profile(self) -> Profile:
        """Measure every layer. Raises ModelError."""
        self._settings.apply()
        self._survey = survey(self._load(), self._training, self._settings, timed=True)
        found = self._survey
        return Profile(found.shape, found.layers, found.numerics, _memory_bytes(self._settings))

    # --- what is held -------------------------------------------------------------------------

    def build(self, stages: Sequence[tuple[int, int]], stage: int) -> bytes:
        """Hold the layers [first, last) of `stages[stage]` with initial weights, version 0."""
        self._held = held = self._make(stages, stage)
        return held.root_hash()

    def load(
        self,
        stages: Sequence[tuple[int, int]],
        stage: int,
        version: int,
        layers: Mapping[int, Buffer],
    ) -> None:
        """Hold the layers of `stages[stage]` as `snapshot` gave them at `version`.

        Raises ValueError if the bytes are not their state; then nothing is held."""
        held = self._make(stages, stage)
        held.restore(layers)
        if version < 0:
            raise ValueError(f"there is no version {version}")
        self._held, self.version = held, version

    def snapshot(self, version: int) -> dict[int, Buffer] | None:
        """Return a copy of the state of every held layer (`torch_state`), by number; None if
        another version is held, or nothing."""
        if self._held is None or version != self.version:
            return None
        return {number: memoryview(data) for number, data in self._held.snapshot().items()}

    def layer_state(self, layer: int) -> Buffer:
        """Return a held layer's weights as safetensors bytes, under the model's own names."""
        return memoryview(self._built().weights(layer))

    def settle(self) -> bool:
        """Drop activations; return whether the reduced gradient of the step in hand is whole."""
        self._passes.clear()
        return self._held is not None and self._held.gradients.whole

    def discard(self) -> None:
        """Empty accumulator and ledger."""
        self._built().gradients.clear()
        with self._ledger_lock:
            self.ledger.clear()

    def gradient(self, step: int) -> dict[int, Buffer] | None:
        """Return a copy of a whole reduced gradient: of the step in hand or the one before."""
        if self._held is None:
            return None
        if step == self.version:
            return self._held.gradients.reduced()
        return self._held.gradients.committed() if step == self.version - 1 else None

    def load_gradient(self, step: int, buckets: Mapping[int, Buffer]) -> None:
        """Take the whole reduced gradient of the step in hand."""
        held = self._built()
        if step != self.version:
            raise ValueError(f"a gradient of step {step} at version {self.version}")
        held.gradients.load(buckets)

    # --- microbatches ---------------------------------------------------------------------------

    def forward(self, mb: Microbatch, inputs: Buffer, keep: bool = True) -> Outcome:
        """Run the layers on the bytes of their input; keep what `backward` needs, if `keep`.

        Where numbers go non-finite nothing is kept, and the ledger is left to `flag`.
        """
        held = self._begin(mb)
        passed = held.run(mb, self._decode_input(held, inputs))
        if layer := passed.record.first_bad():
            return Outcome(None, layer)
        if keep:
            self._passes[mb] = passed
        return Outcome(encode(passed.output))

    def backward(
        self, mb: Microbatch, gradient: Buffer, weight: int, accumulate: bool = True
    ) -> Outcome:
        """Take the gradient of the output; accumulate; return the gradient of the input.

        Where numbers go non-finite or too large nothing is accumulated, and the ledger gets the
        index with the flag. Raises DoubleCount if the ledger has the index.
        """
        held = self._begin(mb)
        if mb not in self._passes:
            raise ValueError(f"no forward of {mb} is waiting for its backward")
        cotangent = decode(gradient, self.shape.layers[held.last - 1].output, self._settings.device)
        entry = self._entry(mb, weight, accumulate)
        passed = self._passes.pop(mb)
        return Outcome(*self._account(held, passed, passed.output, cotangent, entry))

    def turn(
        self,
        mb: Microbatch,
        inputs: Buffer,
        targets: Buffer,
        weight: int,
        accumulate: bool = True,
    ) -> Turn:
        """Last stage: forward, loss, backward, accumulate.

        Non-finite numbers as in `backward`; a bad loss is put down to "loss". Raises DoubleCount.
        """
        held = self._begin(mb)
        hidden = self._decode_input(held, inputs)
        target = decode_batch(targets, self._target, self._settings.device, ignorable=True)
        entry = self._entry(mb, weight, accumulate)
        passed = held.run(mb, hidden)
        layer = passed.record.first_bad()
        if not layer:
            loss = self._loss(passed.output, target)
            passed.record.see(0, "loss", loss)
            layer = passed.record.first_bad()
        if layer:
            self._enter(entry, nonfinite=layer)
            return Turn(None, layer)
        return Turn(*self._account(held, passed, loss, None, entry, float(loss.item())))

    def flag(self, mb: Microbatch, layer: str, weight: int, accumulate: bool = True) -> None:
        """Enter a non-finite microbatch, adding nothing. Raises DoubleCount."""
        self._begin(mb)
        entry = self._entry(mb, weight, accumulate)
        self._passes.pop(mb, None)
        self._enter(entry, nonfinite=layer)

    # --- the end of a step ------------------------------------------------------------------------

    def part(self, bucket: int, start: int, stop: int) -> Buffer:
        """Return elements [start, stop) of an accumulator (a view, valid until `commit`)."""
        return self._built().gradients.part(bucket, start, stop)

    def begin_reduction(self) -> None:
        """Forget what has been reduced of the step in hand."""
        self._built().gradients.begin()

    def reduce(self, bucket: int, start: int, stop: int, parts: Sequence[Buffer | None]) -> Buffer:
        """Sum parts in order into the reduced gradient; return the sum (a view, valid until the
        next reduction of this step, or of the one after the next)."""
        return self._built().gradients.reduce(bucket, start, stop, parts)

    def gather(self, bucket: int, start: int, stop: int, shard: Buffer) -> None:
        """Put an owner's sum into the reduced gradient."""
        self._built().gradients.gather(bucket, start, stop, shard)

    def square_norms(self) -> tuple[float, ...]:
        """Return the squared norm of each reduced tensor that this stage counts, by bucket.

        Raises RuntimeError if the reduced gradient is not whole."""
        self._settings.apply()
        return self._built().gradients.square_norms()

    def commit(self, step: int, totals: Totals) -> None:
        """Apply or skip the step; a verdict of halt changes nothing.

        Raises ValueError for another step than the one in hand, RuntimeError if the step is to
        be applied and the reduced gradient is not whole."""
        self._settings.apply()
        held = self._built()
        if step != self.version:
            raise ValueError(f"commit of step {step} at version {self.version}")
        if totals.verdict == "halt":
            return
        if totals.verdict == "apply":
            held.update(step, totals)
        self._passes.clear()
        held.gradients.advance()
        with self._ledger_lock:
            self.ledger.clear()
        self.version = step + 1

    def ledger_copy(self) -> Ledger:
        """Return the ledger as it is now; may be called from any thread."""
        with self._ledger_lock:
            return self.ledger.copy()

    # --- inside -------------------------------------------------------------------------------

    def _load(self) -> SlicedModel:
        if self._model is None:
            self._model = load_model(self._training)
        return self._model

    def _make(self, stages: Sequence[tuple[int, int]], stage: int) -> StageLayers:
        """Drop what is held; return a stage with its initial weights."""
        self._settings.apply()
        model = self._load()
        first, last = stages[stage]
        if not 0 <= first < last <= len(model.names):
            raise ValueError(f"no layers [{first}, {last}) in a model of {len(model.names)}")
        self._held = None
        self.version = 0
        self._passes.clear()
        with self._ledger_lock:
            self.ledger.clear()
        if self._survey is None:
            self._survey = survey(model, self._training, self._settings, timed=False)
        layers = [model.layer(number, self._settings.device) for number in range(first, last)]
        model.release()
        return StageLayers(self._training, self._settings, self._survey, layers, stages, stage)

    def _built(self) -> StageLayers:
        if self._held is None:
            raise ValueError("no stage has been built")
        return self._held

    def _begin(self, mb: Microbatch) -> StageLayers:
        self._settings.apply()
        if mb.step != self.version:
            raise ValueError(f"microbatch {mb} at version {self.version}")
        if not mb.index < self._training.microbatches_per_step:
            raise ValueError(f"microbatch {mb} of {self._training.microbatches_per_step}")
        return self._built()

    def _decode_input(self, held: StageLayers, data: Buffer) -> Tensor:
        if held.first == 0:
            return decode_batch(data, self._input, self._settings.device)
        below = self.shape.layers[held.first - 1].output
        return decode(data, below, self._settings.device).requires_grad_()

    def _account(
        self,
        held: StageLayers,
        passed: Pass,
        root: Tensor,
        cotangent: Tensor | None,
        entry: _Entry | None,
        loss_sum: float = 0.0,
    ) -> tuple[Buffer | None, str]:
        """Differentiate; accumulate and enter, or enter a flag; return gradient and flag."""
        found = held.differentiate(passed, root, cotangent)
        if found.bad_layer:
            self._enter(entry, nonfinite=found.bad_layer)
            return None, found.bad_layer
        if entry is not None:
            held.gradients.accumulate(found.additions)
            self._enter(entry, loss_sum=loss_sum)
        gradient = found.input_gradient
        return (None if gradient is None else encode(gradient)), ""

    def _entry(self, mb: Microbatch, weight: int, accumulate: bool) -> _Entry | None:
        """Return what is to be entered into the ledger, if anything. Raises DoubleCount."""
        if not accumulate:
            return None
        if mb.index in self.ledger:
            raise DoubleCount(f"index {mb.index} is in the ledger already")
        return _Entry(mb.index, weight)

    def _enter(self, entry: _Entry | None, *, loss_sum: float = 0.0, nonfinite: str = "") -> None:
        if entry is not None:
            with self._ledger_lock:
                self.ledger.add(entry.index, entry.weight, loss_sum=loss_sum, nonfinite=nonfinite)


def check_device(device: str) -> None:
    """Raise ConfigError if torch cannot compute on `device` ("cpu" or "cuda:N") here."""
    if not device.startswith("cuda"):
        return
    found = torch.cuda.device_count()
    if torch.device(device).index >= found:
        raise ConfigError(
            f"there is no device {device} here",
            evidence=(f"torch {torch.__version__} sees {found} CUDA devices",),
            hint="use --device cpu, or install a torch that fits the machine's GPU",
        )


def _memory_bytes(settings: Settings) -> int:
    if settings.device.type == "cuda":
        return int(torch.cuda.get_device_properties(settings.device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
