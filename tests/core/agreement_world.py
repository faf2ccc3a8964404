"""A world of peers that agree: a faulty network, crashes, clocks, and the invariants.

Everything random comes from one seed: a failing seed replays identically, and says how. The
invariants A1 to A4, A6 and A7 are the design's. They are checked from what peers *do* (the effects
that they perform), by code that shares nothing with the code under test.

    python -m tests.core.agreement_world FIRST COUNT [DROP]     runs seeds, prints seeds per second
"""

import contextlib
import functools
import heapq
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec.structs import replace

import protocol.records
import swarm.core.ballots
import swarm.core.chain
from protocol.errors import RemoteProtocolError
from protocol.messages import Accepted, Certified, Propose, RequestVote, Vote
from protocol.packing import canonical
from protocol.records import (
    BALLOT_PURPOSE,
    AcceptedPlan,
    Ballot,
    CertifiedPlan,
    Generation,
    Manifest,
    PlanBody,
    PlanHeader,
    Signed,
    decode_record,
    sha256,
)
from protocol.signing import Identity, PeerId, verify
from swarm.core.agreement import Agreement
from swarm.core.ballots import Draft, ballot_on, certified, drafted
from swarm.core.chain import HardState, genesis, legal_council_change
from swarm.core.effects import Send
from swarm.core.voting import Adopted, Announce, Effect, FetchChain, Leading, Persist, ReviewFailed
from tests.core.plans import training

Key = tuple[Generation, int]
Make = Callable[..., Agreement]
quick_verify = functools.lru_cache(maxsize=1 << 17)(verify)


class QuickIdentity(Identity):
    """Signs as any other; remembers what it has signed, since Ed25519 is deterministic."""

    def __init__(self, name: str, number: int) -> None:
        super().__init__(Identity.from_seed(bytes([number]) * 32).private_key)
        self.name = name
        self.sign = functools.lru_cache(maxsize=1 << 16)(super().sign)  # type: ignore[method-assign]


NAMES = "ABCDEFG"
_by_peer = sorted((QuickIdentity("", n) for n in range(1, 8)), key=lambda who: who.peer)
for _name, _identity in zip(NAMES, _by_peer, strict=True):
    _identity.name = _name
IDENTITIES: dict[str, QuickIdentity] = {who.name: who for who in _by_peer}
"""Named in the order of their peer ids."""
NAME_OF = {who.peer: who.name for who in _by_peer}
RECOVERY = QuickIdentity("recovery", 99)
MANIFEST = Manifest(training(), IDENTITIES["A"].peer, RECOVERY.peer, b"n" * 32)
BODY = genesis(MANIFEST).body


