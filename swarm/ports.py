"""The doors to the outside: what the daemon needs of the world, and nothing about how.

Adapters implement these for real (TLS, hivemind, torch, disk). Tensors cross these doors as
raw bytes (`memoryview`) with a `TensorSpec`, so that nothing inside depends on torch.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from protocol.messages import Microbatch, StateKind, Totals
from protocol.records import PeerRecord
from protocol.signing import PeerId
from swarm.core.ledger import Ledger
from swarm.core.model import Profile
from swarm.core.scheduling.problem import Assignment, Problem

Buffer = memoryview
"""Contiguous raw bytes, format "B"."""


# --- transport ------------------------------------------------------------------------------


class ByteStream(Protocol):
    """An authenticated, encrypted byte stream to one peer."""

    @property
    def peer(self) -> PeerId:
        """Return the id that the other side proved to own."""
        ...

    async def send_all(self, data: bytes | memoryview) -> None:
        """Send all bytes. Raises PeerUnreachable if the stream is broken."""
        ...

    async def receive_some(self, max_bytes: int) -> bytes:
        """Return 1 to `max_bytes` bytes, or b"" at the end. Raises PeerUnreachable."""
        ...

    async def receive_into(self, buffer: memoryview) -> int:
        """Fill `buffer` (not empty) with at least one byte; return how many, 0 at the end.

        Raises PeerUnreachable."""
        ...

    async def aclose(self) -> None:
        """Close at once, without waiting for the other side."""
        ...


class Transport(Protocol):
    """Opens streams to peers and takes in theirs."""

    async def dial(self, address: str, expected: PeerId | None) -> ByteStream:
        """Open a stream to HOST:PORT and shake hands within the deadline.

        Raises PeerUnreachable if nobody answers there in time; PeerRefused if the other side
        is not of this swarm or is not `expected`.
        """
        ...

    async def serve(
        self,
        handler: Callable[[ByteStream], Awaitable[None]],
        *,
        started: Callable[[str], None],
    ) -> None:
        """Listen until cancelled; call `started` with the bound HOST:PORT, then `handler` for
        every stream whose handshake succeeded. Raises AddressError if it cannot listen."""
        ...


# --- discovery ------------------------------------------------------------------------------


class Dht(Protocol):
    """Hints about who is where. Never authority; may be empty, slow, wrong or dead."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Return the multiaddresses at which this node can be reached."""
        ...

    async def publish(self, record: PeerRecord) -> bool:
        """Store this peer's record until its bounded expiry. False if it did not get through."""
        ...

    async def lookup(self) -> tuple[PeerRecord, ...]:
        """Return the valid records of this run, sorted by peer id; () if the DHT is no help."""
        ...

    async def aclose(self) -> None:
        """Stop the node, its libp2p daemon and its sockets."""
        ...


# --- storage -------------------------------------------------------------------------------


class Storage(Protocol):
    """Durable small state of one peer: written whole, fsynced, never half."""

    def save(self, name: str, data: bytes) -> None:
        """Replace `name` durably; returns after fsync."""
        ...

    def load(self, name: str) -> bytes | None:
        """Return what was saved last under `name`, or None."""
        ...


class HeldVersion(NamedTuple):
    """A version whose files are all there, in their sizes."""

    lineage: int
    version: int
    state_hash: bytes
    layers: tuple[int, ...]
    """Ascending."""
    layer_hashes: tuple[bytes, ...]
    """SHA-256 of each layer's weights."""


class Checkpoints(Protocol):
    """Layers of committed versions on this peer's disk.

    A layer has two files: its weights, as they are exported, and its whole state (with the
    optimiser's), from which training goes on."""

    async def write(
        self,
        lineage: int,
        version: int,
        weights: Mapping[int, Buffer],
        states: Mapping[int, Buffer],
        state_hash: bytes,
    ) -> tuple[bytes, ...]:
        """Write layers durably, all or nothing; return the SHA-256 of their weights in order of
        layer. `state_hash` names the history of this version. What was there of this version
        stays until all of it is replaced. Raises HomeError; then nothing has changed."""
        ...

    async def read(self, kind: StateKind, lineage: int, version: int, layer: int) -> Buffer | None:
        """Return "weights" or "state" of a layer, checked against its hash, or None if it is not
        held. Raises HomeError if it is damaged."""
        ...

    async def held(self) -> tuple[HeldVersion, ...]:
        """Return every version that is held whole, oldest first."""
        ...

    async def forget(self, lineage: int, version: int) -> None:
        """Remove a version. Raises HomeError."""
        ...


# --- the model -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one executor task: a tensor, or the layer at which numbers went non-finite."""

    tensor: Buffer | None
    nonfinite: str = ""


@dataclass(frozen=True, slots=True)
class Turn:
    """Result of the last stage's forward, loss and backward in one task."""

    gradient: Buffer | None
    """Gradient of the stage's input; None where there is no stage below (or non-finite)."""
    nonfinite: str = ""


