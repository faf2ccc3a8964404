"""What the leader wants next: every draft passes review, and no living peer loses its place."""

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.messages import Heartbeat
from protocol.records import (
    Completed,
    Manifest,
    Member,
    Signed,
)
from protocol.signing import PeerId
from swarm.core.ballots import Draft
from swarm.core.chain import genesis, legal_council_change
from swarm.core.drafting import RESTART_SECONDS, NoHolder, Situation, next_draft
from swarm.core.review import ReviewContext, review
from swarm.core.scheduling.planning import Candidate, evicted, members_of
from tests.core.drafts import (
    FOUR,
    FOUR_LAYERS,
    ONE,
    RUN,
    SPARE,
    Known,
    adopted,
    begun,
    draft_in,
    groups,
    member,
    newcomer,
    peers,
    ready,
    situation,
    waiting,
)
from tests.core.plans import (
    PEOPLE,
    candidates,
    consent,
    heartbeat,
    manifest,
    observation,
    training,
)
from tests.core.scheduling.test_snapshot import estimates

replace = msgspec.structs.replace
IDENTITIES = {who.peer: who for who in PEOPLE}
# --- nothing to do ------------------------------------------------------------------------------


def test_a_plan_that_is_good_stays() -> None:
    assert next_draft(situation(RUN, FOUR, settled=True)) is None
    assert next_draft(situation(RUN, FOUR)) is None


@pytest.mark.parametrize("changed", [{"ended": True}, {"halted": "the loss is not finite"}])
def test_who_dies_after_the_end_changes_nothing(changed: dict[str, object]) -> None:
    over = Known(FOUR.header, replace(FOUR.body, **changed))
    assert next_draft(situation(RUN, over, gone={member(0): "silent"}, settled=True)) is None


def test_before_the_first_plan_nothing_follows() -> None:
    root = genesis(RUN)
    assert next_draft(Situation(RUN, root.header, root.body, settled=True)) is None


# --- repairs ------------------------------------------------------------------------------------


def test_a_repair_leaves_out_the_dead_and_nothing_else() -> None:
    draft = draft_in(situation(RUN, FOUR, gone={member(1): "silent for 3 s"}, version=7))
    assert (draft.kind, draft.from_step, draft.lineage) == ("repair", 7, 0)
    assert groups(draft.body) == [peers(0), peers(2, 3)]
    assert [each.member for each in draft.body.feeders] == [member(0)]
    assert draft.body.wiring == (((1.0,),), ((0.5, 0.5),))
    assert evicted(FOUR.body, draft.body) == (member(1),)
    assert "is gone: silent for 3 s" in draft.body.reason


def test_lost_work_is_repaired_with_equal_roles_at_any_time() -> None:
    draft = draft_in(situation(RUN, FOUR, lost_work="the link 0-2 broke"))
    assert draft.kind == "repair"
    assert replace(draft.body, reason="") == replace(FOUR.body, reason="")
    assert "the link 0-2 broke" in draft.body.reason


def test_who_stands_by_and_is_ready_takes_the_place_of_the_dead() -> None:
    draft = draft_in(
        situation(ONE, SPARE, gone={member(2): "silent"}, heartbeats=ready(3, 1), version=1)
    )
    assert draft.kind == "repair"
    assert groups(draft.body) == [peers(0), peers(3)]
    assert waiting(draft.body) == [(PEOPLE[1].peer, 0)]


@pytest.mark.parametrize(
    "said",
    [
        {},
        ready(3, 0),
        ready(3, 1, boot=2),
        ready(3, 1, lineage=1),
        ready(3, 1, version=3),
        {PEOPLE[3].peer: heartbeat(state="joining", stage=1, version=5)},
    ],
)
def test_who_is_not_ready_gets_nothing(said: Mapping[PeerId, Heartbeat]) -> None:
    """At version 5 of the group, who says that it holds version 3 or nothing is not ready."""
    now = situation(ONE, SPARE, gone={member(2): "silent"}, heartbeats=said, version=5)
    assert next_draft(now) == NoHolder("stage 1 has no holder: waiting for a peer to come back")


def test_whoever_is_one_version_behind_is_ready() -> None:
    said = ready(3, 1, version=4)
    draft = draft_in(situation(ONE, SPARE, gone={member(2): "silent"}, heartbeats=said, version=5))
    assert groups(draft.body)[1] == peers(3)


