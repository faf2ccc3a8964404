"""Roles, Reports and Accounts as the tests of a step need them."""

from collections.abc import Iterable

from protocol.messages import Account, Fence, Held, Report, Totals
from protocol.records import Generation, Member, PlanBody
from protocol.signing import PeerId
from swarm.core.ledger import bitmap_of
from swarm.core.step import Role, role_of

FENCE = Fence(Generation(), 1, 1)
HASH = b"h" * 32
OTHER_HASH = b"o" * 32
ACCOUNT = Account(10, (), 2.5)
TOTALS = Totals(10, 2.0, (), "apply", 0.5)
MICROBATCHES = 4


def role(plan: PlanBody, peer: PeerId, fence: Fence = FENCE) -> Role:
    """Return the place of a peer that has one."""
    found = role_of(plan, Member(peer, 1), fence, 0)
    assert found is not None
    return found


def held(
    stage: int,
    version: int = 0,
    *,
    indices: Iterable[int] = (),
    state_hash: bytes = HASH,
    prepared: Account | None = None,
    totals: Totals | None = None,
    lineage: int = 0,
    microbatches: int = MICROBATCHES,
) -> Held:
    """Return what a peer holds of a stage of one layer."""
    return Held(
        lineage=lineage,
        first=stage,
        last=stage + 1,
        version=version,
        state_hash=state_hash,
        bitmap=bitmap_of(indices, microbatches),
        prepared=prepared,
        totals=totals,
    )


def report(*each: Held) -> Report:
    """Return what a peer says when it has stopped."""
    return Report(fence=FENCE, held=each)
