"""The life of a step: exactly once, all or nobody, whatever the order in which things arrive.

The invariant of the simulation is A5 of the design: the ledgers behind every committed step
partition {0 .. M-1}, per stage; and nobody applies a step before everybody is prepared.
"""

import math
import re
from collections import Counter, defaultdict
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
    Fence,
    Flag,
    Held,
    LedgerReport,
    Message,
    Prepared,
    Report,
    Resume,
    StartReduction,
    Totals,
)
from protocol.packing import unpack
from protocol.records import Generation, Member, PlanBody
from protocol.signing import PeerId
from swarm.core.coordinators import GroupCoordinator, StepCoordinator
from swarm.core.ledger import Ledger, bitmap_of, indices_of
from swarm.core.step import (
    Apply,
    Effect,
    Reduce,
    ReplicaState,
    ReplicaStep,
    Role,
    Send,
    Trouble,
    replicas_of,
    role_of,
    step_coordinator_of,
    workers_of,
)
from tests.core.plans import body, training

FENCE = Fence(Generation(), 1, 1)
ROOT = b"r" * 32
replace = msgspec.structs.replace


def role(plan: PlanBody, peer: PeerId) -> Role:
    found = role_of(plan, Member(peer, 1), FENCE)
    assert found is not None
    return found


def report(stage: int, version: int = 0, root: bytes = ROOT) -> Report:
    return Report(fence=FENCE, held=(Held(0, stage, stage + 1, version, root),))


# --- simulation -----------------------------------------------------------------------------------


class Peer:
    """One replica: its state machines and an executor that computes nothing."""

    def __init__(self, swarm: "Swarm", peer: PeerId) -> None:
        self.role = role(swarm.plan, peer)
        self.me = peer
        self.step = ReplicaStep(self.role, swarm.training)
        self.ledger = Ledger(swarm.training.microbatches_per_step)
        self.reducing = -1  # the step to whose reduction this replica has contributed
        self.applying: Totals | None = None
        self.group = GroupCoordinator(self.role, swarm.training)
        self.coordinator = StepCoordinator(self.role, swarm.training, swarm.counted)

    @property
    def indices(self) -> tuple[int, ...]:
        """Return what is in this replica's accumulator."""
        return indices_of(self.ledger.bitmap, self.ledger.microbatches)


