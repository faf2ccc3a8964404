"""The small GPT, whose first layer takes its time while a file says so.

The rule: the pace changes no number, so a paced run ends with the weights of one that is not. A
pace keeps a run going for as long as a test has something to do to it, on a fast machine too, and
leaves the processors to others meanwhile.
"""

import os
import time
from functools import partial
from pathlib import Path

from torch import Tensor

from swarm.models import gpt

PACE_VARIABLE = "SWARM_TEST_PACE"
"""Names the file with the seconds that a microbatch takes at least; without it there is no pace."""
LOOK_SECONDS = 0.05
MEASURED_CALLS = 10
"""More than a peer makes of a layer before it joins: that it has no pace yet saves time."""


def layers(width: int = 32, depth: int = 4, heads: int = 2, context: int = 16) -> dict[str, object]:
    """Return what `gpt.layers` returns, with an embedding that keeps the pace."""
    model = gpt.layers(width, depth, heads, context, dropout=0.2)
    made = model["layers"]
    assert isinstance(made, list)
    embedding = partial(PacedEmbedding, width, context, 256, 0.2)
    return model | {"layers": [("embed", embedding), *made[1:]]}


class PacedEmbedding(gpt.Embedding):
    """Token ids to vectors, not faster than the pace, once it is more than measured."""

    calls = 0

    def forward(self, ids_BT: Tensor) -> Tensor:
        begun = time.monotonic()
        hidden = super().forward(ids_BT)
        self.calls += 1
        # It may change meanwhile.
        while self.calls > MEASURED_CALLS and time.monotonic() < begun + pace_seconds():
            time.sleep(min(LOOK_SECONDS, pace_seconds()))
        return hidden


def pace_seconds() -> float:
    """Return how long a microbatch takes at least."""
    path = os.environ.get(PACE_VARIABLE)
    return float(Path(path).read_text()) if path else 0.0


def set_pace(path: Path, seconds: float) -> None:
    """Set the pace of whoever looks at this file: it is never seen half written."""
    fresh = path.with_suffix(".new")
    fresh.write_text(f"{seconds}")
    fresh.replace(path)
