"""Many daemons in one process, on a virtual clock: started, killed, stopped and watched.

The rule: everything that happens follows from the seed. The daemons are the shipped ones; only
what is outside of them (`daemon.Outside`) is pretended.
"""

import random
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import trio

from protocol import signing
from protocol.messages import TABLE, LeaderBeat
from protocol.packing import canonical, unpack
from protocol.records import Manifest, PlanBody, PlanHeader, Training, sha256
from protocol.signing import Identity, PeerId
from swarm.core.agreement import Agreement
from swarm.core.chain import HARD_STATE, HardState, hash_of_body
from swarm.daemon import Daemon, Outside, Settings
from swarm.errors import RecoveryError, SwarmError
from swarm.peer import donor, state
from swarm.peer.keeping import PLACES, load_state
from swarm.ports import Dht
from swarm.simulation.clock import virtual_clock
from swarm.simulation.executor import Machine, SimExecutor
from swarm.simulation.fakes import (
    Board,
    SimCheckpoints,
    SimDht,
    SimDisk,
    SimSource,
    SimStorage,
)
from swarm.simulation.invariants import Invariants
from swarm.simulation.network import Country, SimNetwork, SimTransport, Weather
from swarm.simulation.physics import STATE_CHUNK_BYTES, Physics
from swarm.simulation.process import Process, running, seeded_scheduler
from swarm.simulation.reference import Reference
from swarm.simulation.rules import rule_named
from swarm.simulation.sharing import shared_work
from swarm.simulation.solver import SimSolver
from swarm.simulation.trace import SimulationFailure, Trace

PORT = 1000
RESTART_SECONDS = 1.0
"""How soon a supervisor starts a daemon again that has ended by itself."""
FOUNDER = 0
BOOT = "boot"
NUMBER_OF_BEATS = TABLE[LeaderBeat].number


Rule = Literal["ours", "none", "swarm", "petals"]
"""By which rule peers change their stages: ours, or one to compare with."""


class Watcher(Protocol):
    """Who keeps account of what the daemons do."""

    def started(self, number: int) -> None:
        """A peer's daemon begins."""
        ...

    def ended(self, number: int) -> None:
        """A peer's daemon has ended, however that was."""
        ...

    def worked(self, number: int, seconds: float) -> None:
        """A peer has computed a task of a microbatch: its seconds at speed 1."""
        ...

    def committed(self, number: int, step: int) -> None:
        """A peer has applied a step."""
        ...

    def saved(self, number: int) -> None:
        """Something has become durable, perhaps a plan."""
        ...


@dataclass(frozen=True, slots=True)
class Options:
    """What a world is like, apart from its seed."""

    physics: Physics
    peers: int = 5
    wait_for_peers: int = 0
    """How many peers the first plan waits for; 0: all."""
    stages: int = 2
    weather: Weather = field(default_factory=Weather)
    speeds: tuple[float, ...] = ()
    """How fast each peer computes; 1 where there is none."""
    without_data: tuple[int, ...] = ()
    """Peers that have no data to feed."""
    country: Country | None = None
    """How the ways between hosts differ; None: they do not, and nobody shares any."""
    noise: float = 0.0
    """Relative standard deviation of what a large transfer through a country takes."""
    machines: Callable[[int], Machine] | None = None
    """What each peer computes with, instead of `speeds`."""
    rule: Rule = "ours"
    solver: bool = False
    """Whether peers have a solver for full solves; else plans are greedy ones."""
    watcher: Watcher | None = None
    checked: bool = True
    """Whether all that is computed is compared with a plain loop's, and the end with its end."""
    whole_trace: bool = False
    replay: str = ""
    """The command that runs the same again, for who reads of a failure."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a simulation went."""

    virtual_seconds: float
    epochs: int
    """Number of the newest plan."""
    trace: list[str]


class Peer:
    """One peer over all its starts."""

    def __init__(self, number: int, identity: Identity) -> None:
        self.number = number
        self.identity = identity
        self.disk = SimDisk()
        self.process: Process | None = None
        self.daemon: Daemon | None = None
        self.executor: SimExecutor | None = None
        self.storage: SimStorage | None = None
        self.leaving = False
        """Its owner has told it to stop."""

    @property
    def name(self) -> str:
        """Return how this peer is called in traces."""
        return f"p{self.number}"


