"""The run as one process does it: what every swarm's weights are compared with.

The rule: same code for a layer, a sum and an update as in the swarm, and nothing else of it.
"""

from collections.abc import Callable, Sequence

from protocol.messages import Microbatch, Totals
from protocol.records import Training
from swarm.adapters.datasets import SampleReader
from swarm.adapters.torch_stage import TorchStage
from swarm.adapters.weights import merge
from swarm.core.model import ModelShape
from swarm.core.reduction import buckets
from swarm.core.totals import totals_of
from swarm.errors import RunHalted


def run_reference(
    training: Training,
    data: SampleReader,
    sample_ids: Callable[[int, int], Sequence[int]],
    progress: Callable[[int, float | None], None],
    device: str = "cpu",
) -> bytes:
    """Train to the end and return the exported file.

    `sample_ids(step, index)` names the samples of a microbatch; `progress(version, loss)` is
    called after every step. Raises ModelError, DataError; RunHalted if a step went non-finite
    and the manifest says to halt.
    """
    stage = TorchStage(training, device)
    layers = len(stage.layer_names())
    stages = [(0, layers)]
    stage.build(stages, 0)
    for step in range(training.steps):
        for index in range(training.microbatches_per_step):
            inputs, targets, weight = data.microbatch(sample_ids(step, index))
            stage.turn(Microbatch(step, index), inputs, targets, weight)
        totals = _reduce(training, stage, stage.shape, stages)
        if totals.verdict == "halt":
            raise halted(step, totals)
        stage.commit(step, totals)
        progress(stage.version, totals.loss)
    return merge([stage.layer_state(layer) for layer in range(layers)])


def halted(step: int, totals: Totals) -> RunHalted:
    """Return the error of a run that halts at this step."""
    where = tuple(f"step {step}, microbatch {f.index}, layer {f.layer!r}" for f in totals.flags)
    return RunHalted(
        f"numbers stopped being finite in step {step}",
        evidence=where or (f"step {step}, squared gradient norm {totals.square_norm}",),
        hint='lower the learning rate, clip gradients, or set on_nonfinite = "skip"',
    )


def _reduce(
    training: Training, stage: TorchStage, shape: ModelShape, stages: Sequence[tuple[int, int]]
) -> Totals:
    for bucket in buckets(shape, stages):
        own = stage.part(bucket.index, 0, bucket.elements)
        stage.reduce(bucket.index, 0, bucket.elements, [own])
    ledger = stage.ledger
    return totals_of(
        [stage.square_norms()],
        ledger.weight,
        ledger.flags,
        ledger.loss_sum,
        training.execution.on_nonfinite,
    )
