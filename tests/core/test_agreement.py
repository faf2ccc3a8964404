"""The chain of plans: what counts as decided, and what survives a crash.

The invariants A1 to A6 are those of the design: one certified header per epoch, epochs never
decrease, a chain without gaps, and only the council of the plan before decides.
"""

from collections.abc import Callable, Sequence

import msgspec
import pytest

from protocol.errors import RemoteProtocolError
from protocol.packing import canonical, unpack
from protocol.records import (
    BALLOT_PURPOSE,
    Ballot,
    Certificate,
    CertifiedPlan,
    Generation,
    PlanHeader,
    council_hash,
    sha256,
)
from protocol.signing import Identity
from swarm.core.agreement import (
    Adopted,
    Agreement,
    Announce,
    Effect,
    FetchChain,
    HardState,
    Persist,
    Plan,
    check_certificate,
    genesis,
)
from tests.core import plans

FOUNDER, ALICE, BOB, CAROL, DAVE = plans.PEOPLE[:5]
COUNCIL = (ALICE, BOB, CAROL)
MANIFEST = plans.manifest(FOUNDER.peer)
RUN = MANIFEST.run
BODY = plans.body([["a"]])
OTHER_BODY = plans.body([["b"]])

replace = msgspec.structs.replace


def founder(state: HardState | None = None) -> Agreement:
    return Agreement(MANIFEST, FOUNDER, state or HardState())


def persisted(effects: Sequence[Effect]) -> list[HardState]:
    return [effect.state for effect in effects if isinstance(effect, Persist)]


def only_proof(effects: Sequence[Effect]) -> CertifiedPlan:
    [proof] = [effect.proof for effect in effects if isinstance(effect, Announce)]
    return proof


def first_plan_of_three() -> Plan:
    """Return plan 1, in which the founder hands over to a council of three."""
    before = genesis(MANIFEST)
    header = plans.header_after(before.header, BODY, COUNCIL)
    proof = plans.certify(header, BODY, [FOUNDER], [FOUNDER])
    return check_certificate(proof, before, RUN)


PLAN_1 = first_plan_of_three()
HEADER_2 = plans.header_after(PLAN_1.header, OTHER_BODY, COUNCIL)


def plan_2(*signers: Identity) -> CertifiedPlan:
    return plans.certify(HEADER_2, OTHER_BODY, COUNCIL, signers)


# --- certificates -----------------------------------------------------------------------------


@pytest.mark.parametrize("signers", [(ALICE, BOB), (CAROL, BOB), (CAROL, ALICE, BOB)])
def test_a_majority_of_the_council_decides(signers: tuple[Identity, ...]) -> None:
    plan = check_certificate(plan_2(*signers), PLAN_1, RUN)
    assert plan.header == HEADER_2
    assert plan.body == OTHER_BODY


@pytest.mark.parametrize(
    ("signers", "valid"),
    [
        ((), 0),
        ((ALICE,), 1),
        ((ALICE, ALICE, ALICE), 1),  # twice is once
        ((ALICE, DAVE), 1),  # not of the council
        ((DAVE, FOUNDER), 0),  # a council that is no longer
    ],
)
def test_a_minority_does_not_decide(signers: tuple[Identity, ...], valid: int) -> None:
    with pytest.raises(RemoteProtocolError, match=f"{valid} valid signatures of a council of 3"):
        check_certificate(plan_2(*signers), PLAN_1, RUN)


def test_half_of_an_even_council_does_not_decide() -> None:
    before = genesis(MANIFEST)
    header = plans.header_after(before.header, BODY, (ALICE, BOB))
    first = check_certificate(plans.certify(header, BODY, [FOUNDER], [FOUNDER]), before, RUN)
    second = plans.header_after(first.header, BODY, (ALICE, BOB))
    with pytest.raises(RemoteProtocolError, match="1 valid signatures of a council of 2"):
        check_certificate(plans.certify(second, BODY, (ALICE, BOB), [BOB]), first, RUN)
    both = plans.certify(second, BODY, (ALICE, BOB), [BOB, ALICE])
    assert check_certificate(both, first, RUN).header == second