class Swarm:
    """All replicas of a plan, and a network that loses nothing, repeats, delays and reorders."""

    def __init__(
        self, sizes: Sequence[int], random: Random, *, microbatches: int, steps: int
    ) -> None:
        self.plan = body([[f"s{s}r{r}" for r in range(n)] for s, n in enumerate(sizes)])
        self.training = training(microbatches=microbatches, steps=steps, on_nonfinite="skip")
        self.counted = tuple(range(1, len(sizes) + 1))
        self.random = random
        self.network: list[tuple[PeerId, PeerId, Message]] = []
        self.repeats = 25
        self.peers = {peer: Peer(self, peer) for peer in workers_of(self.plan)}
        self.prepared: set[tuple[int, PeerId]] = set()
        self.committed: Counter[tuple[int, PeerId]] = Counter()
        self.everything = Counter(range(microbatches))
        self.behind: defaultdict[tuple[int, int], Counter[int]] = defaultdict(Counter)
        self.transcript: list[str] = []
        # who computes an index in a stage is for the routing to decide: any replica
        self.hosts = {
            (step, stage, index): random.choice(replicas_of(self.plan, stage))
            for step in range(steps)
            for stage in range(len(sizes))
            for index in range(microbatches)
        }

    def run(self) -> None:
        """Let things happen until nothing can."""
        for peer in self.peers.values():
            self.post(peer.me, step_coordinator_of(self.plan), report(peer.role.stage))
        while actions := [*self.deliveries(), *self.work()]:
            self.random.choice(actions)()

    def post(self, sender: PeerId, receiver: PeerId, message: Message) -> None:
        if isinstance(message, Prepared):
            self.prepared.add((message.step, sender))
        if isinstance(message, StartReduction) and receiver == sender:
            self.check_partition(message)
        # as it arrives: through the codec, so that no message is sent that nobody can read
        message = unpack(encode(message)[PREFIX_BYTES:], type(message))
        self.network.append((sender, receiver, message))

    def deliveries(self) -> list[Callable[[], None]]:
        return [lambda n=n: self.deliver(n) for n in range(len(self.network))]  # type: ignore[misc]

    def deliver(self, number: int) -> None:
        sender, receiver, message = self.network[number]
        if self.repeats and self.random.random() < 0.15:
            self.repeats -= 1
        else:
            del self.network[number]
        self.transcript.append(f"{sender} -> {receiver} {message}")
        self.perform(receiver, self.taken(self.peers[receiver], sender, message))

    def taken(self, peer: Peer, sender: PeerId, message: Message) -> list[Effect]:
        match message:
            case Report():
                return peer.coordinator.report(sender, message)
            case Prepared():
                return peer.coordinator.prepared(sender, message)
            case LedgerReport():
                return peer.group.ledger(sender, message)
            case Resume():
                return peer.step.resume(message)
            case StartReduction():
                return peer.step.start_reduction(message)
            case Commit():
                return peer.step.commit(message)
            case _:
                raise AssertionError(message)

    def perform(self, me: PeerId, effects: Sequence[Effect]) -> None:
        peer = self.peers[me]
        for effect in effects:
            match effect:
                case Send(to, message):
                    self.post(me, to, message)
                case Reduce(step):
                    assert step == peer.step.version
                    peer.reducing = step
                case Apply(step, totals):
                    everybody = {(step, each) for each in self.peers}
                    assert everybody <= self.prepared, "applied before everybody is prepared"
                    assert peer.applying is None
                    peer.applying = totals
                case Trouble(reason):
                    raise AssertionError(f"{reason}\n" + "\n".join(self.transcript))

    def work(self) -> list[Callable[[], None]]:
        """Return what executors can do now."""
        actions: list[Callable[[], None]] = []
        for peer in self.peers.values():
            if peer.step.state is ReplicaState.FILLING:
                for index in self.indices_for(peer):
                    actions.append(lambda peer=peer, index=index: self.compute(peer, index))  # type: ignore[misc]
            group = [self.peers[each] for each in peer.role.group]
            reducing = peer.step.state is ReplicaState.REDUCING
            if reducing and all(each.reducing == peer.step.version for each in group):
                actions.append(lambda peer=peer: self.reduce(peer))  # type: ignore[misc]
            if peer.applying is not None:
                actions.append(lambda peer=peer: self.apply(peer))  # type: ignore[misc]
        return actions

    def indices_for(self, peer: Peer) -> list[int]:
        return [
            index
            for (step, stage, index), host in self.hosts.items()
            if host == peer.me
            and (step, stage) == (peer.step.version, peer.role.stage)
            and index not in peer.ledger
        ]

    def compute(self, peer: Peer, index: int) -> None:
        peer.ledger.add(index, weight=index + 1, loss_sum=0.5)
        self.perform(peer.me, peer.step.accounted(peer.ledger))

    def reduce(self, peer: Peer) -> None:
        stage = peer.role.stage
        norms = tuple(float(stage + n) for n in range(self.counted[stage]))
        self.perform(peer.me, peer.step.reduced(norms))

    def apply(self, peer: Peer) -> None:
        totals, peer.applying = peer.applying, None
        assert totals is not None
        self.check_totals(totals)
        self.committed[peer.step.version, peer.me] += 1
        self.behind[peer.step.version, peer.role.stage].update(peer.indices)
        peer.ledger.clear()
        self.perform(peer.me, peer.step.applied(totals))

    def check_partition(self, message: StartReduction) -> None:
        """A reduction starts when the ledgers of its stage, as they are, partition the step."""
        entered = Counter(
            index
            for peer in map(self.peers.__getitem__, replicas_of(self.plan, message.stage))
            if peer.step.version == message.step
            for index in peer.indices
        )
        assert entered == self.everything, f"step {message.step}: {entered}"

    def check_totals(self, totals: Totals) -> None:
        count = self.training.microbatches_per_step
        norms = [float(stage + n) for stage, size in enumerate(self.counted) for n in range(size)]
        assert totals == Totals(
            weight=count * (count + 1) // 2,
            square_norm=math.fsum(norms),
            flags=(),
            verdict="apply",
            loss=0.5 * count / (count * (count + 1) // 2),
        )


@settings(max_examples=500, deadline=None)
@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
    st.integers(1, 9),
    st.integers(1, 3),
    st.integers(0, 2**32),
)
def test_every_replica_commits_every_step_once(
    sizes: list[int], microbatches: int, steps: int, seed: int
) -> None:
    swarm = Swarm(sizes, Random(seed), microbatches=microbatches, steps=steps)
    swarm.run()
    said = "\n".join(swarm.transcript)
    assert {peer.step.state for peer in swarm.peers.values()} == {ReplicaState.FINISHED}, said
    assert {peer.step.version for peer in swarm.peers.values()} == {steps}
    assert swarm.committed == Counter(
        {(step, peer): 1 for step in range(steps) for peer in swarm.peers}
    )
    assert swarm.behind == {
        (step, stage): swarm.everything for step in range(steps) for stage in range(len(sizes))
    }


