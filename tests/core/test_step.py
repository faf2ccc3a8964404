"""One replica's life in a step: what it does, what it says, and what changes nothing."""

import math
from dataclasses import replace as changed

import msgspec
import pytest

from protocol.codec import PREFIX_BYTES, encode
from protocol.errors import RemoteProtocolError
from protocol.messages import (
    MAX_FLAGS,
    Account,
    Commit,
    Flag,
    LedgerReport,
    Prepared,
    Resume,
    Settlement,
    StartReduction,
    Totals,
)
from protocol.packing import unpack
from protocol.records import Member, StandbyPlan
from protocol.signing import PeerId
from swarm.core.effects import Send
from swarm.core.holding import Holding
from swarm.core.ledger import Ledger, bitmap_of
from swarm.core.step import (
    Apply,
    Recover,
    Reduce,
    ReplicaState,
    ReplicaStep,
    Role,
    Trouble,
    audience_of,
    ranges_of_stages,
    replicas_of,
    role_of,
    step_coordinator_of,
    workers_of,
)
from tests.core.plans import body, training
from tests.core.steps import ACCOUNT, FENCE, HASH, OTHER_HASH, TOTALS, role

PLAN = body([["a", "b"], ["c", "d"]])
RUN = training(microbatches=4, steps=2)
OTHER = Settlement(HASH, bitmap_of((), 4), ("c", "d"), (), None, ())
replace = msgspec.structs.replace


def settlement(
    donors: tuple[PeerId, ...] = ("a", "b"),
    *,
    prepared: tuple[PeerId, ...] = (),
    discards: tuple[PeerId, ...] = (),
) -> Settlement:
    """Return what becomes of stage 0."""
    return Settlement(
        state_hash=HASH,
        missing=bitmap_of(() if prepared else range(4), 4),
        donors=donors,
        prepared=prepared,
        account=ACCOUNT if prepared else None,
        discards=discards,
    )


def resume(of_stage: Settlement, step: int = 0, totals: Totals | None = None) -> Resume:
    return Resume(fence=FENCE, step=step, totals=totals, stages=(of_stage, OTHER))


def holding(version: int = 0) -> Holding:
    return Holding(0, 0, 1, version, HASH)


RESUME = resume(settlement())
INITIAL = holding()


def replica(peer: PeerId = "b", held: Holding | None = INITIAL) -> ReplicaStep:
    return ReplicaStep(role(PLAN, peer), RUN, held)


def filling() -> ReplicaStep:
    """Return a replica that has recovered with nothing to do."""
    step = replica()
    step.resume(RESUME)
    assert step.recovered(holding(), None) == []
    return step


def start(step: int = 0, stage: int = 0) -> StartReduction:
    return StartReduction(fence=FENCE, step=step, stage=stage, weight=10, flags=(), loss_sum=2.5)


def commit(step: int = 0, totals: Totals = TOTALS) -> Commit:
    return Commit(fence=FENCE, step=step, totals=totals)


def committing(step: ReplicaStep) -> None:
    """Bring a replica from filling to the end of its commit, as the executor and the epoch do."""
    assert step.start_reduction(start(step.version)) == [Reduce(step.version)]
    step.reduced((1.0,))
    assert step.commit(commit(step.version)) == [Apply(step.version, TOTALS)]
    assert step.state is ReplicaState.COMMITTING
    assert step.holding is not None
    step.holding = step.holding.after(TOTALS)


# --- a step in the good case ----------------------------------------------------------------------