@contextlib.contextmanager
def remembered_signatures() -> Iterator[None]:
    """Check each signature once: `verify` is a function, so its value may be kept."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (protocol.records, swarm.core.ballots, swarm.core.chain):
            patch.setattr(module, "verify", quick_verify)
        yield


def peers_of(names: str) -> tuple[PeerId, ...]:
    return tuple(IDENTITIES[name].peer for name in names)


def names_of(council: Sequence[PeerId]) -> str:
    return "".join(NAME_OF[peer] for peer in council)


def body(number: int) -> PlanBody:
    return replace(BODY, reason=f"plan {number}")


def draft(council: str, number: int = 0) -> Draft:
    return Draft(body(number), "planned", 0, 0, peers_of(council))


def founded(council: str) -> tuple[CertifiedPlan, ...]:
    """Return the plans by which the founder has handed over to a council of 1, 3 or 5."""
    before, plans = genesis(MANIFEST).header, []
    for size in range(3, len(council) + 1, 2):
        plan = drafted(draft(council[:size]), before, Generation())
        header = decode_record(plan.header, PlanHeader)
        ballot = ballot_on(header, before.council, 1)
        voters = [IDENTITIES[name] for name in names_of(before.council)]
        signatures = {who.peer: who.sign(BALLOT_PURPOSE, ballot) for who in voters}
        plans.append(certified(plan, ballot, signatures))
        before = header
    return tuple(plans)


def state_of(plans: tuple[CertifiedPlan, ...]) -> HardState:
    """Return the hard state of a peer that has heard of these plans and done nothing else."""
    agreement = Agreement(MANIFEST, RECOVERY, HardState(), draw=lambda: 0.0)
    agreement.handle_chain(plans, RECOVERY.peer, 0.0, lambda body: None)
    return agreement.hard_state


# --- what must hold -------------------------------------------------------------------------


class Violation(AssertionError):
    """An invariant does not hold."""


@dataclass
class Invariants:
    """What all peers together have done so far, since the world began."""

    certified: dict[Key, PlanHeader] = field(default_factory=dict)
    ballots: dict[tuple[Key, int, bytes], set[PeerId]] = field(
        default_factory=lambda: defaultdict(set)
    )
    chosen: dict[Key, bytes] = field(default_factory=dict)
    proposed: dict[tuple[Key, int], bytes] = field(default_factory=dict)
    leaders: dict[tuple[Key, int], PeerId] = field(default_factory=dict)
    votes: dict[tuple[PeerId, int], PeerId] = field(default_factory=dict)
    electors: dict[tuple[Key, int, PeerId], set[PeerId]] = field(
        default_factory=lambda: defaultdict(set)
    )
    newest: dict[PeerId, Key] = field(default_factory=dict)
    active: dict[PeerId, Key] = field(default_factory=dict)
    _proofs: set[bytes] = field(default_factory=set)

    def __post_init__(self) -> None:
        root = genesis(MANIFEST).header
        self.certified[(root.generation, 0)] = root

    def saw(self, peer: PeerId, effect: Effect) -> None:
        """Take in what a peer does."""
        match effect:
            case Persist(state):
                self._saw_state(peer, state)
            case Send(_, Accepted() as said):
                ballot = decode_record(said.ballot, Ballot)
                self._ballot(peer, (ballot.generation, ballot.epoch), ballot.term, ballot)
            case Send(_, RequestVote() as said):
                self._vote(peer, said, peer)
            case Send(candidate, Vote() as said):
                self._vote(peer, said, candidate)
            case Send(_, Propose() as said):
                header = decode_record(said.plan.header, PlanHeader)
                self._propose((header.generation, header.epoch), said.term, header.hash)
            case Send(_, Certified(plan=plan)) | Announce(plan):
                self._certificate(plan)
            case Adopted(plan):
                self._certificate(plan.proof)
                self._grew(self.newest, peer, plan.key, "certified")

    def saw_node(self, peer: PeerId, agreement: Agreement) -> None:
        """Look at a peer after an event."""
        if not agreement.is_leader:
            return
        key, term = agreement.newest.key, agreement.term
        if self.leaders.setdefault((key, term), peer) != peer:
            raise Violation(f"A4: two leaders of epoch {key[1]}, term {term}")
        electors = self.electors[(key, term, peer)] | {peer}
        council = set(agreement.newest.header.council)
        if 2 * len(electors & council) <= len(council):
            raise Violation(
                f"A4: {NAME_OF[peer]} leads epoch {key[1]}, term {term} of "
                f"{names_of(agreement.newest.header.council)} with votes of "
                f"{names_of(sorted(electors))}"
            )

    def restarted(self, peer: PeerId, agreement: Agreement) -> None:
        """Look at what a peer knows after a restart."""
        self._grew(self.newest, peer, agreement.newest.key, "certified")
        self._grew(self.active, peer, agreement.active.key, "active")

    def _saw_state(self, peer: PeerId, state: HardState) -> None:
        if state.newest is not None:
            header = self._certificate(state.newest)
            self._grew(self.newest, peer, (header.generation, header.epoch), "certified")
        if state.active is not None:
            header = decode_record(state.active.header, PlanHeader)
            self._grew(self.active, peer, (header.generation, header.epoch), "active")
        if state.accepted is not None:
            self._accepted(peer, state.accepted)

    def _accepted(self, peer: PeerId, accepted: AcceptedPlan) -> None:
        header = decode_record(accepted.plan.header, PlanHeader)
        key = (header.generation, header.epoch)
        self._propose(key, accepted.term, header.hash)
        self._chosen(peer, key, accepted.term, header.hash)

    def _ballot(self, peer: PeerId, key: Key, term: int, ballot: Ballot) -> None:
        self._propose(key, term, ballot.header_hash)
        self._chosen(peer, key, term, ballot.header_hash)

    def _propose(self, key: Key, term: int, header_hash: bytes) -> None:
        if self.proposed.setdefault((key, term), header_hash) != header_hash:
            raise Violation(f"two plans of epoch {key[1]} in term {term}")

    def _chosen(self, peer: PeerId, key: Key, term: int, header_hash: bytes) -> None:
        voters = self.ballots[(key, term, header_hash)]
        voters.add(peer)
        council = set(self.certified[(key[0], key[1] - 1)].council)
        decided = 2 * len(voters & council) > len(council)
        if decided and self.chosen.setdefault(key, header_hash) != header_hash:
            raise Violation(f"A1: two plans decided in epoch {key[1]}")

    def _vote(self, peer: PeerId, said: RequestVote | Vote, candidate: PeerId) -> None:
        if self.votes.setdefault((peer, said.term), candidate) != candidate:
            raise Violation(f"A4: {NAME_OF[peer]} votes twice in term {said.term}")
        self.electors[((said.generation, said.epoch), said.term, candidate)].add(peer)

    def _grew(self, known: dict[PeerId, Key], peer: PeerId, key: Key, what: str) -> None:
        if key < known.get(peer, key):
            raise Violation(f"A2: {what} epoch of {NAME_OF[peer]} goes back to {key[1]}")
        known[peer] = key

    def _certificate(self, proof: CertifiedPlan) -> PlanHeader:
        header = decode_record(proof.header, PlanHeader)
        key = (header.generation, header.epoch)
        if self.certified.get(key, header) != header:
            raise Violation(f"A1: two certified plans of epoch {header.epoch}")
        if proof.certificate is None or proof.certificate.ballot in self._proofs:
            return header
        before = self.certified.get((header.generation, header.epoch - 1))
        if before is None and self._is_recovery(proof):
            self.certified[key] = header
            return header
        if before is None or header.predecessor != sha256(canonical(before)):
            raise Violation(f"A3: nobody has certified what epoch {header.epoch} follows")
        signers = {
            peer
            for peer, signature in proof.certificate.signatures
            if quick_verify(peer, BALLOT_PURPOSE, proof.certificate.ballot, signature)
        }
        if 2 * len(signers & set(before.council)) <= len(before.council):
            raise Violation(f"A6: {names_of(sorted(signers))} decided epoch {header.epoch}")
        self._proofs.add(proof.certificate.ballot)
        self.certified[key] = header
        return header

    def _is_recovery(self, proof: CertifiedPlan) -> bool:
        certificate = proof.certificate
        return certificate is not None and any(
            signer == RECOVERY.peer
            and quick_verify(signer, "recovery", certificate.ballot, signature)
            for signer, signature in certificate.signatures
        )


# --- the world ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Beat:
    """What LeaderBeat and Heartbeat say about agreement."""

    from_leader: bool
    generation: Generation
    epoch: int
    term: int


@dataclass(frozen=True)
class Get:
    generation: Generation
    epoch: int


@dataclass(frozen=True)
class Chain:
    plans: tuple[CertifiedPlan, ...]


@dataclass
class Faults:
    """Probabilities, per message or per effect."""

    drop: float = 0.0
    duplicate: float = 0.0
    slow: float = 0.0
    crash: float = 0.0
    refuse: float = 0.15


@dataclass
class Node:
    identity: QuickIdentity
    disk: HardState
    agreement: Agreement | None = None
    clock: float = 0.0
    """How far its clock is from the world's."""
    drafts_at: float = 0.0
    """When its driver has a new plan."""

    @property
    def up(self) -> Agreement:
        assert self.agreement is not None
        return self.agreement


