"""Who watches a step: one replica of every stage its ledgers, one replica of all the whole.

`GroupCoordinator` is the first replica of a stage: when the ledgers of its group partition the
step, the reduction starts. `StepCoordinator` is the first replica of stage 0: it merges Reports
into one Resume, and Prepared into one Commit. The rule: what does not fit together is trouble,
never a step.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

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
)
from protocol.records import PlanBody, Training
from protocol.signing import PeerId
from swarm.core.effects import Send
from swarm.core.ledger import mask_of
from swarm.core.memo import by_identity
from swarm.core.settlement import NoHolder, settle
from swarm.core.step import Effect, Mishap, Role, Trouble, audience_of, replicas_of
from swarm.core.totals import totals_of


class GroupCoordinator:
    """Watches the ledgers of one stage: when they partition the step, the reduction starts."""

    def __init__(self, role: Role, training: Training) -> None:
        self._role = role
        self._microbatches = training.microbatches_per_step
        self._reports: dict[PeerId, LedgerReport] = {}
        self._step = -1

    def resume(self, step: int, *, prepared: bool) -> None:
        """The step in hand is `step`; where the stage is prepared, ledgers of the next count."""
        self._step = step + 1 if prepared else step

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
        before = mask_of(self._reports[sender].bitmap) if sender in self._reports else 0
        if indices | before not in (indices, before):
            raise RemoteProtocolError(
                f"the ledger of {sender} has lost {_named(before & ~indices)}"
            )
        if indices != indices | before:
            return []
        self._reports[sender] = message
        return self._check()

    def _indices(self, sender: PeerId, message: LedgerReport) -> int:
        size, indices = (self._microbatches + 7) // 8, mask_of(message.bitmap)
        if len(message.bitmap) != size or indices >> self._microbatches:
            raise RemoteProtocolError(
                f"ledger of {sender}: {len(message.bitmap)} bytes, {indices.bit_length()} bits "
                f"for {self._microbatches} microbatches"
            )
        return indices

    def _check(self) -> list[Effect]:
        seen = 0
        for sender in sorted(self._reports):
            indices = mask_of(self._reports[sender].bitmap)
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
    tied: Sequence[Sequence[int]] = ()
    """Groups of stages that reduce tensors together."""
    _reports: dict[PeerId, Report] = field(default_factory=dict)
    _prepared: dict[PeerId, Prepared] = field(default_factory=dict)
    _step: int = -1
    _without_leavers: bool = False

    @property
    def awaited(self) -> tuple[PeerId, ...]:
        """Return the replicas whose Reports are missing; () once Resume has been sent."""
        if self._step >= 0:
            return ()
        return tuple(peer for peer in self._replicas() if peer not in self._reports)

    @property
    def unprepared(self) -> tuple[PeerId, ...]:
        """Return the other replicas that have not said yet that they are prepared."""
        others = [peer for peer in self._replicas() if peer != self.role.me.peer]
        return tuple(peer for peer in others if peer not in self._prepared)

    def report(self, sender: PeerId, message: Report) -> list[Effect | NoHolder]:
        """Take in what a member holds; with the last one, let the step in hand go on.

        Raises RemoteProtocolError if `sender` has nothing to report."""
        if not self._reports_to_me(sender):
            raise RemoteProtocolError(f"{sender} reports and hosts no stage")
        self._check_bitmaps(sender, message)
        self._reports[sender] = message
        return self._resume()

    def go_without_leavers(self) -> list[Effect | NoHolder]:
        """Leavers had their time to report."""
        self._without_leavers = True
        return self._resume()

    def _reports_to_me(self, sender: PeerId) -> bool:
        return sender in _peers_of_replicas(self.role.body) or sender in self._leavers()

    def _resume(self) -> list[Effect | NoHolder]:
        replicas = _peers_of_replicas(self.role.body)
        if self._step >= 0 or len(self._reports) < len(replicas):
            return []
        awaited = replicas if self._without_leavers else {*replicas, *self._leavers()}
        if awaited - self._reports.keys():
            return []
        count = self.training.microbatches_per_step
        settled = settle(self.role.body, self.role.lineage, count, self._reports, self.tied)
        if isinstance(settled, NoHolder):
            return [settled]
        self._step = settled.step
        resume = Resume(
            fence=self.role.fence, step=settled.step, totals=settled.totals, stages=settled.stages
        )
        errors: list[Effect | NoHolder] = [Mishap(error) for error in settled.errors]
        return errors + [Send(peer, resume) for peer in audience_of(self.role.body)]

    def _check_bitmaps(self, sender: PeerId, message: Report) -> None:
        count = self.training.microbatches_per_step
        for held in message.held:
            if len(held.bitmap) != (count + 7) // 8 or mask_of(held.bitmap) >> count:
                raise RemoteProtocolError(
                    f"{sender} reports a ledger of {len(held.bitmap)} bytes for {count} "
                    "microbatches"
                )

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
        if self._prepared.keys() != _peers_of_replicas(self.role.body):
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
        return [Send(peer, commit) for peer in audience_of(self.role.body)]

    def _checked_stage(self, message: Prepared) -> int:
        if message.stage >= len(self.counted):
            raise RemoteProtocolError(f"stage {message.stage} of {len(self.counted)}")
        return message.stage

    def _replicas(self) -> list[PeerId]:
        return [peer for stage in range(len(self.counted)) for peer in self._group(stage)]

    def _group(self, stage: int) -> tuple[PeerId, ...]:
        return replicas_of(self.role.body, stage)

    def _leavers(self) -> list[PeerId]:
        return [member.peer for member in self.role.body.leavers]

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


@by_identity
def _peers_of_replicas(body: PlanBody) -> frozenset[PeerId]:
    return frozenset(member.peer for stage in body.stages for member in stage.replicas)


def _named(mask: int) -> str:
    """Return some of the indices of a mask as text."""
    indices = [i for i in range(mask.bit_length()) if mask >> i & 1]
    return f"indices {indices[:8]}" + (f" and {len(indices) - 8} more" if indices[8:] else "")


def _first_flags(flags: Iterable[Flag]) -> tuple[Flag, ...]:
    return tuple(sorted(set(flags))[:MAX_FLAGS])
