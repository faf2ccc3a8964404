"""Disks, checkpoints, the DHT and the data of simulated peers (`swarm.ports`).

The rule: what is saved when a call returns survives every death; everything else dies with the
process. A disk can kill its process in the middle of a save.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import trio

from protocol.messages import StateKind
from protocol.records import PeerRecord
from protocol.signing import PeerId
from swarm.errors import HomeError
from swarm.ports import Buffer, HeldVersion
from swarm.simulation.physics import SAMPLES, Physics, hollow
from swarm.simulation.process import Process

WRITE_SECONDS = 0.01
DHT_SECONDS = 0.05
RECORD_SECONDS = 120.0
"""How long a record lies in the DHT."""

DhtMood = Literal["good", "empty", "dead", "poisoned"]


@dataclass
class Version:
    """One version of some layers on a disk."""

    weights: dict[int, bytes]
    states: dict[int, bytes]
    state_hash: bytes

    @property
    def hashes(self) -> tuple[bytes, ...]:
        """Return the SHA-256 of each layer's weights."""
        return tuple(hashlib.sha256(data).digest() for data in self.weights.values())


@dataclass
class SimDisk:
    """What one peer has on its disk, over all its starts."""

    names: dict[str, bytes] = field(default_factory=dict)
    versions: dict[tuple[int, int], Version] = field(default_factory=dict)
    """By lineage and version."""
    damaged: set[tuple[int, int, int]] = field(default_factory=set)
    """(lineage, version, layer) of files that cannot be read."""
    write_seconds: float = WRITE_SECONDS
    """How long a version takes to be written: nothing ends that but the death of the process."""
    is_full: bool = False


class SimStorage:
    """Small durable state (`ports.Storage`)."""

    def __init__(
        self,
        disk: SimDisk,
        process: Process,
        saved: Callable[[Process, str, bytes], None],
    ) -> None:
        """`saved` is called for everything that has become durable."""
        self._disk = disk
        self._process = process
        self._saved = saved
        self._fault: tuple[int, bool, Callable[[], None]] | None = None

    def crash_at_save(self, count: int, *, kept: bool, crash: Callable[[], None]) -> None:
        """At the `count`th save from now on (1 is the next), call `crash`: before the new content
        is durable, or, if `kept`, just after."""
        self._fault = (count, kept, crash)

    def behave(self) -> None:
        """Forget about crashing."""
        self._fault = None

    def save(self, name: str, data: bytes) -> None:
        """Replace `name`."""
        if self._process.dead:
            return
        if self._fault is not None:
            count, kept, crash = self._fault
            self._fault = (count - 1, kept, crash) if count > 1 else None
            if count <= 1:
                if kept:
                    self._keep(name, data)
                crash()
                return
        if self._process.reach(f"before save {name}"):
            self._keep(name, data)
            self._process.reach(f"after save {name}")

    def load(self, name: str) -> bytes | None:
        """Return what was saved last."""
        return self._disk.names.get(name)

    def _keep(self, name: str, data: bytes) -> None:
        self._disk.names[name] = bytes(data)
        self._saved(self._process, name, data)