def test_the_new_council_does_not_decide_its_own_plan() -> None:
    header = plans.header_after(genesis(MANIFEST).header, BODY, COUNCIL)
    for decides in ([FOUNDER], list(COUNCIL)):
        proof = plans.certify(header, BODY, decides, COUNCIL)
        with pytest.raises(RemoteProtocolError):
            check_certificate(proof, genesis(MANIFEST), RUN)


def resigned(ballot: Ballot) -> CertifiedPlan:
    """Return plan 2 with signatures of the whole council over another ballot."""
    voted = canonical(ballot)
    signatures = tuple((who.peer, who.sign(BALLOT_PURPOSE, voted)) for who in COUNCIL)
    return CertifiedPlan(canonical(HEADER_2), canonical(OTHER_BODY), Certificate(voted, signatures))


BALLOT = plans.ballot_on(canonical(HEADER_2), HEADER_2, COUNCIL)


@pytest.mark.parametrize(
    ("changed", "rule"),
    [
        ({"run": b"x" * 32}, "the ballot is of this run"),
        ({"generation": Generation(1, b"")}, "the ballot is of this generation"),
        ({"generation": Generation(0, b"n")}, "the ballot is of this generation"),
        ({"epoch": 3}, "the ballot is of this epoch"),
        ({"epoch": 1}, "the ballot is of this epoch"),
        ({"header_hash": PLAN_1.header.hash}, "the ballot names this header"),
        (
            {"council_hash": council_hash((BOB.peer, ALICE.peer, CAROL.peer))},
            "the ballot names the council that decides",
        ),
    ],
)
def test_a_ballot_is_about_this_plan(changed: dict[str, object], rule: str) -> None:
    assert check_certificate(resigned(BALLOT), PLAN_1, RUN).header == HEADER_2
    with pytest.raises(RemoteProtocolError, match=f"epoch 2: not so: {rule}"):
        check_certificate(resigned(replace(BALLOT, **changed)), PLAN_1, RUN)


@pytest.mark.parametrize(
    ("changed", "rule"),
    [
        ({"run": b"x" * 32}, "the plan is of this run"),
        ({"generation": Generation(1, b"")}, "its generation is its predecessor's"),
        ({"epoch": 3}, "its epoch follows its predecessor's"),
        ({"epoch": 1}, "its epoch follows its predecessor's"),
        ({"predecessor": genesis(MANIFEST).header.hash}, "it names its predecessor"),
        ({"predecessor": b""}, "it names its predecessor"),
        ({"body_hash": PLAN_1.header.body_hash}, "its body is the one that the header names"),
        ({"council": ()}, "it has a council"),
        ({"council": (ALICE.peer, BOB.peer, ALICE.peer)}, "its council names nobody twice"),
        ({"kind": "genesis"}, "it is not a genesis"),
    ],
)
def test_a_plan_follows_its_predecessor(changed: dict[str, object], rule: str) -> None:
    """Even if the whole council has signed it."""
    header = replace(HEADER_2, **changed)
    proof = plans.certify(header, OTHER_BODY, COUNCIL, COUNCIL)
    with pytest.raises(RemoteProtocolError, match=f"not so: {rule}"):
        check_certificate(proof, PLAN_1, RUN)


def test_a_header_has_one_encoding() -> None:
    """Else one plan would have two hashes, and two ballots."""
    fields = msgspec.msgpack.decode(canonical(HEADER_2))
    other = msgspec.msgpack.encode(dict(reversed(fields.items())))
    assert unpack(other, PlanHeader) == HEADER_2
    voted = canonical(plans.ballot_on(other, HEADER_2, COUNCIL))
    signatures = tuple((who.peer, who.sign(BALLOT_PURPOSE, voted)) for who in COUNCIL)
    proof = CertifiedPlan(other, canonical(OTHER_BODY), Certificate(voted, signatures))
    with pytest.raises(RemoteProtocolError, match="its header is in the canonical encoding"):
        check_certificate(proof, PLAN_1, RUN)


Tamper = Callable[[CertifiedPlan], CertifiedPlan]


def certificate_of(proof: CertifiedPlan) -> Certificate:
    assert proof.certificate is not None
    return proof.certificate


def with_ballot(proof: CertifiedPlan, ballot: bytes) -> CertifiedPlan:
    return replace(proof, certificate=replace(certificate_of(proof), ballot=ballot))


