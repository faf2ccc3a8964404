"""Every message on a link: frozen structs, one table.

`TABLE` says for each type its number on the wire, the connection it travels on, the cap of its
header and its rank among what waits to be sent (lower goes first). Tensors follow a message as
raw bytes; `tensors` describes them.
"""

from typing import Annotated, Literal, NamedTuple

from msgspec import Meta, Struct

from protocol.records import (
    MAX_VOTERS,
    AcceptedPlan,
    CertifiedPlan,
    Count,
    Generation,
    Hash,
    Label,
    Member,
    OptionalHash,
    Positive,
    Seconds,
    Signed,
    TensorSpec,
    Text,
)
from protocol.signing import PeerId

Index = Annotated[int, Meta(ge=0, lt=65536)]
RequestId = Annotated[int, Meta(ge=0, le=2**53)]
Channel = Literal["control", "bulk"]
Stage = Annotated[int, Meta(ge=-1, le=65536)]
"""-1 without a stage."""
Weight = Annotated[int, Meta(ge=0, le=2**32)]
"""Of one microbatch; the largest step's sum is still a Count."""
Bitmap = Annotated[bytes, Meta(max_length=8192)]
Finite = Annotated[float, Meta(ge=-1.7976931348623157e308, le=1.7976931348623157e308)]
"""Neither an infinity nor NaN."""


class Part(Struct, frozen=True, forbid_unknown_fields=True):
    """Base of what messages are made of."""


class Microbatch(Part, frozen=True, order=True):
    """The unit that travels through the stages; its name everywhere."""

    step: Count
    index: Index

    def __str__(self) -> str:
        return f"{self.step}/{self.index}"


class Fence(Part, frozen=True):
    """Which plan the sender worked by, and which start of the sender it was."""

    generation: Generation
    epoch: Count
    boot: Positive


class Flag(Part, frozen=True, order=True):
    """A microbatch whose numbers stopped being finite, and the layer that noticed."""

    index: Index
    layer: Label


MAX_FLAGS = 64
Flags = Annotated[tuple[Flag, ...], Meta(max_length=MAX_FLAGS)]
"""The first ones: that there is one decides, the others are for people."""


