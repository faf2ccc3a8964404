"""The life of a step: ledgers that partition it, reduction, prepare, commit.

Three small state machines, all sans-IO; a peer runs those that its roles ask for:

* `ReplicaStep`: one replica's own progress,
      waiting -(Resume)-> filling -(StartReduction)-> reducing -> prepared -(Commit)-> filling
  with version + 1, until the last step (finished) or a halting verdict (halted);
* `GroupCoordinator`: the first replica of a stage watches its group's ledgers;
* `StepCoordinator`: the first replica of stage 0 merges Reports into Resume and Prepared into
  Commit.

Each takes the messages of one epoch. The rule: nobody updates before everybody is prepared.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from protocol.errors import RemoteProtocolError
from protocol.messages import (
    MAX_FLAGS,
    Commit,
    Fence,
    Flag,
    LedgerReport,
    Message,
    Missing,
    Prepared,
    Report,
    Resume,
    StartReduction,
    Totals,
)
from protocol.records import Member, PlanBody, Training
from protocol.signing import PeerId
from swarm.core.ledger import Ledger, bitmap_of
from swarm.core.totals import totals_of


@dataclass(frozen=True, slots=True)
class Send:
    """Send `message` to `peer` (which may be this peer itself)."""

    peer: PeerId
    message: Message


@dataclass(frozen=True, slots=True)
class Trouble:
    """Something that training cannot go on with; `reason` is for people."""

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


Effect = Send | Trouble | Reduce | Apply


class ReplicaState(Enum):
    """Where a replica is in the step in hand."""

    WAITING = "waiting"
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

    @property
    def stage(self) -> int:
        """Return the number of the stage that this peer hosts."""
        for number, stage in enumerate(self.body.stages):
            if self.me in stage.replicas:
                return number
        raise ValueError(f"{self.me} hosts no stage in this plan")

    @property
    def group(self) -> tuple[PeerId, ...]:
        """Return the replicas of this peer's stage, in plan order."""
        return replicas_of(self.body, self.stage)

    @property
    def is_last(self) -> bool:
        """Return whether this peer's stage computes the loss."""
        return self.stage == len(self.body.stages) - 1


def role_of(body: PlanBody, me: Member, fence: Fence) -> Role | None:
    """Return the replica role of `me`, or None if the plan gives it none."""
    if any(me in stage.replicas for stage in body.stages):
        return Role(body, me, fence)
    return None


def replicas_of(body: PlanBody, stage: int) -> tuple[PeerId, ...]:
    """Return the peers of a stage's replicas, in plan order."""
    return tuple(member.peer for member in body.stages[stage].replicas)


def step_coordinator_of(body: PlanBody) -> PeerId:
    """Return the first replica of stage 0, which collects Prepared and sends Commit."""
    return body.stages[0].replicas[0].peer


def workers_of(body: PlanBody) -> tuple[PeerId, ...]:
    """Return all replicas and feeders, each once, sorted."""
    replicas = {member.peer for stage in body.stages for member in stage.replicas}
    return tuple(sorted(replicas | {feeder.member.peer for feeder in body.feeders}))


class ReplicaStep:
    """One replica's progress through the steps of one epoch."""

    def __init__(self, role: Role, training: Training, version: int = 0) -> None:
        self._role = role
        self._training = training
        self._account: StartReduction | None = None
        self._early: StartReduction | None = None
        self.state = ReplicaState.WAITING
        self.version = version

    def resume(self, message: Resume) -> list[Effect]:
        """All have reported: work on the step that the swarm has in hand."""
        if self.state is not ReplicaState.WAITING:
            return []
        if message.step != self.version:
            return [Trouble(f"step {message.step} is in hand, this peer holds {self.version}")]
        self.state = ReplicaState.FILLING
        return self._start_early()

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
        waiting = self.state is ReplicaState.WAITING
        if message.step == self.version + 1 or (waiting and message.step == self.version):
            self._early = message
        if message.step != self.version or self.state is not ReplicaState.FILLING:
            return []
        self.state = ReplicaState.REDUCING
        self._account = message
        return [Reduce(message.step)]

    def reduced(self, square_norms: tuple[float, ...]) -> list[Effect]:
        """This replica holds its stage's full reduced gradient: say so."""
        assert self.state is ReplicaState.REDUCING and self._account is not None
        self.state = ReplicaState.PREPARED
        prepared = Prepared(
            fence=self._role.fence,
            step=self.version,
            stage=self._role.stage,
            square_norms=square_norms,
            weight=self._account.weight,
            flags=self._account.flags,
            loss_sum=self._account.loss_sum,
        )
        return [Send(step_coordinator_of(self._role.body), prepared)]

    def commit(self, message: Commit) -> list[Effect]:
        """Everybody is prepared: apply."""
        if message.step != self.version or self.state is not ReplicaState.PREPARED:
            return []
        self.state = ReplicaState.COMMITTING
        return [Apply(message.step, message.totals)]

    def applied(self, totals: Totals) -> list[Effect]:
        """The executor has committed: go on with the next step, or stop."""
        assert self.state is ReplicaState.COMMITTING
        self._account = None
        if totals.verdict == "halt":
            self.state = ReplicaState.HALTED
            return []
        self.version += 1
        if self.version >= self._training.steps:
            self.state = ReplicaState.FINISHED
            return []
        self.state = ReplicaState.FILLING
        return self._start_early()

    def _start_early(self) -> list[Effect]:
        early, self._early = self._early, None
        return self.start_reduction(early) if early is not None else []