def with_signatures(
    proof: CertifiedPlan, change: Callable[[str, bytes], tuple[str, bytes]]
) -> CertifiedPlan:
    certificate = certificate_of(proof)
    signatures = tuple(change(*each) for each in certificate.signatures)
    return replace(proof, certificate=replace(certificate, signatures=signatures))


TAMPERED: dict[str, tuple[Tamper, str]] = {
    "no certificate": (lambda p: replace(p, certificate=None), "has no certificate"),
    "body": (lambda p: replace(p, body=canonical(BODY)), "its body is the one"),
    "body byte": (lambda p: replace(p, body=p.body[:-1] + b"\x01"), "its body is the one"),
    "header": (
        lambda p: replace(p, header=canonical(replace(HEADER_2, from_step=1))),
        "the ballot names this header",
    ),
    "term after signing": (
        lambda p: with_ballot(p, canonical(replace(BALLOT, term=2))),
        "0 valid signatures",
    ),
    "signatures": (
        lambda p: with_signatures(p, lambda peer, said: (peer, bytes([said[0] ^ 1]) + said[1:])),
        "0 valid signatures",
    ),
    "short signatures": (
        lambda p: with_signatures(p, lambda peer, said: (peer, said[:32])),
        "0 valid signatures",
    ),
    "signatures of another purpose": (
        lambda p: with_signatures(
            p,
            lambda peer, said: (peer, ALICE.sign("join-request", certificate_of(p).ballot)),
        ),
        "0 valid signatures",
    ),
    "one signature under all names": (
        lambda p: with_signatures(p, lambda peer, said: (peer, certificate_of(p).signatures[0][1])),
        "1 valid signatures",
    ),
    "header is garbage": (lambda p: replace(p, header=b"\xc1"), "PlanHeader does not decode"),
    "ballot is garbage": (lambda p: with_ballot(p, b"\x80"), "Ballot does not decode"),
}


@pytest.mark.parametrize(("tamper", "reason"), TAMPERED.values(), ids=TAMPERED.keys())
def test_what_was_tampered_with_is_refused(tamper: Tamper, reason: str) -> None:
    proof = plan_2(*COUNCIL)
    check_certificate(proof, PLAN_1, RUN)
    with pytest.raises(RemoteProtocolError, match=reason):
        check_certificate(tamper(proof), PLAN_1, RUN)


def test_signatures_of_different_terms_do_not_add_up() -> None:
    early = canonical(replace(BALLOT, term=1))
    late = canonical(replace(BALLOT, term=2))
    signatures = (
        (ALICE.peer, ALICE.sign(BALLOT_PURPOSE, early)),
        (BOB.peer, BOB.sign(BALLOT_PURPOSE, late)),
    )
    for ballot in (early, late):
        proof = CertifiedPlan(
            canonical(HEADER_2), canonical(OTHER_BODY), Certificate(ballot, signatures)
        )
        with pytest.raises(RemoteProtocolError, match="1 valid signatures of a council of 3"):
            check_certificate(proof, PLAN_1, RUN)


def test_a_body_that_does_not_decode_is_refused_however_well_it_is_signed() -> None:
    header = replace(HEADER_2, body_hash=sha256(b"\x90"))
    proof = replace(plans.certify(header, OTHER_BODY, COUNCIL, COUNCIL), body=b"\x90")
    with pytest.raises(RemoteProtocolError, match="PlanBody does not decode"):
        check_certificate(proof, PLAN_1, RUN)


# --- adopting ---------------------------------------------------------------------------------


def test_genesis_is_the_same_for_everybody_and_another_for_another_run() -> None:
    assert genesis(MANIFEST) == genesis(plans.manifest(FOUNDER.peer))
    assert genesis(MANIFEST).header.council == (FOUNDER.peer,)
    assert genesis(MANIFEST).header.hash != genesis(plans.manifest(ALICE.peer)).header.hash


def test_a_certified_plan_is_saved_before_it_is_told_or_adopted() -> None:
    follower = Agreement(MANIFEST, DAVE, HardState())
    effects = follower.handle_certified(PLAN_1.proof, FOUNDER.peer)
    state = HardState(chain=(PLAN_1.proof,))
    assert effects == [Persist(state), Announce(PLAN_1.proof), Adopted(PLAN_1)]
    assert follower.newest == PLAN_1


