"""Who watches a step: nothing that does not fit together becomes a step."""

import math
from collections.abc import Callable, Sequence
from random import Random
from typing import Literal

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.codec import PREFIX_BYTES, encode
from protocol.errors import RemoteProtocolError
from protocol.messages import (
    MAX_FLAGS,
    Commit,
    Flag,
    LedgerReport,
    Prepared,
    Report,
    Resume,
    StartReduction,
    Totals,
)
from protocol.packing import unpack
from protocol.records import Member, StandbyPlan, Training
from protocol.signing import PeerId
from swarm.core.coordinators import GroupCoordinator, StepCoordinator
from swarm.core.effects import Send
from swarm.core.ledger import bitmap_of
from swarm.core.settlement import NoHolder, settle
from swarm.core.step import Effect, Mishap, Trouble
from tests.core.plans import body, training
from tests.core.steps import ACCOUNT, FENCE, OTHER_HASH, TOTALS, held, report, role

PLAN = body([["a", "b"], ["c", "d"]])
STAGES = {"a": 0, "b": 0, "c": 1, "d": 1}
RUN = training(microbatches=4, steps=2)
replace = msgspec.structs.replace


# --- the coordinator of a stage -------------------------------------------------------------------


def ledger_report(
    indices: Sequence[int],
    *,
    step: int = 0,
    stage: int = 0,
    flags: tuple[Flag, ...] = (),
    loss_sum: float = 1.0,
) -> LedgerReport:
    return LedgerReport(
        fence=FENCE,
        step=step,
        stage=stage,
        bitmap=bitmap_of(indices, 4),
        weight=10 * len(indices),
        flags=flags,
        loss_sum=loss_sum,
    )


def coordinator(run: Training = RUN) -> GroupCoordinator:
    group = GroupCoordinator(role(PLAN, "a"), run)
    group.resume(0, prepared=False)
    return group


def test_the_reduction_starts_when_the_ledgers_partition_the_step() -> None:
    group = coordinator()
    assert group.ledger("b", ledger_report([3], flags=(Flag(3, "y"),))) == []
    assert group.ledger("a", ledger_report([0])) == []
    assert group.ledger("a", ledger_report([0, 1], flags=(Flag(0, "x"),), loss_sum=2.0)) == []
    message = StartReduction(
        fence=FENCE,
        step=0,
        stage=0,
        weight=40,
        flags=(Flag(0, "x"), Flag(3, "y")),
        loss_sum=3.5,
    )
    last = ledger_report([2, 3], flags=(Flag(3, "y"),), loss_sum=1.5)
    assert group.ledger("b", last) == [Send("a", message), Send("b", message)]
    assert group.ledger("b", last) == []  # again, late
    assert group.ledger("a", ledger_report([0, 1, 2, 3], step=1)) != []


@settings(max_examples=80, deadline=None)
@given(st.lists(st.sampled_from("ab"), min_size=4, max_size=4), st.randoms(use_true_random=False))
def test_reports_that_come_late_or_twice_take_nothing_back(
    hosts: list[PeerId], random: Random
) -> None:
    """A ledger only grows, so the largest report is the newest, in whatever order they come."""
    reports = [
        (peer, ledger_report([i for i in range(last + 1) if hosts[i] == peer]))
        for peer in "ab"
        for last in range(4)
    ]
    reports *= 2
    random.shuffle(reports)
    group = coordinator()
    effects = [effect for sender, message in reports for effect in group.ledger(sender, message)]
    assert [effect.peer for effect in effects if isinstance(effect, Send)] == ["a", "b"]
    assert len(effects) == 2


def test_an_index_in_two_ledgers_is_trouble() -> None:
    group = coordinator()
    group.ledger("a", ledger_report([0, 1]))
    [trouble] = group.ledger("b", ledger_report([1, 2, 3]))
    assert trouble == Trouble("step 0: indices [1] in two ledgers of stage 0, one of b")


def test_trouble_is_told_in_few_words() -> None:
    many = training(microbatches=65536)
    group = coordinator(many)
    full = replace(ledger_report([]), bitmap=b"\xff" * 8192)
    assert group.ledger("a", full) != []
    group = coordinator(many)
    group.ledger("a", replace(full, bitmap=b"\xff" * 8191 + b"\x7f"))
    [trouble] = group.ledger("b", full)
    assert trouble == Trouble(
        "step 0: indices [0, 1, 2, 3, 4, 5, 6, 7] and 65527 more in two ledgers of stage 0, "
        "one of b"
    )


