"""When the leader has been told enough: by how many, and by whom."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.records import Member, PlanHeader
from protocol.signing import Identity
from swarm.core.chain import genesis
from swarm.core.evidence import (
    OBSERVATION_SECONDS,
    OBSERVERS,
    REPORT_MISSING,
    RESUME_MISSING,
    Evidence,
)
from tests.core.plans import PEOPLE, manifest, observation

BEFORE: PlanHeader = genesis(manifest()).header
LEADER = PEOPLE[0].peer
MEMBERS = [Member(who.peer, 1) for who in PEOPLE[:6]]


def told(*words: tuple[int, int], reason: str = "is silent", at: float = 0.0) -> Evidence:
    """Return what the leader knows after each (observer, target)."""
    evidence = Evidence(LEADER)
    evidence.begin_epoch(PEOPLE[1].peer)
    for by, of in words:
        signed = observation(PEOPLE[by], MEMBERS[of], BEFORE, reason)
        evidence.add(PEOPLE[by].peer, MEMBERS[of], signed, at)
    return evidence


def gone(
    evidence: Evidence, members: int, now: float = 0.0, sure: tuple[int, ...] = ()
) -> list[int]:
    found = evidence.gone(MEMBERS[:members], {MEMBERS[n]: "has left" for n in sure}, now)
    return [MEMBERS.index(member) for member in found]


@pytest.mark.parametrize(
    ("members", "words", "expected"),
    [
        # two observers; the leader is one
        (4, [(0, 3)], []),
        (4, [(0, 3), (1, 3)], [3]),
        (4, [(1, 3), (2, 3)], [3]),
        # two members: the leader alone
        (2, [(0, 1)], [1]),
        # whom the leader does not reach does not count, and is not waited for
        (3, [(0, 1), (0, 2)], [1, 2]),
        (4, [(0, 3), (0, 2), (2, 3)], []),
        (4, [(0, 3), (0, 2), (2, 3), (1, 3)], [3]),
        # accusing each other does not make two
        (4, [(0, 3), (3, 2), (0, 2), (2, 3)], []),
        (3, [(1, 2), (2, 1)], []),
        # nor is who is given up itself a witness
        (5, [(0, 2), (1, 2), (3, 1), (4, 1)], [1]),
        (5, [(0, 2), (1, 2), (3, 1), (4, 1), (3, 2)], [1, 2]),
        # one's own word
        (4, [(3, 3)], [3]),
        # nobody speaks against the leader but itself
        (4, [(1, 0), (2, 0)], []),
    ],
)
def test_who_is_gone(members: int, words: list[tuple[int, int]], expected: list[int]) -> None:
    assert gone(told(*words), members) == expected


def test_who_is_surely_gone_is_no_observer() -> None:
    assert gone(told((1, 3), (2, 3)), 4, sure=(2,)) == [2]
    assert gone(told((0, 1)), 3, sure=(2,)) == [1, 2]


def test_the_step_coordinator_alone_tells_of_missing_reports() -> None:
    assert gone(told((1, 3), reason=REPORT_MISSING), 5) == [3]
    assert gone(told((2, 3), reason=REPORT_MISSING), 5) == []


def test_an_observation_counts_for_a_while_and_for_one_epoch() -> None:
    evidence = told((0, 3), (1, 3), at=10.0)
    assert gone(evidence, 4, 10.0 + OBSERVATION_SECONDS) == [3]
    assert gone(evidence, 4, 10.1 + OBSERVATION_SECONDS) == []
    assert gone(told((3, 3)), 4, 100.0) == [3]  # one's own word is not taken back
    evidence.begin_epoch("")
    assert gone(evidence, 4, 10.0) == []
    assert evidence.of(MEMBERS[3]) == ()


def test_a_word_that_is_taken_back_does_not_count() -> None:
    evidence = told((0, 3), (1, 3))
    evidence.withdraw(LEADER, MEMBERS[3])
    evidence.withdraw(LEADER, MEMBERS[2])
    assert gone(evidence, 4) == []
    assert [signed.signer for signed in evidence.of(MEMBERS[3])] == [PEOPLE[1].peer]


def test_the_evidence_against_half_of_a_large_swarm_fits_into_a_review() -> None:
    """65 of 130 accuse the other 65: all their words would be 4225, a Review has room for 4096."""
    who = [Identity.from_seed(number.to_bytes(32, "big")) for number in range(1, 131)]
    members = [Member(each.peer, 1) for each in who]
    evidence = Evidence(who[0].peer)
    evidence.begin_epoch(who[1].peer)
    for target in members[65:]:
        signed = observation(who[0], target, BEFORE)
        for by in who[:65]:
            evidence.add(by.peer, target, signed, 0.0)
    gone_ = evidence.gone(members, {}, 0.0)
    assert list(gone_) == sorted(members[65:], key=lambda member: member.peer)
    assert all(2 <= len(evidence.of(member)) <= 3 for member in gone_)


def test_the_step_coordinators_word_goes_into_the_review() -> None:
    evidence = told((1, 3), reason=REPORT_MISSING)
    gone(evidence, 5)
    assert [signed.signer for signed in evidence.of(MEMBERS[3])] == [PEOPLE[1].peer]


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 6), st.sets(st.tuples(st.integers(0, 5), st.integers(0, 5))))
def test_whoever_is_gone_would_be_gone_for_a_reviewer(
    members: int, words: set[tuple[int, int]]
) -> None:
    """A reviewer counts the leader, which votes, and the observers that the plan keeps: it needs
    two, or as many as are kept. It gets no more than that, and who says it of itself."""
    evidence = told(*sorted(words))
    found = gone(evidence, members)
    kept = [n for n in range(members) if n not in found]
    for target in found:
        signers = [signed.signer for signed in evidence.of(MEMBERS[target])]
        told_by = {by for by, of in words if of == target}
        assert {MEMBERS.index(Member(signer, 1)) for signer in signers} <= told_by
        assert len(signers) <= OBSERVERS + 2
        counted = [by for by in [0, *kept] if MEMBERS[by].peer in signers]
        assert (target, target) in words or len(set(counted)) >= min(2, max(1, len(kept)))
        assert (target, target) not in words or MEMBERS[target].peer in signers


def test_who_waits_for_others_is_not_given_up_for_the_resume_it_cannot_send() -> None:
    silent = told((2, 1), (3, 1), reason=RESUME_MISSING)
    assert gone(silent, 4) == [1]
    assert silent.gone(MEMBERS[:4], {}, 0.0, waiting=[MEMBERS[1].peer]) == {}


def test_waiting_excuses_nothing_else() -> None:
    dead = told((2, 1), (3, 1))
    found = dead.gone(MEMBERS[:4], {}, 0.0, waiting=[MEMBERS[1].peer])
    assert list(found) == [MEMBERS[1]]