class StageExecutor(Protocol):
    """Computes. All methods run in one worker thread, in the order in which they are called.

    A microbatch's gradient is added to the accumulator and its index to `ledger` in the same
    task, so that the two never disagree. A flagged (non-finite) index adds nothing to the
    accumulator. With `accumulate` False a microbatch is computed for the sake of other stages:
    neither accumulator nor ledger changes, whether or not the ledger has it. What does not fit
    (bytes, a token id out of range, a microbatch of another step) raises ValueError and changes
    nothing; an index that the ledger has raises DoubleCount.

    Weights, optimiser state, accumulator, ledger and reduced gradient outlive a plan: only
    `build`, `load`, `discard`, `load_gradient` and `commit` change what is held.
    """

    @property
    def ledger(self) -> Ledger:
        """Return the ledger of the step in hand as it is now: a copy."""
        ...

    @property
    def compute_seconds(self) -> float:
        """Return seconds of compute since the start."""
        ...

    @property
    def task_seconds(self) -> float:
        """Return for how long the running task has been running; 0 while there is none."""
        ...

    async def profile(self) -> Profile:
        """Measure every layer at the manifest's microbatch shape. Raises ModelError."""
        ...

    # --- what is held ---

    async def build(self, stages: Sequence[tuple[int, int]], stage: int) -> bytes:
        """Hold layers of `stages[stage]` = [first, last) with their initial weights, version 0;
        what was held is dropped. Returns the root hash (32 bytes) of the weights."""
        ...

    async def load(
        self,
        stages: Sequence[tuple[int, int]],
        stage: int,
        version: int,
        layers: Mapping[int, Buffer],
    ) -> None:
        """Hold layers of `stages[stage]` as they were at `version` according to their states
        (`snapshot`); accumulator, ledger and reduced gradients are empty. Raises ValueError if
        the bytes are not the state of these layers; then nothing is held."""
        ...

    async def snapshot(self, version: int) -> dict[int, Buffer] | None:
        """Return a copy of the state of every held layer, parameters, buffers and optimiser
        state, as safetensors bytes; None if another version is held."""
        ...

    async def layer_state(self, layer: int) -> Buffer:
        """Return a layer's parameters and persistent buffers as safetensors bytes."""
        ...

    async def settle(self) -> bool:
        """Drop what microbatches in flight have left (activations). Returns whether the reduced
        gradient of the step in hand is whole."""
        ...

    async def discard(self) -> None:
        """Empty the accumulator and the ledger of the step in hand."""
        ...

    async def gradient(self, step: int) -> dict[int, Buffer] | None:
        """Return a copy of the reduced gradient of `step`, by bucket: the step in hand, if its
        is whole, or the one that was committed last. None where it is not here (any more)."""
        ...

    async def load_gradient(self, step: int, buckets: Mapping[int, Buffer]) -> None:
        """Take the whole reduced gradient of the step in hand from another replica.

        Raises ValueError if it does not fit; then nothing changes."""
        ...

    # --- microbatches ---

    async def forward(self, mb: Microbatch, inputs: Buffer, keep: bool = True) -> Outcome:
        """Run the layers; keep what backward needs, if `keep`: without it there will be no
        backward. Output of shape `StagePlan.output`.

        A non-finite outcome keeps nothing and is not in the ledger yet: call `flag`."""
        ...

    async def backward(
        self, mb: Microbatch, gradient: Buffer, weight: int, accumulate: bool = True
    ) -> Outcome:
        """Backward of an earlier forward: accumulates, adds to the ledger, returns the gradient
        of the input (no tensor on stage 0). A non-finite outcome is in the ledger, flagged."""
        ...

    async def turn(
        self,
        mb: Microbatch,
        inputs: Buffer,
        targets: Buffer,
        weight: int,
        accumulate: bool = True,
    ) -> Turn:
        """Last stage: forward, loss (a sum; kept in the ledger), backward, accumulate.

        A non-finite outcome is in the ledger, flagged; a bad loss names the layer "loss"."""
        ...

    async def flag(self, mb: Microbatch, layer: str, weight: int, accumulate: bool = True) -> None:
        """Put a non-finite microbatch into the ledger, adding nothing; drop its activations."""
        ...

    # --- the end of a step ---

    async def part(self, bucket: int, start: int, stop: int) -> Buffer:
        """Return elements [start, stop) of this replica's accumulator of a bucket."""
        ...

    async def begin_reduction(self) -> None:
        """Forget what has been reduced of the step in hand."""
        ...

    async def reduce(
        self, bucket: int, start: int, stop: int, parts: Sequence[Buffer | None]
    ) -> Buffer:
        """Sum the parts in order (None is zero) into the reduced gradient; return the sum."""
        ...

    async def gather(self, bucket: int, start: int, stop: int, shard: Buffer) -> None:
        """Put an owner's sum into the reduced gradient. Accumulators are not touched."""
        ...

    async def square_norms(self) -> tuple[float, ...]:
        """Return the squared L2 norm of each reduced tensor that this stage counts."""
        ...

    async def commit(self, step: int, totals: Totals) -> None:
        """Apply (or skip) the step; empty accumulator and ledger; version becomes step + 1.

        The reduced gradient is kept until the next commit. A verdict of halt changes nothing."""
        ...

    async def aclose(self) -> None:
        """Finish the running task and stop the thread."""
        ...


class DataSource(Protocol):
    """Reads samples."""

    async def digest(self) -> bytes:
        """Return SHA-256 over the data's content. Raises DataError."""
        ...

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    async def microbatch(self, sample_ids: Sequence[int]) -> tuple[Buffer, Buffer, int]:
        """Return inputs, targets and weight (what counts in the mean). Raises DataError."""
        ...


# --- solver ---------------------------------------------------------------------------------


class Solver(Protocol):
    """Looks for a good assignment, beside the event loop."""

    async def solve(self, problem: Problem, seed: int) -> Assignment | None:
        """Return the best assignment found (core/solver.py); None if none is feasible, or if the
        solver has failed: greedy answers go on without it."""
        ...