def test_older_and_known_plans_change_nothing() -> None:
    follower = Agreement(MANIFEST, DAVE, HardState())
    follower.handle_certified(PLAN_1.proof, FOUNDER.peer)
    second = plan_2(ALICE, BOB)
    follower.handle_certified(second, ALICE.peer)
    for old in (PLAN_1.proof, second, plan_2(BOB, CAROL), genesis(MANIFEST).proof):
        assert follower.handle_certified(old, ALICE.peer) == []
    assert follower.newest.header == HEADER_2


def test_who_misses_plans_asks_who_has_a_newer_one() -> None:
    follower = Agreement(MANIFEST, DAVE, HardState())
    second = plan_2(ALICE, BOB)
    assert follower.handle_certified(second, BOB.peer) == [FetchChain(BOB.peer, 0)]
    assert follower.newest == genesis(MANIFEST)
    for proof in (PLAN_1.proof, second):
        follower.handle_certified(proof, BOB.peer)
    assert follower.newest.header == HEADER_2
    assert follower.chain_after(0) == (PLAN_1.proof, second)
    assert follower.chain_after(1) == (second,)
    assert follower.chain_after(2) == ()
    assert follower.chain_after(99) == ()


def test_a_plan_that_is_not_certified_leaves_no_trace() -> None:
    follower = Agreement(MANIFEST, DAVE, HardState(chain=(PLAN_1.proof,)))
    with pytest.raises(RemoteProtocolError):
        follower.handle_certified(plan_2(ALICE), ALICE.peer)
    assert follower.newest == PLAN_1
    effects = follower.handle_certified(plan_2(ALICE, BOB), ALICE.peer)
    assert [state.chain for state in persisted(effects)] == [
        (PLAN_1.proof, plan_2(ALICE, BOB)),
    ]


# --- deciding as the only voter ---------------------------------------------------------------


def test_the_sole_voter_accepts_saves_certifies_saves_and_then_tells() -> None:
    agreement = founder()
    effects = agreement.propose(BODY, kind="planned", from_step=0)
    accepted, adopted, announce, plan = effects
    assert isinstance(accepted, Persist) and isinstance(adopted, Persist)
    assert accepted.state.term == 1 and accepted.state.chain == ()
    assert accepted.state.accepted is not None and accepted.state.accepted.certificate is None
    assert isinstance(announce, Announce) and isinstance(plan, Adopted)
    assert adopted.state == HardState(1, None, (announce.proof,))
    assert plan.plan.body == BODY
    check_certificate(announce.proof, genesis(MANIFEST), RUN)


def test_every_decision_has_a_term_of_its_own() -> None:
    agreement = founder()
    for epoch in (1, 2, 3):
        proof = only_proof(agreement.propose(BODY, kind="planned", from_step=0))
        ballot = unpack(certificate_of(proof).ballot, Ballot)
        assert (ballot.epoch, ballot.term) == (epoch, epoch)
        assert agreement.term == epoch
    assert len(agreement.chain_after(0)) == 3


def test_only_a_council_of_one_decides_alone() -> None:
    for who in (ALICE, FOUNDER):
        agreement = Agreement(MANIFEST, who, HardState(chain=(PLAN_1.proof,)))
        assert not agreement.is_sole_voter
        with pytest.raises(ValueError, match="council of one"):
            agreement.propose(BODY, kind="planned", from_step=0)


def test_the_kind_and_the_step_of_a_plan_are_in_its_header() -> None:
    agreement = founder()
    agreement.propose(BODY, kind="repair", from_step=7)
    header = agreement.newest.header
    assert (header.kind, header.from_step, header.council) == ("repair", 7, (FOUNDER.peer,))


# --- crashes ----------------------------------------------------------------------------------


def test_a_plan_that_was_accepted_before_a_crash_is_completed_unchanged() -> None:
    """A vote may have been seen: another plan in its place would be a second one (A1)."""
    before, *_ = persisted(founder().propose(BODY, kind="repair", from_step=3))
    assert before.accepted is not None
    again = founder(unpack(canonical(before), HardState))
    assert again.newest == genesis(MANIFEST)
    effects = again.propose(OTHER_BODY, kind="planned", from_step=9)
    assert again.newest.body == BODY
    proof = only_proof(effects)
    assert (proof.header, proof.body) == (before.accepted.header, before.accepted.body)
    assert unpack(certificate_of(proof).ballot, Ballot).term == 2  # one vote per term (A4)
    again.propose(OTHER_BODY, kind="planned", from_step=9)
    assert again.newest.body == OTHER_BODY
    assert again.newest.header.epoch == 2