BEAT_SECONDS = 0.5


class World:
    """Peers, what is on its way between them, and what may go wrong."""

    def __init__(
        self,
        rng: random.Random,
        *,
        peers: str = "ABC",
        council: str = "ABC",
        faults: Faults | None = None,
        make: Make = Agreement,
        fixed_council: bool = False,
        recovers: bool = False,
    ) -> None:
        self.rng = rng
        self.make = make
        self.faults = faults or Faults()
        self.fixed_council = fixed_council
        self.recovers = recovers
        self.invariants = Invariants()
        self.now = 0.0
        self.cut: set[tuple[str, str]] = set()
        self.drafts = 0
        self.events = 0
        self.log: list[tuple[float, str, object]] = []
        self._queue: list[tuple[float, int, str, str, object]] = []
        self._sent = 0
        for plan in founded(council):
            self.invariants._certificate(plan)
        disk = state_of(founded(council))
        self.nodes = {name: Node(IDENTITIES[name], disk) for name in peers}
        for name in peers:
            self.restart(name)
        self._push(BEAT_SECONDS, "", "", "beats")

    # --- what a test may do ---

    @property
    def up(self) -> list[str]:
        return [name for name, node in self.nodes.items() if node.agreement is not None]

    def crash(self, name: str) -> None:
        """All that was not saved is lost."""
        lost = self.nodes[name]
        lost.agreement = None
        self._note(name, "CRASH")
        for node in self.nodes.values():
            if node.agreement is not None and self.rng.random() < 0.5:
                node.agreement.lost_leader(lost.identity.peer, self.now + node.clock)

    def restart(self, name: str) -> None:
        node = self.nodes[name]
        node.agreement = self.make(MANIFEST, node.identity, node.disk, draw=self.rng.random)
        self._note(name, "START")
        self.invariants.restarted(node.identity.peer, node.agreement)
        self._perform(name, node.agreement.start(self.now + node.clock))

    def heal(self) -> None:
        """No fault from now on; who is down comes up again."""
        self.cut.clear()
        self.faults = Faults(refuse=self.faults.refuse)
        self._note("", "HEALED")
        for name, node in self.nodes.items():
            if node.agreement is None:
                self.restart(name)

    def step(self) -> None:
        """Let the next thing happen, whatever it is, and check the invariants."""
        name, at = self._next_timer()
        if at <= self._queue[0][0]:
            self.now = max(self.now, at)
            node = self.nodes[name]
            local = self.now + node.clock + 1e-9  # sums of floats round
            if node.up.may_lead and not node.up.is_reviewing and local >= node.drafts_at:
                self.lead(name)
            else:
                self._perform(name, node.up.expire(local))
        else:
            self.now, _, source, name, message = heapq.heappop(self._queue)
            self._deliver(source, name, message)
        self.check()

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.step()

    def lead(self, name: str) -> None:
        """Have a leader review another plan, with a legal council."""
        node = self.nodes[name]
        self.drafts += 1
        council = names_of(node.up.newest.header.council)
        changed = council if self.fixed_council else self._new_council(council)
        plan = draft(changed, self.drafts)
        self._note(name, f"drafts plan {self.drafts} with {changed} after {council}")
        node.drafts_at = self.now + node.clock + self.rng.uniform(0.0, 1.0)
        self._perform(name, node.up.lead(plan, self.now + node.clock, self.judge))

    def recover(self, name: str) -> None:
        """Start a new generation from what one peer knows, with a council of any size."""
        node = self.nodes[name]
        pool = list(self.nodes)
        size = self.rng.choice([s for s in (1, 3, 5) if s <= len(pool)])
        council = "".join(sorted(self.rng.sample(pool, size)))
        self.drafts += 1
        self._note(name, f"RECOVERS with {council}")
        plan = draft(council, self.drafts)
        proof = node.up.recovery_plan(RECOVERY, self.rng.randbytes(32), plan)
        now = self.now + node.clock
        self._perform(name, node.up.handle_certified(proof, RECOVERY.peer, now, _no_check))

    def judge(self, header: PlanHeader, content: PlanBody, evidence: tuple[Signed, ...]) -> str:
        return "I do not like it" if self.rng.random() < self.faults.refuse else ""

    def check(self) -> None:
        self.events += 1
        for node in self.nodes.values():
            if node.agreement is not None:
                self.invariants.saw_node(node.identity.peer, node.agreement)

    def transcript(self, last: int = 120) -> str:
        lines = [f"{at:8.3f} {name or '*'} {_readable(what)}" for at, name, what in self.log]
        left_out = len(lines) - last
        head = [f"... {left_out} lines before"] if left_out > 0 else []
        return "\n".join((*head, *lines[-last:]))

    # --- what happens by itself ---

    def _next_timer(self) -> tuple[str, float]:
        soonest, who = float("inf"), ""
        for name, node in self.nodes.items():
            if node.agreement is None:
                continue
            at = node.agreement.deadline
            if node.agreement.may_lead and not node.agreement.is_reviewing:
                at = min(at, node.drafts_at)
            if at - node.clock < soonest:
                soonest, who = at - node.clock, name
        return who, soonest

    def _deliver(self, source: str, name: str, message: object) -> None:
        if message == "beats":
            self._beats()
            return
        node = self.nodes[name]
        if (source, name) in self.cut or node.agreement is None:
            return
        self._note(name, (source, message))
        try:
            effects = self._handle(source, node, message)
        except RemoteProtocolError as error:
            raise Violation(f"{name} takes what {source} says for a lie: {error}") from error
        self._perform(name, effects)

    def _handle(self, source: str, node: Node, message: Any) -> list[Effect]:
        sender, now = IDENTITIES[source].peer, self.now + node.clock
        agreement = node.up
        match message:
            case Beat(from_leader, generation, epoch, term):
                heard = agreement.heard_leader if from_leader else agreement.heard_follower
                return heard(sender, generation, epoch, term, now)
            case Get(generation, epoch):
                self._send(
                    node.identity.name, source, Chain(agreement.chain_for(generation, epoch))
                )
                return []
            case Chain(plans):
                return agreement.handle_chain(plans, sender, now, _no_check)
            case Certified(plan=plan):
                return agreement.handle_certified(plan, sender, now, _no_check)
        return agreement.handle(sender, message, now, self.judge)

    def _perform(self, name: str, effects: list[Effect]) -> None:
        node = self.nodes[name]
        for effect in effects:
            if node.agreement is None:
                return
            if self.faults.crash and self.rng.random() < self.faults.crash:
                self.crash(name)
                return
            self._note(name, effect)
            self.invariants.saw(node.identity.peer, effect)
            self._perform_one(name, node, effect)

    def _perform_one(self, name: str, node: Node, effect: Effect) -> None:
        match effect:
            case Persist(state):
                node.disk = state
            case Send(peer, message):
                self._send(name, NAME_OF[peer], message)
            case Announce(proof):
                for other in self.nodes:
                    if other != name:
                        self._send(name, other, Certified(plan=proof))
            case FetchChain(peer):
                self._send(name, NAME_OF[peer], Get(*node.up.newest.key))
            case Leading() | ReviewFailed():
                node.drafts_at = self.now + node.clock + self.rng.uniform(0.0, 1.0)
            case Adopted(plan) if self.rng.random() < 0.5:
                self._perform(name, node.up.activate(plan))

    def _beats(self) -> None:
        for name in self.up:
            agreement = self.nodes[name].up
            generation, epoch = agreement.newest.key
            if agreement.is_leader:
                beat = Beat(True, generation, epoch, agreement.term)
                hearers = set(self.nodes)
            else:
                leader = agreement.leader
                term = agreement._leader[1] if agreement._leader is not None else 0
                beat = Beat(False, generation, epoch, term)
                hearers = set(names_of(agreement.newest.header.council))
                hearers |= {NAME_OF[leader]} if leader is not None else set()
            for other in sorted(hearers - {name}):
                self._send(name, other, beat)
        self._push(BEAT_SECONDS, "", "", "beats")

    def _send(self, source: str, name: str, message: object) -> None:
        for _ in range(2 if self.rng.random() < self.faults.duplicate else 1):
            if self.rng.random() < self.faults.drop or (source, name) in self.cut:
                continue
            slow = self.rng.random() < self.faults.slow
            self._push(self.rng.uniform(0.005, 4.0 if slow else 0.06), source, name, message)

    def _push(self, delay: float, source: str, name: str, message: object) -> None:
        self._sent += 1
        heapq.heappush(self._queue, (self.now + delay, self._sent, source, name, message))

    def _note(self, name: str, what: object) -> None:
        self.log.append((self.now, name, what))

    def _new_council(self, council: str) -> str:
        """Return a legal next council among the peers; it often stays."""
        if self.rng.random() < 0.3:
            return council
        pool = list(self.nodes)
        for _ in range(20):
            size = self.rng.choice([s for s in (1, 3, 5, 7) if s <= len(pool)])
            chosen = "".join(sorted(self.rng.sample(pool, size)))
            if not legal_council_change(peers_of(council), peers_of(chosen)):
                return chosen
        return council