@pytest.mark.parametrize(
    ("sender", "message", "reason"),
    [
        ("c", ledger_report([0]), "c reports a ledger of stage 0"),
        ("x", ledger_report([0]), "x reports a ledger of stage 0"),
        ("b", ledger_report([0], stage=1), "b reports a ledger of stage 1"),
        ("b", ledger_report([0], step=1), "ledger of step 1, 0 is in hand"),
        ("b", replace(ledger_report([]), bitmap=b""), "0 bytes, 0 bits for 4"),
        ("b", replace(ledger_report([]), bitmap=b"\x00\x00"), "2 bytes, 0 bits for 4"),
        ("b", replace(ledger_report([]), bitmap=b"\x10"), "1 bytes, 5 bits for 4"),
        ("a", ledger_report([1]), r"the ledger of a has lost indices \[0\]"),
    ],
)
def test_a_ledger_that_cannot_be_is_refused(
    sender: PeerId, message: LedgerReport, reason: str
) -> None:
    group = coordinator()
    group.ledger("a", ledger_report([0]))
    with pytest.raises(RemoteProtocolError, match=reason):
        group.ledger(sender, message)


def test_ledgers_of_the_step_in_hand_count_whichever_it_is() -> None:
    group = GroupCoordinator(role(PLAN, "a"), RUN)
    group.resume(5, prepared=False)
    assert group.ledger("a", ledger_report([0, 1, 2, 3], step=4)) == []
    effects = group.ledger("a", ledger_report([0, 1, 2, 3], step=5))
    assert [effect.peer for effect in effects if isinstance(effect, Send)] == ["a", "b"]


def test_where_the_stage_is_prepared_only_ledgers_of_the_next_step_count() -> None:
    group = GroupCoordinator(role(PLAN, "a"), RUN)
    group.resume(5, prepared=True)
    assert group.ledger("a", ledger_report([0, 1, 2, 3], step=5)) == []
    [first, _] = group.ledger("b", ledger_report([0, 1, 2, 3], step=6))
    assert isinstance(first, Send) and isinstance(first.message, StartReduction)
    assert first.message.step == 6


# --- the coordinator of the step ------------------------------------------------------------------


def reports(version: int = 0) -> dict[PeerId, Report]:
    return {peer: report(held(stage, version)) for peer, stage in STAGES.items()}


def step_coordinator(
    on_nonfinite: Literal["halt", "skip"] = "halt", *, resumed: bool = True
) -> StepCoordinator:
    run = training(microbatches=4, steps=2, on_nonfinite=on_nonfinite)
    found = StepCoordinator(role(PLAN, "a"), run, (2, 1))
    if resumed:
        for peer, message in reports().items():
            found.report(peer, message)
    return found


def resume_in(effects: Sequence[object]) -> tuple[list[PeerId], Resume]:
    """Return the Resume in these effects, and to whom it is sent."""
    sent = [effect for effect in effects if isinstance(effect, Send)]
    messages = [each.message for each in sent]
    assert isinstance(messages[0], Resume)
    assert messages == [messages[0]] * len(messages)
    assert unpack(encode(messages[0])[PREFIX_BYTES:], Resume) == messages[0]
    return [each.peer for each in sent], messages[0]


def prepared(stage: int, /, **changed: object) -> Prepared:
    message = Prepared(
        fence=FENCE,
        step=0,
        stage=stage,
        square_norms=(1.0, 2.0) if stage == 0 else (4.0,),
        weight=10,
        flags=(),
        loss_sum=5.0 * stage,
    )
    return replace(message, **changed)


def all_prepared(
    found: StepCoordinator,
    change: Callable[[PeerId, Prepared], Prepared] = lambda _, message: message,
) -> list[Effect]:
    """Let all four replicas be prepared; return what follows from the last."""
    effects: list[Effect] = []
    for peer, stage in zip("abcd", (0, 0, 1, 1), strict=True):
        assert effects == []
        effects = found.prepared(peer, change(peer, prepared(stage)))
    return effects


def test_when_all_replicas_have_reported_the_step_in_hand_goes_on() -> None:
    found = step_coordinator(resumed=False)
    assert found.awaited == ("a", "b", "c", "d")
    said = reports(version=1) | {"b": report(held(0, 1, indices=[0, 2], totals=TOTALS))}
    for peer in "dab":
        assert found.report(peer, said[peer]) == []
    assert found.awaited == ("c",)
    peers, resume = resume_in(found.report("c", said["c"]))
    assert peers == list("abcd")
    assert resume.step == 1 and resume.fence == FENCE
    settled = settle(PLAN, 0, 4, said)
    assert not isinstance(settled, NoHolder)
    assert (resume.totals, resume.stages) == (settled.totals, settled.stages)
    assert [stage.missing for stage in resume.stages] == [b"\x0a", b"\x0f"]
    assert found.awaited == ()
    assert found.report("c", said["c"]) == []


