"""A stage that computes without pause, as a load beside the network.

The rule: it is the executor of a real peer, on its thread and at its niceness.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy
import trio

from protocol.messages import Microbatch
from swarm.adapters.torch_executor import ThreadedExecutor
from swarm.adapters.torch_stage import TorchStage
from swarm.config import read_training

DEMO = Path(__file__).parents[1] / "demo.toml"
MICROBATCHES = 4096


@dataclass(slots=True)
class Computed:
    """How much has been computed."""

    microbatches: int = 0


@asynccontextmanager
async def computing() -> AsyncIterator[Computed]:
    """Compute microbatches of the demo's model, the whole of it, until the block ends."""
    training = msgspec.structs.replace(read_training(DEMO), microbatches_per_step=MICROBATCHES)
    stage = TorchStage(training)
    executor = ThreadedExecutor(stage)
    try:
        await executor.build([(0, len(stage.layer_names()))], 0)
        shape = (training.microbatch_size, training.data.sequence_length)
        tokens = numpy.random.default_rng(0).integers(0, 256, shape).reshape(-1)
        data = tokens.view(numpy.uint8).data
        computed = Computed()

        async def compute() -> None:
            for index in range(MICROBATCHES):
                await trio.lowlevel.checkpoint()  # a task of the executor is none
                await executor.turn(Microbatch(0, index), data, data, tokens.size)
                computed.microbatches = index + 1

        async with trio.open_nursery() as nursery:
            nursery.start_soon(compute)
            yield computed
            nursery.cancel_scope.cancel()
    finally:
        with trio.CancelScope(shield=True):
            await executor.aclose()