def _no_check(content: PlanBody) -> None:
    """Accept any content: it is not what is tested here."""


def _readable(what: object) -> str:
    match what:
        case (source, message):
            return f"<- {source}: {_readable(message)}"
        case Send(peer, message):
            return f"   -> {NAME_OF[peer]}: {_readable(message)}"
        case Persist(state):
            return f"   saves term {state.term}, vote {NAME_OF.get(state.voted_for, '-')}, " + (
                f"accepted {_plan(state.accepted.plan)} of term {state.accepted.term}"
                if state.accepted is not None
                else "nothing accepted"
            )
        case Announce(plan) | Certified(plan=plan):
            return f"{type(what).__name__} {_plan(plan)}"
        case Adopted(plan):
            return f"   adopts {_plan(plan.proof)}"
        case FetchChain(peer):
            return f"   fetches the chain from {NAME_OF[peer]}"
        case Chain(plans):
            return f"Chain {', '.join(map(_plan, plans))}"
        case Vote(accepted=AcceptedPlan() as accepted) as vote:
            told = f"{_plan(accepted.plan)} of term {accepted.term}"
            return f"Vote e{vote.epoch} t{vote.term}, accepted {told}"
        case Beat() | Get() | str():
            return str(what)
    epoch, term = getattr(what, "epoch", ""), getattr(what, "term", "")
    about = getattr(what, "plan", None)
    more = f" {_plan(about)}" if about is not None else ""
    if hasattr(what, "granted"):
        more += f" granted={what.granted}"
    if epoch == "":
        return f"   {what}"
    return f"{type(what).__name__} e{epoch} t{term}{more}"


