"""The chain of plans: what counts as decided, and what leads from the genesis to it."""

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

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
    decode_record,
    sha256,
)
from swarm.core.ballots import ballot_on, certified, drafted
from swarm.core.chain import (
    RECOVERY_PURPOSE,
    HardState,
    check_certificate,
    check_state,
    checked_chain,
    genesis,
    legal_council_change,
)
from tests.core.agreement_world import (
    IDENTITIES,
    MANIFEST,
    NAMES,
    RECOVERY,
    body,
    draft,
    founded,
    peers_of,
)

replace = msgspec.structs.replace
PLAN_1 = decode_record(founded("ABC")[0].header, PlanHeader)
"""The founder A has handed over to A, B and C."""


def decided(
    before: PlanHeader, council: str, signers: str, number: int = 0, term: int = 1
) -> CertifiedPlan:
    """Return the plan after `before` that names `council`, as `signers` decide it."""
    plan = drafted(draft(council, number), before, before.generation)
    return signed(plan, before, signers, term)


def signed(plan: CertifiedPlan, before: PlanHeader, signers: str, term: int = 1) -> CertifiedPlan:
    ballot = ballot_on(decode_record(plan.header, PlanHeader), before.council, term)
    return with_ballot(plan, ballot, signers)


def with_ballot(plan: CertifiedPlan, ballot: bytes, signers: str = "ABC") -> CertifiedPlan:
    signatures = {
        IDENTITIES[name].peer: IDENTITIES[name].sign(BALLOT_PURPOSE, ballot) for name in signers
    }
    return certified(plan, ballot, signatures)


def header_of(plan: CertifiedPlan) -> PlanHeader:
    return decode_record(plan.header, PlanHeader)


PLAN_2 = decided(PLAN_1, "ABC", "ABC")
HEADER_2 = header_of(PLAN_2)


@pytest.mark.parametrize("signers", ["AB", "CB", "CAB"])
def test_a_majority_of_the_council_decides(signers: str) -> None:
    proof = decided(PLAN_1, "ABC", signers)
    assert check_certificate(proof, PLAN_1, MANIFEST) == HEADER_2


@pytest.mark.parametrize(("signers", "valid"), [("", 0), ("A", 1), ("AD", 1), ("DE", 0)])
def test_a_minority_does_not_decide(signers: str, valid: int) -> None:
    with pytest.raises(RemoteProtocolError, match=f"{valid} valid signatures of a council of 3"):
        check_certificate(decided(PLAN_1, "ABC", signers), PLAN_1, MANIFEST)


def test_one_voter_twice_is_one_voter() -> None:
    proof = decided(PLAN_1, "ABC", "A")
    assert proof.certificate is not None
    twice = replace(proof.certificate, signatures=proof.certificate.signatures * 2)
    with pytest.raises(RemoteProtocolError, match="1 valid signatures"):
        check_certificate(replace(proof, certificate=twice), PLAN_1, MANIFEST)


def test_the_new_council_does_not_decide_its_own_plan() -> None:
    """V(e), named in plan e, alone decides plan e+1."""
    root = genesis(MANIFEST).header
    with pytest.raises(RemoteProtocolError, match="0 valid signatures of a council of 1"):
        check_certificate(decided(root, "ABC", "BC"), root, MANIFEST)


BALLOT = unpack(ballot_on(HEADER_2, PLAN_1.council, 1), Ballot)


@pytest.mark.parametrize(
    ("changed", "rule"),
    [
        ({"run": b"x" * 32}, "the ballot is of this run"),
        ({"generation": Generation(1, b"")}, "the ballot is of this generation"),
        ({"generation": Generation(0, b"n")}, "the ballot is of this generation"),
        ({"epoch": 3}, "the ballot is of this epoch"),
        ({"header_hash": PLAN_1.hash}, "the ballot names this header"),
        ({"council_hash": council_hash(peers_of("BAC"))}, "names the council that decides"),
    ],
)
def test_a_ballot_is_about_this_plan(changed: dict[str, object], rule: str) -> None:
    ballot = canonical(replace(BALLOT, **changed))
    with pytest.raises(RemoteProtocolError, match=rule):
        check_certificate(with_ballot(PLAN_2, ballot), PLAN_1, MANIFEST)


