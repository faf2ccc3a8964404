"""What is signed and kept: the manifest, plans, certificates, peer records, join requests.

Records are frozen structs with one canonical encoding. Where a signature matters, the bytes
travel as they were signed (`Signed`), and are decoded only after the check.
"""

import hashlib
from functools import lru_cache
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from protocol.errors import RemoteProtocolError
from protocol.packing import canonical, unpack
from protocol.signing import Identity, PeerId, verify

Name = Annotated[str, Meta(min_length=1, max_length=200)]
Label = Annotated[str, Meta(max_length=200)]
MAX_TEXT_CHARS = 4096
Text = Annotated[str, Meta(max_length=MAX_TEXT_CHARS)]
Addresses = Annotated[tuple[Name, ...], Meta(max_length=64)]
Hash = Annotated[bytes, Meta(min_length=32, max_length=32)]
OptionalHash = Annotated[bytes, Meta(max_length=32)]
RunId = bytes
Count = Annotated[int, Meta(ge=0, le=2**53)]
Positive = Annotated[int, Meta(ge=1, le=2**53)]
PositiveFloat = Annotated[float, Meta(gt=0)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
"""Measured; finite, because an infinity would make every plan equally bad."""
Rate = Annotated[float, Meta(ge=0, le=1e15)]
"""Bytes per second; 0 where nothing has been measured."""
Spread = Annotated[float, Meta(ge=0, le=1e3)]
"""Relative standard error of an estimate; 1 says that it is hardly more than a guess."""
MAX_DIMENSIONS = 64
Scalar = bool | int | float | str
Argument = Scalar | list[Scalar]


class Record(Struct, frozen=True, forbid_unknown_fields=True):
    """Base of everything that is hashed or signed."""


# --- manifest: what is trained ---------------------------------------------------------


class TensorSpec(Record, frozen=True):
    """Shape and dtype of a tensor; `dtype` is torch's name without the prefix."""

    dtype: Literal["float32", "float64", "float16", "bfloat16", "int64", "int32", "uint8", "bool"]
    shape: Annotated[tuple[Count, ...], Meta(max_length=MAX_DIMENSIONS)]

    @property
    def elements(self) -> int:
        """Return the number of elements."""
        product = 1
        for size in self.shape:
            product *= size
        return product

    @property
    def nbytes(self) -> int:
        """Return the number of bytes of a contiguous tensor."""
        return self.elements * ITEM_BYTES[self.dtype]


ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "uint8": 1,
    "bool": 1,
}


class ModelSpec(Record, frozen=True):
    """A factory `package.module:function` and its keyword arguments."""

    factory: Name
    arguments: dict[str, Argument] = {}


class SampleSpec(Record, frozen=True):
    """One sample of a `factory` data source, without the batch dimension."""

    dtype: Literal["float32", "float64", "int64"]
    shape: tuple[Positive, ...] = ()
    high: Count = 0
    """Integer samples lie in [0, high)."""


class DataSpec(Record, frozen=True):
    """Where samples come from. Which keys apply depends on `source` (docs/manifest.md)."""

    source: Literal["text", "tokens", "factory"]
    files: tuple[Name, ...] = ()
    """text: files or glob patterns; tokens: one file. `${stdlib}` is Python's own sources."""
    sequence_length: Count = 0
    """Tokens per sample, for text and tokens."""
    vocabulary: Count = 256
    """Token ids lie in [0, vocabulary)."""
    dtype: Literal["uint8", "uint16", "uint32", "int32", "int64"] = "uint16"
    """tokens: type of the ids in the file (little-endian)."""
    factory: str = ""
    """factory: import path of a function that returns a map-style dataset."""
    arguments: dict[str, Argument] = {}
    sample: SampleSpec | None = None
    target: SampleSpec | None = None


class LossSpec(Record, frozen=True):
    """A sum over the targets of a microbatch, and what counts in the mean."""

    function: Name = "cross_entropy"
    """`cross_entropy`, `mse`, or an import path of f(output, target) -> sum (0-dim)."""
    weight: Literal["targets", "samples"] = "targets"
    """What one unit of the mean is: a target that is not ignored, or a sample."""


