"""Every message on a link: frozen structs, one table.

`TABLE` says for each type its number on the wire, the connection it travels on, the cap of its
header and its rank among what waits to be sent (lower goes first). Tensors follow a message as
raw bytes; `tensors` describes them.
"""

from typing import Annotated, Literal, NamedTuple

from msgspec import Meta, Struct

from protocol.records import (
    CertifiedPlan,
    Count,
    Generation,
    Hash,
    Label,
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
    """Answers Ping `number`."""

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


class GetChain(Request, frozen=True, kw_only=True):
    """Ask for the certified plans after `epoch`."""

    epoch: Count


class ChainAnswer(Reply, frozen=True, kw_only=True):
    """Certified plans in order of epoch."""

    plans: tuple[CertifiedPlan, ...]


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
    """What a member holds and does, once a second, to the leader."""

    epoch: Count
    boot: Positive
    state: State
    stage: Stage
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


class LeaderBeat(Message, frozen=True, kw_only=True):
    """The leader is alive, and this is the swarm as it sees it."""

    epoch: Count
    term: Count
    members: tuple[MemberView, ...]
    waiting_for: Count
    """How many more peers must join before training starts."""
    version: Count
    loss: Finite | None
    samples_per_second: Finite
    trouble: Text


# --- training: data -----------------------------------------------------------------------


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


class GetState(Request, frozen=True, kw_only=True):
    """Ask for a piece of a layer's state at a version: [offset, offset + length) bytes."""

    version: Count
    layer: Count
    offset: Count
    length: Positive


class StateChunk(Reply, frozen=True, kw_only=True):
    """A piece of the layer's serialized state; `total` bytes in all; `refusal` if not held."""

    total: Count
    refusal: Text = ""
    tensors: tuple[TensorSpec, ...] = ()


# --- training: control ----------------------------------------------------------------------


class Held(Part, frozen=True):
    """What a replica holds of one range of layers when it reports."""

    lineage: Count
    first: Count
    last: Positive
    version: Count
    root_hash: Hash


class Report(Training, frozen=True, kw_only=True):
    """A member has stopped the work of the previous epoch and holds this."""

    held: tuple[Held, ...]


class Missing(Part, frozen=True):
    """Indices that a stage still needs, as a bitmap of the step's microbatches."""

    stage: Count
    bitmap: Bitmap


class Resume(Training, frozen=True, kw_only=True):
    """All have reported: this step goes on with these indices."""

    step: Count
    missing: tuple[Missing, ...]


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


class Totals(Part, frozen=True):
    """What every stage needs to commit a step."""

    weight: Count
    square_norm: Annotated[float, Meta(ge=0)]
    """Infinite where the sum of the gradients is not finite; never NaN."""
    flags: Flags
    verdict: Literal["apply", "skip", "halt"]
    loss: Finite | None
    """Mean loss of the step, before the update."""


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
    GetChain: Kind(15, "bulk", 64, 0),
    ChainAnswer: Kind(16, "bulk", PLAN_CAP_BYTES, 0),
    Heartbeat: Kind(20, "control", CONTROL_CAP_BYTES, 1),
    LeaderBeat: Kind(21, "control", SWARM_CAP_BYTES, 1),
    Backward: Kind(30, "bulk", CONTROL_CAP_BYTES, 1, True),
    Forward: Kind(31, "bulk", CONTROL_CAP_BYTES, 2, True),
    ReduceShard: Kind(32, "bulk", CONTROL_CAP_BYTES, 3, True),
    GatherShard: Kind(33, "bulk", CONTROL_CAP_BYTES, 3, True),
    GetState: Kind(34, "bulk", 128, 4),
    StateChunk: Kind(35, "bulk", 8192, 4, True),
    Report: Kind(40, "control", CONTROL_CAP_BYTES, 1),
    Resume: Kind(41, "control", SWARM_CAP_BYTES, 1),
    LedgerReport: Kind(42, "control", CONTROL_CAP_BYTES, 1),
    StartReduction: Kind(43, "control", CONTROL_CAP_BYTES, 1),
    Prepared: Kind(44, "control", SWARM_CAP_BYTES, 1),
    Commit: Kind(45, "control", CONTROL_CAP_BYTES, 1),
    Durable: Kind(46, "control", CONTROL_CAP_BYTES, 1),
}

BY_NUMBER: dict[int, type[Message]] = {kind.number: name for name, kind in TABLE.items()}


def tensors_of(message: Message) -> tuple[TensorSpec, ...]:
    """Return the specs of the tensors that follow `message`."""
    if isinstance(message, Forward | Backward | ReduceShard | GatherShard | StateChunk):
        return message.tensors
    return ()