def _plan(plan: CertifiedPlan) -> str:
    header = decode_record(plan.header, PlanHeader)
    where = f"e{header.epoch}" + (
        f"g{header.generation.number}" if header.generation.number else ""
    )
    return f"{where}:{header.hash.hex()[:6]}({names_of(header.council)})"


# --- one seed -------------------------------------------------------------------------------

FAULTY_SECONDS = 40.0
LIVE_SECONDS = 60.0
"""Fifteen of the longest election timeouts: within them two plans are certified (A7)."""


def run_seed(seed: int, make: Make = Agreement, drop: float | None = None) -> World:
    """Run one world: faults, then none. With `drop`, five voters lose so many messages, and the
    council stays. Raises AssertionError with the transcript."""
    rng = random.Random(seed)
    council = rng.choice(["A", "ABC", "ABC", "ABCDE"]) if drop is None else "ABCDE"
    count = max(len(council), rng.choice([3, 4, 5, 6, 7]))
    with remembered_signatures():
        faults = Faults(
            drop=rng.choice([0.0, 0.05, 0.2]) if drop is None else drop,
            duplicate=rng.choice([0.0, 0.1]),
            slow=rng.choice([0.0, 0.1, 0.3]),
            crash=rng.choice([0.0, 0.003, 0.02]),
        )
        world = World(
            rng,
            peers=NAMES[:count],
            council=council,
            faults=faults,
            make=make,
            fixed_council=drop is not None,
            recovers=drop is None and rng.random() < 0.15,
        )
        try:
            _trouble(world)
            _recover(world)
        except AssertionError as error:
            again = f"python -m tests.core.agreement_world {seed} 1 {'' if drop is None else drop}"
            raise AssertionError(f"{error}\n{world.transcript()}\nreplay: {again}") from error
    return world