@pytest.mark.parametrize(
    ("changed", "rule"),
    [
        ({"run": b"x" * 32}, "the plan is of this run"),
        ({"generation": Generation(1, b"")}, "not signed by the recovery key"),
        ({"epoch": 1}, "newer than the one known"),
        ({"predecessor": genesis(MANIFEST).header.hash}, "it names its predecessor"),
        ({"predecessor": b""}, "it names a predecessor"),
        ({"council": ()}, "a council has 1, 3, 5 or 7 members, not 0"),
        ({"council": peers_of("ABA")}, "names somebody twice"),
        ({"council": peers_of("DEF")}, "3 come and 3 go"),
        ({"kind": "genesis"}, "it is not a genesis"),
    ],
)
def test_a_plan_follows_its_predecessor(changed: dict[str, object], rule: str) -> None:
    """Even if the whole council has signed it."""
    plan = CertifiedPlan(canonical(replace(HEADER_2, **changed)), PLAN_2.body, None)
    with pytest.raises(RemoteProtocolError, match=rule):
        check_certificate(signed(plan, PLAN_1, "ABC"), PLAN_1, MANIFEST)


def test_a_header_has_one_encoding() -> None:
    """Else one plan would have two hashes, and two ballots."""
    fields = msgspec.msgpack.decode(PLAN_2.header)
    other = msgspec.msgpack.encode(dict(reversed(fields.items())))
    assert unpack(other, PlanHeader) == HEADER_2
    with pytest.raises(RemoteProtocolError, match="its header is in the canonical encoding"):
        check_certificate(replace(PLAN_2, header=other), PLAN_1, MANIFEST)


Tamper = Callable[[Certificate], Certificate]
TAMPERED: dict[str, tuple[Tamper, str]] = {
    "term after signing": (
        lambda c: replace(c, ballot=canonical(replace(BALLOT, term=2))),
        "0 valid signatures",
    ),
    "a bit of each signature": (
        lambda c: replace(
            c, signatures=tuple((p, bytes([s[0] ^ 1]) + s[1:]) for p, s in c.signatures)
        ),
        "0 valid signatures",
    ),
    "short signatures": (
        lambda c: replace(c, signatures=tuple((p, s[:32]) for p, s in c.signatures)),
        "0 valid signatures",
    ),
    "one signature under all names": (
        lambda c: replace(c, signatures=tuple((p, c.signatures[0][1]) for p, _ in c.signatures)),
        "1 valid signatures",
    ),
    "ballot is garbage": (lambda c: replace(c, ballot=b"\x80"), "Ballot does not decode"),
}


@pytest.mark.parametrize(("tamper", "reason"), TAMPERED.values(), ids=TAMPERED.keys())
def test_what_was_tampered_with_is_refused(tamper: Tamper, reason: str) -> None:
    assert PLAN_2.certificate is not None
    with pytest.raises(RemoteProtocolError, match=reason):
        check_certificate(replace(PLAN_2, certificate=tamper(PLAN_2.certificate)), PLAN_1, MANIFEST)


def test_signatures_of_different_terms_do_not_add_up() -> None:
    """All with the same term."""
    early = decided(PLAN_1, "ABC", "A", term=1).certificate
    late = decided(PLAN_1, "ABC", "B", term=2).certificate
    assert early is not None and late is not None
    for ballot in (early.ballot, late.ballot):
        mixed = Certificate(ballot, (*early.signatures, *late.signatures))
        with pytest.raises(RemoteProtocolError, match="1 valid signatures of a council of 3"):
            check_certificate(replace(PLAN_2, certificate=mixed), PLAN_1, MANIFEST)


def test_the_last_plan_of_a_chain_has_its_body_and_the_others_need_none() -> None:
    links = (replace(founded("ABC")[0], body=b""),)
    kept, newest = checked_chain((*links, PLAN_2), MANIFEST)
    assert (kept, newest.header, newest.body) == (links, HEADER_2, body(0))
    for wrong in (b"", canonical(body(1)), b"\x90"):
        with pytest.raises(RemoteProtocolError, match="its body is the one that the header"):
            checked_chain((*links, replace(PLAN_2, body=wrong)), MANIFEST)


def test_a_body_that_does_not_decode_is_refused_however_well_it_is_signed() -> None:
    header = canonical(replace(HEADER_2, body_hash=sha256(b"\x90")))
    proof = signed(CertifiedPlan(header, b"\x90", None), PLAN_1, "ABC")
    with pytest.raises(RemoteProtocolError, match="PlanBody does not decode"):
        checked_chain((*founded("ABC"), proof), MANIFEST)


def test_a_plan_can_be_checked_from_an_older_one_that_names_its_council() -> None:
    third = decided(HEADER_2, "ABC", "BC", 1)
    assert check_certificate(third, PLAN_1, MANIFEST).epoch == 3
    _, newest = checked_chain((*founded("ABC"), third), MANIFEST)
    assert newest.header.epoch == 3


def test_a_chain_without_a_change_of_the_council_does_not_hold() -> None:
    with pytest.raises(RemoteProtocolError, match="the council that decides"):
        checked_chain((PLAN_2,), MANIFEST)


