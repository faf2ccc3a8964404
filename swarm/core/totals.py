"""What the stages of a step agree on before they update, and what follows from it.

The rule: nothing here depends on how the model is cut or on how many replicas it has. Sums of
floats are `math.fsum`, whose result does not depend on order.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Literal

from protocol.messages import Flag, Totals

CLIP_EPSILON = 1e-6
"""Keeps the clip coefficient finite; the same as in `torch.nn.utils.clip_grad_norm_`."""


def totals_of(
    square_norms: Sequence[Sequence[float]],
    weight: int,
    flags: Iterable[Flag],
    loss_sum: float,
    on_nonfinite: Literal["halt", "skip"],
) -> Totals:
    """Merge the accounts of all stages into the totals of a step.

    `square_norms[s]` are the squared L2 norms of the summed gradients that stage s counts;
    `weight` is what the stages agree to have counted; `flags` may repeat themselves. A step
    with a flag, or whose norm is not finite, is not applied but halts or is skipped. A step of
    weight 0 has no mean and is skipped. The loss is None where it is not that of all
    microbatches.
    """
    unique = tuple(sorted(set(flags)))
    square_norm = _sum(value for stage in square_norms for value in stage)
    verdict: Literal["apply", "skip", "halt"]
    if unique or not math.isfinite(square_norm):
        verdict = on_nonfinite
    elif weight == 0:
        verdict = "skip"
    else:
        verdict = "apply"
    whole = weight > 0 and not unique and math.isfinite(loss_sum)
    return Totals(weight, square_norm, unique, verdict, loss_sum / weight if whole else None)


def mean_norm(totals: Totals) -> float:
    """Return the L2 norm of the whole model's mean gradient: sum over weight."""
    return math.sqrt(totals.square_norm) / totals.weight


def clip_coefficient(totals: Totals, clip_norm: float) -> float:
    """Return the factor, at most 1, that bounds the mean gradient's norm; 0 does not clip."""
    if clip_norm == 0:
        return 1.0
    return min(1.0, clip_norm / (mean_norm(totals) + CLIP_EPSILON))


def update_scale(totals: Totals, clip_norm: float) -> float:
    """Return the factor from the summed gradient to the one that the optimiser gets."""
    return clip_coefficient(totals, clip_norm) / totals.weight


def _sum(values: Iterable[float]) -> float:
    terms = list(values)
    if not all(0 <= term < math.inf for term in terms):
        return math.inf
    try:
        return math.fsum(terms)
    except OverflowError:
        return math.inf