def _trouble(world: World) -> None:
    while world.now < FAULTY_SECONDS:
        world.run(world.rng.expovariate(1.0))
        down = [name for name in world.nodes if name not in world.up]
        match world.rng.randrange(8):
            case 0:
                _partition(world)
            case 1:
                world.cut.clear()
            case 2:
                ends = world.rng.sample(list(world.nodes), 2)
                world.cut.add((ends[0], ends[1]))
            case 3 if world.up and world.faults.crash:
                world.crash(world.rng.choice(world.up))
            case 4 if world.up:
                world.nodes[world.rng.choice(world.up)].clock += world.rng.uniform(0.0, 10.0)
            case 5:
                leaders = [name for name in world.up if world.nodes[name].up.may_lead]
                if leaders:
                    world.lead(world.rng.choice(leaders))
            case 6 if world.up and world.recovers and world.rng.random() < 0.5:
                world.recover(world.rng.choice(world.up))
            case _ if down:
                world.restart(world.rng.choice(down))


def _partition(world: World) -> None:
    side = {name for name in world.nodes if world.rng.random() < 0.5}
    world.cut = {(a, b) for a in world.nodes for b in world.nodes if (a in side) is not (b in side)}


def _recover(world: World) -> None:
    world.heal()
    before = max(node.up.newest.key for node in world.nodes.values())
    healed_at = world.now
    while world.now < healed_at + LIVE_SECONDS:
        world.step()
        newest = min(node.up.newest.key for node in world.nodes.values())
        if newest >= (before[0], before[1] + 2):
            return
    raise Violation(f"A7: not two plans more in {LIVE_SECONDS:.0f} s without faults")


def main(first: int, count: int, drop: float | None = None) -> None:
    started = time.perf_counter()
    events = epochs = 0
    slowest = 0.0
    for seed in range(first, first + count):
        world = run_seed(seed, drop=drop)
        events += world.events
        epochs += max(key[1] for key in world.invariants.certified)
        slowest = max(slowest, world.now)
    seconds = time.perf_counter() - started
    print(
        f"seeds={count} events={events} epochs={epochs} longest_s={slowest:.0f} "
        f"seeds_per_second={count / seconds:.1f}"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *map(float, sys.argv[3:]))