def test_a_newcomer_is_taken_in_by_a_repair_and_stands_by() -> None:
    draft = draft_in(situation(RUN, FOUR, gone={member(1): "silent"}, joining=[newcomer(5, RUN)]))
    assert groups(draft.body) == [peers(0), peers(2, 3)]
    assert waiting(draft.body) == [(PEOPLE[5].peer, 0)]


def test_a_newer_boot_replaces_the_older_one_without_its_role() -> None:
    draft = draft_in(situation(RUN, FOUR, joining=[newcomer(1, RUN, boot=2)]))
    assert draft.kind == "repair"
    assert groups(draft.body) == [peers(0), peers(2, 3)]
    assert draft.body.standby[0].member == member(1, boot=2)
    assert evicted(FOUR.body, draft.body) == (member(1),)


def test_the_boot_that_is_gone_is_not_taken_in_by_the_plan_that_leaves_it_out() -> None:
    """Cut off and back, it asks to join before the plan is made: its turn is the next plan."""
    gone = {member(1): "silent"}
    draft = draft_in(situation(RUN, FOUR, gone=gone, joining=[newcomer(1, RUN)]))
    assert evicted(FOUR.body, draft.body) == (member(1),)
    after = adopted(draft, FOUR.header)
    again = draft_in(situation(RUN, after, joining=[newcomer(1, RUN)], settled=True))
    assert waiting(again.body) == [(PEOPLE[1].peer, 0)]


def test_what_loses_nothing_waits_for_its_turn_and_a_repair_does_not() -> None:
    joining = [newcomer(5, RUN)]
    idle = situation(RUN, FOUR, joining=joining, settled=True, improves=False)
    assert next_draft(idle) is None
    assert draft_in(dataclasses.replace(idle, improves=True)).kind == "planned"
    assert draft_in(dataclasses.replace(idle, gone={member(1): "silent"})).kind == "repair"


def test_leavers_of_a_plan_that_is_not_active_yet_stay_leavers() -> None:
    pending = Known(
        FOUR.header,
        replace(
            FOUR.body,
            stages=(
                replace(
                    FOUR.body.stages[0],
                    replicas=FOUR.body.stages[0].replicas[:1],
                    shares=(1,),
                ),
                FOUR.body.stages[1],
            ),
            leavers=(member(1),),
        ),
    )
    gone = {member(3): "silent"}
    assert draft_in(situation(RUN, pending, gone=gone)).body.leavers == (member(1),)
    assert draft_in(situation(RUN, pending, gone=gone, settled=True)).body.leavers == ()


def test_without_data_among_the_replicas_any_member_feeds_and_does_nothing_else() -> None:
    """0 and 3 hold the data; 0 dies, 2 takes its stage, and 3 stood by for it as well."""
    plan = begun(ONE, candidates(4, ONE, FOUR_LAYERS, holders=[0, 3]), 2)
    assert groups(plan.body) == [peers(0), peers(1)]
    assert waiting(plan.body) == [(PEOPLE[3].peer, 0), (PEOPLE[2].peer, 1)]
    both = tuple(replace(each, stage=0) for each in plan.body.standby)
    plan = Known(plan.header, replace(plan.body, standby=both))
    gone = {member(0): "silent"}
    draft = draft_in(situation(ONE, plan, gone=gone, heartbeats=ready(2, 0)))
    assert groups(draft.body) == [peers(2), peers(1)]
    assert [each.member for each in draft.body.feeders] == [member(3)]
    assert waiting(draft.body) == []


def test_a_run_halts_when_nobody_with_the_data_comes_back() -> None:
    plan = begun(RUN, candidates(4, RUN, FOUR_LAYERS, holders=[0]), 2)
    gone = {member(0): "silent"}
    now = situation(RUN, plan, gone=gone)
    assert next_draft(now) == NoHolder("no member has the data: waiting for a peer to come back")
    draft = draft_in(situation(RUN, plan, gone=gone, waited_seconds=RESTART_SECONDS + 1))
    assert draft.body.halted == "no member has the data"
    assert draft.body.feeders == ()
    back = [newcomer(0, RUN, boot=2)]
    draft = draft_in(situation(RUN, plan, gone=gone, joining=back))
    assert [each.member for each in draft.body.feeders] == [member(0, boot=2)]


# --- rollback -----------------------------------------------------------------------------------


def complete_at(plan: Known, version: int) -> Known:
    done = Completed(version, (b"h" * 32,) * 4)
    return Known(plan.header, replace(plan.body, completed=done))


