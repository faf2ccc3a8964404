"""The chain of plans: what counts as decided, and what a peer remembers of it.

The rule: V(e), the council named in the header of plan e, alone decides plan e + 1, by the
signatures of a majority over one ballot. A ballot names the council that decides, so any plan can
be checked from an older one that names this council; a peer keeps as many plans as lead from the
genesis to the newest one (*links*, without bodies), not all. The recovery key alone starts a new
generation: its plan is the root of the chain from then on.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from protocol.errors import RemoteProtocolError
from protocol.packing import canonical
from protocol.records import (
    BALLOT_PURPOSE,
    AcceptedPlan,
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
    decode_body,
    decode_record,
    sha256,
)
from protocol.signing import PeerId, verify
from swarm.core.memo import by_identity

HARD_STATE = "agreement"
"""Under which name the hard state is stored."""

RECOVERY_PURPOSE = "recovery"
"""What the recovery key signs a ballot for: a vote of the same key is no recovery."""

COUNCIL_SIZES = (1, 3, 5, 7)

Key = tuple[Generation, int]
"""Generation and epoch of a plan: how plans are ordered."""


class HardState(Record, frozen=True):
    """What a peer must remember across restarts: saved before anything that relies on it."""

    term: Count = 0
    """The highest term that this peer has voted or accepted in, or knows of."""
    voted_for: PeerId = ""
    """Who has this peer's vote in `term`; "" is nobody."""
    accepted: AcceptedPlan | None = None
    """What this voter has accepted for the epoch after the newest."""
    links: tuple[CertifiedPlan, ...] = ()
    """Plans without bodies, each decided by the council of the one before; the last one's decided
    the newest plan. After a recovery its plan is the first."""
    newest: CertifiedPlan | None = None
    """The newest certified plan; None for the genesis."""
    active: CertifiedPlan | None = None
    """The plan that this peer works by; None for the genesis."""

    def with_plans(self, changed: Callable[[CertifiedPlan], CertifiedPlan]) -> "HardState":
        """Return the state with those of its plans changed that have bodies."""
        accepted = self.accepted
        return replace(
            self,
            accepted=accepted and replace(accepted, plan=changed(accepted.plan)),
            newest=self.newest and changed(self.newest),
            active=self.active and changed(self.active),
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """A certified plan, decoded."""

    header: PlanHeader
    body: PlanBody
    proof: CertifiedPlan

    @property
    def key(self) -> Key:
        """Return generation and epoch."""
        return key_of(self.header)


def key_of(header: PlanHeader) -> Key:
    """Return generation and epoch of a plan."""
    return (header.generation, header.epoch)


def genesis(manifest: Manifest) -> Plan:
    """Return plan 0, which every peer derives from the manifest: the founder decides plan 1."""
    body = PlanBody(
        members=(),
        requests=(),
        stages=(),
        feeders=(),
        wiring=(),
        standby=(),
        leavers=(),
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


def majority(council: Sequence[PeerId]) -> int:
    """Return how many members of a council decide."""
    return len(council) // 2 + 1


def legal_council_change(before: Sequence[PeerId], after: Sequence[PeerId]) -> str:
    """Return why the council may not change so from one plan to the next, or "" if it may."""
    old, new = set(before), set(after)
    if len(new) != len(after):
        return "the council names somebody twice"
    if len(after) not in COUNCIL_SIZES:
        return f"a council has 1, 3, 5 or 7 members, not {len(after)}"
    grows = len(after) == len(before) + 2 and old < new
    shrinks = len(after) == len(before) - 2 and new < old
    replaced = len(old - new)
    swaps = len(after) == len(before) and replaced <= max((len(before) - 1) // 2, 0)
    hands_over = len(after) == len(before) == 1
    if grows or shrinks or swaps or hands_over:
        return ""
    return (
        f"a council of {len(before)} may gain two, lose two or replace "
        f"{(len(before) - 1) // 2}, but {len(new - old)} come and {replaced} go"
    )


# --- checking ------------------------------------------------------------------------------


def check_follows(plan: CertifiedPlan, before: PlanHeader) -> PlanHeader:
    """Return the header of `plan` if it could be decided next after `before`; no certificate
    is needed. Raises RemoteProtocolError with the rule that does not hold."""
    header = _check_header(plan, before.run)
    _check_body(plan, header)
    rules = {
        "its generation is its predecessor's": header.generation == before.generation,
        "its epoch follows its predecessor's": header.epoch == before.epoch + 1,
    }
    _check_rules(rules, _name(header))
    _check_link(header, before)
    return header


def check_certificate(plan: CertifiedPlan, known: PlanHeader, manifest: Manifest) -> PlanHeader:
    """Return the header of `plan` if the council of `known` decided it, or the recovery key.

    `known` is the plan before, or an older one that names the same council. Of the body nothing
    is checked. Raises RemoteProtocolError with the rule that does not hold.
    """
    header = _check_header(plan, manifest.run)
    if plan.certificate is None:
        raise RemoteProtocolError(f"{_name(header)} has no certificate")
    ballot = decode_record(plan.certificate.ballot, Ballot)
    _check_ballot(ballot, header)
    if header.generation > known.generation:
        if not is_recovery(plan, manifest):
            raise RemoteProtocolError(f"{_name(header)} is not signed by the recovery key")
        _check_rules({"its council is legal": _is_council(header.council)}, _name(header))
        return header
    rules = {
        "its generation is not an older one": header.generation == known.generation,
        "it is newer than the one known": header.epoch > known.epoch,
    }
    _check_rules(rules, _name(header))
    _check_link(header, known)
    by_known = ballot.council_hash == council_hash(known.council)
    rules = {"the ballot names the council that decides": by_known}
    _check_rules(rules, _certificate_name(header))
    _check_majority(plan.certificate, known.council, header)
    return header


def is_recovery(plan: CertifiedPlan, manifest: Manifest) -> bool:
    """Return whether the recovery key has signed this plan."""
    certificate = plan.certificate
    return certificate is not None and any(
        signer == manifest.recovery
        and verify(signer, RECOVERY_PURPOSE, certificate.ballot, signature)
        for signer, signature in certificate.signatures
    )


def decider_of(plan: CertifiedPlan) -> bytes:
    """Return the hash of the council whose certificate this claims to be.

    Raises RemoteProtocolError if there is none, or it is malformed."""
    if plan.certificate is None:
        raise RemoteProtocolError("a plan without a certificate")
    return decode_record(plan.certificate.ballot, Ballot).council_hash


def open_plan(proof: CertifiedPlan, header: PlanHeader) -> Plan:
    """Return a certified plan, whose certificate was checked, with its body.

    Raises RemoteProtocolError if the body is another's or does not decode."""
    _check_body(proof, header)
    data, body = decode_body(proof.body)
    return Plan(header, body, CertifiedPlan(proof.header, data, proof.certificate))


@by_identity
def hash_of_body(body: bytes) -> bytes:
    """Return SHA-256 of a body's bytes."""
    return sha256(body)


def without_body(plan: CertifiedPlan) -> CertifiedPlan:
    """Return the link: all that is needed to check what follows."""
    return CertifiedPlan(plan.header, b"", plan.certificate)


def checked_chain(
    plans: Sequence[CertifiedPlan], manifest: Manifest
) -> tuple[tuple[CertifiedPlan, ...], Plan]:
    """Return links and newest plan of a whole chain: each plan was decided by the council of the
    one before, the first by the founder or by the recovery key. Raises RemoteProtocolError."""
    known = genesis(manifest).header
    for number, plan in enumerate(plans):
        before, known = known, check_certificate(plan, known, manifest)
        if number and before.generation != known.generation:
            raise RemoteProtocolError("a recovery is the root of its chain")
    return tuple(without_body(plan) for plan in plans[:-1]), open_plan(plans[-1], known)


def links_to(
    council: bytes, links: tuple[CertifiedPlan, ...], newest: Plan, manifest: Manifest
) -> tuple[tuple[CertifiedPlan, ...], PlanHeader] | None:
    """Return the links that lead to the council with this hash, and the header that names it;
    None if it is not known. A council that comes back makes the detour superfluous: there is at
    most one link for every council that there has been."""
    first = genesis(manifest)
    plans = [*links, newest.proof] if newest.header.epoch else []
    headers = [decode_record(plan.header, PlanHeader) for plan in plans]
    if not headers or headers[0].generation == first.header.generation:
        plans, headers = [first.proof, *plans], [first.header, *headers]
    for number, header in enumerate(headers):
        if council_hash(header.council) == council:
            chain = (plan for plan in plans[: number + 1] if plan != first.proof)
            return tuple(without_body(plan) for plan in chain), header
    return None


def check_state(state: HardState, manifest: Manifest) -> tuple[Plan, Plan]:
    """Return the newest and the active plan of a hard state that was read back.

    Raises RemoteProtocolError if the chain does not hold from the genesis on."""
    newest = active = genesis(manifest)
    if state.newest is not None:
        _, newest = checked_chain((*state.links, state.newest), manifest)
    elif state.links or state.active is not None:
        raise RemoteProtocolError("the newest plan is missing")
    if state.active is not None:
        active = open_plan(state.active, _check_header(state.active, manifest.run))
        _check_rules({"it is not newer than certified": active.key <= newest.key}, "active plan")
    if state.accepted is not None:
        check_follows(state.accepted.plan, newest.header)
        decode_record(state.accepted.plan.body, PlanBody)
    return newest, active


def _check_header(plan: CertifiedPlan, run: bytes) -> PlanHeader:
    header = decode_record(plan.header, PlanHeader)
    rules = {
        "its header is in the canonical encoding": canonical(header) == plan.header,
        "the plan is of this run": header.run == run,
        "it is not a genesis": header.kind != "genesis" and header.epoch > 0,
        "it names a predecessor": len(header.predecessor) == 32,
    }
    _check_rules(rules, _name(header))
    return header


def _check_body(plan: CertifiedPlan, header: PlanHeader) -> None:
    of_header = header.body_hash == hash_of_body(plan.body)
    _check_rules({"its body is the one that the header names": of_header}, _name(header))


def _check_link(header: PlanHeader, known: PlanHeader) -> None:
    """A plan that follows `known`, at once or with others of the same council in between."""
    if header.epoch == known.epoch + 1:
        named = header.predecessor == known.hash
        _check_rules({"it names its predecessor": named}, _name(header))
    refusal = legal_council_change(known.council, header.council)
    if refusal:
        raise RemoteProtocolError(f"{_name(header)}: {refusal}")


def _is_council(council: Sequence[PeerId]) -> bool:
    return len(council) in COUNCIL_SIZES and len(set(council)) == len(council)


def _check_ballot(ballot: Ballot, header: PlanHeader) -> None:
    rules = {
        "the ballot is of this run": ballot.run == header.run,
        "the ballot is of this generation": ballot.generation == header.generation,
        "the ballot is of this epoch": ballot.epoch == header.epoch,
        "the ballot names this header": ballot.header_hash == header.hash,
    }
    _check_rules(rules, _certificate_name(header))


def _check_majority(
    certificate: Certificate, council: tuple[PeerId, ...], header: PlanHeader
) -> None:
    signers = {
        peer
        for peer, signature in certificate.signatures
        if peer in council and verify(peer, BALLOT_PURPOSE, certificate.ballot, signature)
    }
    if len(signers) < majority(council):
        raise RemoteProtocolError(
            f"{_certificate_name(header)}: {len(signers)} valid signatures of a council of "
            f"{len(council)}, a majority is needed"
        )


def _check_rules(rules: dict[str, bool], what: str) -> None:
    for rule, holds in rules.items():
        if not holds:
            raise RemoteProtocolError(f"{what}: not so: {rule}")


def _name(header: PlanHeader) -> str:
    return f"plan of epoch {header.epoch}"


def _certificate_name(header: PlanHeader) -> str:
    return f"certificate of epoch {header.epoch}"
