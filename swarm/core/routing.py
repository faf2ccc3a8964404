"""Which replica gets this microbatch now, and how many it may hold of us.

A receiver grants every source a window of microbatches per parity of the step, so that early
arrivals of the next step cannot take the places that the last ones of this step need. Both
sides know the window from the plan. A Backward gives its Forward's credit back: that is when the
activations behind it are gone.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from protocol.errors import RemoteProtocolError
from protocol.messages import Microbatch
from protocol.records import PlanBody
from protocol.signing import PeerId
from swarm.core.memo import by_identity

ROUNDING = 1e-9
PATIENCE = 1.0
"""So many turns a replica without credit may lose to others, if a plan uses few ways."""


def credit_windows(body: PlanBody, stage: int) -> tuple[tuple[int, ...], ...]:
    """Return how many microbatches of one step parity each source may have at each replica of
    `stage`: rows are sources (feeders for stage 0, else the stage before), columns replicas.

    The replica with the largest share takes `StagePlan.window` of them. All take as many as 1F1B
    keeps in flight and one that hides the way, which a replica itself is busy with however slow it
    is, and of what the largest takes beyond that as many as their shares say. Sources get their
    part of it by the wiring, two at least.
    """
    known = _known_windows(body)
    if stage not in known:
        known[stage] = _windows(body, stage)
    return known[stage]


@by_identity
def _known_windows(body: PlanBody) -> dict[int, tuple[tuple[int, ...], ...]]:
    """Return the windows of a plan by stage, as far as somebody has asked for them."""
    return {}


def _windows(body: PlanBody, stage: int) -> tuple[tuple[int, ...], ...]:
    least = len(body.stages) - stage + 1
    most = body.stages[stage].window or least
    shares = np.array([float(feeder.share) for feeder in body.feeders])
    arriving = shares / shares.sum()
    for matrix in body.wiring[:stage]:
        arriving = arriving @ np.array(matrix)
    flow = arriving[:, None] * np.array(body.wiring[stage])
    into = flow.sum(axis=0)
    parts = np.divide(flow, into, out=np.zeros_like(flow), where=into > 0)
    own = min(least, most)
    depth = own + np.ceil((most - own) * into / into.max() - ROUNDING)
    windows = np.maximum(2, np.ceil(depth * parts - ROUNDING)).astype(int)
    return tuple(tuple(row) for row in windows.tolist())


class Router:
    """Smooth weighted round robin over the replicas of the next stage that have credit.

    The replica with the largest sum of weights since its last turn goes next (the rule of
    nginx's upstream balancer), so turns are spread evenly and no draw is random.

    Who has no credit loses its turns to the others. Where a plan uses at most a quarter of the
    ways there are, it loses `PATIENCE` turns at most: then the source waits, since who runs ahead
    in the middle of a step leaves others more to do at its end.
    """

    def __init__(
        self,
        targets: Sequence[PeerId],
        weights: Sequence[float],
        windows: Sequence[int],
        phase: float = 0.0,
    ) -> None:
        """Weights and windows are by target; `phase`, in [0, 1), is the part of a round of turns
        that is taken to be over: sources that begin at the same time do not begin with the same
        target then."""
        self._targets = tuple(targets)
        self._weights = tuple(weights)
        self._windows = tuple(windows)
        self._turns = [0.0] * len(self._targets)
        self._held: dict[tuple[PeerId, int], int] = {}
        self._usable = [i for i, weight in enumerate(self._weights) if weight > 0]
        self._has_few_ways = 4 * len(self._usable) <= len(self._targets)
        for _ in range(int(phase * len(self._usable) + ROUNDING)):
            self._next(self._usable)

    def choose(self, step: int) -> PeerId | None:
        """Return the replica that gets the next microbatch of `step` and take its credit.

        Returns None while no replica with a weight has credit, or while the one whose turn it is
        has to be waited for.
        """
        opened = [
            i
            for i in self._usable
            if self._held.get((self._targets[i], step % 2), 0) < self._windows[i]
        ]
        if not opened:
            return None
        if self._has_few_ways:
            due = [self._turns[i] + self._weights[i] for i in self._usable]
            ahead = max(due) - max(self._turns[i] + self._weights[i] for i in opened)
            if ahead > PATIENCE * sum(self._weights):
                return None
        target = self._targets[self._next(opened)]
        self._held[target, step % 2] = self._held.get((target, step % 2), 0) + 1
        return target

    def _next(self, targets: Sequence[int]) -> int:
        """Return whose turn it is among some, and take it. Of few ways those that are closed keep
        their turns."""
        taking_part = self._usable if self._has_few_ways else targets
        for i in taking_part:
            self._turns[i] += self._weights[i]
        chosen = max(targets, key=lambda i: (self._turns[i], -i))
        self._turns[chosen] -= sum(self._weights[i] for i in taking_part)
        return chosen

    def give_back(self, target: PeerId, step: int) -> None:
        """Return the credit of a microbatch whose Backward has come from `target`."""
        self._held[target, step % 2] -= 1


class Inflow:
    """The receiver's side of the windows: what each source has here and has no Backward of."""

    def __init__(self, windows: Mapping[PeerId, int]) -> None:
        """Windows are by source."""
        self._windows = dict(windows)
        self._held: dict[tuple[PeerId, int], set[Microbatch]] = {}

    def take(self, source: PeerId, mb: Microbatch) -> None:
        """Enter a Forward. Raises RemoteProtocolError if the source had no credit for it or
        sent this microbatch already."""
        held = self._held.setdefault((source, mb.step % 2), set())
        if mb in held:
            raise RemoteProtocolError(f"mb={mb} was sent twice by {source}")
        window = self._windows[source]
        if len(held) >= window:
            raise RemoteProtocolError(
                f"mb={mb} has no credit: {source} has {len(held)} here of {window}"
            )
        held.add(mb)

    def release(self, source: PeerId, mb: Microbatch) -> None:
        """Note that the Backward of a microbatch has been sent to its source."""
        self._held[source, mb.step % 2].remove(mb)