@pytest.mark.parametrize("lost", range(6))
def test_no_crash_between_two_saves_forks_the_chain(lost: int) -> None:
    """Whatever was told before the crash is in the chain after it (A1 to A3)."""
    agreement = founder()
    effects = [
        effect
        for content in (BODY, OTHER_BODY)
        for effect in agreement.propose(content, kind="planned", from_step=0)
    ]
    saved, told = HardState(), []
    for effect in effects[: lost + 2]:
        match effect:
            case Persist(state):
                saved = state
            case Announce(proof):
                told.append(proof)
    again = founder(unpack(canonical(saved), HardState))
    assert again.chain_after(0)[: len(told)] == tuple(told)
    third = plans.body([["c"]])
    again.propose(third, kind="planned", from_step=0)
    again.propose(third, kind="planned", from_step=0)
    assert again.chain_after(0)[: len(told)] == tuple(told)
    assert again.newest.body == third
    assert again.term > len(told)


def test_a_restart_goes_on_from_the_hard_state() -> None:
    agreement = founder()
    states = [
        persisted(agreement.propose(content, kind="planned", from_step=0))[-1]
        for content in (BODY, OTHER_BODY)
    ]
    again = founder(unpack(canonical(states[-1]), HardState))
    assert again.newest == agreement.newest
    assert (again.term, again.is_sole_voter) == (2, True)


def chain_of_three() -> HardState:
    agreement = founder()
    for content in (BODY, OTHER_BODY, BODY):
        effects = agreement.propose(content, kind="planned", from_step=0)
    return persisted(effects)[-1]


CHAIN = chain_of_three().chain


@pytest.mark.parametrize(
    "chain",
    [
        CHAIN[1:],
        (CHAIN[0], CHAIN[2]),
        (CHAIN[1], CHAIN[0], CHAIN[2]),
        (CHAIN[0], CHAIN[0]),
        (*CHAIN[:2], replace(CHAIN[2], certificate=None)),
        (*CHAIN[:2], replace(CHAIN[2], certificate=CHAIN[1].certificate)),
        (*CHAIN[:2], replace(CHAIN[2], body=CHAIN[1].body)),
        (*CHAIN[:2], replace(CHAIN[2], header=CHAIN[2].header[:-1])),
    ],
)
def test_a_damaged_chain_is_not_started_from(chain: tuple[CertifiedPlan, ...]) -> None:
    assert founder(HardState(3, None, CHAIN)).newest.header.epoch == 3
    with pytest.raises(RemoteProtocolError):
        founder(HardState(3, None, chain))


def test_a_chain_of_another_run_is_not_started_from() -> None:
    with pytest.raises(RemoteProtocolError, match="the plan is of this run"):
        Agreement(plans.manifest(ALICE.peer), ALICE, HardState(3, None, CHAIN))


FOURTH_HEADER = plans.header_after(unpack(CHAIN[2].header, PlanHeader), BODY, [FOUNDER])
FOURTH = CertifiedPlan(canonical(FOURTH_HEADER), canonical(BODY), None)
FIFTH = plans.header_after(FOURTH_HEADER, BODY, [FOUNDER])


@pytest.mark.parametrize(
    "accepted",
    [
        CertifiedPlan(b"\xc1", canonical(BODY), None),
        CertifiedPlan(FOURTH.header, b"\xc1", None),
        CertifiedPlan(canonical(FIFTH), canonical(BODY), None),
        CertifiedPlan(CHAIN[2].header, CHAIN[2].body, None),  # of an epoch that is decided
    ],
)
def test_an_accepted_plan_that_cannot_be_completed_is_not_started_from(
    accepted: CertifiedPlan,
) -> None:
    assert founder(HardState(4, FOURTH, CHAIN)).newest.header.epoch == 3
    with pytest.raises(RemoteProtocolError):
        founder(HardState(4, accepted, CHAIN))
