"""The problem that a plan answers, from what members have signed and what the manifest says.

The rule: whoever has the same signed records gets the same problem. So a problem never travels: a
reviewer makes it anew from the estimates that come with the plan, and nobody can lie about it.
"""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TypeVar

import numpy as np

from protocol.packing import canonical
from protocol.records import (
    Estimates,
    JoinRequest,
    Member,
    PeerRecord,
    PlanBody,
    SampleSpec,
    Signed,
    Training,
    decode_record,
)
from protocol.signing import PeerId
from swarm.core.measuring.network import Network, completed
from swarm.core.model import microbatch_seconds
from swarm.core.scheduling.horizon import LONGEST_SECONDS
from swarm.core.scheduling.problem import (
    Assignment,
    Holding,
    Layer,
    Links,
    Peer,
    Problem,
    Standby,
    Terms,
)
from swarm.core.scheduling.wiring import Flow

Number = TypeVar("Number", int, float)
SAFE_REPLICAS = 2
SNAPSHOTS = 8
"""So many problems are remembered,"""
NETWORKS = 2
"""and so many networks."""


def problem_of(
    training: Training,
    members: Sequence[Signed],
    requests: Sequence[Signed],
    estimates: Mapping[PeerId, Signed],
    *,
    before: PlanBody | None = None,
    stages: int = 0,
    horizon_seconds: float = LONGEST_SECONDS,
) -> Problem:
    """Return the problem of these members, in order of peer, as `PlanBody` names them.

    `estimates` are signed `Estimates` that have been checked; who has none, or those of another
    boot, is as others are on average. `before` is the plan whose stages are kept: its cuts are the
    only ones, and its hosts hold what they host. `stages` says how many there are; 0: free.
    `horizon_seconds`: how long a role is expected to last (horizon.py).
    """
    own = tuple(estimates.get(each.signer) for each in members)
    kept = _Kept(before) if before is not None and before.stages else None
    return _problem(
        canonical(training), tuple(members), tuple(requests), own, kept, stages, horizon_seconds
    )


class _Kept:
    """What a problem depends on of the plan before; compared by content."""

    def __init__(self, body: PlanBody) -> None:
        self.ranges = tuple((stage.first, stage.last) for stage in body.stages)
        self.groups = tuple(stage.replicas for stage in body.stages)
        self.standby = tuple((each.member, each.stage) for each in body.standby)
        self.feeders = tuple(each.member for each in body.feeders)
        self._key = (self.ranges, self.groups, self.standby, self.feeders)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Kept) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


@lru_cache(maxsize=SNAPSHOTS)
def _problem(
    training_bytes: bytes,
    members: tuple[Signed, ...],
    requests: tuple[Signed, ...],
    estimates: tuple[Signed | None, ...],
    kept: _Kept | None,
    stages: int,
    horizon_seconds: float,
) -> Problem:
    training = decode_record(training_bytes, Training)
    asked = [decode_record(each.payload, JoinRequest) for each in requests]
    records = [decode_record(each.payload, PeerRecord) for each in members]
    told, network = _measured(members, requests, estimates)
    starts = {Member(each.peer, each.boot): i for i, each in enumerate(asked)}
    layers = _layers(asked)
    whole = sum(layer.forward_seconds + layer.backward_seconds for layer in layers)
    peers = tuple(
        Peer(
            id=request.peer,
            speed=_speed(request, whole, told.get(request.peer)),
            memory_bytes=request.memory_bytes,
            uplink=float(network.uplink[i]),
            downlink=float(network.downlink[i]),
            place=record.host_label,
            has_data=bool(request.data_digest),
        )
        for i, (request, record) in enumerate(zip(asked, records, strict=True))
    )
    return Problem(
        layers=layers,
        peers=peers,
        links=Links(network.bandwidth, network.latency),
        terms=_terms(training, kept, stages, len(peers)),
        current=_current(kept, starts) if kept is not None else None,
        holdings=_holdings(kept, starts) if kept is not None else (),
        horizon_seconds=horizon_seconds,
    )


@lru_cache(maxsize=NETWORKS)
def _measured(
    members: tuple[Signed, ...],
    requests: tuple[Signed, ...],
    estimates: tuple[Signed | None, ...],
) -> tuple[Mapping[PeerId, Estimates], Network]:
    """Return what peers have told, and the network that it makes: for many peers that takes as long
    as all else, and plans of the same peers share it."""
    asked = [decode_record(each.payload, JoinRequest) for each in requests]
    records = [decode_record(each.payload, PeerRecord) for each in members]
    told = {
        mine.peer: mine
        for request, signed in zip(asked, estimates, strict=True)
        if signed is not None
        and (mine := decode_record(signed.payload, Estimates)).boot == request.boot
    }
    places = {record.peer: record.host_label for record in records}
    return told, completed([request.peer for request in asked], told, places)


