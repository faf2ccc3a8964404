"""Daemons with one rule of the training fence broken, as patches of the shipped classes.

The rule: a patch changes one decision and nothing else, so that what notices it is known.
"""

from typing import Any

import pytest
from msgspec.structs import replace

from protocol.messages import Fence, Held, Report, Settlement, Totals, Training
from protocol.records import Member
from protocol.signing import PeerId
from swarm.core import settlement
from swarm.core.coordinators import StepCoordinator
from swarm.core.ledger import Ledger
from swarm.core.membership import Effect as MembershipEffect
from swarm.core.membership import Membership
from swarm.core.settlement import NoHolder
from swarm.core.step import Effect, replicas_of
from swarm.daemon import Daemon
from swarm.peer.pipeline import Pipeline
from swarm.peer.vigil import Vigil
from swarm.ports import Buffer
from swarm.simulation.stage import SimStage


def without_fence(patch: pytest.MonkeyPatch) -> None:
    """What was said by an older plan is taken for said by this one."""
    fenced = Daemon._handle_training

    def unfenced(self: Daemon, peer: PeerId, boot: int, message: Training, payload: Buffer) -> None:
        fence, active = message.fence, self._active.key
        if (fence.generation, fence.epoch) < active:
            message = replace(message, fence=Fence(*active, fence.boot))
        fenced(self, peer, boot, message, payload)

    patch.setattr(Daemon, "_handle_training", unfenced)


def without_boots(patch: pytest.MonkeyPatch) -> None:
    """Members are known by their peer alone, and nobody notices that one starts again: not
    even by the link that it had, whose loss alone brings a repair that heals everything."""

    def same(self: Member, other: object) -> bool:
        return isinstance(other, Member) and other.peer == self.peer

    heard = Membership.heard

    def heard_of_peer(
        self: Membership, member: Member, now: float, rtt_seconds: float | None = None
    ) -> list[MembershipEffect]:
        watched = self._watched.get(member.peer)
        known = watched.member if watched is not None else member
        return heard(self, known, now, rtt_seconds)

    def unnoticed(self: Membership, *_: object) -> list[MembershipEffect]:
        return []

    patch.setattr(Member, "__eq__", same)
    patch.setattr(Member, "__hash__", lambda self: hash(self.peer))
    patch.setattr(Vigil, "report_lost_work", lambda self, peer: None)
    patch.setattr(Membership, "heard", heard_of_peer)
    patch.setattr(Membership, "_started_again", unnoticed)
    patch.setattr(Membership, "_own_older_boot", unnoticed)
    patch.setattr(Membership, "boot_of", lambda self, peer: 0)


def resume_early(patch: pytest.MonkeyPatch) -> None:
    """Resume follows the first Report of every stage; who has not reported is believed to
    hold the same version, and nothing of the step in hand."""
    patient = StepCoordinator._resume

    def hasty(self: StepCoordinator) -> list[Effect | NoHolder]:
        reported = dict(self._reports)
        believed: dict[PeerId, Report] = {}
        for stage in range(len(self.role.body.stages)):
            group = replicas_of(self.role.body, stage)
            first = next((reported[peer] for peer in group if peer in reported), None)
            if first is None or not first.held:
                return patient(self)
            for peer in group:
                if peer not in reported:
                    nothing = bytes(len(first.held[0].bitmap))
                    held = replace(first.held[0], bitmap=nothing, prepared=None)
                    believed[peer] = replace(first, held=(held,))
        self._reports = {**reported, **believed}
        self._without_leavers = True
        try:
            return patient(self)
        finally:
            self._reports = reported

    patch.setattr(StepCoordinator, "_resume", hasty)


def count_again(patch: pytest.MonkeyPatch) -> None:
    """An index that is in the ledger already is taken in, and accumulated, once more."""
    add, forward = Ledger.add, Pipeline.forward

    def add_again(self: Ledger, index: int, weight: int, **more: Any) -> None:
        if index not in self:
            add(self, index, weight, **more)

    class Forgetful(Ledger):
        def __contains__(self, index: int) -> bool:
            return False

    def forward_again(self: Pipeline, sender: PeerId, message: Any, payload: Buffer) -> None:
        executor = self._executor

        class Unlooked:
            ledger = Forgetful(self._training.microbatches_per_step)

        self._executor = Unlooked  # type: ignore[assignment]
        try:
            forward(self, sender, message, payload)
        finally:
            self._executor = executor

    patch.setattr(Ledger, "add", add_again)
    patch.setattr(Pipeline, "forward", forward_again)
    patch.setattr(SimStage, "_refuse_double", lambda self, mb, accumulate: None)


def overlap_ignored(patch: pytest.MonkeyPatch) -> None:
    """Accumulators that have an index in common all count."""
    settle_stage = settlement._settle_stage

    def careless(*arguments: Any) -> Settlement:
        return replace(settle_stage(*arguments), discards=())

    patch.setattr(settlement, "_settle_stage", careless)


def prepared_ignored(patch: pytest.MonkeyPatch) -> None:
    """Who is prepared for a step that others have committed does not count as a holder."""

    def will_hold(held: Held, step: int, totals: Totals | None) -> bool:
        return held.version == step

    patch.setattr(settlement, "_will_hold", will_hold)