class OptimiserSpec(Record, frozen=True):
    """torch's optimiser, its arguments, and the learning-rate schedule."""

    name: Literal["sgd", "adam", "adamw"] = "adamw"
    learning_rate: PositiveFloat = 1e-3
    momentum: Fraction = 0.9
    nesterov: bool = False
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    weight_decay: Annotated[float, Meta(ge=0)] = 0.0
    clip_norm: Annotated[float, Meta(ge=0)] = 0.0
    """Largest L2 norm of the whole model's mean gradient; 0 does not clip."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: Count = 0
    final_fraction: Fraction = 0.0
    """Learning rate at the last step, as a fraction of `learning_rate`."""


class ExecutionSpec(Record, frozen=True):
    """How numbers are computed: everything here changes bits, so it is part of the run."""

    determinism: Literal["standard", "exact"] = "standard"
    recompute: bool = False
    threads: Annotated[int, Meta(ge=1, le=256)] = 1
    fraction_bits: Annotated[int, Meta(ge=16, le=48)] = 40
    """exact: gradients are rounded to multiples of 2**-fraction_bits and summed as int64."""
    on_nonfinite: Literal["halt", "skip"] = "halt"


class SlicingSpec(Record, frozen=True):
    """Where the model is cut, and how many peers host a stage."""

    cuts: tuple[Positive, ...] = ()
    """Index of the first layer of every stage but the first; empty lets the swarm choose by
    measured time."""
    max_replicas: Count = 0
    """Further peers of a stage stand by: they hold its state and replace the dead at once.
    0: every peer that is ready gets work."""


class CheckpointSpec(Record, frozen=True):
    """When the swarm writes its state to disk; its last version it always writes."""

    every_steps: Count = 0
    """0: only at the end of the run."""
    keep: Positive = 2
    """How many complete versions are kept."""


class Training(Record, frozen=True):
    """What the author of a run writes: the tables of RUN.toml."""

    name: Name
    steps: Positive
    microbatches_per_step: Annotated[int, Meta(ge=1, le=65536)]
    microbatch_size: Positive
    model: ModelSpec
    data: DataSpec
    seed: Count = 0
    loss: LossSpec = LossSpec()
    optimiser: OptimiserSpec = OptimiserSpec()
    execution: ExecutionSpec = ExecutionSpec()
    slicing: SlicingSpec = SlicingSpec()
    checkpoints: CheckpointSpec = CheckpointSpec()


class Manifest(Record, frozen=True):
    """Immutable definition of a run; its hash is the run id."""

    training: Training
    founder: PeerId
    recovery: PeerId
    """Public half of the recovery key, which alone starts a new generation of councils."""
    nonce: Hash

    @property
    def run(self) -> RunId:
        """Return the run id: SHA-256 of the canonical encoding."""
        return sha256(canonical(self))


# --- signed things ----------------------------------------------------------------------


class Signed(Record, frozen=True):
    """Bytes of a record, who signed them and the signature; decode with `open_signed`."""

    payload: bytes
    signer: PeerId
    signature: bytes


class PeerRecord(Record, frozen=True):
    """Where a peer can be reached. `sequence` grows; a reader keeps the newest."""

    run: RunId
    peer: PeerId
    boot: Positive
    addresses: Addresses
    """HOST:PORT of its own listener."""
    dht_addresses: Addresses
    """libp2p multiaddresses of its DHT node."""
    sequence: Count
    host_label: Label = ""


class LayerProfile(Record, frozen=True):
    """One layer as this peer measured it at the manifest's microbatch shape."""

    name: Name
    forward_seconds: Seconds
    backward_seconds: Seconds
    parameter_bytes: Count
    output: TensorSpec
    activation_bytes: Count = 0
    """What is kept of one microbatch between its forward and its backward."""


class JoinRequest(Record, frozen=True):
    """A peer asks to be given work: what it can compute, and what it holds."""

    run: RunId
    peer: PeerId
    boot: Positive
    epoch: Count
    """Newest certified epoch that the peer knows: the request is good for a few more."""
    device: Name
    layers: tuple[LayerProfile, ...]
    memory_bytes: Count
    numerics: Text
    """Numerics fingerprint: equal fingerprints mean equal bits."""
    data_digest: OptionalHash
    """Digest of the data it can feed; empty if it has none."""


# --- what peers have measured --------------------------------------------------------------

MAX_LINKS = 1024
GUESS_SPREAD = 1.0


class LinkEstimate(Record, frozen=True):
    """The way from the signer to `peer`, as far as it has been measured."""

    peer: PeerId
    bandwidth: Rate
    """What one transfer alone gets."""
    latency_seconds: Seconds
    """One way; 0 where it has not been measured."""
    spread: Spread
    """Of the bandwidth; of the latency where the bandwidth is not known. From GUESS_SPREAD on the
    bandwidth was not measured: it is no more than a lower bound."""


class Estimates(Record, frozen=True):
    """What a peer has measured of itself and of its links. `sequence` grows; a reader keeps the
    newest."""

    run: RunId
    peer: PeerId
    boot: Positive
    sequence: Positive
    slowdown: Annotated[float, Meta(ge=1e-6, le=1e6)]
    """Seconds that microbatches take by seconds that its join request says; 1.0 before any."""
    slowdown_spread: Spread
    uplink: Rate
    """What all its transfers together get, out of this peer: a lower bound."""
    uplink_spread: Spread
    downlink: Rate
    """The same, into this peer."""
    downlink_spread: Spread
    links: Annotated[tuple[LinkEstimate, ...], Meta(max_length=MAX_LINKS)]
    """In order of peer, each once."""