class SimCheckpoints:
    """Versions on a disk (`ports.Checkpoints`)."""

    def __init__(
        self,
        disk: SimDisk,
        process: Process,
        written: Callable[[Process, int, Mapping[int, bytes]], None],
    ) -> None:
        """`written` is called with the version and the weights that have become durable."""
        self._disk = disk
        self._process = process
        self._written = written

    async def write(
        self,
        lineage: int,
        version: int,
        weights: Mapping[int, Buffer],
        states: Mapping[int, Buffer],
        state_hash: bytes,
    ) -> tuple[bytes, ...]:
        """Write layers, all or nothing. Raises HomeError if the disk is full."""
        made = Version(
            {layer: bytes(weights[layer]) for layer in sorted(weights)},
            {layer: bytes(states[layer]) for layer in sorted(states)},
            state_hash,
        )
        await self._write_all()
        if self._disk.is_full:
            raise HomeError(f"cannot write version {version}: No space left on device")
        if not self._process.dead:
            self._disk.versions[lineage, version] = made
            self._disk.damaged -= {(lineage, version, layer) for layer in made.weights}
            self._written(self._process, version, made.weights)
        return made.hashes

    async def read(self, kind: StateKind, lineage: int, version: int, layer: int) -> Buffer | None:
        """Return a layer's bytes. Raises HomeError if they are damaged."""
        await trio.sleep(WRITE_SECONDS)
        held = self._disk.versions.get((lineage, version))
        if held is None:
            return None
        data = (held.weights if kind == "weights" else held.states).get(layer)
        if data is None:
            return None
        if (lineage, version, layer) in self._disk.damaged:
            raise HomeError(f"layer {layer} of version {version} is damaged")
        return memoryview(data)

    async def _write_all(self) -> None:
        """Take the time of a write, as a thread does that cannot be cancelled."""
        with trio.CancelScope(shield=True) as scope:
            self._process.on_death.append(scope.cancel)
            await trio.sleep(self._disk.write_seconds)
        self._process.on_death.remove(scope.cancel)

    async def held(self) -> tuple[HeldVersion, ...]:
        """Return what is held whole, oldest first."""
        await trio.sleep(WRITE_SECONDS)
        return tuple(
            HeldVersion(lineage, version, held.state_hash, tuple(held.weights), held.hashes)
            for (lineage, version), held in sorted(self._disk.versions.items())
        )

    async def forget(self, lineage: int, version: int) -> None:
        """Remove a version."""
        await trio.sleep(WRITE_SECONDS)
        if not self._process.dead:
            self._disk.versions.pop((lineage, version), None)


class Board:
    """What all DHT nodes together remember: records with the wall time at which they expire."""

    def __init__(self) -> None:
        self.mood: DhtMood = "good"
        self.sides: dict[int, int] = {}
        """In a split DHT, which side a peer is on; everybody is on side 0 unless named."""
        self.wall_offset_seconds: dict[int, float] = {}
        """By how much a peer's clock is wrong."""
        self._records: dict[tuple[int, PeerId], list[tuple[PeerRecord, float]]] = {}

    def put(self, number: int, record: PeerRecord) -> None:
        """Store a record, as a peer with its own idea of the time does."""
        side = self.sides.get(number, 0)
        records = self._records.setdefault((side, record.peer), [])
        records.append((record, self._now(number) + RECORD_SECONDS))

    def get(self, number: int) -> tuple[PeerRecord, ...]:
        """Return what a peer finds: one record of each peer, sorted by peer; the newest, or the
        oldest where the DHT is poisoned."""
        side, now = self.sides.get(number, 0), self._now(number)
        found = []
        for (at, _), records in sorted(self._records.items()):
            if at != side:
                continue
            if self.mood == "poisoned":
                found.append(records[0][0])
            elif records[-1][1] > now:
                found.append(records[-1][0])
        return tuple(found)

    def _now(self, number: int) -> float:
        return trio.current_time() + self.wall_offset_seconds.get(number, 0.0)


class SimDht:
    """One process's DHT node (`ports.Dht`)."""

    def __init__(self, board: Board, process: Process) -> None:
        self._board = board
        self._process = process

    @property
    def addresses(self) -> tuple[str, ...]:
        """Return a multiaddress that nobody dials."""
        return (f"/dns4/sim-{self._process.number}/tcp/1",)

    async def publish(self, record: PeerRecord) -> bool:
        """Store a record. False if the DHT is dead."""
        await trio.sleep(DHT_SECONDS)
        if self._board.mood == "dead":
            return False
        if not self._process.dead:
            self._board.put(self._process.number, record)
        return True

    async def lookup(self) -> tuple[PeerRecord, ...]:
        """Return the records that are found."""
        await trio.sleep(DHT_SECONDS)
        if self._board.mood in ("dead", "empty"):
            return ()
        return self._board.get(self._process.number)

    async def aclose(self) -> None:
        """Stop the node."""


class SimSource:
    """Samples that are their own numbers (`ports.DataSource`)."""

    def __init__(self, physics: Physics) -> None:
        self._physics = physics

    async def digest(self) -> bytes:
        """Return the digest of the only data that there is."""
        return hashlib.sha256(b"samples").digest()

    def __len__(self) -> int:
        return SAMPLES

    async def microbatch(self, sample_ids: Sequence[int]) -> tuple[Buffer, Buffer, int]:
        """Return inputs, targets and weight."""
        await trio.lowlevel.checkpoint()
        inputs, targets, weight = self._physics.sample(sample_ids)
        shape = self._physics.shape
        return hollow(inputs, shape.input.nbytes), hollow(targets, shape.target.nbytes), weight
