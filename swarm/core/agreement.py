"""One plan per epoch: certificates, the chain of plans, and what a voter persists.

V(e), the council named in the header of plan e, alone decides plan e + 1, by the signatures of
a majority over one ballot. A peer adopts whatever carries a valid certificate of the next epoch
and never goes back. This module is sans-IO: methods return effects, and `Persist` must be
performed (fsync) before any effect that follows it in the list.
"""

from collections.abc import Callable
from dataclasses import dataclass

from protocol.errors import RemoteProtocolError
from protocol.packing import canonical
from protocol.records import (
    BALLOT_PURPOSE,
    Ballot,
    Certificate,
    CertifiedPlan,
    Count,
    Generation,
    Manifest,
    PlanBody,
    PlanHeader,
    Record,
    council_hash,
    decode_record,
    sha256,
)
from protocol.signing import Identity, PeerId, verify

HARD_STATE = "agreement"
"""Under which name the hard state is stored."""


class HardState(Record, frozen=True):
    """What a peer must remember across restarts: saved before anything that relies on it."""

    term: Count = 0
    accepted: CertifiedPlan | None = None
    """The plan that this voter has accepted for the next epoch, not yet known to be certified."""
    chain: tuple[CertifiedPlan, ...] = ()
    """Certified plans after epoch 0, in order."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A certified plan, decoded."""

    header: PlanHeader
    body: PlanBody
    proof: CertifiedPlan


@dataclass(frozen=True, slots=True)
class Persist:
    """Save the hard state durably before performing the effects that follow."""

    state: HardState