def test_a_step_as_one_replica_sees_it() -> None:
    step = replica()
    assert (step.version, step.state, step.is_working) == (0, ReplicaState.WAITING, False)
    [recover] = step.resume(RESUME)
    assert recover == Recover(0, settlement(), None, False, False, False, False)
    assert (step.version, step.state, step.is_working) == (0, ReplicaState.RECOVERING, False)
    assert step.recovered(holding(), None) == []
    assert (step.version, step.state, step.is_working) == (0, ReplicaState.FILLING, True)
    ledger = Ledger(4)
    ledger.add(2, weight=3, loss_sum=1.5)
    [sent] = step.accounted(ledger)
    assert sent == Send(
        "a",
        LedgerReport(
            fence=FENCE, step=0, stage=0, bitmap=b"\x04", weight=3, flags=(), loss_sum=1.5
        ),
    )
    assert step.start_reduction(start()) == [Reduce(0)]
    assert step.holding == changed(holding(), account=Account(10, (), 2.5))
    [sent] = step.reduced((4.0, 9.0))
    assert sent == Send(
        "a",
        Prepared(
            fence=FENCE,
            step=0,
            stage=0,
            square_norms=(4.0, 9.0),
            weight=10,
            flags=(),
            loss_sum=2.5,
        ),
    )
    assert step.commit(commit()) == [Apply(0, TOTALS)]
    step.holding = holding().after(TOTALS)
    assert step.applied(TOTALS) == []
    assert (step.version, step.state) == (1, ReplicaState.FILLING)
    committing(step)
    step.applied(TOTALS)
    assert (step.version, step.state) == (2, ReplicaState.FINISHED)


def test_a_reduction_that_starts_before_this_replica_has_recovered_waits_for_it() -> None:
    """Resume and StartReduction come from different peers: either may be first."""
    for messages in (["start", "resume"], ["resume", "start"]):
        step = replica()
        for each in messages:
            effects = step.resume(RESUME) if each == "resume" else step.start_reduction(start())
            assert not any(isinstance(effect, Reduce) for effect in effects)
        assert (step.version, step.state) == (0, ReplicaState.RECOVERING)
        assert step.recovered(holding(), None) == [Reduce(0)]
        assert (step.version, step.state) == (0, ReplicaState.REDUCING)


def test_a_reduction_that_starts_before_the_last_commit_waits_for_it() -> None:
    """The others of the stage may have computed all of the next step meanwhile."""
    step = filling()
    committing(step)
    assert step.start_reduction(start(1)) == []
    assert step.applied(TOTALS) == [Reduce(1)]
    assert (step.version, step.state) == (1, ReplicaState.REDUCING)


def test_what_comes_again_or_at_the_wrong_time_changes_nothing() -> None:
    step = replica()
    assert step.commit(commit()) == []
    step.resume(RESUME)
    assert step.commit(commit()) == []
    assert step.resume(RESUME) == []
    step.recovered(holding(), None)
    assert step.commit(commit()) == []
    step.start_reduction(start())
    for message in (start(), start(7)):
        assert step.start_reduction(message) == []
    assert step.resume(RESUME) == []
    assert step.commit(commit()) == []  # reducing: this replica is not prepared
    step.reduced((1.0,))
    assert step.commit(commit(1)) == []
    assert step.commit(commit()) == [Apply(0, TOTALS)]
    assert step.commit(commit()) == []
    step.holding = holding().after(TOTALS)
    step.applied(TOTALS)
    assert step.commit(commit()) == []
    assert step.start_reduction(start(0)) == []
    assert step.resume(resume(settlement(), step=1, totals=TOTALS)) == []
    assert (step.version, step.state) == (1, ReplicaState.FILLING)


def test_a_halting_verdict_stops_a_replica_at_its_version() -> None:
    step = filling()
    step.start_reduction(start())
    step.reduced((1.0,))
    halt = replace(TOTALS, verdict="halt")
    assert step.commit(commit(0, halt)) == [Apply(0, halt)]
    assert step.start_reduction(start(1)) == []
    assert step.applied(halt) == []
    assert (step.version, step.state) == (0, ReplicaState.HALTED)
    for effects in (
        step.start_reduction(start(0)),
        step.start_reduction(start(1)),
        step.commit(commit()),
        step.resume(RESUME),
    ):
        assert effects == []