def test_without_a_holder_the_swarm_waits_and_then_goes_back() -> None:
    gone = {member(2): "silent", member(3): "silent"}
    early = situation(RUN, FOUR, gone=gone, waited_seconds=RESTART_SECONDS, version=9)
    assert isinstance(next_draft(early), NoHolder)
    late = {"gone": gone, "waited_seconds": RESTART_SECONDS + 1, "version": 9}
    draft = draft_in(situation(RUN, FOUR, **late))
    assert (draft.kind, draft.from_step, draft.lineage) == ("repair", 0, 1)
    assert groups(draft.body) == [peers(0), peers(1)]
    assert draft.body.leavers == ()
    draft = draft_in(situation(RUN, complete_at(FOUR, 6), **late))
    assert (draft.from_step, draft.lineage) == (6, 1)
    assert draft.body.completed == Completed(6, (b"h" * 32,) * 4)


def test_nobody_waits_for_a_stage_whose_holders_have_all_started_again() -> None:
    back = [newcomer(2, RUN, boot=2), newcomer(3, RUN, boot=2)]
    draft = draft_in(situation(RUN, complete_at(FOUR, 6), joining=back, version=9))
    assert (draft.from_step, draft.lineage) == (6, 1)
    assert groups(draft.body) == [peers(0, 1), peers(2, 3)]


def test_the_restart_of_a_whole_swarm_is_a_rollback() -> None:
    back = [newcomer(n, RUN, boot=2) for n in range(4)]
    draft = draft_in(situation(RUN, complete_at(FOUR, 6), joining=back))
    assert (draft.from_step, draft.lineage) == (6, 1)
    assert sorted(chain.from_iterable(groups(draft.body))) == peers(0, 1, 2, 3)
    assert len(draft.body.stages) == 2


def test_too_few_peers_get_fewer_stages_unless_the_manifest_says_where_to_cut() -> None:
    gone = {member(n): "silent" for n in (1, 2, 3)}
    late = {"gone": gone, "waited_seconds": RESTART_SECONDS + 1}
    draft = draft_in(situation(RUN, FOUR, **late))
    assert groups(draft.body) == [peers(0)]
    assert draft.lineage == 1
    cut = manifest(run=training(cuts=(2,)))
    plan = begun(cut, candidates(4, cut, FOUR_LAYERS), 0)
    assert next_draft(situation(cut, plan, **late)) == NoHolder(
        "2 stages need 2 peers, 1 have joined: waiting for a peer to come back"
    )


def test_the_step_coordinator_says_that_nobody_holds_the_step_in_hand() -> None:
    said = {PEOPLE[0].peer: heartbeat(rollback=8)}
    draft = draft_in(situation(RUN, complete_at(FOUR, 6), heartbeats=said, version=9))
    assert (draft.from_step, draft.lineage) == (6, 1)
    assert groups(draft.body) == groups(FOUR.body)
    not_yet = {PEOPLE[0].peer: heartbeat(rollback=8, epoch=2)}
    for other in ({PEOPLE[1].peer: said[PEOPLE[0].peer]}, not_yet):
        assert next_draft(situation(RUN, FOUR, heartbeats=other)) is None


def test_a_complete_version_that_nobody_has_is_waited_for_and_then_given_up() -> None:
    complete = complete_at(FOUR, 6)
    tried = Known(replace(complete.header, from_step=6, lineage=1), complete.body)
    said = {PEOPLE[0].peer: heartbeat(rollback=6)}

    def after(seconds: float, **more: object) -> Draft | NoHolder | None:
        return next_draft(
            situation(RUN, tried, heartbeats=said, waited_seconds=seconds, version=6, **more)
        )

    assert isinstance(after(RESTART_SECONDS), NoHolder)
    back = after(RESTART_SECONDS, joining=[newcomer(5, RUN)])
    assert isinstance(back, Draft)
    assert (back.from_step, back.lineage) == (6, 2)
    assert member(5) in {each for stage in back.body.stages for each in stage.replicas}
    anew = after(RESTART_SECONDS + 1)
    assert isinstance(anew, Draft)
    assert (anew.from_step, anew.lineage) == (0, 2)


def test_in_a_new_lineage_all_without_work_may_have_it_on_their_disks() -> None:
    said = {PEOPLE[0].peer: heartbeat(rollback=8)}
    draft = draft_in(situation(ONE, complete_at(SPARE, 6), heartbeats=said, version=9))
    assert draft.lineage == 1
    assert draft.body.leavers == (member(1), member(3))