# --- plans and certificates ------------------------------------------------------------------

MAX_VOTERS = 64


class Generation(Record, frozen=True, order=True):
    """Lineage of councils; totally ordered. Grows only by recovery."""

    number: Count = 0
    nonce: OptionalHash = b""


class Member(Record, frozen=True):
    """One start of one peer. Another boot of the same peer is not the same member."""

    peer: PeerId
    boot: Positive


class StagePlan(Record, frozen=True):
    """A contiguous range of layers [first, last) and its replicas, in plan order."""

    first: Count
    last: Positive
    replicas: tuple[Member, ...]
    shares: tuple[Positive, ...]
    """Relative size of the shard that each replica owns in the reduction."""
    output: TensorSpec
    """What the stage sends to the next one (the last stage: its model output)."""
    window: Count = 0
    """How many microbatches of a step the replica with the largest share of them takes at the same
    time, the others by their shares; 0: as 1F1B needs."""


class FeederPlan(Record, frozen=True):
    """A peer that reads data; it injects `share` out of the sum of all shares."""

    member: Member
    share: Positive


class StandbyPlan(Record, frozen=True):
    """A member without work that follows a stage: it holds its state, or fetches it."""

    member: Member
    stage: Count
    reason: Text = ""
    """Why it is to have no work; empty if it gets work once it is ready and there is room."""


class Completed(Record, frozen=True):
    """A version that every stage holds durably, with the hash of every layer's state."""

    version: Count
    layer_hashes: tuple[Hash, ...]


class PlanBody(Record, frozen=True):
    """What everybody does in one epoch."""

    members: tuple[Signed, ...]
    """Peer records of all members, sorted by peer."""
    requests: tuple[Signed, ...]
    """The join requests of all members, in the same order."""
    stages: tuple[StagePlan, ...]
    feeders: tuple[FeederPlan, ...]
    wiring: tuple[tuple[tuple[Fraction, ...], ...], ...]
    """wiring[s][i][j]: share of what source i sends to replica j of stage s.

    Sources of stage 0 are the feeders, of stage s the replicas of stage s - 1."""
    standby: tuple[StandbyPlan, ...]
    leavers: tuple[Member, ...]
    """Replicas of the plan before without a role in this one: still donors."""
    step_seconds: Annotated[float, Meta(ge=0, le=1e300)]
    """Predicted seconds per step; 0 where nothing was predicted."""
    completed: Completed | None
    ended: bool
    halted: Text
    """Why training stands still for good; empty while it does not."""
    reason: Text


class BodyChanges(Record, frozen=True):
    """What makes a plan's body of the one before it."""

    left: tuple[Count, ...]
    """Which members of the body before are none any more, or others: their numbers."""
    came: tuple[tuple[Signed, Signed], ...]
    """Peer record and join request of who is new, or has started again."""
    rest: PlanBody
    """The body without its members."""


class PlanHeader(Record, frozen=True):
    """What a certificate signs: the identity of a plan."""

    run: RunId
    generation: Generation
    epoch: Count
    predecessor: OptionalHash
    """Hash of the previous plan's header; empty for epoch 0."""
    council: Annotated[tuple[PeerId, ...], Meta(max_length=MAX_VOTERS)]
    """V(epoch): the peers that decide the plan of epoch + 1."""
    body_hash: Hash
    kind: Literal["genesis", "planned", "repair"]
    from_step: Count
    lineage: Count

    @property
    def hash(self) -> bytes:
        """Return SHA-256 of the canonical encoding (32 bytes)."""
        return sha256(canonical(self))


class Ballot(Record, frozen=True):
    """What a voter signs when it accepts a plan."""

    run: RunId
    generation: Generation
    epoch: Positive
    term: Positive
    header_hash: Hash
    council_hash: Hash
    """Hash of the council that decides: V(epoch - 1)."""


class Verdict(Record, frozen=True):
    """What a voter signs when it has reviewed a plan; binds nobody."""

    run: RunId
    generation: Generation
    epoch: Positive
    header_hash: Hash
    refusal: Text
    """The check that does not hold, with its figures; empty if the plan is good."""


class Observation(Record, frozen=True):
    """What a member signs when it cannot reach another, or gives itself up."""

    run: RunId
    generation: Generation
    epoch: Count
    """Newest certified epoch of the observer: an observation is good for this epoch only."""
    suspect: Member
    reason: Text


