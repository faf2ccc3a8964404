"""The learning rate: a function of the step and of nothing that a peer keeps."""

import math

from protocol.records import OptimiserSpec


def learning_rate(spec: OptimiserSpec, step: int, steps: int) -> float:
    """Return the learning rate of the update that ends `step` (0-based) of a run of `steps`.

    Over the first `warmup_steps` it grows linearly and reaches `learning_rate` at the last of
    them. From there it stays (`constant`), or falls along a line or half a cosine wave, so
    that the last step of the run has `learning_rate * final_fraction`.
    """
    if step < spec.warmup_steps:
        return spec.learning_rate * (step + 1) / spec.warmup_steps
    if spec.schedule == "constant":
        return spec.learning_rate
    falling_steps = steps - 1 - spec.warmup_steps
    progress = min(1.0, (step - spec.warmup_steps) / falling_steps) if falling_steps > 0 else 0.0
    if spec.schedule == "linear":
        remaining = 1.0 - progress
    else:
        remaining = 0.5 * (1.0 + math.cos(math.pi * progress))
    return spec.learning_rate * (spec.final_fraction + (1.0 - spec.final_fraction) * remaining)