# --- peers that cannot reach each other -------------------------------------------------------


def test_of_two_that_keep_losing_work_one_stands_by() -> None:
    apart = [(PEOPLE[0].peer, PEOPLE[2].peer)]
    draft = draft_in(situation(RUN, FOUR, lost_work="again", apart=apart))
    assert groups(draft.body) == [peers(0, 1), peers(3)]
    assert waiting(draft.body) == [(PEOPLE[2].peer, 1)]
    assert draft.body.leavers == (member(2),)


def test_who_loses_work_with_everybody_is_the_one_that_stands_by() -> None:
    apart = [(PEOPLE[0].peer, PEOPLE[2].peer), (PEOPLE[0].peer, PEOPLE[3].peer)]
    draft = draft_in(situation(RUN, FOUR, lost_work="again", apart=apart))
    assert groups(draft.body) == [peers(1), peers(2, 3)]


def test_who_is_kept_apart_is_not_promoted_meanwhile() -> None:
    three = begun(ONE, candidates(3, ONE, FOUR_LAYERS), 2)
    roomy = manifest(run=training(steps=100))
    now = situation(roomy, three, heartbeats=ready(1, 0), settled=True)
    assert groups(draft_in(now).body)[0] == peers(0, 1)
    kept = dataclasses.replace(now, apart=[(PEOPLE[1].peer, PEOPLE[2].peer)])
    assert next_draft(kept) is None


def test_who_alone_holds_a_stage_stays_whatever_is_lost() -> None:
    two = begun(RUN, candidates(2, RUN, FOUR_LAYERS), 2)
    apart = [(PEOPLE[0].peer, PEOPLE[1].peer)]
    draft = draft_in(situation(RUN, two, lost_work="again", apart=apart))
    assert groups(draft.body) == groups(two.body)


# --- planned ------------------------------------------------------------------------------------


def test_a_newcomer_waits_until_the_plan_is_settled_and_stands_by_for_the_smallest_group() -> None:
    three = begun(RUN, candidates(3, RUN, FOUR_LAYERS), 2)
    joining = [newcomer(5, RUN)]
    assert next_draft(situation(RUN, three, joining=joining)) is None
    draft = draft_in(situation(RUN, three, joining=joining, settled=True, version=4))
    assert (draft.kind, draft.from_step, draft.lineage) == ("planned", 5, 0)
    assert waiting(draft.body) == [(PEOPLE[5].peer, 1)]
    assert groups(draft.body) == groups(three.body)


def test_who_is_ready_is_promoted_as_far_as_the_manifest_allows() -> None:
    three = begun(RUN, candidates(3, RUN, FOUR_LAYERS), 2)
    joined = adopted(
        draft_in(situation(RUN, three, joining=[newcomer(5, RUN)], settled=True)), three.header
    )
    now = situation(RUN, joined, heartbeats=ready(5, 1), settled=True)
    draft = draft_in(now)
    assert draft.kind == "planned"
    assert groups(draft.body) == [peers(0, 1), peers(2, 5)]
    assert waiting(draft.body) == []
    assert next_draft(situation(ONE, SPARE, heartbeats=ready(3, 1), settled=True)) is None


def test_who_was_ready_is_promoted_however_far_the_swarm_has_come_since() -> None:
    """A heartbeat is a second old, and a step may take some milliseconds: the change waits until
    who is promoted holds the version with which it begins."""
    three = begun(RUN, candidates(3, RUN, FOUR_LAYERS), 2)
    joined = adopted(
        draft_in(situation(RUN, three, joining=[newcomer(5, RUN)], settled=True)), three.header
    )
    said = ready(5, 1, version=40)
    draft = draft_in(situation(RUN, joined, heartbeats=said, settled=True, version=60))
    assert (draft.kind, draft.from_step) == ("planned", 61)
    assert groups(draft.body) == [peers(0, 1), peers(2, 5)]


def test_at_the_end_of_the_run_nobody_is_moved_any_more() -> None:
    now = situation(RUN, FOUR, joining=[newcomer(5, RUN)], settled=True, version=100)
    assert next_draft(now) is None