class Message(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all messages."""


class Request(Message, frozen=True, kw_only=True):
    """A message that is answered by exactly one Reply with the same id."""

    id: RequestId = 0


class Reply(Message, frozen=True, kw_only=True):
    """The answer to the request with this id."""

    id: RequestId = 0


class Training(Message, frozen=True, kw_only=True):
    """A message about training: fenced by generation, epoch and boot."""

    fence: Fence


# --- the link itself ---------------------------------------------------------------------


class Hello(Message, frozen=True, kw_only=True):
    """First message in both directions of every connection."""

    version: Count
    run: Hash
    channel: Channel
    boot: Positive


class Goodbye(Message, frozen=True, kw_only=True):
    """The sender closes this connection on purpose; `fault` if the receiver's fault."""

    fault: Text = ""


class Ping(Message, frozen=True, kw_only=True):
    """Answered at once by a Pong of the same number: the round trip."""

    number: Count


class Pong(Message, frozen=True, kw_only=True):
    """Answers Ping `number`; 0 answers none and says that this peer lives."""

    number: Count


# --- joining, plans ------------------------------------------------------------------------


class GetManifest(Request, frozen=True, kw_only=True):
    """Ask for the manifest of the run: its hash is known already."""


class ManifestAnswer(Reply, frozen=True, kw_only=True):
    """The canonical manifest."""

    manifest: bytes


class Join(Request, frozen=True, kw_only=True):
    """Ask to become a member: a signed PeerRecord and a signed JoinRequest."""

    record: Signed
    request: Signed


class JoinAnswer(Reply, frozen=True, kw_only=True):
    """Whether the leader took the request; `refusal` says why not."""

    refusal: Text
    leader: PeerId
    leader_address: Label


class Certified(Message, frozen=True, kw_only=True):
    """A certified plan, sent to who lacks it."""

    plan: CertifiedPlan


class Changed(Message, frozen=True, kw_only=True):
    """A certified plan, to who has the plan before it."""

    plan: CertifiedPlan
    """Without its body."""
    changes: bytes
    """What is other than in the body before: compressed records.BodyChanges."""


class GetChain(Request, frozen=True, kw_only=True):
    """Ask for the newest certified plan and what leads to it, if it is newer than the one named."""

    generation: Generation
    epoch: Count


class ChainAnswer(Reply, frozen=True, kw_only=True):
    """The plans at which the council changed, without bodies, and the newest plan last; nothing if
    the asker knows as much. The chain is whole: whoever gets it can pass it on."""

    plans: tuple[CertifiedPlan, ...]


# --- agreement -----------------------------------------------------------------------------


class Agreeing(Message, frozen=True, kw_only=True):
    """A message among voters. `epoch` is the newest certified epoch of the sender, and V(epoch)
    is the council that it speaks to."""

    generation: Generation
    epoch: Count
    term: Count


class PreVote(Agreeing, frozen=True, kw_only=True):
    """Would you vote for me in `term`? Changes nothing."""


class PreVoteAnswer(Agreeing, frozen=True, kw_only=True):
    """Answers PreVote of the same term; or, not granted, tells a higher term."""

    granted: bool


class RequestVote(Agreeing, frozen=True, kw_only=True):
    """Vote for me in `term`."""


class Vote(Agreeing, frozen=True, kw_only=True):
    """The vote of `term`, and what the voter has accepted for epoch + 1."""

    accepted: AcceptedPlan | None


class Stand(Agreeing, frozen=True, kw_only=True):
    """The plan of `epoch` ended my leadership of `term`, and I do not vote any more: stand."""


class Review(Agreeing, frozen=True, kw_only=True):
    """The sender would propose this plan: is it a good one."""

    plan: CertifiedPlan
    evidence: Annotated[tuple[Signed, ...], Meta(max_length=4096)]
    """Observations of who is left out, consents of who is new in the council."""


class VerdictAnswer(Agreeing, frozen=True, kw_only=True):
    """A signed records.Verdict."""

    verdict: Signed


class Propose(Agreeing, frozen=True, kw_only=True):
    """Accept this plan: a majority of the council finds it good."""

    plan: CertifiedPlan
    verdicts: Annotated[tuple[Signed, ...], Meta(max_length=MAX_VOTERS)]


class Accepted(Agreeing, frozen=True, kw_only=True):
    """The sender has accepted, durably, and signed."""

    ballot: bytes
    signature: bytes


class Consented(Message, frozen=True, kw_only=True):
    """A signed records.Consent, to who leads."""

    consent: Signed


class CandidatePlan(Message, frozen=True, kw_only=True):
    """A plan that anybody has made for the leader to consider."""

    generation: Generation
    epoch: Count
    """The epoch that it would follow."""
    body: bytes


# --- membership and status -----------------------------------------------------------------


class Traffic(Part, frozen=True):
    """Bytes that a peer has sent and received of one kind of message."""

    kind: Annotated[str, Meta(max_length=32)]
    sent_bytes: Count
    received_bytes: Count


MAX_KINDS = 64
State = Annotated[str, Meta(max_length=32)]
Traffics = Annotated[tuple[Traffic, ...], Meta(max_length=MAX_KINDS)]


class Heartbeat(Message, frozen=True, kw_only=True):
    """What a member holds and does, now and then, to the leader and to voters that listen."""

    generation: Generation
    epoch: Count
    """Newest certified epoch."""
    active_epoch: Count
    term: Count
    """Of the leader that this member follows; 0 without one."""
    boot: Positive
    state: State
    stage: Stage
    lineage: Count
    version: Count
    loss: Finite | None
    """Mean loss of the last step that this member committed."""
    ledger_size: Count
    queue_length: Count
    samples: Count
    """Samples computed since the start of this boot."""
    compute_seconds: Seconds
    rtt_seconds: Seconds
    traffic: Traffics
    suspects: tuple[PeerId, ...] = ()
    awaits: tuple[PeerId, ...] = ()
    """Who owes this member a message of training."""
    awaits_seconds: Seconds = 0.0
    """For how long, the oldest."""
    task_seconds: Seconds = 0.0
    """How long the executor has been at the task in hand."""
    rollback: Annotated[int, Meta(ge=-1, le=2**53)] = -1
    """From the step coordinator: a version that nobody holds any more; -1 if there is none."""
    trouble: Text = ""
    """Why this member cannot go on with training; empty while it can."""


class MemberView(Part, frozen=True):
    """One member as the leader sees it."""

    peer: PeerId
    boot: Positive
    address: Label
    state: State
    stage: Stage
    version: Count
    ledger_size: Count
    queue_length: Count
    silent_seconds: Seconds
    rtt_seconds: Seconds
    compute_seconds: Seconds
    traffic: Traffics = ()


class GetSwarm(Request, frozen=True, kw_only=True):
    """Ask a leader for the swarm as it sees it."""


class SwarmAnswer(Reply, frozen=True, kw_only=True):
    """A line for every member, sorted by peer; nothing from who does not lead."""

    members: tuple[MemberView, ...]


class LeaderBeat(Message, frozen=True, kw_only=True):
    """The leader is alive, and so far is the swarm: as large for a thousand members as for one."""

    generation: Generation
    epoch: Count
    term: Count
    waiting_for: Count
    """How many more peers must join before training starts."""
    version: Count
    loss: Finite | None
    samples_per_second: Finite
    trouble: Text


class PingFor(Message, frozen=True, kw_only=True):
    """Can you reach `target`? I cannot."""

    target: Member


class PingResult(Message, frozen=True, kw_only=True):
    """Answers PingFor: the target answers; or, as a signed Observation, it does not."""

    target: Member
    observation: Signed | None
    """None if it answers."""


class Suspect(Message, frozen=True, kw_only=True):
    """A signed records.Observation, to leader and council."""

    observation: Signed


class LostWork(Message, frozen=True, kw_only=True):
    """Frames of this epoch between the sender and `peer` were lost with a link."""

    generation: Generation
    epoch: Count
    peer: PeerId


class Leave(Message, frozen=True, kw_only=True):
    """The sender is about to stop on purpose."""

    boot: Positive


class Measured(Message, frozen=True, kw_only=True):
    """A signed records.Estimates of the sender's, to leader and council, and to whom it asks to
    join."""

    estimates: Signed


MAX_CHUNKS = 32


class Probe(Message, frozen=True, kw_only=True):
    """One of `chunks` pieces that are sent back to back, so that the receiver sees how fast they
    come; with 0 chunks: may I send some? The bytes mean nothing."""

    number: Positive
    """Of the train; grows."""
    chunk: Annotated[int, Meta(ge=0, lt=MAX_CHUNKS)] = 0
    chunks: Annotated[int, Meta(ge=0, le=MAX_CHUNKS)] = 0
    tensors: Annotated[tuple[TensorSpec, ...], Meta(max_length=1)] = ()


class ProbeAnswer(Message, frozen=True, kw_only=True):
    """Answers the last chunk of train `number`, or the question whether there may be one."""

    number: Positive
    busy: bool = False
    """Nothing has been measured, and nothing will be now."""
    arrivals: Annotated[tuple[Seconds, ...], Meta(max_length=MAX_CHUNKS)] = ()
    """When each chunk had arrived, in order, since the first one had."""


class Forwarded(Message, frozen=True, kw_only=True):
    """A Letter for `target`, whom its signer cannot reach; goes one hop."""

    target: PeerId
    letter: Signed


# --- training: data -----------------------------------------------------------------------


Needs = Annotated[bytes, Meta(max_length=128)]
"""A bitmap of stages; empty: all of them."""


class Forward(Training, frozen=True, kw_only=True):
    """A microbatch on its way to the loss: (input of the stage, targets) follow as tensors.

    `nonfinite` names a layer instead: then no tensor follows but every stage still has to
    account for the index.
    """

    microbatch: Microbatch
    weight: Weight
    path: tuple[PeerId, ...]
    """Feeder and replicas so far: the gradient returns this way."""
    tensors: tuple[TensorSpec, ...]
    needs: Needs = b""
    """Stages whose ledgers lack it: the others compute it and add nothing."""
    nonfinite: Label = ""


class Backward(Training, frozen=True, kw_only=True):
    """The gradient of the stage's output; `path` still to go, next hop last.

    It also gives back the credit that its Forward used (swarm/core/routing.py).
    """

    microbatch: Microbatch
    path: tuple[PeerId, ...]
    tensors: tuple[TensorSpec, ...]
    nonfinite: Label = ""


class ReduceShard(Training, frozen=True, kw_only=True):
    """A replica's part of one owner's shard of a bucket; empty parts travel as no tensor."""

    step: Count
    bucket: Count
    shard: Count
    tensors: tuple[TensorSpec, ...]


class GatherShard(Training, frozen=True, kw_only=True):
    """The owner's sum of one shard of a bucket."""

    step: Count
    bucket: Count
    shard: Count
    tensors: tuple[TensorSpec, ...]


class Totals(Part, frozen=True):
    """What every stage needs to commit a step."""

    weight: Count
    square_norm: Annotated[float, Meta(ge=0)]
    """Infinite where the sum of the gradients is not finite; never NaN."""
    flags: Flags
    verdict: Literal["apply", "skip", "halt"]
    loss: Finite | None
    """Mean loss of the step, before the update."""


StateKind = Literal["weights", "state", "gradient"]
"""weights: a layer of a checkpoint, as it is exported; state: a layer's parameters, buffers and
optimiser state; gradient: a bucket's reduced gradient of the step that follows the version."""


class GetListing(Request, frozen=True, kw_only=True):
    """Ask what there is to fetch of a version of layers [first, last): it is kept for a while.

    Fenced by lineage and version, not by epoch: a new plan does not disturb a download."""

    kind: StateKind
    lineage: Count
    version: Count
    first: Count
    last: Positive
    state_hash: OptionalHash = b""
    """Whoever knows the hash of the state may get it from a checkpoint, too, of any lineage."""


class Piece(Part, frozen=True):
    """One layer, or one bucket."""

    number: Count
    nbytes: Count
    sha256: Hash


class Listing(Reply, frozen=True, kw_only=True):
    """What there is to fetch; `refusal` if there is nothing, and the version held instead."""

    version: Count
    state_hash: OptionalHash
    totals: Totals | None
    """What made this version, as far as the donor knows."""
    pieces: tuple[Piece, ...]
    refusal: Text = ""


class GetState(Request, frozen=True, kw_only=True):
    """Ask for [offset, offset + length) bytes of a piece of a listing."""

    kind: StateKind
    lineage: Count
    version: Count
    number: Count
    offset: Count
    length: Positive
    sha256: OptionalHash = b""
    """Of weights: whoever knows the layer's hash gets it wherever it lies, of any lineage."""


class StateChunk(Reply, frozen=True, kw_only=True):
    """Some bytes of a piece; `total` bytes in all; `refusal` if it is not held."""

    total: Count
    refusal: Text = ""
    tensors: tuple[TensorSpec, ...] = ()


# --- training: control ----------------------------------------------------------------------


class Account(Part, frozen=True):
    """What all microbatches of a step weigh in one stage, and what was odd about them."""

    weight: Count
    flags: Flags
    loss_sum: float


class Held(Part, frozen=True):
    """What a member holds of one range of layers when it reports."""

    lineage: Count
    first: Count
    last: Positive
    version: Count
    state_hash: Hash
    """Names the history of this version (core/holding.py): equal hashes, equal state."""
    bitmap: Bitmap
    """Its ledger of step `version`."""
    prepared: Account | None
    """The stage's account, if this member holds the whole reduced gradient of step `version`."""
    totals: Totals | None
    """What it committed last, to reach `version`."""


class Report(Training, frozen=True, kw_only=True):
    """A member has stopped the work of the previous epoch and holds this."""

    held: Annotated[tuple[Held, ...], Meta(max_length=16)]


class Settlement(Part, frozen=True):
    """What becomes of one stage in the step in hand."""

    state_hash: Hash
    """Of the stage's state at the step's version."""
    missing: Bitmap
    """Indices that no ledger has."""
    donors: tuple[PeerId, ...]
    """Hold the step's version, or will as soon as they commit."""
    prepared: tuple[PeerId, ...]
    """Of the donors, those that hold the reduced gradient of the step in hand."""
    account: Account | None
    """What they account for; None where nobody is prepared."""
    discards: tuple[PeerId, ...]
    """Replicas whose accumulators do not count."""


class Resume(Training, frozen=True, kw_only=True):
    """All have reported: this step goes on, and so."""

    step: Count
    totals: Totals | None
    """What made version `step`, for who is one behind; None at the first version."""
    stages: Annotated[tuple[Settlement, ...], Meta(max_length=1024)]
    """In order of stage."""


class LedgerReport(Training, frozen=True, kw_only=True):
    """The set of indices in a replica's accumulator, to the stage's coordinator."""

    step: Count
    stage: Count
    bitmap: Bitmap
    weight: Count
    flags: Flags
    loss_sum: float


class StartReduction(Training, frozen=True, kw_only=True):
    """The ledgers of a stage partition the step: reduce it.

    Carries the stage's whole account, which every replica repeats in Prepared.
    """

    step: Count
    stage: Count
    weight: Count
    flags: Flags
    loss_sum: float


class Prepared(Training, frozen=True, kw_only=True):
    """A replica holds its stage's full reduced gradient."""

    step: Count
    stage: Count
    square_norms: tuple[float, ...]
    """Squared L2 norm of every tensor that this stage counts, in its order."""
    weight: Count
    flags: Flags
    loss_sum: float


class Commit(Training, frozen=True, kw_only=True):
    """Every replica of every stage is prepared: apply the step."""

    step: Count
    totals: Totals


class Durable(Training, frozen=True, kw_only=True):
    """A replica has written its layers at this version to disk."""

    stage: Count
    version: Count
    layer_hashes: tuple[Hash, ...]


class Kind(NamedTuple):
    """How one message type travels."""

    number: int
    channel: Channel | None
    header_cap_bytes: int
    rank: int
    has_payload: bool = False


CONTROL_CAP_BYTES = 64 * 1024
PLAN_CAP_BYTES = 16 * 1024 * 1024
SWARM_CAP_BYTES = 1024 * 1024
"""For what grows with the number of members, stages or tensors."""
RESUME_CAP_BYTES = 4 * SWARM_CAP_BYTES
"""For bitmaps and flags of every stage."""
FORWARDED_CAP_BYTES = RESUME_CAP_BYTES + 1024
"""For the largest of what is forwarded, who says it and to whom."""

# None as channel: legal on both connections.
TABLE: dict[type[Message], Kind] = {
    Hello: Kind(1, None, 1024, 0),
    Goodbye: Kind(2, None, 8192, 0),
    Ping: Kind(4, "control", 64, 0),
    Pong: Kind(5, "control", 64, 0),
    GetManifest: Kind(10, "bulk", 64, 0),
    ManifestAnswer: Kind(11, "bulk", CONTROL_CAP_BYTES, 0),
    Join: Kind(12, "bulk", PLAN_CAP_BYTES, 0),
    JoinAnswer: Kind(13, "bulk", CONTROL_CAP_BYTES, 0),
    Certified: Kind(14, "bulk", PLAN_CAP_BYTES, 0),
    Changed: Kind(17, "bulk", PLAN_CAP_BYTES, 0),
    GetChain: Kind(15, "bulk", 256, 0),
    ChainAnswer: Kind(16, "bulk", PLAN_CAP_BYTES, 0),
    PreVote: Kind(50, "control", 256, 0),
    PreVoteAnswer: Kind(51, "control", 256, 0),
    RequestVote: Kind(52, "control", 256, 0),
    Vote: Kind(53, "bulk", PLAN_CAP_BYTES, 0),
    Stand: Kind(54, "control", 256, 0),
    Review: Kind(55, "bulk", PLAN_CAP_BYTES, 0),
    VerdictAnswer: Kind(56, "control", CONTROL_CAP_BYTES, 0),
    Propose: Kind(57, "bulk", PLAN_CAP_BYTES, 0),
    Accepted: Kind(58, "control", 8192, 0),
    Consented: Kind(59, "control", 8192, 0),
    CandidatePlan: Kind(60, "bulk", PLAN_CAP_BYTES, 5),
    PingFor: Kind(61, "control", 1024, 0),
    PingResult: Kind(62, "control", CONTROL_CAP_BYTES, 0),
    Suspect: Kind(63, "control", CONTROL_CAP_BYTES, 0),
    LostWork: Kind(64, "control", 1024, 0),
    Leave: Kind(65, "control", 64, 0),
    Forwarded: Kind(66, "control", FORWARDED_CAP_BYTES, 1),
    Measured: Kind(67, "bulk", SWARM_CAP_BYTES, 5),
    Probe: Kind(68, "bulk", 256, 6, True),
    ProbeAnswer: Kind(69, "bulk", 1024, 6),
    Heartbeat: Kind(20, "control", CONTROL_CAP_BYTES, 1),
    LeaderBeat: Kind(21, "control", CONTROL_CAP_BYTES, 1),
    GetSwarm: Kind(22, "bulk", 64, 5),
    SwarmAnswer: Kind(23, "bulk", SWARM_CAP_BYTES, 5),
    Backward: Kind(30, "bulk", CONTROL_CAP_BYTES, 1, True),
    Forward: Kind(31, "bulk", CONTROL_CAP_BYTES, 2, True),
    ReduceShard: Kind(32, "bulk", CONTROL_CAP_BYTES, 3, True),
    GatherShard: Kind(33, "bulk", CONTROL_CAP_BYTES, 3, True),
    GetState: Kind(34, "bulk", 128, 4),
    GetListing: Kind(36, "bulk", 128, 4),
    Listing: Kind(37, "bulk", PLAN_CAP_BYTES, 4),
    StateChunk: Kind(35, "bulk", 8192, 4, True),
    Report: Kind(40, "control", RESUME_CAP_BYTES, 1),
    Resume: Kind(41, "control", RESUME_CAP_BYTES, 1),
    LedgerReport: Kind(42, "control", CONTROL_CAP_BYTES, 1),
    StartReduction: Kind(43, "control", CONTROL_CAP_BYTES, 1),
    Prepared: Kind(44, "control", SWARM_CAP_BYTES, 1),
    Commit: Kind(45, "control", CONTROL_CAP_BYTES, 1),
    Durable: Kind(46, "control", CONTROL_CAP_BYTES, 1),
}

BY_NUMBER: dict[int, type[Message]] = {kind.number: name for name, kind in TABLE.items()}


def tensors_of(message: Message) -> tuple[TensorSpec, ...]:
    """Return the specs of the tensors that follow `message`."""
    if isinstance(message, Forward | Backward | ReduceShard | GatherShard | StateChunk | Probe):
        return message.tensors
    return ()
