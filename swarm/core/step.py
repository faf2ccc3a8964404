"""The life of a step in one replica, sans-IO, by the messages of one epoch.

    waiting -(Resume)-> recovering -> filling -(StartReduction)-> reducing -> prepared
    prepared -(Commit)-> committing -> filling

with version + 1, until the last step (finished) or a halting verdict (halted). A replica that has
reported while it was prepared may go from recovering to prepared at once. What the others are doing
meanwhile is in coordinators.py. The rule: nobody updates before everybody is prepared.
"""

import math
from dataclasses import dataclass, replace
from enum import Enum

from protocol.errors import RemoteProtocolError
from protocol.messages import (
    MAX_FLAGS,
    Account,
    Commit,
    Fence,
    LedgerReport,
    Prepared,
    Resume,
    Settlement,
    StartReduction,
    Totals,
)
from protocol.records import Member, PlanBody, Training
from protocol.signing import PeerId
from swarm.core.effects import Send
from swarm.core.holding import Holding
from swarm.core.ledger import Ledger
from swarm.core.memo import by_identity
from swarm.core.roll import stage_of, working_peers


@dataclass(frozen=True, slots=True)
class Trouble:
    """Something that training cannot go on with; `reason` is for people."""

    reason: str


@dataclass(frozen=True, slots=True)
class Mishap:
    """Something that should not have happened and that training goes on after."""

    reason: str


@dataclass(frozen=True, slots=True)
class Reduce:
    """Start reducing this step."""

    step: int


@dataclass(frozen=True, slots=True)
class Apply:
    """Let the executor commit this step."""

    step: int
    totals: Totals


@dataclass(frozen=True, slots=True)
class Recover:
    """Get this replica to the step in hand, in this order, and say `recovered`."""

    step: int
    settlement: Settlement
    commit: Totals | None
    """Commit step - 1 first: this replica is prepared for it."""
    fetch_state: bool
    """Fetch the state at version `step`."""
    fetch_gradient: bool
    """Fetch the reduced gradient of the step in hand."""
    keep_gradient: bool
    """The reduced gradient that this replica holds counts."""
    discard: bool
    """Empty the accumulator and the ledger."""


Effect = Send | Trouble | Mishap | Reduce | Apply | Recover


class ReplicaState(Enum):
    """Where a replica is in the step in hand."""

    WAITING = "waiting"
    RECOVERING = "recovering"
    FILLING = "filling"
    REDUCING = "reducing"
    PREPARED = "prepared"
    COMMITTING = "committing"
    FINISHED = "finished"
    HALTED = "halted"


@dataclass(frozen=True, slots=True)
class Role:
    """A replica's place in a plan; raises ValueError for who has none."""

    body: PlanBody
    me: Member
    fence: Fence
    lineage: int = 0

    @property
    def stage(self) -> int:
        """Return the number of the stage that this peer hosts."""
        stage = stage_of(self.body).get(self.me)
        if stage is None:
            raise ValueError(f"{self.me} hosts no stage in this plan")
        return stage

    @property
    def group(self) -> tuple[PeerId, ...]:
        """Return the replicas of this peer's stage, in plan order."""
        return replicas_of(self.body, self.stage)

    @property
    def is_last(self) -> bool:
        """Return whether this peer's stage computes the loss."""
        return self.stage == len(self.body.stages) - 1


def role_of(body: PlanBody, me: Member, fence: Fence, lineage: int) -> Role | None:
    """Return the replica role of `me`, or None if the plan gives it none."""
    return Role(body, me, fence, lineage) if me in stage_of(body) else None


def replicas_of(body: PlanBody, stage: int) -> tuple[PeerId, ...]:
    """Return the peers of a stage's replicas, in plan order."""
    return _groups_of(body)[stage]


@by_identity
def _groups_of(body: PlanBody) -> tuple[tuple[PeerId, ...], ...]:
    return tuple(tuple(member.peer for member in stage.replicas) for stage in body.stages)


def ranges_of_stages(body: PlanBody) -> list[tuple[int, int]]:
    """Return the layers [first, last) of every stage."""
    return [(stage.first, stage.last) for stage in body.stages]


def step_coordinator_of(body: PlanBody) -> PeerId:
    """Return the first replica of stage 0, which collects Prepared and sends Commit."""
    return body.stages[0].replicas[0].peer


@by_identity
def audience_of(body: PlanBody) -> tuple[PeerId, ...]:
    """Return who hears how the steps go on: workers, standbys and leavers, sorted."""
    standby = {each.member.peer for each in body.standby}
    leavers = {member.peer for member in body.leavers}
    return tuple(sorted({*workers_of(body), *standby, *leavers}))


@by_identity
def workers_of(body: PlanBody) -> tuple[PeerId, ...]:
    """Return all replicas and feeders, each once, sorted."""
    return tuple(sorted(working_peers(body)))