def test_a_stage_that_is_much_faster_gives_one_away() -> None:
    """Six peers, three each; two of stage 1 have died. Of equal ones the first moves."""
    six = begun(RUN, candidates(6, RUN, FOUR_LAYERS), 2)
    gone = {member(4): "silent", member(5): "silent"}
    repaired = adopted(draft_in(situation(RUN, six, gone=gone)), six.header)
    assert groups(repaired.body) == [peers(0, 1, 2), peers(3)]
    draft = draft_in(situation(RUN, repaired, settled=True, version=4))
    assert draft.kind == "planned"
    assert groups(draft.body) == [peers(1, 2), peers(3)]
    assert waiting(draft.body) == [(PEOPLE[0].peer, 1)]
    assert draft.body.leavers == (member(0),)
    moved = adopted(draft, repaired.header)
    assert review(moved.header, moved.body, (), repaired, ReviewContext(RUN, 4)) == ""
    assert next_draft(situation(RUN, moved, settled=True, version=5)) is None
    promoted = draft_in(
        situation(RUN, moved, settled=True, version=6, heartbeats=ready(0, 1, version=6))
    )
    assert groups(promoted.body) == [peers(1, 2), peers(3, 0)]
    last = adopted(promoted, moved.header)
    assert review(last.header, last.body, (), moved, ReviewContext(RUN, 4)) == ""
    assert promoted.body.leavers == ()


def test_who_stands_by_moves_before_who_works() -> None:
    """Of stage 0 one works and two stand by; nobody stands by for stage 1."""
    plan = begun(ONE, candidates(4, ONE, FOUR_LAYERS), 2)
    uneven = Known(
        plan.header,
        replace(
            plan.body,
            standby=tuple(replace(each, stage=0) for each in plan.body.standby),
        ),
    )
    draft = draft_in(situation(ONE, uneven, settled=True))
    assert groups(draft.body) == groups(plan.body)
    assert waiting(draft.body) == [(PEOPLE[1].peer, 0), (PEOPLE[3].peer, 1)]
    assert draft.body.leavers == ()


def test_nobody_is_moved_away_from_the_slowest_stage() -> None:
    """Layers of 9, 9, 1 and 1 s: two replicas of the slow stage are worth more, and three peers are
    too few for two everywhere."""
    slow = [9.0, 9.0, 1.0, 1.0]
    cut = manifest(run=training(cuts=(2,), steps=100))
    six = begun(cut, candidates(6, cut, slow), 2)
    gone = {member(2): "silent", member(4): "silent", member(5): "silent"}
    repaired = adopted(draft_in(situation(cut, six, gone=gone)), six.header)
    assert groups(repaired.body) == [peers(0, 1), peers(3)]
    assert next_draft(situation(cut, repaired, settled=True)) is None


def test_nobody_stands_by_for_what_does_not_fit_into_its_memory() -> None:
    """Each stage has two layers of 16 bytes: AdamW keeps six times that."""
    for memory_bytes, stage in ((192, [(PEOPLE[5].peer, 0)]), (191, [])):
        joining = [newcomer(5, RUN, memory_bytes=memory_bytes)]
        draft = draft_in(situation(RUN, FOUR, joining=joining, settled=True))
        assert member(5) in members_of(draft.body)
        assert waiting(draft.body) == stage


def test_when_nobody_with_work_is_gone_no_work_stops() -> None:
    gone = {member(3): "silent"}
    assert draft_in(situation(ONE, SPARE, gone=gone, settled=True)).kind == "planned"
    assert draft_in(situation(ONE, SPARE, gone=gone)).kind == "repair"


def test_the_council_grows_with_equal_roles() -> None:
    founder = RUN.founder
    assert FOUR.header.council == (founder,)
    willing = frozenset(peers(1, 2, 3))
    assert next_draft(situation(RUN, FOUR, consents=willing)) is None
    draft = draft_in(situation(RUN, FOUR, consents=willing, settled=True))
    assert draft.council == tuple(peers(0, 1, 2))
    assert replace(draft.body, reason="") == replace(FOUR.body, reason="")
    assert draft.body.reason == "the council has 3 voters"


# --- whatever happens -----------------------------------------------------------------------------