def test_a_report_that_comes_again_before_the_last_replaces_the_first() -> None:
    found = step_coordinator(resumed=False)
    said = reports()
    for message in (report(), said["a"]):
        assert found.report("a", message) == []
    for peer in "bc":
        assert found.report(peer, said[peer]) == []
    _, resume = resume_in(found.report("d", said["d"]))
    assert resume.stages[0].donors == ("a", "b")


def test_feeders_standbys_and_leavers_are_resumed_too() -> None:
    plan = replace(
        body([["a"]], feeders=["f", "a"]),
        standby=(StandbyPlan(Member("s", 1), 0),),
        leavers=(Member("l", 1),),
    )
    found = StepCoordinator(role(plan, "a"), RUN, (1,))
    assert found.report("a", report(held(0))) == []
    peers, _ = resume_in(found.report("l", report(held(0))))
    assert peers == ["a", "f", "l", "s"]
    for peer in "fs":
        with pytest.raises(RemoteProtocolError, match=f"{peer} reports and hosts no stage"):
            found.report(peer, report(held(0)))


def test_leavers_are_waited_for_until_their_time_is_over() -> None:
    plan = replace(PLAN, leavers=(Member("x", 1),))
    of_leaver = report(held(0, 1, totals=TOTALS))
    donors = {}
    for late in (False, True):
        found = StepCoordinator(role(plan, "a"), RUN, (2, 1))
        for peer, message in reports(version=1).items():
            assert found.report(peer, message) == []
        assert found.awaited == ()  # no replica is suspected for the sake of a leaver
        effects = found.go_without_leavers() if late else found.report("x", of_leaver)
        peers, resume = resume_in(effects)
        assert peers == list("abcdx")
        donors[late] = resume.stages[0].donors
        assert found.report("x", of_leaver) == []
        assert found.go_without_leavers() == []
    assert donors == {False: ("a", "b", "x"), True: ("a", "b")}


def test_the_end_of_the_leavers_time_does_not_excuse_a_replica() -> None:
    found = step_coordinator(resumed=False)
    assert found.go_without_leavers() == []
    said = reports()
    for peer in "abc":
        assert found.report(peer, said[peer]) == []
    assert found.awaited == ("d",)
    resume_in(found.report("d", said["d"]))


def test_reports_that_do_not_fit_together_are_told_and_the_step_goes_on() -> None:
    found = step_coordinator(resumed=False)
    said = reports() | {
        "b": report(held(0, state_hash=OTHER_HASH)),
        "c": report(held(1, indices=[0, 1])),
        "d": report(held(1, indices=[1])),
    }
    effects = [effect for peer in "abcd" for effect in found.report(peer, said[peer])]
    assert [effect for effect in effects if isinstance(effect, Mishap)] == [
        Mishap("replicas of stage 0 hold different weights at version 0"),
        Mishap("stage 1: the ledger of d overlaps with another's"),
    ]
    peers, resume = resume_in(effects)
    assert peers == list("abcd")
    assert [stage.discards for stage in resume.stages] == [(), ("d",)]


def test_stages_that_are_tied_are_settled_together() -> None:
    found = StepCoordinator(role(PLAN, "a"), RUN, (2, 1), tied=((0, 1),))
    said = reports() | {"a": report(held(0, indices=[3], prepared=ACCOUNT))}
    effects = [effect for peer in "abcd" for effect in found.report(peer, said[peer])]
    _, resume = resume_in(effects)
    assert [stage.prepared for stage in resume.stages] == [(), ()]
    assert [stage.missing for stage in resume.stages] == [b"\x07", b"\x0f"]


def test_a_stage_that_nobody_holds_is_no_step_until_somebody_reports_it() -> None:
    found = step_coordinator(resumed=False)
    said = reports() | {"c": report(), "d": report()}
    effects = [effect for peer in "abcd" for effect in found.report(peer, said[peer])]
    assert effects == [NoHolder(1, 0)]
    assert all_prepared(found) == []
    _, resume = resume_in(found.report("d", report(held(1))))
    assert (resume.step, resume.stages[1].donors) == (0, ("d",))


@pytest.mark.parametrize("bitmap", [b"", b"\x00\x00", b"\x10"])
def test_a_report_with_a_ledger_of_another_size_is_refused(bitmap: bytes) -> None:
    found = step_coordinator(resumed=False)
    wrong = report(held(0), replace(held(1), bitmap=bitmap))
    with pytest.raises(RemoteProtocolError, match="a reports a ledger of . bytes for 4 micro"):
        found.report("a", wrong)
    assert "a" in found.awaited


