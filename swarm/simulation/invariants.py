"""What must hold after every event (the invariants A1 to A6), seen from outside.

Looks at what peers make durable and at the beats that leaders send. The rule: it checks
certificates with code of its own, and remembers everything that any peer ever held for certified.
"""

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from protocol.messages import LeaderBeat
from protocol.records import (
    BALLOT_PURPOSE,
    Ballot,
    CertifiedPlan,
    Manifest,
    PlanBody,
    PlanHeader,
    council_hash,
    decode_record,
    sha256,
)
from protocol.signing import PeerId, verify
from swarm.core.chain import HARD_STATE, HardState, genesis, hash_of_body
from swarm.peer.keeping import PLACES
from swarm.simulation.process import Process

Violate = Callable[[str, str], None]
MOST_BODIES = 32
"""So many plans are kept, and as many more as peers are at."""
Key = tuple[Any, int]
"""Generation and epoch."""


class Invariants:
    """Everything that was ever certified, voted for and led."""

    def __init__(self, manifest: Manifest, violate: Violate) -> None:
        """`violate(rule, text)` is called for what must not be."""
        self._violate = violate
        self._recovery = manifest.recovery
        root = genesis(manifest)
        self._headers: dict[bytes, PlanHeader] = {root.header.hash: root.header}
        self._by_key: dict[Key, bytes] = {_key(root.header): root.header.hash}
        self._bodies: dict[bytes, PlanBody] = {}
        """By their hashes."""
        self._proofs: set[tuple[bytes, bytes]] = set()
        self._newest: dict[int, PlanHeader] = {}
        self._active: dict[int, Key] = {}
        self._votes: dict[int, tuple[int, PeerId]] = {}
        self._leaders: dict[tuple[Any, int, int], PeerId] = {}

    def newest(self, number: int) -> tuple[PlanHeader, PlanBody | None] | None:
        """Return the newest certified plan that a peer has on its disk; None for the genesis."""
        header = self._newest.get(number)
        return (header, self._bodies.get(header.body_hash)) if header is not None else None

    @property
    def kept_bodies(self) -> int:
        """Return how many plans' bodies are kept."""
        return len(self._bodies)

    def saved(self, process: Process, name: str, data: bytes) -> None:
        """A peer has made something durable."""
        if name in PLACES:
            digest, body = hash_of_body(data), decode_record(data, PlanBody)
            self._keep_body(digest, body)
        if name != HARD_STATE:
            return
        state = decode_record(data, HardState)
        certified = [proof for proof in _plans(state) if proof.certificate is not None]
        certified.sort(key=_key_of_proof)
        for proof in certified:
            self._certified(process, proof)
        self._check_progress(process, state, certified)
        self._check_vote(process, state)

    def beat(self, process: Process, message: LeaderBeat) -> None:
        """A peer leads, or says so."""
        key = (message.generation, message.epoch, message.term)
        leader = self._leaders.setdefault(key, process.peer)
        if leader != process.peer:
            self._violate("A4", f"{process.name} leads {_short(key)}, as does {leader}")

    # --- inside ------------------------------------------------------------------------

    def _keep_body(self, digest: bytes, body: PlanBody) -> None:
        """Keep a body; the oldest that nobody has as its newest plan any more is forgotten."""
        self._bodies[digest] = body
        if len(self._bodies) > MOST_BODIES:
            used = {header.body_hash for header in self._newest.values()}
            for old in list(self._bodies)[:-1]:
                if old not in used:
                    del self._bodies[old]
                    return

    def _certified(self, process: Process, proof: CertifiedPlan) -> None:
        assert proof.certificate is not None
        name = (sha256(proof.header), sha256(proof.certificate.ballot))
        if proof.body:
            self._keep_body(hash_of_body(proof.body), decode_record(proof.body, PlanBody))
        if name in self._proofs:
            return
        self._proofs.add(name)
        header = decode_record(proof.header, PlanHeader)
        key = _key(header)
        first = self._by_key.setdefault(key, header.hash)
        if first != header.hash:
            self._violate("A1", f"{process.name} holds another plan of {_short(key)} for certified")
        before = self._headers.get(header.predecessor)
        self._headers[header.hash] = header
        if before is None:
            self._violate("A3", f"{process.name}: nobody held the predecessor of {_short(key)}")
        else:
            self._check_signatures(process, proof, header, before)

    def _check_signatures(
        self, process: Process, proof: CertifiedPlan, header: PlanHeader, before: PlanHeader
    ) -> None:
        assert proof.certificate is not None
        ballot = decode_record(proof.certificate.ballot, Ballot)
        facts = (ballot.run, ballot.generation, ballot.epoch, ballot.header_hash)
        if facts != (header.run, header.generation, header.epoch, header.hash):
            self._violate("A6", f"{process.name}: the ballot is not of {_short(_key(header))}")
        if header.generation != before.generation:
            signers = {peer for peer, _ in proof.certificate.signatures}
            if self._recovery not in signers:
                self._violate("A6", f"{process.name}: nobody recovered {_short(_key(header))}")
            return
        voters = {
            peer
            for peer, signature in proof.certificate.signatures
            if peer in before.council
            and verify(peer, BALLOT_PURPOSE, proof.certificate.ballot, signature)
        }
        right = ballot.council_hash == council_hash(before.council)
        if not right or 2 * len(voters) <= len(before.council):
            self._violate(
                "A6",
                f"{process.name}: {len(voters)} of {len(before.council)} signed "
                f"{_short(_key(header))}",
            )

    def _check_progress(
        self, process: Process, state: HardState, certified: list[CertifiedPlan]
    ) -> None:
        number = process.number
        newest = decode_record(certified[-1].header, PlanHeader) if certified else None
        known = self._newest.get(number)
        if known is not None and (newest is None or _key(newest) < _key(known)):
            self._violate("A2", f"{process.name} forgets the plan of {_short(_key(known))}")
        if newest is not None:
            self._newest[number] = newest
        active: CertifiedPlan | None = getattr(state, "active", None)
        if active is None:
            if number in self._active:
                self._violate("A2", f"{process.name} forgets its active plan")
            return
        key = _key_of_proof(active)
        if key < self._active.get(number, key):
            self._violate("A2", f"{process.name} goes back to the plan of {_short(key)}")
        self._active[number] = key

    def _check_vote(self, process: Process, state: HardState) -> None:
        voted_for: PeerId = getattr(state, "voted_for", "")
        term, before = self._votes.get(process.number, (0, ""))
        if state.term < term:
            self._violate("A4", f"{process.name} goes back from term {term} to {state.term}")
        if state.term == term and before not in ("", voted_for):
            self._violate("A4", f"{process.name} changes its vote of term {term}")
        self._votes[process.number] = (state.term, voted_for)


def _key(header: PlanHeader) -> Key:
    return (header.generation, header.epoch)


def _key_of_proof(proof: CertifiedPlan) -> Key:
    return _key(decode_record(proof.header, PlanHeader))


def _short(key: tuple[Any, ...]) -> str:
    generation, *rest = key
    return "/".join(str(each) for each in (generation.number, *rest))


def _plans(value: object) -> Iterator[CertifiedPlan]:
    """Return every certified plan somewhere inside a record."""
    if isinstance(value, CertifiedPlan):
        yield value
    elif isinstance(value, tuple):
        for each in value:
            yield from _plans(each)
    elif isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            yield from _plans(getattr(value, name))