# --- one replica ----------------------------------------------------------------------------------

PLAN = body([["a", "b"], ["c", "d"]])
RUN = training(microbatches=4, steps=2)
RESUME = Resume(fence=FENCE, step=0, missing=())
APPLY = Totals(10, 2.0, (), "apply", 0.5)


def replica(peer: PeerId = "b", version: int = 0) -> ReplicaStep:
    return ReplicaStep(role(PLAN, peer), RUN, version)


def start(step: int = 0, stage: int = 0) -> StartReduction:
    return StartReduction(fence=FENCE, step=step, stage=stage, weight=10, flags=(), loss_sum=2.5)


def committing(step: ReplicaStep) -> None:
    """Bring a replica from waiting or filling to committing its version."""
    step.resume(RESUME)
    step.start_reduction(start(step.version))
    step.reduced((1.0,))
    step.commit(Commit(fence=FENCE, step=step.version, totals=APPLY))
    assert step.state is ReplicaState.COMMITTING


def test_a_step_as_one_replica_sees_it() -> None:
    step = replica()
    assert (step.version, step.state) == (0, ReplicaState.WAITING)
    assert step.resume(RESUME) == []
    assert (step.version, step.state) == (0, ReplicaState.FILLING)
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
    assert step.commit(Commit(fence=FENCE, step=0, totals=APPLY)) == [Apply(0, APPLY)]
    assert step.applied(APPLY) == []
    assert (step.version, step.state) == (1, ReplicaState.FILLING)
    committing(step)
    step.applied(APPLY)
    assert (step.version, step.state) == (2, ReplicaState.FINISHED)


def test_a_reduction_that_starts_before_resume_waits_for_it() -> None:
    """Resume and StartReduction come from different peers: either may be first."""
    step = replica()
    assert step.start_reduction(start()) == []
    assert (step.version, step.state) == (0, ReplicaState.WAITING)
    assert step.resume(RESUME) == [Reduce(0)]
    assert (step.version, step.state) == (0, ReplicaState.REDUCING)


def test_a_reduction_that_starts_before_the_last_commit_waits_for_it() -> None:
    """The others of the stage may have computed all of the next step meanwhile."""
    step = replica()
    committing(step)
    assert step.start_reduction(start(1)) == []
    assert step.applied(APPLY) == [Reduce(1)]
    assert (step.version, step.state) == (1, ReplicaState.REDUCING)