class GroupCoordinator:
    """Watches the ledgers of one stage: when they partition the step, the reduction starts."""

    def __init__(self, role: Role, training: Training, version: int = 0) -> None:
        self._role = role
        self._microbatches = training.microbatches_per_step
        self._reports: dict[PeerId, LedgerReport] = {}
        self._step = version

    def ledger(self, sender: PeerId, message: LedgerReport) -> list[Effect]:
        """Take in a replica's ledger. In one epoch and step a ledger only grows, so an older
        report that comes late changes nothing.

        Raises RemoteProtocolError if the sender is not of this stage, if its bitmap is not one
        of this step's size, or if it has lost an index."""
        if sender not in self._role.group or message.stage != self._role.stage:
            raise RemoteProtocolError(f"{sender} reports a ledger of stage {message.stage}")
        indices = self._indices(sender, message)
        if message.step < self._step:
            return []
        if message.step > self._step:
            raise RemoteProtocolError(
                f"{sender} reports a ledger of step {message.step}, {self._step} is in hand"
            )
        before = _mask(self._reports[sender].bitmap) if sender in self._reports else 0
        if indices | before not in (indices, before):
            raise RemoteProtocolError(
                f"the ledger of {sender} has lost {_named(before & ~indices)}"
            )
        if indices != indices | before:
            return []
        self._reports[sender] = message
        return self._check()

    def _indices(self, sender: PeerId, message: LedgerReport) -> int:
        size, indices = (self._microbatches + 7) // 8, _mask(message.bitmap)
        if len(message.bitmap) != size or indices >> self._microbatches:
            raise RemoteProtocolError(
                f"ledger of {sender}: {len(message.bitmap)} bytes, {indices.bit_length()} bits "
                f"for {self._microbatches} microbatches"
            )
        return indices

    def _check(self) -> list[Effect]:
        seen = 0
        for sender in sorted(self._reports):
            indices = _mask(self._reports[sender].bitmap)
            if seen & indices:
                return [
                    Trouble(
                        f"step {self._step}: {_named(seen & indices)} in two ledgers of stage "
                        f"{self._role.stage}, one of {sender}"
                    )
                ]
            seen |= indices
        if seen.bit_count() < self._microbatches:
            return []
        ordered = [self._reports[peer] for peer in self._role.group if peer in self._reports]
        start = StartReduction(
            fence=self._role.fence,
            step=self._step,
            stage=self._role.stage,
            weight=sum(report.weight for report in ordered),
            flags=_first_flags(flag for report in ordered for flag in report.flags),
            loss_sum=sum(report.loss_sum for report in ordered),
        )
        self._reports = {}
        self._step += 1
        return [Send(peer, start) for peer in self._role.group]