def test_a_skipped_step_counts_as_a_step() -> None:
    step = filling()
    committing(step)
    step.applied(replace(TOTALS, verdict="skip"))
    assert (step.version, step.state) == (1, ReplicaState.FILLING)


def test_a_ledger_report_names_no_more_flags_than_it_can_carry() -> None:
    ledger = Ledger(200)
    for index in range(200):
        ledger.add(index, weight=1, nonfinite=f"layer{index}")
    [sent] = replica().accounted(ledger)
    assert isinstance(sent, Send) and isinstance(sent.message, LedgerReport)
    assert sent.message.flags == tuple(Flag(n, f"layer{n}") for n in range(MAX_FLAGS))
    assert unpack(encode(sent.message)[PREFIX_BYTES:], LedgerReport) == sent.message


# --- what a replica has to do to get to the step in hand ------------------------------------------

AT_3 = resume(settlement(), step=3, totals=TOTALS)


@pytest.mark.parametrize(
    ("held", "message", "todo"),
    [
        pytest.param(holding(3), AT_3, {}, id="is there"),
        pytest.param(holding(2), AT_3, {"commit": TOTALS}, id="is one behind and commits"),
        pytest.param(
            holding(2),
            resume(settlement(("a",)), step=3, totals=TOTALS),
            {"fetch_state": True},
            id="is one behind and cannot commit",
        ),
        pytest.param(None, AT_3, {"fetch_state": True}, id="holds nothing"),
        pytest.param(
            Holding(1, 0, 1, 3, HASH), AT_3, {"fetch_state": True}, id="holds another lineage"
        ),
        pytest.param(
            Holding(0, 0, 1, 3, OTHER_HASH),
            resume(settlement(("a",)), step=3, totals=TOTALS),
            {"fetch_state": True},
            id="holds another state",
        ),
        pytest.param(
            holding(3),
            resume(settlement(discards=("b",)), step=3, totals=TOTALS),
            {"discard": True},
            id="has accumulated what another has",
        ),
        pytest.param(
            holding(3),
            resume(settlement(prepared=("a", "b")), step=3, totals=TOTALS),
            {"keep_gradient": True},
            id="is prepared",
        ),
        pytest.param(
            holding(3),
            resume(settlement(prepared=("a",)), step=3, totals=TOTALS),
            {"fetch_gradient": True},
            id="lacks the gradient",
        ),
        pytest.param(
            holding(2),
            resume(settlement(prepared=("a",)), step=3, totals=TOTALS),
            {"commit": TOTALS, "fetch_gradient": True},
            id="is one behind and lacks the gradient",
        ),
        pytest.param(
            None,
            resume(settlement(prepared=("a",)), step=3, totals=TOTALS),
            {"fetch_state": True, "fetch_gradient": True},
            id="holds nothing and lacks the gradient",
        ),
    ],
)
def test_a_replica_gets_to_the_step_in_hand(
    held: Holding | None, message: Resume, todo: dict[str, object]
) -> None:
    step = replica(held=held)
    expected = Recover(3, message.stages[0], None, False, False, False, False)
    assert step.resume(message) == [changed(expected, **todo)]  # type: ignore[arg-type]
    assert (step.version, step.state) == (3, ReplicaState.RECOVERING)


def test_a_replica_that_recovers_with_the_gradient_has_nothing_to_fill() -> None:
    step = replica("a")
    step.resume(resume(settlement(prepared=("b",))))
    assert step.recovered(holding(), ACCOUNT) == []
    assert (step.state, step.is_working) == (ReplicaState.REDUCING, True)
    assert step.start_reduction(start()) == []  # nobody reduces what is reduced
    [sent] = step.reduced((4.0,))
    assert isinstance(sent, Send) and isinstance(sent.message, Prepared)
    assert (sent.message.weight, sent.message.loss_sum) == (ACCOUNT.weight, ACCOUNT.loss_sum)
    assert step.commit(commit()) == [Apply(0, TOTALS)]


