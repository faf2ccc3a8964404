"""What is checked before a member is taken in and before a plan is voted for.

Every refusal names the rule and the figures.
"""

from protocol.errors import RemoteProtocolError
from protocol.records import (
    JOIN_REQUEST_PURPOSE,
    PEER_RECORD_PURPOSE,
    JoinRequest,
    Manifest,
    PeerRecord,
    PlanBody,
    Signed,
    open_signed,
)
from protocol.signing import PeerId
from swarm.core.planning import Candidate

JOIN_REQUEST_EPOCHS = 8
"""A join request is good for this many epochs after the one that it names."""


def check_join(
    record: Signed, request: Signed, sender: PeerId, manifest: Manifest, epoch: int
) -> Candidate:
    """Return the candidate behind a Join message.

    Raises RemoteProtocolError if it is not what `sender` may send.
    """
    where = open_signed(record, PEER_RECORD_PURPOSE, PeerRecord)
    asked = open_signed(request, JOIN_REQUEST_PURPOSE, JoinRequest)
    if {where.peer, asked.peer, record.signer, request.signer} != {sender}:
        raise RemoteProtocolError(f"{sender} sends a join request of another peer")
    if (where.run, asked.run) != (manifest.run, manifest.run) or where.boot != asked.boot:
        raise RemoteProtocolError("join request and peer record are not of this run and boot")
    if not asked.epoch <= epoch <= asked.epoch + JOIN_REQUEST_EPOCHS:
        raise RemoteProtocolError(f"join request of epoch {asked.epoch} at epoch {epoch}")
    return Candidate(record, asked)


def refusal_of(candidate: Candidate, founder: Candidate | None, manifest: Manifest) -> str:
    """Return why a candidate must not be a member, or "" if it may.

    It has to agree with `founder`, the first member, on everything that decides the result.
    """
    if founder is None:
        return ""
    theirs, ours = candidate.request, founder.request
    exact = manifest.training.execution.determinism == "exact"
    if exact and theirs.numerics != ours.numerics:
        return (
            "numerics fingerprint differs, so exact mode would not be exact: "
            f"yours is [{_short(theirs.numerics)}], the swarm's is [{_short(ours.numerics)}]"
        )
    shapes = [
        tuple((layer.name, layer.parameter_bytes, layer.output) for layer in each.layers)
        for each in (theirs, ours)
    ]
    if shapes[0] != shapes[1]:
        return (
            f"the model differs: yours has {len(theirs.layers)} layers and "
            f"{sum(layer.parameter_bytes for layer in theirs.layers)} parameter bytes, the "
            f"swarm's {len(ours.layers)} and "
            f"{sum(layer.parameter_bytes for layer in ours.layers)}"
        )
    if theirs.data_digest and ours.data_digest and theirs.data_digest != ours.data_digest:
        return (
            f"the data differs: your digest is {theirs.data_digest.hex()}, "
            f"the swarm's is {ours.data_digest.hex()}"
        )
    return ""


def _short(text: str) -> str:
    return text if len(text) <= 1000 else text[:999] + "…"


def check_plan(body: PlanBody, manifest: Manifest, layers: int = 0) -> None:
    """Check that a plan is well-formed; `layers` is the model's number, 0 while it is unknown.

    Raises RemoteProtocolError with the rule and figures."""
    members = _members_of(body, manifest)
    if not body.stages:
        raise RemoteProtocolError("the plan has no stages")
    _check_ranges(body, manifest)
    if layers and body.stages[-1].last != layers:
        raise RemoteProtocolError(
            f"the last stage ends at layer {body.stages[-1].last}, the model has {layers}"
        )
    working = [member for stage in body.stages for member in stage.replicas]
    if len({member.peer for member in working}) != len(working):
        raise RemoteProtocolError("a peer hosts two stages or two replicas")
    feeding = [feeder.member for feeder in body.feeders]
    if len({member.peer for member in feeding}) != len(feeding):
        raise RemoteProtocolError("a peer is named twice among the feeders")
    for member in [*working, *feeding]:
        if (member.peer, member.boot) not in members:
            raise RemoteProtocolError(f"{member.peer} has a role and is no member")
    if not body.feeders and not body.halted:
        raise RemoteProtocolError("nobody feeds, and the plan does not halt the run")
    _check_wiring(body)


def _members_of(body: PlanBody, manifest: Manifest) -> set[tuple[PeerId, int]]:
    members = set()
    for signed in body.members:
        record = open_signed(signed, PEER_RECORD_PURPOSE, PeerRecord)
        if record.peer != signed.signer or record.run != manifest.run:
            raise RemoteProtocolError(
                f"the record of {record.peer} is signed by {signed.signer}, "
                f"for run {record.run.hex()[:16]}"
            )
        members.add((record.peer, record.boot))
    return members


def _check_ranges(body: PlanBody, manifest: Manifest) -> None:
    edge = 0
    for number, stage in enumerate(body.stages):
        if stage.first != edge or stage.last <= stage.first:
            raise RemoteProtocolError(
                f"stage {number} covers layers [{stage.first}, {stage.last}), "
                f"the one before ends at {edge}"
            )
        if not stage.replicas or len(stage.replicas) != len(stage.shares):
            raise RemoteProtocolError(
                f"stage {number} has {len(stage.replicas)} replicas and {len(stage.shares)} shares"
            )
        edge = stage.last
    cuts = manifest.training.slicing.cuts
    if cuts and tuple(stage.first for stage in body.stages[1:]) != cuts:
        raise RemoteProtocolError(f"the manifest cuts at {list(cuts)}, the plan does not")


def _check_wiring(body: PlanBody) -> None:
    sources = [len(body.feeders), *(len(stage.replicas) for stage in body.stages[:-1])]
    if len(body.wiring) != len(body.stages):
        raise RemoteProtocolError(f"wiring of {len(body.wiring)} stages for {len(body.stages)}")
    for number, (matrix, count) in enumerate(zip(body.wiring, sources, strict=True)):
        targets = len(body.stages[number].replicas)
        if len(matrix) != count or any(len(row) != targets for row in matrix):
            raise RemoteProtocolError(f"wiring into stage {number} is not {count} x {targets}")
        for row in matrix:
            if not abs(sum(row) - 1) <= 1e-9:  # so that NaN is refused
                raise RemoteProtocolError(
                    f"wiring of a source of stage {number} sums to {sum(row)}"
                )