def test_what_comes_again_or_at_the_wrong_time_changes_nothing() -> None:
    step = replica()
    commit = Commit(fence=FENCE, step=0, totals=APPLY)
    assert step.commit(commit) == []
    step.resume(RESUME)
    assert step.commit(commit) == []
    step.start_reduction(start())
    for message in (start(), start(7)):
        assert step.start_reduction(message) == []
    assert step.resume(RESUME) == []
    assert step.commit(commit) == []  # reducing: this replica is not prepared
    step.reduced((1.0,))
    assert step.commit(replace(commit, step=1)) == []
    assert step.commit(commit) == [Apply(0, APPLY)]
    assert step.commit(commit) == []
    step.applied(APPLY)
    assert step.commit(commit) == []
    assert step.start_reduction(start(0)) == []
    assert (step.version, step.state) == (1, ReplicaState.FILLING)


def test_a_halting_verdict_stops_a_replica_at_its_version() -> None:
    step = replica()
    committing(step)
    assert step.start_reduction(start(1)) == []
    assert step.applied(replace(APPLY, verdict="halt")) == []
    assert (step.version, step.state) == (0, ReplicaState.HALTED)
    for effects in (
        step.start_reduction(start(0)),
        step.start_reduction(start(1)),
        step.commit(Commit(fence=FENCE, step=0, totals=APPLY)),
        step.resume(RESUME),
    ):
        assert effects == []


def test_a_skipped_step_counts_as_a_step() -> None:
    step = replica()
    committing(step)
    step.applied(replace(APPLY, verdict="skip"))
    assert (step.version, step.state) == (1, ReplicaState.FILLING)


def test_a_step_that_this_replica_does_not_hold_is_trouble() -> None:
    step = replica()
    [trouble] = step.resume(replace(RESUME, step=3))
    assert trouble == Trouble("step 3 is in hand, this peer holds 0")
    assert step.state is ReplicaState.WAITING


def test_a_ledger_report_names_no_more_flags_than_it_can_carry() -> None:
    ledger = Ledger(200)
    for index in range(200):
        ledger.add(index, weight=1, nonfinite=f"layer{index}")
    [sent] = replica().accounted(ledger)
    assert isinstance(sent, Send) and isinstance(sent.message, LedgerReport)
    assert sent.message.flags == tuple(Flag(n, f"layer{n}") for n in range(MAX_FLAGS))
    assert unpack(encode(sent.message)[PREFIX_BYTES:], LedgerReport) == sent.message


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


def coordinator() -> GroupCoordinator:
    return GroupCoordinator(role(PLAN, "a"), RUN)


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
    group = GroupCoordinator(role(PLAN, "a"), many)
    full = replace(ledger_report([]), bitmap=b"\xff" * 8192)
    assert group.ledger("a", full) != []
    group = GroupCoordinator(role(PLAN, "a"), many)
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


# --- the coordinator of the step ------------------------------------------------------------------


def step_coordinator(
    on_nonfinite: Literal["halt", "skip"] = "halt", *, resumed: bool = True
) -> StepCoordinator:
    run = training(microbatches=4, steps=2, on_nonfinite=on_nonfinite)
    found = StepCoordinator(role(PLAN, "a"), run, (2, 1))
    for peer, stage in zip("abcd", (0, 0, 1, 1), strict=True):
        if resumed:
            found.report(peer, report(stage))
    return found


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


def test_when_all_have_reported_one_state_the_step_goes_on() -> None:
    found = step_coordinator(resumed=False)
    for peer, stage in (("d", 1), ("a", 0), ("b", 0)):
        assert found.report(peer, report(stage, version=1)) == []
    effects = found.report("c", report(1, version=1))
    assert [effect.peer for effect in effects if isinstance(effect, Send)] == list("abcd")
    for effect in effects:
        assert isinstance(effect, Send) and isinstance(effect.message, Resume)
        assert effect.message.step == 1
        assert [(m.stage, m.bitmap) for m in effect.message.missing] == [(0, b"\x0f"), (1, b"\x0f")]
    assert found.report("c", report(1, version=1)) == []


