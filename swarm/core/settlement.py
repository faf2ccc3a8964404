"""What becomes of the step in hand when a plan is activated: Reports merged into one Resume.

The rule: the step in hand is the highest version that anybody holds. Its ledgers count if they are
of replicas of the new plan; an index is missing in a stage if no such ledger has it, unless someone
holds the stage's whole reduced gradient. Nothing else is computed again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from protocol.messages import Account, Held, Report, Settlement, Totals
from protocol.records import PlanBody
from protocol.signing import PeerId
from swarm.core.ledger import bitmap_of, indices_of, mask_of
from swarm.core.step import ranges_of_stages, replicas_of


@dataclass(frozen=True, slots=True)
class Settled:
    """What Resume says; `errors` are for people: accumulators that did not fit together."""

    step: int
    totals: Totals | None
    stages: tuple[Settlement, ...]
    errors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NoHolder:
    """The state of a stage at the step's version is lost: only a rollback can go on."""

    stage: int
    version: int


def settle(
    body: PlanBody,
    lineage: int,
    microbatches: int,
    reports: Mapping[PeerId, Report],
    tied: Sequence[Sequence[int]] = (),
) -> Settled | NoHolder:
    """Return how the replicas of `body` go on after these reports.

    `tied` are the groups of stages that reduce tensors together (core/reduction.py): they are
    prepared together or not at all.
    """
    held = [_held_of(stage, lineage, reports) for stage in ranges_of_stages(body)]
    step = max((each.version for stage in held for each in stage.values()), default=-1)
    totals = _totals(held, step)
    for number, stage in enumerate(held):
        if not any(_will_hold(each, step, totals) for each in stage.values()):
            return NoHolder(number, max(step, 0))
    errors: list[str] = []
    able = [
        {peer: each for peer, each in stage.items() if _will_hold(each, step, totals)}
        for stage in held
    ]
    chosen = [_donors(stage, step) for stage in able]
    prepared = _prepared(able, [donors for _, donors in chosen], step, tied)
    stages = tuple(
        _settle_stage(
            number,
            replicas_of(body, number),
            stage,
            chosen[number],
            step,
            microbatches,
            prepared[number],
            errors,
        )
        for number, stage in enumerate(able)
    )
    return Settled(step, totals, stages, tuple(errors))


def replayed_indices(stages: Sequence[Settlement], microbatches: int) -> int:
    """Return how many microbatches are computed although some stage has them already."""
    masks = [mask_of(stage.missing) for stage in stages]
    everywhere = (1 << microbatches) - 1
    somewhere = 0
    for mask in masks:
        somewhere |= mask
        everywhere &= mask
    return (somewhere & ~everywhere).bit_count()


def needs_of(stages: Sequence[Settlement], microbatches: int) -> dict[int, int]:
    """Return the indices that some stage lacks, each with a mask of the stages that lack it.

    Raises ValueError if they are none of a step's."""
    needs: dict[int, int] = {}
    for stage, settlement in enumerate(stages):
        for index in indices_of(settlement.missing, microbatches):
            needs[index] = needs.get(index, 0) | 1 << stage
    return needs


def _held_of(
    layers: tuple[int, int], lineage: int, reports: Mapping[PeerId, Report]
) -> dict[PeerId, Held]:
    """Return what each peer holds of a stage; the highest version if it is more than one."""
    found: dict[PeerId, Held] = {}
    for peer in sorted(reports):
        for each in reports[peer].held:
            if (each.first, each.last) != layers or each.lineage != lineage:
                continue
            if peer not in found or found[peer].version < each.version:
                found[peer] = each
    return found


def _will_hold(held: Held, step: int, totals: Totals | None) -> bool:
    """Return whether a peer holds version `step`, or can commit to it: prepared, one behind."""
    behind = held.version == step - 1 and held.prepared is not None and totals is not None
    return held.version == step or behind


def _totals(held: Sequence[Mapping[PeerId, Held]], step: int) -> Totals | None:
    known = [
        each.totals
        for stage in held
        for each in stage.values()
        if each.version == step and each.totals is not None
    ]
    return known[0] if known else None


def _prepared(
    held: Sequence[Mapping[PeerId, Held]],
    donors: Sequence[Sequence[PeerId]],
    step: int,
    tied: Sequence[Sequence[int]],
) -> list[dict[PeerId, Account]]:
    """Return who is prepared for the step in hand, by stage: of the donors of each."""
    prepared = [
        {
            peer: each.prepared
            for peer, each in stage.items()
            if peer in giving and each.version == step and each.prepared is not None
        }
        for stage, giving in zip(held, donors, strict=True)
    ]
    changed = True
    while changed:  # a stage that is not prepared keeps all from it that are tied to it, and so on
        changed = False
        for group in tied:
            if not all(prepared[stage] for stage in group) and any(prepared[s] for s in group):
                for stage in group:
                    prepared[stage] = {}
                changed = True
    return prepared


def _settle_stage(
    number: int,
    replicas: Sequence[PeerId],
    held: Mapping[PeerId, Held],
    chosen: tuple[bytes, tuple[PeerId, ...]],
    step: int,
    microbatches: int,
    prepared: Mapping[PeerId, Account],
    errors: list[str],
) -> Settlement:
    state_hash, donors = chosen
    current = {peer: each for peer, each in held.items() if each.version == step}
    if len({each.state_hash for each in current.values()}) > 1:
        errors.append(f"replicas of stage {number} hold different weights at version {step}")
    counted = {
        peer: mask_of(current[peer].bitmap)
        for peer in replicas
        if peer in current and peer in donors
    }
    union, discards = 0, []
    for peer in sorted(counted, key=lambda each: (-counted[each].bit_count(), each)):
        if union & counted[peer]:
            discards.append(peer)
            errors.append(f"stage {number}: the ledger of {peer} overlaps with another's")
        else:
            union |= counted[peer]
    able = tuple(sorted(prepared))
    missing = 0 if able else ((1 << microbatches) - 1) & ~union
    return Settlement(
        state_hash=state_hash,
        missing=bitmap_of((i for i in range(microbatches) if missing >> i & 1), microbatches),
        donors=donors,
        prepared=able,
        account=prepared[able[0]] if able else None,
        discards=() if able else tuple(discards),
    )


def _donors(held: Mapping[PeerId, Held], step: int) -> tuple[bytes, tuple[PeerId, ...]]:
    """Return the stage's state hash and who has that state.

    Where hashes differ, that of most holders counts, then that of the first peer. A stage where
    all are one behind gets its hash from their commit: the zero hash stands for "any"."""
    current = {peer: each for peer, each in held.items() if each.version == step}
    if not current:
        return bytes(32), tuple(sorted(held))
    votes: dict[bytes, list[PeerId]] = {}
    for peer in sorted(current):
        votes.setdefault(current[peer].state_hash, []).append(peer)
    state_hash = min(votes, key=lambda each: (-len(votes[each]), min(votes[each])))
    behind = [peer for peer in held if peer not in current]
    return state_hash, tuple(sorted([*votes[state_hash], *behind]))