@dataclass
class StepCoordinator:
    """Merges what all replicas say: Reports into one Resume, Prepared into one Commit."""

    role: Role
    training: Training
    counted: Sequence[int]
    """How many tensors each stage counts in the norm."""
    _reports: dict[PeerId, Report] = field(default_factory=dict)
    _prepared: dict[PeerId, Prepared] = field(default_factory=dict)
    _step: int = -1

    def report(self, sender: PeerId, message: Report) -> list[Effect]:
        """Take in what a replica holds; with the last one, let the step in hand go on."""
        replicas = self._replicas()
        if sender not in replicas:
            raise RemoteProtocolError(f"{sender} reports and hosts no stage")
        self._reports[sender] = message
        if self._step >= 0 or set(self._reports) != set(replicas):
            return []
        trouble = self._disagreement()
        if trouble:
            return [Trouble(trouble)]
        self._step = self._reports[sender].held[0].version
        everything = bitmap_of(
            range(self.training.microbatches_per_step), self.training.microbatches_per_step
        )
        resume = Resume(
            fence=self.role.fence,
            step=self._step,
            missing=tuple(Missing(stage, everything) for stage in range(len(self.counted))),
        )
        return [Send(peer, resume) for peer in workers_of(self.role.body)]

    def prepared(self, sender: PeerId, message: Prepared) -> list[Effect]:
        """Take in that a replica is prepared; with the last one, let everybody commit.

        Raises RemoteProtocolError if it is not what a replica of that stage can say."""
        if sender not in replicas_of(self.role.body, self._checked_stage(message)):
            raise RemoteProtocolError(f"{sender} is no replica of stage {message.stage}")
        if len(message.square_norms) != self.counted[message.stage]:
            raise RemoteProtocolError(
                f"{len(message.square_norms)} norms of stage {message.stage}, "
                f"which counts {self.counted[message.stage]} tensors"
            )
        if message.step != self._step:
            return []
        self._prepared[sender] = message
        if set(self._prepared) != set(self._replicas()):
            return []
        trouble = self._split_gradient()
        if trouble:
            return [Trouble(trouble)]
        firsts = [self._prepared[stage.replicas[0].peer] for stage in self.role.body.stages]
        weights = {prepared.weight for prepared in firsts}
        if len(weights) != 1:
            return [Trouble(f"step {self._step}: stages count weights {sorted(weights)}")]
        totals = totals_of(
            [prepared.square_norms for prepared in firsts],
            firsts[-1].weight,
            _first_flags(flag for prepared in firsts for flag in prepared.flags),
            firsts[-1].loss_sum,
            self.training.execution.on_nonfinite,
        )
        commit = Commit(fence=self.role.fence, step=self._step, totals=totals)
        self._prepared = {}
        self._step += 1
        return [Send(peer, commit) for peer in workers_of(self.role.body)]

    def _checked_stage(self, message: Prepared) -> int:
        if message.stage >= len(self.counted):
            raise RemoteProtocolError(f"stage {message.stage} of {len(self.counted)}")
        return message.stage

    def _replicas(self) -> list[PeerId]:
        return [peer for stage in range(len(self.counted)) for peer in self._group(stage)]

    def _group(self, stage: int) -> tuple[PeerId, ...]:
        return replicas_of(self.role.body, stage)

    def _disagreement(self) -> str:
        """Return what keeps the reports from being one state, or ""."""
        versions = set()
        for number, stage in enumerate(self.role.body.stages):
            hashes = set()
            for member in stage.replicas:
                held = self._reports[member.peer].held
                if len(held) != 1 or (held[0].first, held[0].last) != (stage.first, stage.last):
                    return f"{member.peer} does not hold stage {number}"
                versions.add(held[0].version)
                hashes.add(held[0].root_hash)
            if len(hashes) != 1:
                seen = ", ".join(sorted(each.hex()[:16] for each in hashes))
                return f"replicas of stage {number} hold different weights: {seen}"
        if len(versions) != 1:
            return f"stages hold versions {sorted(versions)}"
        return ""

    def _split_gradient(self) -> str:
        """Return why the replicas of a stage are not prepared with one gradient, or ""."""
        for stage in range(len(self.counted)):
            said = {
                (
                    repr(self._prepared[peer].square_norms),
                    self._prepared[peer].weight,
                    self._prepared[peer].flags,
                )
                for peer in self._group(stage)
            }
            if len(said) != 1:
                return f"step {self._step}: replicas of stage {stage} reduced different gradients"
        return ""


def _mask(bitmap: bytes) -> int:
    """Return a bitmap as a number whose bit i is index i."""
    return int.from_bytes(bitmap, "little")


def _named(mask: int) -> str:
    """Return some of the indices of a mask as text."""
    indices = [i for i in range(mask.bit_length()) if mask >> i & 1]
    return f"indices {indices[:8]}" + (f" and {len(indices) - 8} more" if indices[8:] else "")


def _first_flags(flags: Iterable[Flag]) -> tuple[Flag, ...]:
    return tuple(sorted(set(flags))[:MAX_FLAGS])