class ReplicaStep:
    """One replica's progress through the steps of one epoch."""

    def __init__(self, role: Role, training: Training, holding: Holding | None = None) -> None:
        """`holding` is what this replica holds of its stage, None if that is nothing."""
        self._role = role
        self._training = training
        self._early: StartReduction | None = None
        self.holding = holding
        self.state = ReplicaState.WAITING
        self.version = holding.version if holding is not None else 0
        """The step in hand; from Resume on the swarm's, not only this replica's."""

    @property
    def is_working(self) -> bool:
        """Return whether Resume has come and this replica is at the step in hand."""
        return self.state not in (ReplicaState.WAITING, ReplicaState.RECOVERING)

    def resume(self, message: Resume) -> list[Effect]:
        """All have reported: get to the step that the swarm has in hand."""
        if self.state is not ReplicaState.WAITING:
            return []
        if self._role.stage >= len(message.stages):
            return [Trouble(f"Resume settles {len(message.stages)} stages, this is another")]
        self.state = ReplicaState.RECOVERING
        self.version = message.step
        settlement = message.stages[self._role.stage]
        me, held = self._role.me.peer, self.holding
        same = held is not None and held.lineage == self._role.lineage and me in settlement.donors
        current = same and held is not None and held.version == message.step
        commit = None if current or not same else message.totals
        keep = current and me in settlement.prepared
        return [
            Recover(
                step=message.step,
                settlement=settlement,
                commit=commit,
                fetch_state=not current and commit is None,
                fetch_gradient=bool(settlement.prepared) and not keep,
                keep_gradient=keep,
                discard=me in settlement.discards,
            )
        ]

    def recovered(self, holding: Holding, account: Account | None) -> list[Effect]:
        """This replica holds the step's version, and with `account` its reduced gradient."""
        self.holding = replace(holding, account=account)
        if self.version >= self._training.steps:
            self.state = ReplicaState.FINISHED
        elif account is not None:
            self.state = ReplicaState.REDUCING  # until its norms are known: see `reduced`
        else:
            self.state = ReplicaState.FILLING
            return self._start_early()
        return []

    def accounted(self, ledger: Ledger) -> list[Effect]:
        """The ledger has grown: tell the stage's coordinator."""
        report = LedgerReport(
            fence=self._role.fence,
            step=self.version,
            stage=self._role.stage,
            bitmap=ledger.bitmap,
            weight=ledger.weight,
            flags=ledger.flags[:MAX_FLAGS],
            loss_sum=ledger.loss_sum,
        )
        return [Send(self._role.group[0], report)]

    def start_reduction(self, message: StartReduction) -> list[Effect]:
        """The ledgers of the group partition the step.

        If this replica had no microbatch of the step, this may come before Resume, or before it
        has committed the step before: then it waits for that."""
        waiting = not self.is_working
        if message.step == self.version + 1 or (waiting and message.step == self.version):
            self._early = message
        if message.step != self.version or self.state is not ReplicaState.FILLING:
            return []
        self.state = ReplicaState.REDUCING
        assert self.holding is not None
        account = Account(message.weight, message.flags, message.loss_sum)
        self.holding = replace(self.holding, account=account)
        return [Reduce(message.step)]

    def reduced(self, square_norms: tuple[float, ...]) -> list[Effect]:
        """This replica holds its stage's full reduced gradient: say so."""
        assert self.state is ReplicaState.REDUCING
        account = self._account
        self.state = ReplicaState.PREPARED
        prepared = Prepared(
            fence=self._role.fence,
            step=self.version,
            stage=self._role.stage,
            square_norms=square_norms,
            weight=account.weight,
            flags=account.flags,
            loss_sum=account.loss_sum,
        )
        return [Send(step_coordinator_of(self._role.body), prepared)]

    def commit(self, message: Commit) -> list[Effect]:
        """Everybody is prepared: apply.

        Raises RemoteProtocolError if the totals cannot follow from this replica's account."""
        if message.step != self.version or self.state is not ReplicaState.PREPARED:
            return []
        totals = message.totals
        if totals.weight != self._account.weight:
            raise RemoteProtocolError(
                f"Commit of step {message.step} counts weight {totals.weight}, "
                f"this stage counts {self._account.weight}"
            )
        flagged = bool(totals.flags or self._account.flags)
        whole = totals.weight > 0 and math.isfinite(totals.square_norm) and not flagged
        if totals.verdict == "apply" and not whole:
            raise RemoteProtocolError(
                f"Commit of step {message.step} applies weight {totals.weight}, squared norm "
                f"{totals.square_norm}, {len(totals.flags)} flags"
            )
        self.state = ReplicaState.COMMITTING
        return [Apply(message.step, message.totals)]

    def applied(self, totals: Totals) -> list[Effect]:
        """The executor has committed, and `holding` says so: go on with the next step, or stop."""
        assert self.state is ReplicaState.COMMITTING and self.holding is not None
        if totals.verdict == "halt":
            self.state = ReplicaState.HALTED
            return []
        self.version += 1
        if self.version >= self._training.steps:
            self.state = ReplicaState.FINISHED
            return []
        self.state = ReplicaState.FILLING
        return self._start_early()

    @property
    def _account(self) -> Account:
        assert self.holding is not None and self.holding.account is not None
        return self.holding.account

    def _start_early(self) -> list[Effect]:
        early, self._early = self._early, None
        return self.start_reduction(early) if early is not None else []