class Consent(Record, frozen=True):
    """What a member signs when it holds the chain of plans to `epoch` and is willing to vote."""

    run: RunId
    generation: Generation
    epoch: Count


MAX_LETTER_BYTES = 4 * 1024 * 1024 + 2


class Letter(Record, frozen=True):
    """What a member signs when another has to pass on what it says."""

    run: RunId
    boot: Positive
    """Of the signer."""
    target: PeerId
    number: Positive
    """Each letter of a start has its own: it is taken in once."""
    frame: Annotated[bytes, Meta(max_length=MAX_LETTER_BYTES)]
    """Number of the message type (2 bytes, big-endian) and its MessagePack."""


class Certificate(Record, frozen=True):
    """A council majority's signatures over one plan, all in one term."""

    ballot: bytes
    """The canonical Ballot, as it was signed."""
    signatures: Annotated[tuple[tuple[PeerId, bytes], ...], Meta(max_length=MAX_VOTERS)]
    """Bounded, because checking one costs more than sending it."""


class CertifiedPlan(Record, frozen=True):
    """A plan and the proof that it was decided; bytes as they were hashed."""

    header: bytes
    body: bytes
    """Empty where only the link in the chain matters: a change of the council."""
    certificate: Certificate | None
    """None for epoch 0, which every peer derives from the manifest, and for a plan that is not
    decided yet."""


class AcceptedPlan(Record, frozen=True):
    """A plan that a voter has accepted, not known to be certified: whoever leads next has to
    complete it, so it travels whole."""

    term: Positive
    plan: CertifiedPlan
    """Without certificate."""
    verdicts: tuple[Signed, ...]


BALLOT_PURPOSE = "ballot"
VERDICT_PURPOSE = "verdict"
OBSERVATION_PURPOSE = "observation"
CONSENT_PURPOSE = "consent"
PEER_RECORD_PURPOSE = "peer-record"
JOIN_REQUEST_PURPOSE = "join-request"
LETTER_PURPOSE = "letter"
ESTIMATES_PURPOSE = "estimates"

R = TypeVar("R", bound=Record)


def clip(text: str) -> str:
    """Return `text` cut to what a field of type Text holds."""
    return text if len(text) <= MAX_TEXT_CHARS else text[: MAX_TEXT_CHARS - 1] + "…"


def sha256(data: bytes | memoryview) -> bytes:
    """Return the SHA-256 digest of `data` (32 bytes)."""
    return hashlib.sha256(data).digest()


def council_hash(council: tuple[PeerId, ...]) -> bytes:
    """Return the hash that a ballot uses to name the council that decides."""
    return sha256(msgspec.msgpack.encode(council))


MAX_KEPT_BYTES = 16 * 1024
MAX_KEPT_RECORDS, MAX_KEPT_BODIES = 8192, 8


def decode_record(data: bytes, kind: type[R]) -> R:
    """Decode a record that was received or read back.

    Plans name the same signed records again and again, so what was decoded last is kept: equal
    bytes give the same object. Raises RemoteProtocolError if the bytes are not a `kind`.
    """
    if kind is PlanBody and isinstance(data, bytes):
        return _decoded_body(data)[1]  # type: ignore[return-value]
    if kind in _KEPT and isinstance(data, bytes) and len(data) <= MAX_KEPT_BYTES:
        return _decoded(data, kind)  # type: ignore[return-value]
    return unpack(data, kind)


def decode_body(data: bytes) -> tuple[bytes, PlanBody]:
    """Decode a plan's body; return it with its bytes: of equal ones, those that came first, so
    that others need not be kept. Raises RemoteProtocolError."""
    return _decoded_body(data)


_KEPT = frozenset({PeerRecord, JoinRequest, PlanHeader, Ballot, Verdict, Observation, Consent})
"""Small records that nobody can change."""


@lru_cache(maxsize=MAX_KEPT_RECORDS)
def _decoded(data: bytes, kind: type[Record]) -> Record:
    return unpack(data, kind)


@lru_cache(maxsize=MAX_KEPT_BODIES)
def _decoded_body(data: bytes) -> tuple[bytes, PlanBody]:
    return data, unpack(data, PlanBody)


def sign_record(identity: Identity, purpose: str, record: Record) -> Signed:
    """Return `record` in its canonical bytes, signed for `purpose`."""
    payload = canonical(record)
    return Signed(payload, identity.peer, identity.sign(purpose, payload))


def open_signed(signed: Signed, purpose: str, kind: type[R]) -> R:
    """Return the record inside `signed`.

    Raises RemoteProtocolError if the signature or the schema does not hold.
    """
    if not verify(signed.signer, purpose, signed.payload, signed.signature):
        raise RemoteProtocolError(f"bad {purpose} signature claimed by {signed.signer}")
    return decode_record(signed.payload, kind)