@dataclass
class World:
    """A swarm as its leader sees it."""

    run: Manifest
    plan: Known
    boots: dict[PeerId, int]
    alive: set[PeerId]
    holders: set[int]
    """Numbers of the peers that have the data."""
    ready: set[Member] = field(default_factory=set)
    version: int = 0

    def member(self, peer: PeerId) -> Member:
        return Member(peer, self.boots[peer])

    @property
    def living(self) -> set[Member]:
        return {self.member(peer) for peer in self.alive}

    def heartbeats(self) -> dict[PeerId, Heartbeat]:
        stages = {each.member: each.stage for each in self.plan.body.standby}
        return {
            member.peer: heartbeat(
                boot=member.boot,
                state="ready" if member in self.ready else "joining",
                stage=stages.get(member, -1),
                lineage=self.plan.header.lineage,
                version=self.version,
            )
            for member in sorted(self.living, key=lambda each: each.peer)
            if member in stages
        }

    def joining(self) -> list[Candidate]:
        members = members_of(self.plan.body)
        epoch = self.plan.header.epoch
        return [
            newcomer(
                n,
                self.run,
                boot=self.boots[who.peer],
                epoch=epoch,
                digest=b"d" * 32 if n in self.holders else b"",
            )
            for n, who in enumerate(PEOPLE)
            if who.peer in self.alive and self.member(who.peer) not in members
        ]

    def evidence(self, draft: Draft) -> list[Signed]:
        """What a leader would enclose: the word of two who are kept about each who is not and
        has not started again; consents of new voters."""
        members = members_of(self.plan.body)
        out = evicted(self.plan.body, draft.body)
        back = {each.peer for each in members_of(draft.body)}
        kept = [each.peer for each in members if each not in out]
        observers = kept[:2] or [self.plan.header.council[0]]
        new_voters = [peer for peer in draft.council if peer not in self.plan.header.council]
        return [
            *(
                observation(IDENTITIES[peer], each, self.plan.header)
                for each in out
                if each.peer not in back
                for peer in observers
            ),
            *(consent(IDENTITIES[peer], self.plan.header) for peer in new_voters),
        ]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whatever_happens_every_draft_is_legal_and_passes_review(data: st.DataObject) -> None:
    run = manifest(run=training(steps=100, max_replicas=data.draw(st.integers(0, 2))))
    count = data.draw(st.integers(1, 6))
    stages = data.draw(st.integers(1, min(count, 3)))
    everybody = [who.peer for who in PEOPLE[:8]]
    holders = data.draw(st.sets(st.integers(0, 7), min_size=1)) | {
        data.draw(st.integers(0, count - 1))
    }
    world = World(
        run,
        begun(run, candidates(count, run, FOUR_LAYERS, sorted(holders)), stages),
        dict.fromkeys(everybody, 1),
        set(everybody[:count]),
        holders,
    )
    for _ in range(data.draw(st.integers(1, 8))):
        _live_on(world, data)
        _decide(world, data)


def _live_on(world: World, data: st.DataObject) -> None:
    """Some die, some start (again), some become ready; steps pass."""
    some = st.sets(st.sampled_from(sorted(world.boots)), max_size=data.draw(st.integers(0, 3)))
    world.alive -= data.draw(some)
    for peer in sorted(data.draw(some)):
        if peer not in world.alive or data.draw(st.booleans()):
            world.boots[peer] += 1
        world.alive.add(peer)
    standing_by = [each.member for each in world.plan.body.standby if each.member in world.living]
    if standing_by:
        world.ready |= data.draw(st.sets(st.sampled_from(standing_by)))
    world.version += data.draw(st.integers(0, 1))


def _decide(world: World, data: st.DataObject) -> None:
    before = world.plan
    members = members_of(before.body)
    now = Situation(
        manifest=world.run,
        header=before.header,
        body=before.body,
        heartbeats=world.heartbeats(),
        gone={each: "silent" for each in members if each not in world.living},
        joining=world.joining(),
        consents=frozenset(data.draw(st.sets(st.sampled_from(sorted(world.boots))))) & world.alive,
        lost_work=data.draw(st.sampled_from(["", "", "a link broke"])),
        settled=data.draw(st.booleans()),
        version=world.version,
        waited_seconds=data.draw(st.sampled_from([0.0, 100.0])),
    )
    draft = next_draft(now)
    assert draft == next_draft(now)
    if not isinstance(draft, Draft):
        if draft is None and not (before.body.halted or before.body.ended):
            assert set(members) <= world.living  # else something would have to be done
        return
    _check_draft(draft, world, before)
    after = adopted(draft, before.header)
    context = ReviewContext(world.run, 4, world.heartbeats())
    evidence = world.evidence(draft)
    assert review(after.header, after.body, evidence, before, context) == ""
    world.plan = after


