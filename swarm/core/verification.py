"""What is checked before a member is taken in and before a plan is voted for.

Every refusal names the rule and the figures.
"""

from collections.abc import Sequence

from protocol.errors import RemoteProtocolError
from protocol.records import (
    JOIN_REQUEST_PURPOSE,
    PEER_RECORD_PURPOSE,
    JoinRequest,
    Manifest,
    Member,
    PeerRecord,
    PlanBody,
    Signed,
    open_signed,
)
from protocol.signing import PeerId
from swarm.core.scheduling.planning import Candidate, replica_limit

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
    return Candidate(record, asked, request)


def refusal_of(candidate: Candidate, others: Sequence[Candidate], manifest: Manifest) -> str:
    """Return why a candidate must not be a member beside `others`, or "" if it may.

    It has to agree with them on everything that decides the result. They agree with each other, but
    not everybody has the data: whoever has it is compared with the first of those.
    """
    if not others:
        return ""
    theirs, ours = candidate.request, others[0].request
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
    digests = [each.request.data_digest for each in others if each.request.data_digest]
    if theirs.data_digest and digests and theirs.data_digest != digests[0]:
        return (
            f"the data differs: your digest is {theirs.data_digest.hex()}, "
            f"the swarm's is {digests[0].hex()}"
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
    _check_roles(body, members)
    limit = replica_limit(manifest.training)
    for number, stage in enumerate(body.stages):
        if limit is not None and len(stage.replicas) > limit:
            raise RemoteProtocolError(
                f"stage {number} has {len(stage.replicas)} replicas, the manifest allows {limit}"
            )
    if not body.feeders and not body.halted:
        raise RemoteProtocolError("nobody feeds, and the plan does not halt the run")
    _check_wiring(body)


def _members_of(body: PlanBody, manifest: Manifest) -> set[Member]:
    """Return the members, whose records and join requests have to match."""
    if len(body.members) != len(body.requests):
        raise RemoteProtocolError(
            f"{len(body.members)} members and {len(body.requests)} join requests"
        )
    peers = [signed.signer for signed in body.members]
    if peers != sorted(set(peers)):
        raise RemoteProtocolError("the members are not in order of peer, each once")
    members = set()
    for signed, asked in zip(body.members, body.requests, strict=True):
        record = open_signed(signed, PEER_RECORD_PURPOSE, PeerRecord)
        if record.peer != signed.signer or record.run != manifest.run:
            raise RemoteProtocolError(
                f"the record of {record.peer} is signed by {signed.signer}, "
                f"for run {record.run.hex()[:16]}"
            )
        request = open_signed(asked, JOIN_REQUEST_PURPOSE, JoinRequest)
        if asked.signer != record.peer or (request.peer, request.boot, request.run) != (
            record.peer,
            record.boot,
            record.run,
        ):
            raise RemoteProtocolError(
                f"the join request beside {record.peer}, boot {record.boot}, is of "
                f"{request.peer}, boot {request.boot}, signed by {asked.signer}"
            )
        members.add(Member(record.peer, record.boot))
    return members


def _check_roles(body: PlanBody, members: set[Member]) -> None:
    """Everybody with a role is a member, and works, stands by or leaves: a leaver may stand by for
    another stage at once."""
    working = [member for stage in body.stages for member in stage.replicas]
    waiting = [each.member for each in body.standby]
    feeding = [feeder.member for feeder in body.feeders]
    if _names_twice(working):
        raise RemoteProtocolError("a peer hosts two stages or two replicas")
    if _names_twice(feeding):
        raise RemoteProtocolError("a peer is named twice among the feeders")
    if _names_twice(waiting) or _names_twice(body.leavers):
        raise RemoteProtocolError("a peer is named twice among those who stand by or leave")
    for member in [*working, *feeding, *waiting, *body.leavers]:
        if member not in members:
            raise RemoteProtocolError(f"{member.peer} has a role and is no member")
    for member in waiting:
        if member in working or member in feeding:
            raise RemoteProtocolError(f"{member.peer} stands by and has work")
    for member in body.leavers:
        if member in working:
            raise RemoteProtocolError(f"{member.peer} leaves and hosts a stage")
    for each in body.standby:
        if each.stage >= len(body.stages):
            raise RemoteProtocolError(
                f"{each.member.peer} stands by for stage {each.stage} of {len(body.stages)}"
            )


def _names_twice(members: Sequence[Member]) -> bool:
    return len({member.peer for member in members}) != len(members)


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