def test_genesis_is_the_same_for_everybody_and_another_for_another_run() -> None:
    assert genesis(MANIFEST).header.council == (MANIFEST.founder,)
    other = replace(MANIFEST, nonce=b"m" * 32)
    assert genesis(MANIFEST).header.hash != genesis(other).header.hash


def test_a_damaged_hard_state_is_refused() -> None:
    [link] = founded("ABC")
    bare = replace(link, body=b"")
    good = HardState(links=(bare,), newest=PLAN_2, active=link)
    newest, active = check_state(good, MANIFEST)
    assert (newest.header, active.header) == (HEADER_2, PLAN_1)
    for bad in (
        replace(good, links=()),
        replace(good, newest=None),
        HardState(newest=link, active=PLAN_2),
    ):
        with pytest.raises(RemoteProtocolError):
            check_state(bad, MANIFEST)


# --- councils ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "legal"),
    [
        ("A", "A", True),
        ("A", "B", True),  # a council of one may hand over
        ("A", "ABC", True),
        ("A", "BCD", False),
        ("ABC", "ABD", True),
        ("ABC", "ADE", False),
        ("ABC", "A", True),
        ("ABC", "D", False),
        ("ABC", "ABCDE", True),
        ("ABC", "ABDEF", False),  # grows and replaces
        ("ABCDE", "ABCFG", True),
        ("ABCDE", "ABEFG", True),
        ("ABCDE", "AB", False),
        ("ABCDE", "A", False),
        ("ABCDEFG", "ABCDE", True),
        ("ABC", "AAB", False),
    ],
)
def test_a_plan_adds_two_removes_two_or_replaces_fewer_than_half(
    before: str, after: str, legal: bool
) -> None:
    assert (legal_council_change(before, after) == "") is legal


councils = st.sampled_from([1, 3, 5, 7]).flatmap(
    lambda size: st.permutations(NAMES).map(lambda names: "".join(names[:size]))
)


@given(councils, councils)
def test_a_change_that_is_legal_keeps_most_of_the_smaller_council(before: str, after: str) -> None:
    if not legal_council_change(before, after) and (len(before), len(after)) != (1, 1):
        kept = set(before) & set(after)
        assert 2 * len(kept) > min(len(before), len(after))


# --- recovery ---------------------------------------------------------------------------------


def recovered(number: int, council: str, *, key: str = "", epoch: int = 9) -> CertifiedPlan:
    plan = drafted(draft(council), HEADER_2, Generation(number, b"r" * 32))
    header = replace(header_of(plan), epoch=epoch)
    plan = replace(plan, header=canonical(header))
    ballot = ballot_on(header, HEADER_2.council, 5)
    who = IDENTITIES[key] if key else RECOVERY
    return certified(plan, ballot, {who.peer: who.sign(RECOVERY_PURPOSE, ballot)})


def test_the_recovery_key_alone_starts_a_generation_of_any_council_at_any_epoch() -> None:
    for epoch in (1, 9):
        proof = recovered(1, "DEF", epoch=epoch)
        assert check_certificate(proof, HEADER_2, MANIFEST).council == peers_of("DEF")
    with pytest.raises(RemoteProtocolError, match="not signed by the recovery key"):
        check_certificate(recovered(1, "DEF", key="A"), HEADER_2, MANIFEST)
    with pytest.raises(RemoteProtocolError, match="its council is legal"):
        check_certificate(recovered(1, "DE"), HEADER_2, MANIFEST)


def test_a_recovery_is_the_root_of_its_chain() -> None:
    root = recovered(1, "DEF")
    follower = decided(header_of(root), "DEF", "DE")
    links, newest = checked_chain((replace(root, body=b""), follower), MANIFEST)
    assert (len(links), newest.header.epoch) == (1, 10)
    with pytest.raises(RemoteProtocolError, match="root of its chain"):
        checked_chain((*founded("ABC"), root, follower), MANIFEST)


def test_an_older_generation_is_refused() -> None:
    root = header_of(recovered(1, "DEF"))
    for older in (PLAN_2, recovered(0, "ABC")):
        with pytest.raises(RemoteProtocolError):
            check_certificate(older, root, MANIFEST)


def test_a_vote_of_the_recovery_key_is_no_recovery() -> None:
    """Its signature counts for this purpose only."""
    proof = recovered(1, "DEF")
    assert proof.certificate is not None
    vote = RECOVERY.sign(BALLOT_PURPOSE, proof.certificate.ballot)
    certificate = replace(proof.certificate, signatures=((RECOVERY.peer, vote),))
    with pytest.raises(RemoteProtocolError, match="not signed by the recovery key"):
        check_certificate(replace(proof, certificate=certificate), HEADER_2, MANIFEST)
