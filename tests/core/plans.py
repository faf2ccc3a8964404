"""Manifests, candidates, plans and certificates as the tests of the core need them."""

from collections.abc import Sequence
from typing import Literal

from protocol.messages import Heartbeat
from protocol.packing import canonical
from protocol.records import (
    BALLOT_PURPOSE,
    CONSENT_PURPOSE,
    JOIN_REQUEST_PURPOSE,
    OBSERVATION_PURPOSE,
    PEER_RECORD_PURPOSE,
    Ballot,
    Certificate,
    CertifiedPlan,
    Consent,
    DataSpec,
    ExecutionSpec,
    FeederPlan,
    Generation,
    JoinRequest,
    LayerProfile,
    Manifest,
    Member,
    ModelSpec,
    Observation,
    PeerRecord,
    PlanBody,
    PlanHeader,
    Signed,
    SlicingSpec,
    StagePlan,
    TensorSpec,
    Training,
    council_hash,
    sha256,
    sign_record,
)
from protocol.signing import Identity, PeerId
from swarm.core.scheduling.planning import Candidate

PEOPLE = sorted((Identity.from_seed(bytes([n]) * 32) for n in range(1, 13)), key=lambda i: i.peer)
"""Peers in the order of their ids."""
RECOVERY = Identity.from_seed(b"r" * 32)
OUTPUT = TensorSpec("float32", (4, 8))


def training(
    *,
    microbatches: int = 4,
    steps: int = 3,
    cuts: tuple[int, ...] = (),
    determinism: Literal["standard", "exact"] = "standard",
    on_nonfinite: Literal["halt", "skip"] = "halt",
    max_replicas: int = 0,
) -> Training:
    """Return the tables of a run."""
    return Training(
        name="test",
        steps=steps,
        microbatches_per_step=microbatches,
        microbatch_size=2,
        model=ModelSpec("models:make"),
        data=DataSpec("text", ("${stdlib}",), 8),
        execution=ExecutionSpec(determinism=determinism, on_nonfinite=on_nonfinite),
        slicing=SlicingSpec(cuts, max_replicas),
    )


def manifest(founder: PeerId = PEOPLE[0].peer, run: Training | None = None) -> Manifest:
    """Return the manifest of a run."""
    return Manifest(run if run is not None else training(), founder, RECOVERY.peer, b"n" * 32)


def record(
    who: Identity, run: bytes, *, boot: int = 1, peer: PeerId = "", host_label: str = ""
) -> Signed:
    """Return a peer record, signed by `who`."""
    where = PeerRecord(
        run=run,
        peer=peer or who.peer,
        boot=boot,
        addresses=("127.0.0.1:1",),
        dht_addresses=(),
        sequence=1,
        host_label=host_label,
    )
    return sign_record(who, PEER_RECORD_PURPOSE, where)


def request(
    who: Identity,
    run: bytes,
    *,
    seconds: Sequence[float] = (1.0, 1.0),
    boot: int = 1,
    epoch: int = 0,
    numerics: str = "cpu",
    digest: bytes = b"d" * 32,
    parameter_bytes: int = 16,
    memory_bytes: int = 1 << 30,
) -> JoinRequest:
    """Return what a peer says of itself; `seconds` per layer, forward and backward together."""
    return JoinRequest(
        run=run,
        peer=who.peer,
        boot=boot,
        epoch=epoch,
        device="cpu",
        layers=tuple(
            LayerProfile(f"layer{n}", each / 4, each * 3 / 4, parameter_bytes, OUTPUT)
            for n, each in enumerate(seconds)
        ),
        memory_bytes=memory_bytes,
        numerics=numerics,
        data_digest=digest,
    )


def signed_request(who: Identity, asked: JoinRequest) -> Signed:
    """Return a join request, signed by `who`."""
    return sign_record(who, JOIN_REQUEST_PURPOSE, asked)


def candidate(who: Identity, of: Manifest, asked: JoinRequest, *, label: str = "") -> Candidate:
    """Return a peer with what it says of itself, signed."""
    where = record(who, of.run, boot=asked.boot, host_label=label)
    return Candidate(where, asked, signed_request(who, asked))


