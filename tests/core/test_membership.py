"""Sounds and silence: who is suspected when, who is asked, and what is said about it."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.records import Member
from protocol.signing import PeerId
from swarm.core.chain import genesis
from swarm.core.evidence import REPORT_MISSING
from swarm.core.membership import (
    ACCUSE_SECONDS,
    DIAL_SECONDS,
    REACHED_SECONDS,
    RTT_SAMPLES,
    Accuse,
    Answer,
    AskOthers,
    Cleared,
    Effect,
    LoseWork,
    Membership,
    Probe,
)
from swarm.core.silence import SUSPICION_LEAST_SECONDS, SUSPICION_MOST_SECONDS
from swarm.core.waiting import OVERDUE_SECONDS
from tests.core.plans import PEOPLE, heartbeat, manifest, observation

ME, ALICE, BOB, CAROL = (Member(who.peer, 1) for who in PEOPLE[:4])
EVERYBODY = [ME, ALICE, BOB, CAROL]
BEFORE = genesis(manifest()).header


def watching(*members: Member, coordinator: PeerId = "") -> Membership:
    """Return who watches `members` since 0 and has heard and reached all of them then; round trips
    take no time."""
    membership = Membership(ME)
    assert membership.watch([ME, *members], 0.0, coordinator) == []
    for member in members:
        membership.link_open(member.peer, 0.0)
        assert membership.heard(member, 0.0, 0.0) == []
    return membership


def until(
    membership: Membership, end: float, start: float = 0.0, seconds: float = 0.5
) -> list[tuple[float, Effect]]:
    """Call expire every half second; return the effects with their time."""
    found = []
    for n in range(1, round((end - start) / seconds) + 1):
        now = start + n * seconds
        found += [(now, effect) for effect in membership.expire(now)]
    return found


def test_who_is_suspected_or_charged_is_a_suspect_and_nobody_else() -> None:
    membership = watching(ALICE, BOB)
    assert not any(membership.is_suspect(each.peer) for each in EVERYBODY)
    membership.left(BOB, 1.0)
    membership.heard(ALICE, 1.0)
    assert [each for each in EVERYBODY if membership.is_suspect(each.peer)] == [BOB]
    until(membership, 10.0, 1.0)
    suspects = [each for each in EVERYBODY if membership.is_suspect(each.peer)]
    assert sorted(each.peer for each in suspects) == list(membership.suspects)
    assert ALICE in suspects


# --- silence ------------------------------------------------------------------------------------


def test_whoever_is_silent_is_probed_and_asked_for_each_second_and_then_accused() -> None:
    membership = watching(ALICE)
    effects = until(membership, 10.0)
    seconds = [float(at) for at in range(3, 11)]
    for effect in (Probe(ALICE), AskOthers(ALICE)):
        assert [at for at, each in effects if each == effect] == seconds
    accusations = [(at, effect.reason) for at, effect in effects if isinstance(effect, Accuse)]
    assert accusations == [(4.0, "has been silent for 3.0 s"), (9.0, "has been silent for 3.0 s")]
    assert membership.suspects == (ALICE.peer,)


def test_who_has_only_stood_still_answers_the_probe_and_is_not_accused() -> None:
    """Two standing still for 2.9 s, heard 0.9 s before and 0.1 s after that."""
    membership = watching(ALICE, BOB)
    effects = until(membership, 3.5)
    assert [effect for _, effect in effects if isinstance(effect, Accuse)] == []
    for member in (ALICE, BOB):
        assert membership.heard(member, 3.9) == [Cleared(member)]
    assert until(membership, 6.5, start=3.5) == []


@pytest.mark.parametrize(("rtt", "is_open", "seconds"), [(0.5, True, 2.0), (0.3, False, 4.0)])
def test_an_answer_has_the_time_of_its_round_trips(
    rtt: float, is_open: bool, seconds: float
) -> None:
    membership = Membership(ME)
    membership.watch([ME, ALICE], 0.0)
    membership.link_open(ALICE.peer, 0.0)
    membership.heard(ALICE, 0.0, rtt)
    if not is_open:
        membership.link_lost(ALICE.peer, "reset", 0.1)
    accusations = [at for at, each in until(membership, 10.0) if isinstance(each, Accuse)]
    assert accusations[0] == 3.0 + seconds


def test_whoever_is_heard_again_is_cleared_once() -> None:
    membership = watching(ALICE)
    until(membership, 4.0)
    assert membership.heard(ALICE, 4.2) == [Cleared(ALICE)]
    assert membership.heard(ALICE, 4.3) == []
    assert membership.suspects == ()
    assert until(membership, 6.0, start=4.0) == []


def first_suspicion(intervals: list[float]) -> float:
    """Return after what silence somebody is suspected who was heard at these intervals."""
    membership = watching(ALICE)
    now = 0.0
    for interval in intervals:
        for _ in range(math.floor(interval)):
            now += 1
            membership.expire(now)
        now += interval - math.floor(interval)
        membership.expire(now)
        membership.heard(ALICE, now)
    for n in range(1, 200):
        if membership.expire(now + n / 10):
            return n / 10
    raise AssertionError("never suspected")


def test_patience_follows_what_a_member_is_like() -> None:
    assert first_suspicion([1.0] * 20) == SUSPICION_LEAST_SECONDS
    assert first_suspicion([0.01] * 500) == SUSPICION_LEAST_SECONDS
    # An irregular one, within its patience: mean 1.75 s, deviation about 0.75 s.
    assert 4.0 < first_suspicion([1.0, 2.5] * 20) < 6.0
    assert first_suspicion([2.0, 14.9] * 20) == SUSPICION_MOST_SECONDS


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0.01, 20.0), max_size=30))
def test_patience_has_bounds(intervals: list[float]) -> None:
    silence = first_suspicion(intervals)
    assert SUSPICION_LEAST_SECONDS <= silence <= SUSPICION_MOST_SECONDS + 0.1


def test_before_its_first_sound_a_member_has_most_time() -> None:
    membership = Membership(ME)
    membership.watch([ME, ALICE], 0.0)
    effects = until(membership, 21.0)
    assert effects[0] == (SUSPICION_MOST_SECONDS, Probe(ALICE))
    accusations = [at for at, effect in effects if isinstance(effect, Accuse)]
    assert accusations == [SUSPICION_MOST_SECONDS + DIAL_SECONDS]


def test_patience_outlasts_an_eviction() -> None:
    membership = watching(ALICE)
    for n in range(1, 21):
        membership.heard(ALICE, 3.0 * n)
    membership.watch([ME], 61.0)
    membership.watch([ME, ALICE], 62.0)
    membership.heard(ALICE, 62.0)
    # About 3 s apart, less and less surely so: more than the 3 s of who was never seen before.
    first = next(at for at, effect in until(membership, 80.0, start=62.0))
    assert first - 62.0 > SUSPICION_LEAST_SECONDS


def test_while_this_peer_stood_still_nobody_was_silent() -> None:
    membership = watching(ALICE, BOB)
    until(membership, 2.0)
    # It does not know for how long they had been silent before: it asks, and tells nobody.
    assert [each for each in membership.expire(62.0) if isinstance(each, Accuse)] == []
    assert membership.heard(ALICE, 62.1) == [Cleared(ALICE)]
    effects = until(membership, 64.5, start=62.0)
    accusations = [(at, each.target) for at, each in effects if isinstance(each, Accuse)]
    assert accusations == [(63.0, BOB)]


@pytest.mark.parametrize("pause", [0.6, 1.2, 60.0])
def test_who_stands_still_while_a_suspect_answers_asks_again(pause: float) -> None:
    membership = watching(ALICE, BOB)
    until(membership, 3.5)
    late = 4.0 + pause
    assert membership.expire(late) == [
        each for member in (ALICE, BOB) for each in (Probe(member), AskOthers(member))
    ]
    assert membership.heard(ALICE, late + 0.1) == [Cleared(ALICE)]
    effects = until(membership, late + 1.5, start=late)
    (accusation,) = [(at, each.target) for at, each in effects if isinstance(each, Accuse)]
    assert accusation[0] == pytest.approx(late + 1.0)
    assert accusation[1] == BOB


def test_whoever_is_always_late_suspects_and_accuses_all_the_same() -> None:
    membership = watching(ALICE)
    effects = until(membership, 32.0, seconds=1.6)
    assert [each.target for _, each in effects if isinstance(each, Accuse)][:1] == [ALICE]


def test_deadlines_are_kept() -> None:
    """Driven by its own deadlines alone, nothing is late and nothing is polled in vain for long."""
    membership = watching(ALICE)
    assert membership.deadline == 3.0
    effects: list[tuple[float, Effect]] = []
    calls = 0
    while (now := membership.deadline) <= 9.0:
        effects += [(now, effect) for effect in membership.expire(now)]
        calls += 1
    assert [at for at, effect in effects if isinstance(effect, Accuse)] == [4.0, 9.0]
    assert calls <= 14
    assert Membership(ME).deadline == math.inf


# --- links and boots ----------------------------------------------------------------------------


def test_a_lost_link_is_no_death_but_a_refused_redial_after_it_is_suspicious() -> None:
    membership = watching(ALICE)
    assert membership.dial_refused(ALICE.peer, "refused", 0.1) == []  # the link is open
    membership.link_lost(ALICE.peer, "reset", 1.0)
    assert membership.suspects == ()
    reason = "its link was lost (reset) and nobody listens (refused)"
    assert membership.dial_refused(ALICE.peer, "refused", 1.1) == [
        AskOthers(ALICE),
        Accuse(ALICE, reason),
    ]
    assert membership.dial_refused(ALICE.peer, "refused", 1.2) == []


def test_who_is_silent_and_then_not_there_is_accused_at_once() -> None:
    membership = watching(ALICE)
    until(membership, 3.5)
    membership.link_lost(ALICE.peer, "reset", 3.6)
    membership.ping_for(BOB.peer, ALICE, 3.6)
    reason = "its link was lost (reset) and nobody listens (refused)"
    assert Accuse(ALICE, reason) in membership.dial_refused(ALICE.peer, "refused", 3.6)


def test_after_a_reconnection_a_refused_dial_means_nothing() -> None:
    membership = watching(ALICE)
    membership.link_lost(ALICE.peer, "reset", 1.0)
    membership.link_open(ALICE.peer, 1.1)
    assert membership.dial_refused(ALICE.peer, "refused", 1.2) == []


def test_a_newer_boot_makes_the_older_one_gone_at_once() -> None:
    membership = watching(ALICE, BOB)
    again = Member(ALICE.peer, 2)
    assert membership.heard(again, 1.0) == [Accuse(ALICE, "has started again (boot 2)")]
    assert membership.heard(again, 1.1) == []
    assert membership.heard(ALICE, 1.2) == []  # a late frame of the older one
    assert membership.gone(EVERYBODY, 1.2) == {ALICE: "has started again (boot 2)"}
    assert membership.boot_of(ALICE.peer) == 2
    # A plan that still names the older boot changes nothing, one that names the newer one does.
    assert membership.watch([ME, ALICE, BOB], 2.0) == [Accuse(ALICE, "has started again (boot 2)")]
    assert membership.gone([ME, ALICE, BOB], 2.0) == {ALICE: "has started again (boot 2)"}
    assert membership.watch([ME, again, BOB], 3.0) == []
    assert membership.gone([ME, again, BOB], 3.0) == {}


def test_a_plan_of_this_peers_older_boot_is_answered_by_its_own_word() -> None:
    membership = Membership(Member(ME.peer, 2))
    assert membership.watch([ME, ALICE], 0.0) == [Accuse(ME, "has started again (boot 2)")]
    assert membership.gone([ME, ALICE], 0.0) == {ME: "has started again (boot 2)"}


def test_whoever_says_that_it_leaves_is_gone() -> None:
    membership = watching(ALICE)
    assert membership.left(Member(ALICE.peer, 2), 1.0) == []
    assert membership.left(ALICE, 1.0) == [Accuse(ALICE, "has left")]
    assert membership.left(ALICE, 1.1) == []
    assert membership.heard(ALICE, 1.2) == []
    assert membership.gone(EVERYBODY, 1.2) == {ALICE: "has left"}


def test_only_members_of_the_newest_plan_are_watched() -> None:
    membership = watching(ALICE, BOB)
    assert membership.watch([ME, BOB], 1.0) == []
    membership.heard(BOB, 1.0)
    effects = until(membership, 5.5, start=1.0)
    assert {effect.target for _, effect in effects if isinstance(effect, Accuse)} == {BOB}
    assert membership.silent_seconds(BOB.peer, 5.0) == 4.0
    assert membership.silent_seconds(ALICE.peer, 5.0) == 0.0


def test_silence_outlasts_a_plan_and_is_told_anew() -> None:
    """Observations are good for one epoch."""
    membership = watching(ALICE)
    until(membership, 4.0)
    membership.watch([ME, ALICE], 4.1)
    assert membership.suspects == (ALICE.peer,)
    assert Accuse(ALICE, "has been silent for 3.0 s") in membership.expire(4.2)


def test_a_plan_does_not_hurry_who_has_yet_to_answer() -> None:
    membership = watching(ALICE)
    until(membership, 3.0)
    membership.watch([ME, ALICE], 3.1)
    assert membership.expire(3.2) == []
    assert Accuse(ALICE, "has been silent for 3.0 s") in membership.expire(4.0)


def test_a_round_trip_that_waited_for_something_else_does_not_count() -> None:
    membership = Membership(ME)
    assert membership.rtt_seconds(ALICE.peer) == 0.0
    membership.heard(ALICE, 1.0, 2.5)  # it was dialled first
    assert membership.rtt_seconds(ALICE.peer) == 2.5
    membership.heard(ALICE, 2.0, 0.08)
    for late in (4.0, 3.0, 2.0):  # it stood still
        membership.heard(ALICE, 6.0, late)
    assert membership.rtt_seconds(ALICE.peer) == 0.08


def test_a_way_that_has_become_longer_is_noticed_after_a_while() -> None:
    membership = Membership(ME)
    for n, rtt in enumerate([0.08] + [1.5] * RTT_SAMPLES):
        membership.heard(ALICE, float(n), rtt)
    assert membership.rtt_seconds(ALICE.peer) == 1.5


# --- for others ---------------------------------------------------------------------------------


def test_who_is_heard_on_an_open_link_is_reached() -> None:
    membership = watching(ALICE, CAROL)
    assert membership.ping_for(BOB.peer, ALICE, 3.0) == [Answer(BOB.peer, ALICE, "")]
    assert membership.ping_for(BOB.peer, ME, 3.0) == [Answer(BOB.peer, ME, "")]
    assert membership.ping_for(BOB.peer, ALICE, 3.1) == [Probe(ALICE)]
    membership.link_lost(CAROL.peer, "reset", 1.0)
    assert membership.ping_for(BOB.peer, CAROL, 1.1) == [Probe(CAROL)]


def test_a_probe_is_answered_by_a_sound_a_failure_or_in_a_second() -> None:
    membership = Membership(ME)
    membership.link_open(ALICE.peer, 0.0)
    membership.heard(ALICE, 0.0, 0.0)
    for asker in (CAROL, BOB):
        assert membership.ping_for(asker.peer, ALICE, 0.0) == [Probe(ALICE)]
    assert membership.deadline == 1.0
    assert membership.heard(ALICE, 0.5) == [
        Answer(BOB.peer, ALICE, ""),
        Answer(CAROL.peer, ALICE, ""),
    ]
    membership.ping_for(BOB.peer, ALICE, 1.0)
    assert membership.dial_refused(ALICE.peer, "refused", 1.2) == [
        Answer(BOB.peer, ALICE, "refused")
    ]
    membership.ping_for(BOB.peer, ALICE, 2.0)
    assert membership.expire(2.9) == []
    assert membership.expire(3.0) == [Answer(BOB.peer, ALICE, "does not answer a ping")]
    assert membership.expire(3.1) == []


@pytest.mark.parametrize("one_way", [0.05, 0.1, 0.15, 0.2, 0.5])
def test_a_probe_allows_for_dialling(one_way: float) -> None:
    """Dialling takes TCP, TLS and Hello one round trip each, and the ping itself another."""
    membership = Membership(ME)
    membership.ping_for(BOB.peer, ALICE, 0.0)
    answered = 8 * one_way
    assert until(membership, answered, seconds=answered / 8) == []
    assert membership.heard(ALICE, answered) == [Answer(BOB.peer, ALICE, "")]


def test_what_else_is_wrong_with_a_member_is_an_answer() -> None:
    """The target answers: that would take back the word that is out."""
    membership = watching(ALICE, BOB)
    membership.resume_missing(ALICE, 1.0)
    expected = Answer(BOB.peer, ALICE, "sent no Resume")
    assert membership.ping_for(BOB.peer, ALICE, 1.0) == [expected]


def test_who_told_an_asker_that_a_member_does_not_answer_takes_it_back() -> None:
    """Though it has not come to suspect it itself."""
    membership = watching(ALICE, BOB)
    membership.expire(1.0)
    membership.link_lost(ALICE.peer, "reset", 1.0)
    membership.ping_for(BOB.peer, ALICE, 1.0)
    assert membership.probe_failed(ALICE.peer, "timed out") == [
        Answer(BOB.peer, ALICE, "timed out")
    ]
    assert membership.heard(ALICE, 1.5) == [Cleared(ALICE)]
    assert membership.heard(ALICE, 1.6) == []


def test_another_boot_is_no_answer() -> None:
    membership = Membership(ME)
    membership.ping_for(BOB.peer, Member(ALICE.peer, 2), 0.0)
    assert membership.heard(ALICE, 0.1) == []  # an older one
    expected = Answer(BOB.peer, Member(ALICE.peer, 2), "has started again (boot 3)")
    assert membership.heard(Member(ALICE.peer, 3), 0.2) == [expected]
    assert membership.ping_for(BOB.peer, Member(ALICE.peer, 2), 0.3) == [expected]


# --- grey failure -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "predicted", "hangs"),
    [(30.0, 0.1, False), (30.1, 0.1, True), (60.0, 3.0, False), (60.1, 3.0, True)],
)
def test_a_task_may_take_thirty_seconds_or_twenty_times_what_was_predicted(
    task: float, predicted: float, hangs: bool
) -> None:
    membership = watching(ALICE)
    said = heartbeat(task_seconds=task)
    for member in (ME, ALICE):
        effects = membership.stuck(member, said, predicted, 1.0)
        assert [effect.target for effect in effects if isinstance(effect, Accuse)] == (
            [member] if hangs else []
        )
        assert membership.stuck(member, said, predicted, 1.1) == []
    assert membership.suspects == ((ALICE.peer,) if hangs else ())


def test_being_heard_does_not_excuse_a_hanging_executor() -> None:
    membership = watching(ALICE)
    accusation = membership.stuck(ALICE, heartbeat(task_seconds=40.0), 0.1, 0.0)
    for n in range(1, 11):
        assert membership.heard(ALICE, n / 2) == []
    assert membership.expire(ACCUSE_SECONDS) == accusation
    assert membership.suspects == (ALICE.peer,)


def test_a_plan_settles_what_a_member_owed() -> None:
    membership = watching(ALICE)
    membership.resume_missing(ALICE, 1.0)
    membership.watch(EVERYBODY, 1.1)
    assert membership.suspects == ()


def test_whoever_is_overdue_is_accused_once() -> None:
    membership = watching(ALICE, BOB, CAROL)
    said = {
        ALICE.peer: heartbeat(awaits=(BOB.peer,), awaits_seconds=31.0),
        BOB.peer: heartbeat(),
    }
    assert membership.overdue(said, 0.1, 0.0) == []
    reason = f"{ALICE.peer} has waited for it for 31 s"
    assert membership.overdue(said, 0.1, OVERDUE_SECONDS) == [Accuse(BOB, reason)]
    assert membership.overdue(said, 0.1, OVERDUE_SECONDS) == []


def test_what_the_silent_said_last_is_no_evidence() -> None:
    membership = watching(ALICE, BOB)
    said = {
        ALICE.peer: heartbeat(awaits=(BOB.peer,), awaits_seconds=31.0),
        BOB.peer: heartbeat(),
    }
    for n in range(10):
        membership.heard(BOB, float(n))
        assert membership.overdue(said, 0.1, float(n)) == [] or n <= REACHED_SECONDS


def test_a_missing_report_loses_work_and_the_second_running_is_a_word_against_its_sender() -> None:
    membership = watching(ALICE, BOB)
    assert membership.report_missing(ALICE, 10.0) == [LoseWork(ALICE.peer, "sent no Report")]
    assert membership.report_missing(ALICE, 10.1) == []
    membership.watch(EVERYBODY, 11.0)
    assert membership.report_missing(ALICE, 21.0) == [Accuse(ALICE, REPORT_MISSING)]
    assert membership.report_missing(BOB, 21.0) == [LoseWork(BOB.peer, "sent no Report")]
    membership.watch(EVERYBODY, 22.0)
    membership.watch(EVERYBODY, 23.0)
    # Not running: there was an epoch in between.
    assert membership.report_missing(BOB, 33.0) == [LoseWork(BOB.peer, "sent no Report")]


def test_a_missing_resume_is_a_word_against_the_step_coordinator() -> None:
    membership = watching(ALICE)
    assert membership.resume_missing(ALICE, 1.0) == [Accuse(ALICE, "sent no Resume")]
    assert membership.resume_missing(ALICE, 1.1) == []


# --- on the leader --------------------------------------------------------------------------------


def observed(membership: Membership, by: int, target: Member, now: float) -> None:
    signed = observation(PEOPLE[by], target, BEFORE)
    membership.observed(PEOPLE[by].peer, target, signed, now)


def test_the_leader_collects_what_goes_into_the_review() -> None:
    membership = watching(ALICE, BOB, CAROL)
    observed(membership, 0, CAROL, 3.0)
    assert membership.gone(EVERYBODY, 3.0) == {}
    observed(membership, 2, CAROL, 3.1)
    assert membership.gone(EVERYBODY, 3.1) == {CAROL: "is silent"}
    assert membership.evidence(CAROL) == tuple(
        observation(PEOPLE[n], CAROL, BEFORE) for n in (0, 2)
    )


def test_a_leader_that_hears_a_suspect_again_takes_its_own_word_back() -> None:
    membership = watching(ALICE, BOB, CAROL)
    membership.link_lost(CAROL.peer, "reset", 1.0)
    membership.dial_refused(CAROL.peer, "refused", 1.1)
    observed(membership, 0, CAROL, 1.1)
    observed(membership, 2, CAROL, 1.2)
    assert membership.heard(CAROL, 1.3) == [Cleared(CAROL)]
    assert membership.gone(EVERYBODY, 1.3) == {}


def test_who_reaches_a_suspect_again_takes_its_word_back() -> None:
    """Of two short cuts, one after the other, neither is evidence during the other."""
    membership = watching(ALICE, BOB, CAROL)
    observed(membership, 1, CAROL, 3.0)
    membership.withdrawn(ALICE.peer, CAROL)
    observed(membership, 2, CAROL, 13.0)
    assert membership.gone(EVERYBODY, 13.0) == {}


def test_what_a_peer_says_of_itself_stays_said() -> None:
    membership = watching(ALICE, BOB, CAROL)
    observed(membership, 3, CAROL, 3.0)
    membership.withdrawn(CAROL.peer, CAROL)
    assert membership.gone(EVERYBODY, 3.0) == {CAROL: "is silent"}


@pytest.mark.parametrize(
    ("by", "target"), [(4, CAROL), (1, Member(PEOPLE[4].peer, 1)), (1, Member(CAROL.peer, 2))]
)
def test_only_members_have_a_word_and_only_about_members(by: int, target: Member) -> None:
    membership = watching(ALICE, BOB, CAROL)
    observed(membership, by, target, 3.0)
    observed(membership, 2, target, 3.0)
    assert membership.gone([*EVERYBODY, target], 3.0) == {}
    assert len(membership.evidence(target)) <= 1


def test_hearing_a_suspect_does_not_take_back_what_else_is_wrong_with_it() -> None:
    membership = watching(ALICE, BOB, CAROL)
    membership.stuck(CAROL, heartbeat(task_seconds=40.0), 0.1, 0.0)
    for by in (0, 2):
        observed(membership, by, CAROL, 0.0)
    until(membership, 3.0)
    assert membership.heard(CAROL, 3.1) == []
    assert membership.gone(EVERYBODY, 3.1) == {CAROL: "is silent"}


def test_what_has_been_observed_is_forgotten_with_the_next_plan() -> None:
    membership = watching(ALICE, BOB, CAROL)
    for by in (0, 1, 2):
        observed(membership, by, CAROL, 1.0)
    membership.watch(EVERYBODY, 2.0)
    assert membership.gone(EVERYBODY, 2.0) == {}


# --- large swarms -------------------------------------------------------------------------------


CROWD = [Member(f"peer{number:03}", 1) for number in range(100)]


def in_a_crowd(near: dict[PeerId, float]) -> Membership:
    """Return who is one of a hundred, and to whom the silence of `near` means something."""
    membership = Membership(ME)
    assert membership.watch([ME, ALICE, BOB, *CROWD], 0.0, near=near) == []
    return membership


def test_whose_silence_means_nothing_is_not_suspected() -> None:
    membership = in_a_crowd({ALICE.peer: 10.0})
    for member in (ALICE, BOB, *CROWD):
        membership.heard(member, 0.0)
    effects = until(membership, 60.0)
    assert {each.target for _, each in effects if isinstance(each, Accuse)} == {ALICE}


def test_patience_grows_with_the_period() -> None:
    membership = in_a_crowd({ALICE.peer: 10.0})
    for now in (0.0, 10.0, 20.0):
        membership.heard(ALICE, now)
    first = next(at for at, effect in until(membership, 80.0, start=20.0))
    assert first - 20.0 >= 30.0


def test_whom_one_works_with_is_accused_when_its_link_ends_and_nobody_listens() -> None:
    """Others are asked by who hears all."""
    membership = in_a_crowd({})
    membership.link_open(BOB.peer, 0.0)
    membership.link_lost(BOB.peer, "reset", 1.0)
    (accusation,) = membership.dial_refused(BOB.peer, "refused", 1.1)
    assert isinstance(accusation, Accuse) and accusation.target == BOB
    assert membership.suspects == (BOB.peer,)
    assert membership.heard(BOB, 2.0) == [Cleared(BOB)]


def test_a_newer_boot_of_anybody_is_noticed() -> None:
    membership = in_a_crowd({})
    again = Member(CROWD[7].peer, 2)
    reason = "has started again (boot 2)"
    assert membership.heard(again, 1.0) == [Accuse(CROWD[7], reason)]


def test_who_hears_all_sees_for_itself_when_another_does_not_reach_somebody() -> None:
    everybody = dict.fromkeys((each.peer for each in (ALICE, BOB, *CROWD)), 10.0)
    membership = in_a_crowd(everybody)
    membership.heard(BOB, 0.0, 0.0)
    assert membership.doubt(BOB, 1.0) == [Probe(BOB), AskOthers(BOB)]
    assert membership.doubt(BOB, 1.1) == []
    effects = until(membership, 3.0, start=1.0)
    accusations = [(at, each.target) for at, each in effects if isinstance(each, Accuse)]
    assert accusations[0][1] == BOB and accusations[0][0] <= 3.0
    assert watching(BOB).doubt(BOB, 1.0) == []  # of few everybody hears all


def test_attention_begins_anew() -> None:
    membership = in_a_crowd({})
    membership.heard(BOB, 0.0)
    membership.attend({BOB.peer: 1.0}, 100.0)
    assert until(membership, 102.0, start=100.0) == []
    membership.attend({}, 102.0)
    assert until(membership, 150.0, start=102.0) == []


def test_deadlines_of_a_crowd_are_kept_too() -> None:
    """What is queued and what is true come apart with every sound, and together when it matters."""
    everybody = dict.fromkeys((each.peer for each in CROWD), 1.0)
    membership = in_a_crowd(everybody)
    now = 0.0
    for number in range(2000):
        now += 0.01
        membership.heard(CROWD[number % 100], now)
        assert membership.expire(now) == []
    silent = min(membership._watched[each.peer].silent_from for each in CROWD)
    assert membership.deadline <= silent
    while (due := membership.deadline) < silent:
        assert membership.expire(due) == []
    assert Probe(CROWD[0]) in membership.expire(due)