def test_a_reduction_of_the_next_step_waits_for_who_recovers_with_the_gradient() -> None:
    step = replica()
    step.resume(resume(settlement(prepared=("a",))))
    assert step.start_reduction(start(1)) == []
    step.recovered(holding(), ACCOUNT)
    step.reduced((4.0,))
    step.commit(commit())
    step.holding = holding().after(TOTALS)
    assert step.applied(TOTALS) == [Reduce(1)]


def test_who_recovers_after_the_last_step_has_finished() -> None:
    step = replica(held=None)
    step.resume(resume(settlement(), step=2, totals=TOTALS))
    assert step.recovered(holding(2), None) == []
    assert (step.version, step.state) == (2, ReplicaState.FINISHED)


def test_a_resume_that_settles_too_few_stages_is_trouble() -> None:
    step = ReplicaStep(role(PLAN, "c"), RUN, None)
    [trouble] = step.resume(replace(RESUME, stages=(settlement(),)))
    assert trouble == Trouble("Resume settles 1 stages, this is another")
    assert step.state is ReplicaState.WAITING


# --- totals that cannot be ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "totals",
    [
        Totals(30, 2.0, (), "apply", 0.5),
        Totals(10, math.inf, (), "apply", 0.5),
        Totals(10, 2.0, (Flag(1, "x"),), "apply", 0.5),
    ],
)
def test_totals_that_cannot_follow_from_the_account_are_refused(totals: Totals) -> None:
    step = filling()
    step.start_reduction(start())
    step.reduced((1.0,))
    with pytest.raises(RemoteProtocolError, match="Commit of step 0"):
        step.commit(commit(0, totals))
    assert step.state is ReplicaState.PREPARED
    assert step.commit(commit()) == [Apply(0, TOTALS)]


def test_a_step_of_weight_zero_is_never_applied() -> None:
    step = filling()
    step.start_reduction(replace(start(), weight=0))
    step.reduced((0.0,))
    nothing = Totals(0, 0.0, (), "apply", None)
    with pytest.raises(RemoteProtocolError, match="weight 0"):
        step.commit(commit(0, nothing))
    skipped = replace(nothing, verdict="skip")
    assert step.commit(commit(0, skipped)) == [Apply(0, skipped)]


# --- roles ----------------------------------------------------------------------------------------


def test_a_role_is_that_of_one_boot_of_one_peer() -> None:
    found = role(PLAN, "d")
    assert (found.stage, found.group, found.is_last) == (1, ("c", "d"), True)
    assert not role(PLAN, "a").is_last
    assert role_of(PLAN, Member("a", 2), FENCE, 0) is None
    assert role_of(PLAN, Member("f", 1), FENCE, 0) is None
    with pytest.raises(ValueError, match="hosts no stage"):
        assert Role(PLAN, Member("a", 2), FENCE).stage


def test_coordinators_are_the_first_in_plan_order() -> None:
    plan = body([["z", "a"], ["y"]], feeders=["f", "z"])
    assert step_coordinator_of(plan) == "z"
    assert replicas_of(plan, 0) == ("z", "a")
    assert workers_of(plan) == ("a", "f", "y", "z")
    assert ranges_of_stages(plan) == [(0, 1), (1, 2)]


def test_standbys_and_leavers_hear_how_the_steps_go_on_and_do_not_work() -> None:
    plan = replace(
        body([["b"], ["c"]], feeders=["f"]),
        standby=(StandbyPlan(Member("s", 1), 1), StandbyPlan(Member("l", 1), 0)),
        leavers=(Member("l", 1), Member("a", 1)),
    )
    assert workers_of(plan) == ("b", "c", "f")
    assert audience_of(plan) == ("a", "b", "c", "f", "l", "s")
