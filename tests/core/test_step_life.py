"""The life of steps under plans that change: exactly once, all or nobody, whoever dies.

The invariant is A5 of the design: the gradient behind every committed step has every index of
{0 .. M-1} once, per stage and on every replica; and nobody applies a step before everybody is
prepared. Executors here count indices instead of adding numbers.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.codec import PREFIX_BYTES, encode
from protocol.messages import (
    Account,
    Commit,
    Fence,
    Held,
    LedgerReport,
    Message,
    Prepared,
    Report,
    Resume,
    Settlement,
    StartReduction,
    Totals,
)
from protocol.packing import unpack
from protocol.records import Generation, Member, PlanBody
from protocol.signing import PeerId
from swarm.core.coordinators import GroupCoordinator, StepCoordinator
from swarm.core.effects import Send
from swarm.core.holding import Holding
from swarm.core.ledger import Ledger, indices_of
from swarm.core.settlement import NoHolder
from swarm.core.step import (
    Apply,
    Effect,
    Mishap,
    Recover,
    Reduce,
    ReplicaState,
    ReplicaStep,
    Role,
    Trouble,
    replicas_of,
    role_of,
    step_coordinator_of,
)
from tests.core.plans import body, training
from tests.core.steps import HASH, role

ANY_HASH = bytes(32)
MAX_ACTIONS = 3000
Action = Callable[[], None]


@dataclass
class Executor:
    """What a peer computes with; it outlives plans."""

    ledger: Ledger
    version: int = 0
    history: tuple[Totals, ...] = ()
    """What it has committed, or what its state was made by: the state itself."""
    reduced: Counter[int] | None = None
    """The reduced gradient of step `version`, once it is whole."""
    before: Counter[int] | None = None
    """That of the step before."""

    def gradient(self, step: int) -> Counter[int] | None:
        """Return the reduced gradient of a step, if it is here."""
        held = {self.version: self.reduced, self.version - 1: self.before}
        return held.get(step)

    def commit(self, totals: Totals) -> None:
        self.history += (totals,)
        self.version, self.before, self.reduced = self.version + 1, self.reduced, None
        self.ledger.clear()

    def load(self, other: "Executor") -> None:
        self.version, self.history = other.version, other.history
        self.before = self.reduced = None
        self.ledger.clear()


@dataclass
class Peer:
    """One peer: what it holds, and its part in the plan that it has activated."""

    me: PeerId
    executor: Executor
    holding: Holding | None = None
    epoch: int = 0
    role: Role | None = None
    step: ReplicaStep | None = None
    group: GroupCoordinator | None = None
    coordinator: StepCoordinator | None = None
    recover: Recover | None = None
    applying: Totals | None = None
    todo: list[Callable[[], bool]] = field(default_factory=list)
    """What is left of getting to the step in hand: each does its part if it can now."""

    @property
    def held(self) -> Holding | None:
        return self.step.holding if self.step is not None else self.holding


@dataclass
class Plan:
    """An epoch, and what each stage has to compute in it."""

    body: PlanBody
    lacking: dict[tuple[int, int], set[int]] = field(default_factory=dict)
    parts: dict[tuple[int, PeerId], Counter[int]] = field(default_factory=dict)
    """What each replica gives to the reduction of a step."""
    prepared: set[tuple[int, PeerId]] = field(default_factory=set)


class Swarm:
    """Peers under one plan after another, and a network that repeats, delays and reorders."""

    def __init__(
        self, sizes: Sequence[int], random: Random, *, microbatches: int, steps: int, tied: bool
    ) -> None:
        self.training = training(microbatches=microbatches, steps=steps, on_nonfinite="skip")
        self.counted = tuple(range(1, len(sizes) + 1))
        self.tied = ((0, len(sizes) - 1),) if tied and len(sizes) > 1 else ()
        self.random = random
        self.network: list[tuple[int, PeerId, PeerId, Message]] = []
        self.repeats = 25
        self.peers: dict[PeerId, Peer] = {}
        self.plans: list[Plan] = []
        self.born = 0
        self.lost: NoHolder | None = None
        self.everything = Counter(range(microbatches))
        self.transcript: list[str] = []
        self.plan([[self.be_born(stage, 0) for _ in range(n)] for stage, n in enumerate(sizes)], [])

    def be_born(self, stage: int, version: int | None = None) -> PeerId:
        """Return a new peer; at the first plan it builds the initial weights."""
        peer = f"s{stage}n{self.born}"
        self.born += 1
        self.peers[peer] = Peer(peer, Executor(Ledger(self.training.microbatches_per_step)))
        if version is not None:
            self.peers[peer].holding = Holding(0, stage, stage + 1, version, HASH)
        return peer

    def plan(self, groups: list[list[PeerId]], leavers: list[PeerId]) -> None:
        content = msgspec.structs.replace(
            body(groups), leavers=tuple(Member(peer, 1) for peer in leavers)
        )
        self.plans.append(Plan(content))
        self.transcript.append(f"epoch {len(self.plans)}: {groups}, leavers {leavers}")

    def run(self, repairs: int) -> None:
        """Let things happen until nothing can; `repairs` times another plan is decided."""
        wait = self.random.randrange(60)
        for _ in range(MAX_ACTIONS):
            actions = self.actions()
            if not actions:
                return
            self.random.choice(actions)()
            wait -= 1
            if self.lost is not None:
                return
            if repairs and wait < 0:
                repairs, wait = repairs - 1, self.random.randrange(60)
                self.repair()
        raise AssertionError("nothing comes to an end\n" + "\n".join(self.transcript[-60:]))

    def repair(self) -> None:
        """Some die, some leave, some are new; every stage keeps somebody that held it."""
        groups, leavers = [], []
        for number in range(len(self.counted)):
            group = list(replicas_of(self.plans[-1].body, number))
            self.random.shuffle(group)
            for peer in group[1 + self.random.randrange(len(group)) :]:
                del self.peers[peer]
                group.remove(peer)
            going = group[: self.random.choice([0, 0, 1])]
            new = [self.be_born(number) for _ in range(self.random.choice([0, 0, 1]))]
            stay = [peer for peer in group if peer not in going]
            if not stay and not new:
                new = [self.be_born(number)]
            groups.append([*stay, *new])
            leavers += going
        self.plan(groups, leavers)

    # --- what can happen ---------------------------------------------------------------------

    def actions(self) -> list[Action]:
        found: list[Action] = []
        for each in list(self.network):
            epoch, _, receiver, message = each
            peer = self.peers.get(receiver)
            if peer is None or epoch < peer.epoch:
                self.network.remove(each)
            elif epoch == peer.epoch and not self.is_early(peer, message):
                found.append(lambda each=each: self.deliver(each))  # type: ignore[misc]
        for peer in self.peers.values():
            if peer.epoch < len(self.plans):
                found.append(lambda peer=peer: self.activate(peer))  # type: ignore[misc]
            if peer.step is not None:
                found += self.work(peer, peer.step)
        return found

    def work(self, peer: Peer, step: ReplicaStep) -> list[Action]:
        """Return what a replica's executor can do now."""
        found: list[Action] = []
        plan = self.plans[peer.epoch - 1]
        if peer.todo:
            found.append(lambda: self.recover(peer))
        if step.state is ReplicaState.FILLING:
            found += [
                lambda index=index: self.compute(peer, step, index)  # type: ignore[misc]
                for index in sorted(self.lacking(plan, step.version, self.stage_of(peer)))
            ]
        reducing = step.state is ReplicaState.REDUCING and not peer.todo
        if reducing and self.can_reduce(plan, peer, step.version):
            found.append(lambda: self.reduce(plan, peer, step))
        if peer.applying is not None:
            found.append(lambda: self.apply(peer, step))
        return found

    def lacking(self, plan: Plan, step: int, stage: int) -> set[int]:
        return plan.lacking.setdefault((step, stage), set(self.everything))

    def stage_of(self, peer: Peer) -> int:
        assert peer.role is not None
        return peer.role.stage

    # --- an epoch begins -----------------------------------------------------------------------

    def activate(self, peer: Peer) -> None:
        """Stop the work of the epoch before and report what is held."""
        peer.holding, peer.epoch = peer.held, len(self.plans)
        content = self.plans[-1].body
        fence = Fence(Generation(), peer.epoch, 1)
        peer.role = role_of(content, Member(peer.me, 1), fence, 0)
        peer.step = peer.group = peer.coordinator = peer.recover = peer.applying = None
        peer.todo = []
        if peer.role is not None:
            peer.step = ReplicaStep(role(content, peer.me, fence), self.training, peer.holding)
            peer.group = GroupCoordinator(peer.role, self.training)
            peer.coordinator = StepCoordinator(
                peer.role, self.training, self.counted, tied=self.tied
            )
        elif Member(peer.me, 1) not in content.leavers:
            return
        held: tuple[Held, ...] = ()
        if peer.holding is not None:
            prepared = peer.executor.reduced is not None
            held = (peer.holding.reported(peer.executor.ledger.bitmap, prepared=prepared),)
        self.post(peer, step_coordinator_of(content), Report(fence=fence, held=held))

    def recover(self, peer: Peer) -> None:
        """Do the next part of getting to the step in hand, if somebody can give it."""
        if peer.todo[0]():
            del peer.todo[0]

    def begin_recovery(self, peer: Peer, step: ReplicaStep, todo: Recover) -> None:
        """Note the parts of Recover, in its order."""
        settlement, executor = todo.settlement, peer.executor
        for index in indices_of(settlement.missing, self.training.microbatches_per_step):
            assert index in self.everything
        if todo.commit is not None:
            totals = todo.commit
            peer.todo.append(lambda: self.commit(peer, step, totals))
            peer.todo.append(lambda: self.check_commit(step, settlement))
        if todo.fetch_state:
            peer.todo.append(lambda: self.fetch_state(peer, step, todo))
        elif todo.discard:
            raise AssertionError("honest ledgers do not overlap")
        if todo.fetch_gradient:
            peer.todo.append(lambda: self.fetch_gradient(executor, todo))
        gradient = todo.fetch_gradient or todo.keep_gradient
        account = settlement.account if gradient else None
        peer.todo.append(lambda: self.recovered(peer, step, account))

    def commit(self, peer: Peer, step: ReplicaStep, totals: Totals) -> bool:
        """Apply what is prepared: it has every index once."""
        self.check_totals(totals)
        assert peer.executor.reduced == self.everything, "\n".join(self.transcript)
        peer.executor.commit(totals)
        assert step.holding is not None
        step.holding = step.holding.after(totals)
        return True

    def check_commit(self, step: ReplicaStep, settlement: Settlement) -> bool:
        assert step.holding is not None
        assert settlement.state_hash in (ANY_HASH, step.holding.state_hash)
        return True

    def fetch_state(self, peer: Peer, step: ReplicaStep, todo: Recover) -> bool:
        for donor in todo.settlement.donors:
            giver = self.peers.get(donor)
            given = giver.held if giver is not None else None
            if giver is None or given is None or given.version != todo.step:
                continue
            step.holding = None
            peer.executor.load(giver.executor)
            step.holding = given
            return True
        return False

    def fetch_gradient(self, executor: Executor, todo: Recover) -> bool:
        for donor in todo.settlement.prepared:
            giver = self.peers.get(donor)
            gradient = giver.executor.gradient(todo.step) if giver is not None else None
            if gradient is not None:
                executor.reduced = gradient
                return True
        return False

    def recovered(self, peer: Peer, step: ReplicaStep, account: Account | None) -> bool:
        assert step.holding is not None
        assert step.holding.version == peer.executor.version == step.version
        self.perform(peer, step.recovered(step.holding, account))
        if account is not None and step.state is ReplicaState.REDUCING:
            self.perform(peer, step.reduced(self.norms(self.stage_of(peer))))
        elif len(peer.executor.ledger):
            self.perform(peer, step.accounted(peer.executor.ledger))
        return True

    # --- the network ---------------------------------------------------------------------------

    def post(self, sender: Peer, receiver: PeerId, message: Message) -> None:
        if isinstance(message, Prepared):
            self.plans[sender.epoch - 1].prepared.add((message.step, sender.me))
        # as it arrives: through the codec, so that no message is sent that nobody can read
        message = unpack(encode(message)[PREFIX_BYTES:], type(message))
        self.network.append((sender.epoch, sender.me, receiver, message))

    def deliver(self, each: tuple[int, PeerId, PeerId, Message]) -> None:
        _, sender, receiver, message = each
        if self.repeats and self.random.random() < 0.15:
            self.repeats -= 1
        else:
            self.network.remove(each)
        self.transcript.append(f"{sender} -> {receiver} {message}")
        self.perform(self.peers[receiver], self.taken(self.peers[receiver], sender, message))

    def is_early(self, peer: Peer, message: Message) -> bool:
        """Return whether a message waits for Resume, as in peer/epoch.py."""
        waiting = peer.step is not None and peer.step.state is ReplicaState.WAITING
        return waiting and not isinstance(message, Report | Resume)

    def taken(self, peer: Peer, sender: PeerId, message: Message) -> list[Effect | NoHolder]:
        if peer.step is None:
            assert isinstance(message, Resume | Commit)
            if isinstance(message, Resume):
                self.commit_before_leaving(peer, message)
            return []
        assert peer.group is not None and peer.coordinator is not None
        effects: Sequence[Effect | NoHolder]
        match message:
            case Report():
                effects = peer.coordinator.report(sender, message)
            case Prepared():
                effects = peer.coordinator.prepared(sender, message)
            case LedgerReport():
                effects = peer.group.ledger(sender, message)
            case Resume():
                effects = self.resumed(peer, peer.step, message)
            case StartReduction():
                effects = peer.step.start_reduction(message)
            case Commit():
                effects = peer.step.commit(message)
            case _:
                raise AssertionError(message)
        return list(effects)

    def commit_before_leaving(self, peer: Peer, message: Resume) -> None:
        """Who is one behind and prepared commits at once, leavers too: they are donors."""
        held, totals = peer.holding, message.totals
        if held is None or totals is None or held.version != message.step - 1:
            return
        if peer.me in message.stages[held.first].donors:
            self.check_totals(totals)
            assert peer.executor.reduced == self.everything
            peer.executor.commit(totals)
            peer.holding = held.after(totals)

    def resumed(self, peer: Peer, step: ReplicaStep, message: Resume) -> list[Effect]:
        assert peer.group is not None
        if step.state is ReplicaState.WAITING:
            plan, count = self.plans[peer.epoch - 1], self.training.microbatches_per_step
            for stage, settlement in enumerate(message.stages):
                indices = set(indices_of(settlement.missing, count))
                plan.lacking.setdefault((message.step, stage), indices)
            prepared = bool(message.stages[self.stage_of(peer)].prepared)
            peer.group.resume(message.step, prepared=prepared)
        return step.resume(message)

    def perform(self, peer: Peer, effects: Sequence[Effect | NoHolder]) -> None:
        plan = self.plans[peer.epoch - 1]
        for effect in effects:
            match effect:
                case Send(to, message):
                    self.post(peer, to, message)
                case Recover():
                    assert peer.step is not None
                    self.begin_recovery(peer, peer.step, effect)
                case Reduce(step):
                    assert peer.step is not None and step == peer.step.version
                    peer.executor.reduced = None
                    ledger = peer.executor.ledger
                    indices = indices_of(ledger.bitmap, ledger.microbatches)
                    plan.parts[step, peer.me] = Counter(indices)
                case Apply(step, totals):
                    replicas = [m.peer for s in plan.body.stages for m in s.replicas]
                    everybody = {(step, each) for each in replicas}
                    assert everybody <= plan.prepared, "applied before everybody is prepared"
                    assert peer.applying is None
                    peer.applying = totals
                case NoHolder():
                    self.check_lost(effect)
                    self.lost = effect
                case Mishap(reason) | Trouble(reason):
                    raise AssertionError(f"{reason}\n" + "\n".join(self.transcript))

    # --- the executor's work -------------------------------------------------------------------

    def compute(self, peer: Peer, step: ReplicaStep, index: int) -> None:
        plan = self.plans[peer.epoch - 1]
        self.lacking(plan, step.version, self.stage_of(peer)).remove(index)
        peer.executor.ledger.add(index, weight=index + 1, loss_sum=0.5)
        self.perform(peer, step.accounted(peer.executor.ledger))

    def can_reduce(self, plan: Plan, peer: Peer, step: int) -> bool:
        """Return whether all have given their part, those of tied stages included."""
        stages = {self.stage_of(peer)}
        for group in self.tied:
            stages |= set(group) if stages & set(group) else set()
        members = [each for stage in stages for each in replicas_of(plan.body, stage)]
        return all((step, each) in plan.parts for each in members)

    def reduce(self, plan: Plan, peer: Peer, step: ReplicaStep) -> None:
        assert peer.role is not None
        parts = [plan.parts[step.version, each] for each in peer.role.group]
        peer.executor.reduced = sum(parts, Counter())
        self.perform(peer, step.reduced(self.norms(peer.role.stage)))

    def apply(self, peer: Peer, step: ReplicaStep) -> None:
        totals, peer.applying = peer.applying, None
        assert totals is not None
        self.commit(peer, step, totals)
        self.perform(peer, step.applied(totals))

    def norms(self, stage: int) -> tuple[float, ...]:
        return tuple(float(stage + n) for n in range(self.counted[stage]))

    # --- what must hold ------------------------------------------------------------------------

    def check_totals(self, totals: Totals) -> None:
        count = self.training.microbatches_per_step
        norms = [norm for stage in range(len(self.counted)) for norm in self.norms(stage)]
        assert totals == Totals(
            weight=count * (count + 1) // 2,
            square_norm=math.fsum(norms),
            flags=(),
            verdict="apply",
            loss=0.5 * count / (count * (count + 1) // 2),
        )

    def check_lost(self, lost: NoHolder) -> None:
        """Nobody of the plan holds the stage at that version, or can commit to it."""
        content = self.plans[-1].body
        members = [
            *replicas_of(content, lost.stage),
            *(m.peer for m in content.leavers if m.peer.startswith(f"s{lost.stage}n")),
        ]
        for name in members:
            held = self.peers[name].holding
            if held is not None:
                assert held.version < lost.version
                assert self.peers[name].executor.reduced is None

    def check_end(self, steps: int) -> None:
        said = "\n".join(self.transcript)
        content = self.plans[-1].body
        replicas = [self.peers[m.peer] for stage in content.stages for m in stage.replicas]
        assert {each.step.state for each in replicas if each.step} == {ReplicaState.FINISHED}, said
        assert {each.executor.version for each in replicas} == {steps}
        assert len({each.executor.history for each in replicas}) == 1
        assert len(replicas[0].executor.history) == steps


def lived(
    sizes: list[int], microbatches: int, steps: int, seed: int, repairs: int, tied: bool = False
) -> Swarm:
    swarm = Swarm(sizes, Random(seed), microbatches=microbatches, steps=steps, tied=tied)
    swarm.run(repairs)
    if swarm.lost is None:
        swarm.check_end(steps)
    return swarm


sizes = st.lists(st.integers(1, 3), min_size=1, max_size=3)


@settings(max_examples=200, deadline=None)
@given(sizes, st.integers(1, 9), st.integers(1, 3), st.integers(0, 2**32))
def test_every_replica_commits_every_step_once(
    sizes: list[int], microbatches: int, steps: int, seed: int
) -> None:
    assert lived(sizes, microbatches, steps, seed, repairs=0).lost is None


@settings(max_examples=500, deadline=None)
@given(
    sizes,
    st.integers(1, 6),
    st.integers(1, 3),
    st.integers(0, 2**32),
    st.integers(1, 4),
    st.booleans(),
)
def test_whoever_dies_or_comes_every_step_is_committed_once(
    sizes: list[int], microbatches: int, steps: int, seed: int, repairs: int, tied: bool
) -> None:
    lived(sizes, microbatches, steps, seed, repairs, tied)


def test_histories_go_through_every_way_of_getting_to_the_step_in_hand() -> None:
    """What the properties above say is said of something."""
    seen: Counter[str] = Counter()
    for seed in range(60):
        swarm = lived([2, 2], 3, 2, seed, repairs=3, tied=seed % 2 == 1)
        seen["lost"] += swarm.lost is not None
        seen["finished"] += swarm.lost is None
        for line in swarm.transcript:
            seen["commit"] += "Resume(" in line and "totals=None" not in line
            seen["prepared"] += "Resume(" in line and "account=Account" in line
    assert min(seen[each] for each in ("finished", "commit", "prepared")) > 10, seen