def _check_draft(draft: Draft, world: World, before: Known) -> None:
    body = draft.body
    assert legal_council_change(before.header.council, draft.council) == ""
    assert set(members_of(body)) == world.living  # who lives is in, whoever is dead is out
    working = list(chain.from_iterable(stage.replicas for stage in body.stages))
    feeding = [each.member for each in body.feeders]
    standing_by = [each.member for each in body.standby]
    assert {*working, *feeding, *standing_by, *body.leavers} <= world.living
    if draft.lineage == before.header.lineage:
        for old, new in zip(before.body.stages, body.stages, strict=True):
            survivors = [each for each in old.replicas if each in world.living]
            if draft.kind == "repair":
                assert list(new.replicas[: len(survivors)]) == survivors
            assert all(each in survivors or each in world.ready for each in new.replicas)
        before_and_living = {
            each for stage in before.body.stages for each in stage.replicas
        } & world.living
        assert before_and_living <= {*working, *body.leavers}
    else:
        assert draft.lineage == before.header.lineage + 1


# --- by what members have measured --------------------------------------------------------------


def test_a_newcomer_stands_by_for_the_stage_that_is_slowest_by_what_is_measured() -> None:
    """Both stages have two replicas, those of stage 1 take four times as long as they said."""
    slow = {PEOPLE[n].peer: estimates(n, slowdown=4.0) for n in (2, 3)}
    joining = [newcomer(5, RUN)]
    draft = draft_in(situation(RUN, FOUR, joining=joining, settled=True, estimates=slow))
    assert waiting(draft.body) == [(PEOPLE[5].peer, 1)]
    draft = draft_in(situation(RUN, FOUR, joining=joining, settled=True))
    assert waiting(draft.body) == [(PEOPLE[5].peer, 0)]


def test_a_newcomer_with_which_a_step_takes_longer_stands_by_and_the_plan_says_so() -> None:
    """Its links carry 10 bytes per second, and the stage's parameters are 32."""
    joining = [newcomer(5, RUN)]
    others = [PEOPLE[n].peer for n in range(4)]
    narrow = {PEOPLE[5].peer: estimates(5, links=[(n, 10.0, 0.001) for n in range(4)])} | {
        peer: estimates(n, links=[(5, 10.0, 0.001)]) for n, peer in enumerate(others)
    }
    draft = draft_in(situation(RUN, FOUR, joining=joining, settled=True, estimates=narrow))
    [each] = draft.body.standby
    assert each.member == member(5)
    assert re.fullmatch(r"with it in stage \d a step would take \S+ s, without \S+ s", each.reason)
    then = adopted(draft, FOUR.header)
    heartbeats = ready(5, each.stage, version=3)
    again = situation(RUN, then, settled=True, estimates=narrow, heartbeats=heartbeats, version=3)
    assert next_draft(again) is None  # it is ready, and gets nothing


def test_who_slows_down_gets_less_and_only_if_that_is_worth_a_plan() -> None:
    for slowdown, changes in ((1.05, False), (3.0, True)):
        slow = {PEOPLE[0].peer: estimates(0, slowdown=slowdown)}
        draft = next_draft(situation(RUN, FOUR, settled=True, estimates=slow))
        assert isinstance(draft, Draft) is changes
    assert isinstance(draft, Draft)
    assert groups(draft.body) == groups(FOUR.body)
    shares = {each.member: each.share for each in draft.body.feeders}
    assert shares[member(0)] * 2 < shares[member(1)]
    assert "a step takes" in draft.body.reason


def test_improvements_wait_where_a_change_has_just_been_made_and_what_is_needed_does_not() -> None:
    slow = {PEOPLE[0].peer: estimates(0, slowdown=3.0)}
    waiting = situation(RUN, FOUR, settled=True, estimates=slow, least_gain=math.inf)
    assert next_draft(waiting) is None
    joining = [newcomer(5, RUN)]
    draft = draft_in(
        situation(RUN, FOUR, settled=True, estimates=slow, least_gain=math.inf, joining=joining)
    )
    assert member(5) in members_of(draft.body)


def test_everybody_goes_where_a_better_plan_wants_it_but_no_stage_is_left_empty() -> None:
    target = {PEOPLE[0].peer: 1, PEOPLE[1].peer: 1, PEOPLE[2].peer: 0, PEOPLE[3].peer: "too slow"}
    draft = draft_in(situation(RUN, FOUR, settled=True, target=target))
    assert groups(draft.body) == [peers(1), peers(3)]
    assert sorted(waiting(draft.body)) == sorted([(PEOPLE[0].peer, 1), (PEOPLE[2].peer, 0)])
    assert draft.kind == "planned"