class World:
    """A swarm and all that surrounds it."""

    def __init__(self, seed: int | str, options: Options) -> None:
        self.seed = str(seed)
        self.options = options
        self.physics = options.physics
        self.reference = Reference(options.physics)
        self.rng = random.Random(f"{seed}/faults")
        self.peers = [
            Peer(number, Identity.from_seed(sha256(f"{seed}/{number}/key".encode())))
            for number in range(options.peers)
        ]
        self.manifest = self._make_manifest(options.physics.training)
        self.trace = Trace(whole=options.whole_trace)
        self.trace.names = {peer.identity.peer: peer.name for peer in self.peers}
        self.invariants = Invariants(self.manifest, self.violate)
        self.changed = trio.Event()
        """Set whenever something has become durable; then replaced."""
        self.on_point: Callable[[Process, str], None] | None = None
        """Is told of every point that any daemon reaches (Process.reach)."""
        self._recoveries = 0
        self._rule = self._failure = ""
        self._ending = 0.0

    # --- one run -----------------------------------------------------------------------

    def run(self, scenario: Callable[["World"], Awaitable[None]]) -> Outcome:
        """Live through a scenario. Raises SimulationFailure for what must not be."""
        with (
            seeded_scheduler(f"{self.seed}/scheduler", lambda who: self.violate("livelock", who)),
            _remembered_signatures(),
            shared_work(),
            _scaled_states(self.physics),
            self.trace.logging(),
        ):
            trio.run(self._main, scenario, clock=virtual_clock())
        if self._failure:
            raise SimulationFailure(
                self._rule, self._failure, self.options.replay, self.trace.lines()
            )
        return Outcome(self._ending, self.newest_epoch(), self.trace.lines())

    async def _main(self, scenario: Callable[["World"], Awaitable[None]]) -> None:
        options = self.options
        self.network = SimNetwork(self.seed, self, options.weather, options.country, options.noise)
        self.board = Board()
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            await scenario(self)
            self._end()
        self._ending = trio.current_time()

    def _end(self) -> None:
        """End everything: processes first, since a frozen one would not be cancelled."""
        for peer in self.peers:
            if peer.process is not None:
                peer.process.die()
        self._nursery.cancel_scope.cancel()

    def violate(self, rule: str, text: str) -> None:
        """Something is that must never be: end the simulation."""
        if not self._failure:
            self._rule = rule
            self._failure = f"seed {self.seed}: {rule}: {text}"
            self.trace.add("world", f"VIOLATION {rule}: {text}")
            self._end()

    def note(self, what: str) -> None:
        """Write a line into the trace."""
        self.trace.add("world", what)

    # --- what happens to peers -----------------------------------------------------------

    def start(self, number: int) -> Process:
        """Start a peer's daemon, once more if it has run before."""
        peer = self.peers[number]
        if peer.process is not None and not peer.process.dead:
            raise ValueError(f"{peer.name} runs already")
        disk = peer.disk
        if HARD_STATE not in disk.names:
            disk.names[HARD_STATE] = canonical(HardState())
        boot = int(disk.names.get(BOOT, b"0")) + 1
        disk.names[BOOT] = b"%d" % boot
        process = Process(number, peer.identity.peer, boot)
        process.on_point = self.on_point
        peer.process = process
        peer.leaving = False
        self.note(f"start {process.name}")
        if self.options.watcher is not None:
            self.options.watcher.started(number)
        self._nursery.start_soon(self._live, peer, process)
        return process

    def kill(self, number: int, *, silent: bool = False) -> None:
        """End a peer's daemon as SIGKILL does, or, `silent`, as a power failure of its host."""
        process = self.peers[number].process
        if process is None or process.dead:
            return
        self.note(f"{'power failure of' if silent else 'kill'} {process.name}")
        process.die(silent=silent)
        if silent:
            self.network.unplug(process)
        else:
            self.network.hang_up(process)

    def stop(self, number: int) -> None:
        """Ask a peer's daemon to leave."""
        peer = self.peers[number]
        if peer.daemon is not None and self.is_alive(number):
            self.note(f"stop {peer.name}")
            peer.leaving = True
            peer.daemon.stop()

    def freeze(self, number: int) -> None:
        """Stop scheduling a peer's daemon (SIGSTOP)."""
        process = self.peers[number].process
        if process is not None and not process.dead:
            self.note(f"freeze {process.name}")
            process.freeze()

    def thaw(self, number: int) -> None:
        """Schedule it again (SIGCONT)."""
        process = self.peers[number].process
        if process is not None and process.frozen:
            self.note(f"thaw {process.name}")
            process.thaw()

    def damage(self, number: int) -> None:
        """Let a peer's disk spoil every checkpoint that is on it."""
        disk = self.peers[number].disk
        self.note(f"damage the checkpoints of p{number}: {len(disk.versions)} versions")
        for (lineage, version), held in disk.versions.items():
            disk.damaged |= {(lineage, version, layer) for layer in held.weights}

    def recover(self, number: int) -> None:
        """Let a peer's owner start a new generation of councils with the recovery key."""
        peer = self.peers[number]
        if peer.daemon is None or not self.is_alive(number):
            return
        self._recoveries += 1
        nonce = sha256(f"{self.seed}/{self._recoveries}/recovery".encode())
        try:
            peer.daemon.control.recover(self._recovery_key(), nonce)
        except RecoveryError as error:
            self.note(f"p{number} recovers nothing: {error.what}")
        else:
            self.note(f"p{number} has recovered")

    def hosts(self) -> list[list[int]]:
        """Return who hosts each stage by the newest plan that any peer has; [] before the first."""
        newest = self._newest()
        stages = newest[1].stages if newest is not None and newest[1] is not None else ()
        return [self._numbers([each.peer for each in stage.replicas]) for stage in stages]

    def council(self) -> list[int]:
        """Return who decides what follows the newest plan that any peer has."""
        newest = self._newest()
        return self._numbers(newest[0].council) if newest is not None else [FOUNDER]

    def _newest(self) -> tuple[PlanHeader, PlanBody | None] | None:
        found = [self.invariants.newest(peer.number) for peer in self.peers]
        plans = [plan for plan in found if plan is not None]
        return max(plans, key=lambda plan: (plan[0].generation, plan[0].epoch), default=None)

    def _numbers(self, peers: Sequence[PeerId]) -> list[int]:
        numbers = {peer.identity.peer: peer.number for peer in self.peers}
        return [numbers[peer] for peer in peers]

    def crash_at_save(self, number: int, count: int, *, kept: bool) -> None:
        """Kill a peer's daemon at its `count`th save from now on, before or after it counts."""
        storage = self.peers[number].storage
        if storage is not None:
            storage.crash_at_save(count, kept=kept, crash=lambda: self.kill(number))

    def is_alive(self, number: int) -> bool:
        """Return whether a peer's daemon runs."""
        process = self.peers[number].process
        return process is not None and not process.dead

    def cut(self, left: Sequence[int], right: Sequence[int], *, both: bool = True) -> None:
        """Cut all ways from `left` to `right`, and back if `both`."""
        self.note(f"cut {list(left)} {'<>' if both else '>'} {list(right)}")
        for source, target in _ways(left, right, both):
            self.network.cut(source, target)

    def heal(self, left: Sequence[int], right: Sequence[int]) -> None:
        """Heal all ways between `left` and `right`."""
        self.note(f"heal {list(left)} <> {list(right)}")
        for source, target in _ways(left, right, True):
            self.network.heal(source, target)

    def reset(self, source: int, target: int, after_bytes: int) -> None:
        """Break the streams between two peers after some more bytes of the first."""
        count = self.network.reset(source, target, after_bytes)
        self.note(f"reset {count} streams {source} > {target} after {after_bytes} bytes")

    # --- how it goes -----------------------------------------------------------------------

    def newest_epoch(self) -> int:
        """Return the number of the newest plan that any peer has."""
        found = [self.invariants.newest(peer.number) for peer in self.peers]
        return max((plan[0].epoch for plan in found if plan is not None), default=0)

    def has_ended(self) -> bool:
        """Return whether every living peer knows that the run has ended; checks its weights."""
        alive = [peer.number for peer in self.peers if self.is_alive(peer.number)]
        return bool(alive) and all(self._knows_end(number) for number in alive)

    async def ended(self, within_seconds: float) -> None:
        """Wait until the run has ended everywhere; it is a failure if that takes longer."""
        with trio.move_on_after(within_seconds):
            while not self.has_ended():
                await self.changed.wait()
            return
        states = ", ".join(self._state(peer) for peer in self.peers)
        self.violate("A7", f"not ended {within_seconds:g} s after the last fault: {states}")

    # --- what is seen of the daemons (streams.Tap) --------------------------------------------

    def frame(
        self, sending: bool, process: Process, other: PeerId, number: int, header: bytes
    ) -> None:
        """Note a frame."""
        self.trace.frame(sending, process, other, number, header)
        if sending and number == NUMBER_OF_BEATS:
            self.invariants.beat(process, unpack(header, LeaderBeat))

    def _saved(self, process: Process, name: str, data: bytes) -> None:
        digest = hash_of_body(data) if name in PLACES else sha256(data)
        self.trace.add(process.name, f"   saved {name} {digest.hex()[:8]}")
        self.invariants.saved(process, name, data)
        if self.options.watcher is not None:
            self.options.watcher.saved(process.number)
        self.changed.set()
        self.changed = trio.Event()

    def _written(self, process: Process, version: int, weights: Mapping[int, bytes]) -> None:
        self.trace.add(process.name, f"   wrote version {version} layers {sorted(weights)}")
        if not self.options.checked:
            return
        tensors = self.reference.at(version)
        for layer, data in weights.items():
            if data != self.physics.exported(layer, tensors):
                self.violate("A5", f"{process.name} writes wrong weights of layer {layer}")

    def _knows_end(self, number: int) -> bool:
        newest = self.invariants.newest(number)
        body = newest[1] if newest is not None else None
        if body is None or not body.ended or body.completed is None:
            return False
        if not self.options.checked:
            return True
        wanted = self.reference.layer_hashes(self.physics.training.steps)
        if body.completed.layer_hashes != wanted:
            self.violate("P1", f"p{number}: the run ended with other weights than the plain loop's")
        return True

    def _state(self, peer: Peer) -> str:
        newest = self.invariants.newest(peer.number)
        epoch = newest[0].epoch if newest is not None else 0
        if not self.is_alive(peer.number):
            return f"{peer.name} dead at epoch {epoch}"
        version = peer.executor.version if peer.executor is not None else 0
        return f"{peer.name} at epoch {epoch} version {version}"

    # --- one daemon --------------------------------------------------------------------------

    async def _live(self, peer: Peer, process: Process) -> None:
        """Run one start of a daemon until it ends, however that may be."""
        running.set(process)
        try:
            with process.scope:
                daemon = peer.daemon = self._daemon(peer, process)
                await daemon.run(ready=lambda address: None)
        except BaseExceptionGroup as group:
            self._fell(process, group)
        except SwarmError as error:
            self.trace.add(process.name, f"   exit: {error.what}")
        finally:
            if not process.dead:
                self._exited(peer, process)
            process.ended.set()
            if self.options.watcher is not None:
                self.options.watcher.ended(peer.number)

    def _exited(self, peer: Peer, process: Process) -> None:
        self.trace.add(process.name, "   exit")
        process.die()
        self.network.hang_up(process)

        def again() -> None:
            if peer.process is process:
                self.start(peer.number)

        if not peer.leaving:
            self.network.after(RESTART_SECONDS, again)

    def _fell(self, process: Process, group: BaseExceptionGroup[BaseException]) -> None:
        """A daemon ended with exceptions: legal ones are of a kind that people understand."""
        told, bugs = group.split(SwarmError)
        if bugs is not None and not process.dead:
            if bugs.subgroup(KeyboardInterrupt) is not None:
                raise KeyboardInterrupt
            bugs = bugs.split(trio.Cancelled)[1]
            if bugs is not None:
                text = "".join(traceback.format_exception(bugs))
                self.violate("bug", f"{process.name} crashed\n{text}")
        elif told is not None:
            self.trace.add(process.name, f"   exit: {told}")

    def _daemon(self, peer: Peer, process: Process) -> Daemon:
        options = self.options
        peer.storage = SimStorage(peer.disk, process, self._saved)
        peer.executor = SimExecutor(
            self.physics, self.reference, process, self.violate, self._machine(peer.number)
        )
        draws = random.Random(f"{self.seed}/{process.name}/draws")
        has_data = peer.number not in options.without_data
        outside = Outside(
            transport=SimTransport(self.network, process, f"sim-{peer.number}:{PORT}"),
            storage=peer.storage,
            checkpoints=SimCheckpoints(peer.disk, process, self._written),
            executor=peer.executor,
            source=SimSource(self.physics) if has_data else None,
            start_dht=lambda members: self._start_dht(process),
            draw=draws.random,
            solver=SimSolver() if options.solver else None,
        )
        return Daemon(
            manifest=self.manifest,
            agreement=self._agreement(peer, draws),
            identity=peer.identity,
            boot=process.boot,
            outside=outside,
            settings=Settings(
                addresses=self._addresses(peer.number),
                host_label=f"host-{peer.number}",
                wait_for_peers=options.wait_for_peers or options.peers,
                stages=options.stages,
                place=rule_named(options.rule, f"{self.seed}/{process.name}/rule"),
            ),
        )

    def _machine(self, number: int) -> Machine:
        options = self.options
        if options.machines is not None:
            return options.machines(number)
        speed = options.speeds[number] if number < len(options.speeds) else 1.0
        return Machine(speed, checked=options.checked)

    def _agreement(self, peer: Peer, draws: random.Random) -> Agreement:
        assert peer.storage is not None
        state = load_state(peer.storage) or HardState()
        return Agreement(self.manifest, peer.identity, state, draw=draws.random)

    def _addresses(self, number: int) -> tuple[str, ...]:
        return () if number == FOUNDER else (f"sim-{FOUNDER}:{PORT}",)

    async def _start_dht(self, process: Process) -> Dht:
        await trio.lowlevel.checkpoint()
        return SimDht(self.board, process)

    def _recovery_key(self) -> Identity:
        return Identity.from_seed(sha256(f"{self.seed}/recovery".encode()))

    def _make_manifest(self, training: Training) -> Manifest:
        return Manifest(
            training=training,
            founder=self.peers[FOUNDER].identity.peer,
            recovery=self._recovery_key().peer,
            nonce=sha256(f"{self.seed}/nonce".encode()),
        )