def test_when_all_are_prepared_all_commit_with_one_total() -> None:
    effects = all_prepared(step_coordinator())
    totals = Totals(weight=10, square_norm=7.0, flags=(), verdict="apply", loss=0.5)
    assert effects == [Send(peer, Commit(fence=FENCE, step=0, totals=totals)) for peer in "abcd"]


def test_prepared_again_or_of_another_step_is_not_counted() -> None:
    found = step_coordinator()
    for _ in range(4):
        assert found.prepared("a", prepared(0)) == []
    assert found.prepared("b", prepared(0, step=1)) == []
    for peer, stage in (("c", 1), ("d", 1)):
        assert found.prepared(peer, prepared(stage)) == []
    assert len(found.prepared("b", prepared(0))) == 4
    assert found.prepared("b", prepared(0)) == []


def test_standbys_and_leavers_hear_the_commit() -> None:
    plan = replace(PLAN, standby=(StandbyPlan(Member("s", 1), 0),), leavers=(Member("x", 1),))
    found = StepCoordinator(role(plan, "a"), RUN, (2, 1))
    for peer, message in (reports() | {"x": report()}).items():
        found.report(peer, message)
    effects = all_prepared(found)
    assert [effect.peer for effect in effects if isinstance(effect, Send)] == list("abcdsx")


def test_nobody_is_prepared_before_the_step_in_hand_is_known() -> None:
    assert all_prepared(step_coordinator(resumed=False)) == []


@pytest.mark.parametrize(
    "changed",
    [
        {"square_norms": (4.0000001,)},
        {"square_norms": (math.nan,)},
        {"weight": 11},
        {"flags": (Flag(0, "x"),)},
    ],
)
def test_replicas_of_a_stage_that_reduced_different_gradients_are_trouble(
    changed: dict[str, object],
) -> None:
    [trouble] = all_prepared(
        step_coordinator(),
        lambda peer, message: replace(message, **changed) if peer == "d" else message,
    )
    assert trouble == Trouble("step 0: replicas of stage 1 reduced different gradients")


def test_stages_that_count_different_weights_are_trouble() -> None:
    [trouble] = all_prepared(
        step_coordinator(), lambda peer, message: replace(message, weight=10 + message.stage)
    )
    assert trouble == Trouble("step 0: stages count weights [10, 11]")


@pytest.mark.parametrize("verdict", ["halt", "skip"])
@pytest.mark.parametrize(
    "changed",
    [{"flags": (Flag(2, "x"),)}, {"square_norms": (math.inf,)}, {"square_norms": (math.nan,)}],
)
def test_a_step_that_is_not_finite_is_not_applied(
    verdict: Literal["halt", "skip"], changed: dict[str, object]
) -> None:
    effects = all_prepared(
        step_coordinator(verdict),
        lambda peer, message: replace(message, **changed) if message.stage else message,
    )
    for effect in effects:
        assert isinstance(effect, Send) and isinstance(effect.message, Commit)
        assert effect.message.totals.verdict == verdict
        assert unpack(encode(effect.message)[PREFIX_BYTES:], Commit) == effect.message
    assert len(effects) == 4


def test_a_commit_names_no_more_flags_than_it_can_carry() -> None:
    effects = all_prepared(
        step_coordinator(),
        lambda peer, message: replace(
            message, flags=tuple(Flag(2 * n + message.stage, "x") for n in range(MAX_FLAGS))
        ),
    )
    for effect in effects:
        assert isinstance(effect, Send) and isinstance(effect.message, Commit)
        assert effect.message.totals.flags == tuple(Flag(n, "x") for n in range(MAX_FLAGS))
        assert effect.message.totals.verdict == "halt"


@pytest.mark.parametrize(
    ("sender", "message", "reason"),
    [
        ("c", prepared(0), "c is no replica of stage 0"),
        ("a", prepared(1), "a is no replica of stage 1"),
        ("x", prepared(0), "x is no replica of stage 0"),
        ("a", prepared(0, stage=2), "stage 2 of 2"),
        ("a", prepared(0, square_norms=(1.0,)), "1 norms of stage 0, which counts 2 tensors"),
        ("c", prepared(1, square_norms=()), "0 norms of stage 1, which counts 1 tensors"),
    ],
)
def test_who_is_not_prepared_cannot_say_so(sender: PeerId, message: Prepared, reason: str) -> None:
    with pytest.raises(RemoteProtocolError, match=reason):
        step_coordinator().prepared(sender, message)


@pytest.mark.parametrize("sender", ["x", ""])
def test_who_hosts_nothing_does_not_report(sender: PeerId) -> None:
    with pytest.raises(RemoteProtocolError, match="reports and hosts no stage"):
        step_coordinator(resumed=False).report(sender, report(held(0)))
