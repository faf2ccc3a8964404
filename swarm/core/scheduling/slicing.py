"""Cutting a sequence of layers into stages so that the slowest stage is as fast as possible."""

from collections.abc import Sequence
from itertools import pairwise


def balanced_cuts(layer_seconds: Sequence[float], stages: int) -> tuple[int, ...]:
    """Return the first layer of every stage but the first, minimising the slowest stage.

    Exact dynamic program over prefixes, O(stages * layers^2). Among equally good
    places of the last cut the earliest is taken, and what lies before it is cut by the same
    rule. Raises ValueError if there are fewer layers than stages.
    """
    layers = len(layer_seconds)
    if not 1 <= stages <= layers:
        raise ValueError(f"{layers} layers cannot make {stages} stages")
    prefix = [0.0]
    for seconds in layer_seconds:
        prefix.append(prefix[-1] + seconds)
    # best[n]: slowest stage of the first n layers in the number of stages reached so far.
    best = [prefix[n] for n in range(layers + 1)]
    choices: list[list[int]] = []
    for stage in range(1, stages):
        following = [float("inf")] * (layers + 1)
        choice = [0] * (layers + 1)
        for end in range(stage + 1, layers + 1):
            for cut in range(stage, end):
                slowest = max(best[cut], prefix[end] - prefix[cut])
                if slowest < following[end]:
                    following[end], choice[end] = slowest, cut
        best = following
        choices.append(choice)
    cuts = []
    end = layers
    for choice in reversed(choices):
        end = choice[end]
        cuts.append(end)
    return tuple(reversed(cuts))


def ranges_of(cuts: Sequence[int], layers: int) -> tuple[tuple[int, int], ...]:
    """Return [first, last) of every stage.

    Raises ValueError if a cut leaves a stage without layers.
    """
    edges = [0, *cuts, layers]
    ranges = tuple(pairwise(edges))
    if any(first >= last for first, last in ranges):
        raise ValueError(f"cuts {list(cuts)} do not cut {layers} layers into non-empty stages")
    return ranges