def _ways(left: Sequence[int], right: Sequence[int], both: bool) -> list[tuple[int, int]]:
    there = [(a, b) for a in left for b in right if a != b]
    return there + [(b, a) for a, b in there] if both else there


@contextmanager
def _scaled_states(physics: Physics) -> Iterator[None]:
    """Where the model has costs, ask for states in pieces that stand for the usual ones."""
    asking: tuple[Any, ...] = (donor, state)
    before = [module.CHUNK_BYTES for module in asking]
    if physics.costs is not None:
        for module in asking:
            module.CHUNK_BYTES = STATE_CHUNK_BYTES
    try:
        yield
    finally:
        for module, size in zip(asking, before, strict=True):
            module.CHUNK_BYTES = size


@contextmanager
def _remembered_signatures() -> Iterator[None]:
    """Check every signature once: all peers share the answer, which depends on its bytes only."""
    module: Any = signing
    before = module.Ed25519PublicKey
    known: dict[tuple[bytes, bytes, bytes], bool] = {}

    class Remembering:
        def __init__(self, raw: bytes) -> None:
            self._raw = raw

        @classmethod
        def from_public_bytes(cls, raw: bytes) -> "Remembering":
            return cls(raw)

        def verify(self, signature: bytes, data: bytes) -> None:
            key = (self._raw, signature, sha256(data))
            if key not in known:
                before.from_public_bytes(self._raw).verify(signature, data)
                known[key] = True

    module.Ed25519PublicKey = Remembering
    try:
        yield
    finally:
        module.Ed25519PublicKey = before
