"""What is signed on the way to a certificate: headers, verdicts, ballots.

The rule: a signature is checked over the bytes that were received, and counts for one header in
one epoch (a verdict) or for one header in one term (a ballot).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from protocol.errors import RemoteProtocolError
from protocol.packing import canonical
from protocol.records import (
    BALLOT_PURPOSE,
    VERDICT_PURPOSE,
    Ballot,
    Certificate,
    CertifiedPlan,
    Generation,
    PlanBody,
    PlanHeader,
    Signed,
    Verdict,
    clip,
    council_hash,
    decode_record,
    open_signed,
    sha256,
    sign_record,
)
from protocol.signing import Identity, PeerId, verify
from swarm.core.chain import RECOVERY_PURPOSE, Plan, majority


@dataclass(frozen=True, slots=True)
class Draft:
    """What a leader wants everybody to do next, and who decides after that."""

    body: PlanBody
    kind: Literal["planned", "repair"]
    from_step: int
    lineage: int
    council: tuple[PeerId, ...]


def drafted(draft: Draft, before: PlanHeader, generation: Generation) -> CertifiedPlan:
    """Return the plan, not certified, that would follow `before`."""
    body = canonical(draft.body)
    header = PlanHeader(
        run=before.run,
        generation=generation,
        epoch=before.epoch + 1,
        predecessor=before.hash,
        council=draft.council,
        body_hash=sha256(body),
        kind=draft.kind,
        from_step=draft.from_step,
        lineage=draft.lineage,
    )
    return CertifiedPlan(canonical(header), body, None)


# --- verdicts ------------------------------------------------------------------------------


def sign_verdict(identity: Identity, header: PlanHeader, refusal: str) -> Signed:
    """Return what a voter says about a plan that it has reviewed; "" is good."""
    verdict = Verdict(
        run=header.run,
        generation=header.generation,
        epoch=header.epoch,
        header_hash=header.hash,
        refusal=clip(refusal),
    )
    return sign_record(identity, VERDICT_PURPOSE, verdict)


def check_approved(
    verdicts: Iterable[Signed], header: PlanHeader, council: tuple[PeerId, ...]
) -> None:
    """Raise RemoteProtocolError unless a majority of `council` finds this very plan good."""
    good = {
        signed.signer
        for signed in verdicts
        if signed.signer in council
        and is_about(verdict := open_signed(signed, VERDICT_PURPOSE, Verdict), header)
        and not verdict.refusal
    }
    if len(good) < majority(council):
        raise RemoteProtocolError(
            f"proposal of epoch {header.epoch}: {len(good)} of a council of {len(council)} "
            f"find it good, a majority is needed"
        )


def is_about(verdict: Verdict, header: PlanHeader) -> bool:
    """Return whether a verdict is on this very plan."""
    return (verdict.run, verdict.generation, verdict.epoch, verdict.header_hash) == (
        header.run,
        header.generation,
        header.epoch,
        header.hash,
    )


# --- ballots -------------------------------------------------------------------------------


def ballot_on(header: PlanHeader, council: tuple[PeerId, ...], term: int) -> bytes:
    """Return what a member of `council` signs to accept a plan in `term`."""
    ballot = Ballot(
        run=header.run,
        generation=header.generation,
        epoch=header.epoch,
        term=term,
        header_hash=header.hash,
        council_hash=council_hash(council),
    )
    return canonical(ballot)


def open_ballot(voter: PeerId, ballot: bytes, signature: bytes) -> Ballot:
    """Return a ballot that was received. Raises RemoteProtocolError if `voter` did not sign."""
    if not verify(voter, BALLOT_PURPOSE, ballot, signature):
        raise RemoteProtocolError(f"bad {BALLOT_PURPOSE} signature claimed by {voter}")
    return decode_record(ballot, Ballot)


def certified(
    plan: CertifiedPlan, ballot: bytes, signatures: Mapping[PeerId, bytes]
) -> CertifiedPlan:
    """Return `plan` with the certificate of those who signed `ballot`."""
    votes = tuple(sorted(signatures.items()))
    return CertifiedPlan(plan.header, plan.body, Certificate(ballot, votes))


def recovery_plan(
    recovery: Identity, nonce: bytes, draft: Draft, newest: Plan, term: int
) -> CertifiedPlan:
    """Return a plan that starts a new generation after `newest`, by the recovery key alone."""
    generation = Generation(newest.header.generation.number + 1, nonce)
    plan = drafted(draft, newest.header, generation)
    header = decode_record(plan.header, PlanHeader)
    ballot = ballot_on(header, newest.header.council, term)
    signature = recovery.sign(RECOVERY_PURPOSE, ballot)
    return certified(plan, ballot, {recovery.peer: signature})