def candidates(
    count: int,
    of: Manifest,
    seconds: Sequence[float] = (1.0, 1.0),
    holders: Sequence[int] | None = None,
) -> list[Candidate]:
    """Return the first `count` people as candidates; `holders` says who has the data."""
    return [
        candidate(
            who,
            of,
            request(
                who,
                of.run,
                seconds=seconds,
                digest=b"d" * 32 if holders is None or n in holders else b"",
            ),
        )
        for n, who in enumerate(PEOPLE[:count])
    ]


def heartbeat(
    *,
    boot: int = 1,
    state: str = "filling",
    stage: int = -1,
    lineage: int = 0,
    version: int = 0,
    epoch: int = 1,
    active_epoch: int = 1,
    task_seconds: float = 0.0,
    awaits: tuple[PeerId, ...] = (),
    awaits_seconds: float = 0.0,
    suspects: tuple[PeerId, ...] = (),
    rollback: int = -1,
) -> Heartbeat:
    """Return what a member says of itself once a second."""
    return Heartbeat(
        generation=Generation(),
        epoch=epoch,
        active_epoch=active_epoch,
        term=1,
        boot=boot,
        state=state,
        stage=stage,
        lineage=lineage,
        version=version,
        loss=None,
        ledger_size=0,
        queue_length=0,
        samples=0,
        compute_seconds=0.0,
        rtt_seconds=0.0,
        traffic=(),
        suspects=suspects,
        awaits=awaits,
        awaits_seconds=awaits_seconds,
        task_seconds=task_seconds,
        rollback=rollback,
    )


def observation(
    who: Identity, suspect: Member, before: PlanHeader, reason: str = "is silent"
) -> Signed:
    """Return what `who` signs about `suspect` while `before` is the newest plan."""
    seen = Observation(before.run, before.generation, before.epoch, suspect, reason)
    return sign_record(who, OBSERVATION_PURPOSE, seen)


def consent(who: Identity, before: PlanHeader) -> Signed:
    """Return what `who` signs to vote after `before`."""
    willing = Consent(before.run, before.generation, before.epoch)
    return sign_record(who, CONSENT_PURPOSE, willing)


def body(groups: Sequence[Sequence[PeerId]], feeders: Sequence[PeerId] = ()) -> PlanBody:
    """Return a plan of one layer per stage, evenly wired; the first group feeds by default."""
    feeding = feeders or groups[0]
    sources = [len(feeding), *(len(group) for group in groups[:-1])]
    return PlanBody(
        members=(),
        requests=(),
        stages=tuple(
            StagePlan(
                first=number,
                last=number + 1,
                replicas=tuple(Member(peer, 1) for peer in group),
                shares=(1,) * len(group),
                output=OUTPUT,
            )
            for number, group in enumerate(groups)
        ),
        feeders=tuple(FeederPlan(Member(peer, 1), 1) for peer in feeding),
        wiring=tuple(
            ((1 / len(group),) * len(group),) * count
            for count, group in zip(sources, groups, strict=True)
        ),
        standby=(),
        leavers=(),
        step_seconds=0.0,
        completed=None,
        ended=False,
        halted="",
        reason="",
    )


def header_after(before: PlanHeader, content: PlanBody, council: Sequence[Identity]) -> PlanHeader:
    """Return the header of a plan that follows `before`."""
    return PlanHeader(
        run=before.run,
        generation=before.generation,
        epoch=before.epoch + 1,
        predecessor=before.hash,
        council=tuple(who.peer for who in council),
        body_hash=sha256(canonical(content)),
        kind="planned",
        from_step=0,
        lineage=0,
    )


def ballot_on(header: bytes, of: PlanHeader, council: Sequence[Identity], term: int = 1) -> Ballot:
    """Return what each of `council`, which decides, signs of a header."""
    return Ballot(
        run=of.run,
        generation=Generation(of.generation.number, of.generation.nonce),
        epoch=of.epoch,
        term=term,
        header_hash=sha256(header),
        council_hash=council_hash(tuple(who.peer for who in council)),
    )


def certify(
    header: PlanHeader, content: PlanBody, council: Sequence[Identity], signers: Sequence[Identity]
) -> CertifiedPlan:
    """Return a plan that `signers` voted for before the council that decides."""
    ballot = canonical(ballot_on(canonical(header), header, council))
    return CertifiedPlan(
        canonical(header),
        canonical(content),
        Certificate(ballot, tuple((who.peer, who.sign(BALLOT_PURPOSE, ballot)) for who in signers)),
    )