@dataclass(frozen=True, slots=True)
class Adopted:
    """A newer plan is certified."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class Announce:
    """Send the certificate to every member."""

    proof: CertifiedPlan


@dataclass(frozen=True, slots=True)
class FetchChain:
    """Ask who sent a newer certificate for the ones in between."""

    peer: PeerId
    after_epoch: int


Effect = Persist | Adopted | Announce | FetchChain


class Agreement:
    """What one peer knows of the chain of plans, and its vote."""

    def __init__(self, manifest: Manifest, identity: Identity, state: HardState) -> None:
        """Start from the hard state. Raises RemoteProtocolError if it does not verify."""
        self._identity = identity
        self._run = manifest.run
        self._state = state
        self._newest = genesis(manifest)
        for proof in state.chain:
            self._newest = check_certificate(proof, self._newest, self._run)
        if state.accepted is not None:
            _check_follows(state.accepted, self._newest.header, self._run)
            decode_record(state.accepted.body, PlanBody)

    @property
    def newest(self) -> Plan:
        """Return the newest certified plan that this peer knows."""
        return self._newest

    @property
    def term(self) -> int:
        """Return the highest term that this peer has voted in."""
        return self._state.term

    @property
    def is_sole_voter(self) -> bool:
        """Return whether this peer alone decides the next plan."""
        return self._newest.header.council == (self._identity.peer,)

    def chain_after(self, epoch: int) -> tuple[CertifiedPlan, ...]:
        """Return the certified plans after `epoch`, in order."""
        return self._state.chain[epoch:]

    def handle_certified(
        self,
        proof: CertifiedPlan,
        sender: PeerId,
        check: Callable[[PlanBody], None] = lambda body: None,
    ) -> list[Effect]:
        """Take in a plan that a peer says is certified; `check` may refuse its body.

        Raises RemoteProtocolError if it is not, or what `check` raises.
        """
        epoch = decode_record(proof.header, PlanHeader).epoch
        if epoch <= self._newest.header.epoch:
            return []
        if epoch > self._newest.header.epoch + 1:
            return [FetchChain(sender, self._newest.header.epoch)]
        plan = check_certificate(proof, self._newest, self._run)
        check(plan.body)
        return self._adopt(plan)

    def propose(self, body: PlanBody, *, kind: str, from_step: int) -> list[Effect]:
        """Decide the next plan as the only voter: accept, persist, certify, adopt.

        A plan that this voter accepted before a crash and did not certify goes first, unchanged.
        """
        if not self.is_sole_voter:
            raise ValueError("only a council of one decides alone")
        accepted = self._state.accepted
        if accepted is None:
            header = PlanHeader(
                run=self._run,
                generation=self._newest.header.generation,
                epoch=self._newest.header.epoch + 1,
                predecessor=self._newest.header.hash,
                council=self._newest.header.council,
                body_hash=sha256(canonical(body)),
                kind="repair" if kind == "repair" else "planned",
                from_step=from_step,
                lineage=self._newest.header.lineage,
            )
            accepted = CertifiedPlan(canonical(header), canonical(body), None)
        self._state = HardState(self._state.term + 1, accepted, self._state.chain)
        return [Persist(self._state), *self._adopt(self._certify(accepted))]

    def _certify(self, accepted: CertifiedPlan) -> Plan:
        header = decode_record(accepted.header, PlanHeader)
        ballot = canonical(
            Ballot(
                run=self._run,
                generation=header.generation,
                epoch=header.epoch,
                term=self._state.term,
                header_hash=sha256(accepted.header),
                council_hash=council_hash(self._newest.header.council),
            )
        )
        signature = self._identity.sign(BALLOT_PURPOSE, ballot)
        certificate = Certificate(ballot, ((self._identity.peer, signature),))
        proof = CertifiedPlan(accepted.header, accepted.body, certificate)
        return check_certificate(proof, self._newest, self._run)

    def _adopt(self, plan: Plan) -> list[Effect]:
        self._newest = plan
        self._state = HardState(self._state.term, None, (*self._state.chain, plan.proof))
        return [Persist(self._state), Announce(plan.proof), Adopted(plan)]


def genesis(manifest: Manifest) -> Plan:
    """Return plan 0, which every peer derives from the manifest: the founder decides plan 1."""
    body = PlanBody(
        members=(),
        stages=(),
        feeders=(),
        wiring=(),
        step_seconds=0.0,
        completed=None,
        ended=False,
        halted="",
        reason="genesis",
    )
    header = PlanHeader(
        run=manifest.run,
        generation=Generation(),
        epoch=0,
        predecessor=b"",
        council=(manifest.founder,),
        body_hash=sha256(canonical(body)),
        kind="genesis",
        from_step=0,
        lineage=0,
    )
    return Plan(header, body, CertifiedPlan(canonical(header), canonical(body), None))


def check_certificate(proof: CertifiedPlan, predecessor: Plan, run: bytes) -> Plan:
    """Return the plan of `proof` if V(predecessor) decided that it follows `predecessor`.

    Raises RemoteProtocolError with the rule that does not hold.
    """
    before = predecessor.header
    header = _check_follows(proof, before, run)
    if proof.certificate is None:
        raise RemoteProtocolError(f"plan of epoch {header.epoch} has no certificate")
    _check_ballot(decode_record(proof.certificate.ballot, Ballot), header, before)
    _check_majority(proof.certificate, before.council, header.epoch)
    return Plan(header, decode_record(proof.body, PlanBody), proof)


def _check_follows(proof: CertifiedPlan, before: PlanHeader, run: bytes) -> PlanHeader:
    header = decode_record(proof.header, PlanHeader)
    rules = {
        "its header is in the canonical encoding": canonical(header) == proof.header,
        "the plan is of this run": header.run == run,
        "its generation is its predecessor's": header.generation == before.generation,
        "its epoch follows its predecessor's": header.epoch == before.epoch + 1,
        "it names its predecessor": header.predecessor == before.hash,
        "its body is the one that the header names": header.body_hash == sha256(proof.body),
        "it has a council": bool(header.council),
        "its council names nobody twice": len(set(header.council)) == len(header.council),
        "it is not a genesis": header.kind != "genesis",
    }
    _check_rules(rules, f"plan of epoch {header.epoch}")
    return header


def _check_ballot(ballot: Ballot, header: PlanHeader, before: PlanHeader) -> None:
    rules = {
        "the ballot is of this run": ballot.run == header.run,
        "the ballot is of this generation": ballot.generation == header.generation,
        "the ballot is of this epoch": ballot.epoch == header.epoch,
        "the ballot names this header": ballot.header_hash == header.hash,
        "the ballot names the council that decides": ballot.council_hash
        == council_hash(before.council),
    }
    _check_rules(rules, f"certificate of epoch {header.epoch}")


def _check_rules(rules: dict[str, bool], what: str) -> None:
    for rule, holds in rules.items():
        if not holds:
            raise RemoteProtocolError(f"{what}: not so: {rule}")


def _check_majority(certificate: Certificate, council: tuple[PeerId, ...], epoch: int) -> None:
    signers = {
        peer
        for peer, signature in certificate.signatures
        if peer in council and verify(peer, BALLOT_PURPOSE, certificate.ballot, signature)
    }
    if 2 * len(signers) <= len(council):
        raise RemoteProtocolError(
            f"certificate of epoch {epoch}: {len(signers)} valid signatures of a council of "
            f"{len(council)}, a majority is needed"
        )