def _layers(asked: Sequence[JoinRequest]) -> tuple[Layer, ...]:
    """Return each layer by the median of what peers measured."""
    return tuple(
        Layer(
            forward_seconds=_median([each.forward_seconds for each in column]),
            backward_seconds=_median([each.backward_seconds for each in column]),
            parameter_bytes=column[0].parameter_bytes,
            output_bytes=column[0].output.nbytes,
            activation_bytes=_median([each.activation_bytes for each in column]),
        )
        for column in zip(*(request.layers for request in asked), strict=True)
    )


def _median(values: list[Number]) -> Number:
    """Return the upper median: one of the values."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


def _speed(request: JoinRequest, whole: float, told: Estimates | None) -> float:
    """Return how fast a peer is, relative to the median of each layer: as it measured when it
    joined, corrected by what its work takes since."""
    own = microbatch_seconds(request.layers)
    speed = whole / own if whole > 0 and own > 0 else 1.0
    return min(max(speed / (told.slowdown if told is not None else 1.0), 1e-6), 1e6)


def _terms(training: Training, kept: _Kept | None, stages: int, peers: int) -> Terms:
    exact = training.execution.determinism == "exact"
    moments = 1 if training.optimiser.name == "sgd" else 2
    cuts = training.slicing.cuts
    if kept is not None:
        cuts = tuple(first for first, _ in kept.ranges[1:])
        stages = len(kept.ranges)
    data, samples = training.data, training.microbatch_size
    if data.source == "factory":
        sizes = [_sample_bytes(each) * samples for each in (data.sample, data.target)]
    else:
        sizes = [8 * data.sequence_length * samples] * 2
    return Terms(
        microbatches_per_step=training.microbatches_per_step,
        min_replicas=_least_replicas(training, kept, peers),
        max_replicas=training.slicing.max_replicas,
        stages=stages,
        cuts=cuts,
        input_bytes=sizes[0],
        target_bytes=sizes[1],
        reduction_ratio=2.0 if exact else 1.0,
        state_ratio=2.0 + moments + (4.0 if exact else 2.0),
        moved_ratio=1.0 + moments,
    )


def _least_replicas(training: Training, kept: _Kept | None, peers: int) -> int:
    """Return how many replicas every stage of the plan before keeps: where there are peers enough
    two, so that no single death takes a stage with it."""
    if kept is None or peers < SAFE_REPLICAS * len(kept.ranges):
        return 1
    return min(SAFE_REPLICAS, training.slicing.max_replicas or SAFE_REPLICAS)


def _sample_bytes(spec: SampleSpec | None) -> int:
    if spec is None:
        return 0
    return math.prod(spec.shape) * (4 if spec.dtype == "float32" else 8)


def _current(kept: _Kept, index: Mapping[Member, int]) -> Assignment | None:
    """Return who of these peers does what by the plan before; None if a stage has nobody left."""
    groups = tuple(
        tuple(sorted(index[each] for each in group if each in index)) for group in kept.groups
    )
    feeders = tuple(sorted(index[each] for each in kept.feeders if each in index))
    if not all(groups) or not feeders:
        return None
    busy = {peer for group in groups for peer in group}
    standby = tuple(Standby(i, "") for i in range(len(index)) if i not in busy)
    return Assignment(kept.ranges, groups, feeders, standby)


def _holdings(kept: _Kept, index: Mapping[Member, int]) -> tuple[Holding, ...]:
    """Return who holds what: who hosts it, and who stands by for it and has been fetching it."""
    hosts = [(member, stage) for stage, group in enumerate(kept.groups) for member in group]
    return tuple(
        Holding(index[member], *kept.ranges[stage])
        for member, stage in (*hosts, *kept.standby)
        if member in index
    )


# --- what a plan says, in terms of its problem ---------------------------------------------------


def assignment_of(body: PlanBody) -> Assignment:
    """Return who does what by a plan, with its members as peers."""
    index = {each.signer: i for i, each in enumerate(body.members)}
    reasons = {each.member.peer: each.reason for each in body.standby}
    groups = tuple(
        tuple(sorted(index[each.peer] for each in stage.replicas)) for stage in body.stages
    )
    busy = {peer for group in groups for peer in group}
    return Assignment(
        ranges=tuple((stage.first, stage.last) for stage in body.stages),
        groups=groups,
        feeders=tuple(sorted(index[each.member.peer] for each in body.feeders)),
        standby=tuple(
            Standby(i, reasons.get(peer, "")) for peer, i in index.items() if i not in busy
        ),
    )


def flow_of(body: PlanBody) -> Flow:
    """Return how microbatches go by a plan, in the order of `assignment_of`."""
    index = {each.signer: i for i, each in enumerate(body.members)}
    order = [np.argsort([index[each.member.peer] for each in body.feeders])]
    for stage in body.stages:
        order.append(np.argsort([index[each.peer] for each in stage.replicas]))
    shares = np.array([float(each.share) for each in body.feeders])[order[0]]
    wiring = tuple(
        np.array(matrix, dtype=np.float64)[np.ix_(order[stage], order[stage + 1])]
        for stage, matrix in enumerate(body.wiring)
    )
    return Flow(shares / shares.sum(), wiring)