def test_the_only_replica_that_holds_the_data_stays_where_it_is() -> None:
    """Stage 2 is the slowest, and one of the two of stage 0 could move there: not the feeder, who
    would do nothing but feed until it is ready there."""
    run = manifest(run=training(steps=100, cuts=(1, 2)))
    plan = begun(run, candidates(4, run, FOUR_LAYERS, [0]), 3)
    assert groups(plan.body) == [peers(0, 1), peers(2), peers(3)]
    draft = draft_in(situation(run, plan, settled=True))
    assert groups(draft.body) == [peers(0), peers(2), peers(3)]
    assert waiting(draft.body) == [(PEOPLE[1].peer, 2)]


# --- in the middle of a step ----------------------------------------------------------------------

THREE = adopted(draft_in(situation(RUN, FOUR, gone={member(1): "silent"}, version=3)), FOUR.header)
"""Stage 0 has lost one of its two replicas."""
JOINED = adopted(
    draft_in(situation(RUN, THREE, joining=[newcomer(4, RUN, epoch=2)], settled=True, version=3)),
    THREE.header,
)
"""The newcomer is to follow stage 0, from the end of the step on."""


@pytest.mark.parametrize("state", ["settled", "pending"])
def test_who_is_ready_gets_work_at_once_where_much_of_the_step_is_left(state: str) -> None:
    """Stage 0 is the slowest one, and is twice as fast with it: half of what is left is saved."""
    more = {state: True, "heartbeats": ready(4, 0, version=3), "version": 3}
    draft = draft_in(situation(RUN, JOINED, step_left_seconds=100.0, **more))
    assert (draft.kind, draft.from_step) == ("repair", 3)
    assert groups(draft.body) == [peers(0, 4), peers(2, 3)]
    later = next_draft(situation(RUN, JOINED, step_left_seconds=1.0, **more))
    assert not isinstance(later, Draft) or later.kind == "planned"


@pytest.mark.parametrize(
    "said", [{}, ready(4, 0, version=2), ready(4, 1, version=3), ready(4, 0, version=3, boot=2)]
)
def test_who_would_be_waited_for_gets_no_work_within_a_step(said: dict[PeerId, Heartbeat]) -> None:
    now = situation(RUN, JOINED, pending=True, heartbeats=said, version=3, step_left_seconds=100.0)
    assert next_draft(now) is None


def test_who_does_not_make_the_slowest_stage_faster_waits_for_the_end_of_the_step() -> None:
    joined = adopted(
        draft_in(situation(RUN, FOUR, joining=[newcomer(4, RUN)], settled=True, version=3)),
        FOUR.header,
    )
    stage = joined.body.standby[0].stage
    now = situation(
        RUN,
        joined,
        settled=True,
        heartbeats=ready(4, stage, version=3),
        version=3,
        step_left_seconds=100.0,
    )
    draft = draft_in(now)
    assert (draft.kind, draft.from_step) == ("planned", 4)


def test_newcomers_do_not_wait_for_a_plan_that_waits_for_the_end_of_the_step() -> None:
    now = situation(RUN, JOINED, pending=True, joining=[newcomer(5, RUN, epoch=3)], version=3)
    draft = draft_in(now)
    assert (draft.kind, draft.from_step) == ("planned", 4)
    assert groups(draft.body) == groups(JOINED.body)
    assert {peer for peer, _ in waiting(draft.body)} == set(peers(4, 5))
    asking = [newcomer(5, RUN, epoch=3)]
    assert next_draft(situation(RUN, JOINED, joining=asking, version=3)) is None
    assert next_draft(situation(RUN, JOINED, pending=True, version=3)) is None


def test_a_stage_that_has_lost_a_replica_gets_one_of_a_stage_that_can_spare_it() -> None:
    """Layers of 1 s in stage 0 and next to nothing in stage 1: no step is quicker by it."""
    run = manifest(run=training(steps=100, cuts=(2,)))
    plan = begun(run, candidates(5, run, [1.0, 1.0, 0.01, 0.01]), 2)
    sizes = [len(group) for group in groups(plan.body)]
    lost = next(each for each in plan.body.stages[1].replicas)
    repaired = adopted(draft_in(situation(run, plan, gone={lost: "silent"})), plan.header)
    assert sorted([sizes[0], sizes[1] - 1]) == sorted(map(len, groups(repaired.body))) == [1, 3]
    moved = draft_in(situation(run, repaired, settled=True))
    assert len(moved.body.stages[0].replicas) == 2
    assert [stage for _, stage in waiting(moved.body)] == [1]