def test_feeders_without_a_stage_are_resumed_too() -> None:
    plan = body([["a"]], feeders=["f", "a"])
    found = StepCoordinator(role(plan, "a"), RUN, (1,))
    effects = found.report("a", report(0))
    assert [effect.peer for effect in effects if isinstance(effect, Send)] == ["a", "f"]
    with pytest.raises(RemoteProtocolError, match="f reports and hosts no stage"):
        found.report("f", report(0))


@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        (report(1, root=b"\xee" * 32), "replicas of stage 1 hold different weights: 72.*, ee"),
        (report(1, version=1), r"stages hold versions \[0, 1\]"),
        (report(0), "d does not hold stage 1"),
        (Report(fence=FENCE, held=()), "d does not hold stage 1"),
        (Report(fence=FENCE, held=report(1).held * 2), "d does not hold stage 1"),
    ],
)
def test_reports_that_are_not_one_state_are_trouble(odd: Report, reason: str) -> None:
    found = step_coordinator(resumed=False)
    for peer, stage in zip("abc", (0, 0, 1), strict=True):
        found.report(peer, report(stage))
    [trouble] = found.report("d", odd)
    assert isinstance(trouble, Trouble)
    assert re.search(reason, trouble.reason)


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
        step_coordinator(resumed=False).report(sender, report(0))


# --- roles ----------------------------------------------------------------------------------------


def test_a_role_is_that_of_one_boot_of_one_peer() -> None:
    found = role(PLAN, "d")
    assert (found.stage, found.group, found.is_last) == (1, ("c", "d"), True)
    assert not role(PLAN, "a").is_last
    assert role_of(PLAN, Member("a", 2), FENCE) is None
    assert role_of(PLAN, Member("f", 1), FENCE) is None
    with pytest.raises(ValueError, match="hosts no stage"):
        assert Role(PLAN, Member("a", 2), FENCE).stage


def test_coordinators_are_the_first_in_plan_order() -> None:
    plan = body([["z", "a"], ["y"]], feeders=["f", "z"])
    assert step_coordinator_of(plan) == "z"
    assert replicas_of(plan, 0) == ("z", "a")
    assert workers_of(plan) == ("a", "f", "y", "z")


@pytest.mark.parametrize(
    "totals",
    [
        Totals(30, 2.0, (), "apply", 0.5),
        Totals(10, math.inf, (), "apply", 0.5),
        Totals(10, 2.0, (Flag(1, "x"),), "apply", 0.5),
    ],
)
def test_totals_that_cannot_follow_from_the_account_are_refused(totals: Totals) -> None:
    step = replica()
    step.resume(RESUME)
    step.start_reduction(start())
    step.reduced((1.0,))
    with pytest.raises(RemoteProtocolError, match="Commit of step 0"):
        step.commit(Commit(fence=FENCE, step=0, totals=totals))
    assert step.state is ReplicaState.PREPARED
    assert step.commit(Commit(fence=FENCE, step=0, totals=APPLY)) == [Apply(0, APPLY)]


def test_a_step_of_weight_zero_is_never_applied() -> None:
    step = replica()
    step.resume(RESUME)
    step.start_reduction(msgspec.structs.replace(start(), weight=0))
    step.reduced((0.0,))
    nothing = Totals(0, 0.0, (), "apply", None)
    with pytest.raises(RemoteProtocolError, match="weight 0"):
        step.commit(Commit(fence=FENCE, step=0, totals=nothing))
    skipped = msgspec.structs.replace(nothing, verdict="skip")
    assert step.commit(Commit(fence=FENCE, step=0, totals=skipped)) == [Apply(0, skipped)]
