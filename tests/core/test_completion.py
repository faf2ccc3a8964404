"""When a version is complete, and by whose hashes."""

import pytest
from msgspec.structs import replace

from protocol.records import Completed, PlanBody
from protocol.signing import PeerId
from swarm.core.completion import MAX_VERSIONS, Completion, Layers
from tests.core.plans import PEOPLE, body

A, B, C, D = (who.peer for who in PEOPLE[:4])
PLAN = body([[A, B], [C]])
"""Layer 0 by A and B, layer 1 by C."""


def digest(number: int) -> bytes:
    return bytes([number]) * 32


def write(
    known: Completion, peer: PeerId, version: int, *, lineage: int = 0, plan: PlanBody = PLAN
) -> None:
    """Let a replica write its layer: all that write the same layer write the same bytes."""
    for number, stage in enumerate(plan.stages):
        if peer in [each.peer for each in stage.replicas]:
            layers = Layers(lineage, version, stage.first, stage.last)
            known.written(peer, layers, [digest(number)])


def test_a_version_is_complete_when_all_replicas_of_all_stages_have_written_it() -> None:
    known = Completion()
    for peer in (B, C, A):
        assert known.complete(PLAN, 0) is None
        write(known, peer, 4)
    assert known.complete(PLAN, 0) == Completed(4, (digest(0), digest(1)))
    named = replace(PLAN, completed=Completed(4, (digest(0), digest(1))))
    assert known.complete(named, 0) is None


def test_the_newest_version_that_all_have_counts_whatever_else_somebody_has() -> None:
    known = Completion()
    for peer, versions in ((A, (2, 4, 6, 8)), (B, (2, 6)), (C, (2, 4, 6))):
        for version in versions:
            write(known, peer, version)
    found = known.complete(PLAN, 0)
    assert found is not None and found.version == 6


def test_versions_of_another_lineage_do_not_count() -> None:
    known = Completion()
    for peer in (A, B, C):
        write(known, peer, 4, lineage=1)
    assert known.complete(PLAN, 0) is None
    assert known.complete(PLAN, 1) is not None


def test_what_was_written_of_another_stage_does_not_count() -> None:
    """C hosts two layers now: what it has written of one is not the stage's."""
    known = Completion()
    for peer in (A, B, C):
        write(known, peer, 4)
    first, second = PLAN.stages
    longer = replace(PLAN, stages=(first, replace(second, last=3)))
    moved = body([[C], [A, B]])
    assert known.complete(longer, 0) is None
    assert known.complete(moved, 0) is None


@pytest.mark.parametrize(("order", "number"), [([A, B], 7), ([B, A], 8)])
def test_the_first_replica_of_a_stage_names_the_weights(order: list[PeerId], number: int) -> None:
    plan = body([order, [C]])
    known = Completion()
    known.written(A, Layers(0, 4, 0, 1), [digest(7)])
    known.written(B, Layers(0, 4, 0, 1), [digest(8)])
    write(known, C, 4)
    assert known.complete(plan, 0) == Completed(4, (digest(number), digest(1)))
    assert known.unlike(plan, 0, 4) == [(0, order[1])]


def test_few_versions_of_a_peer_are_remembered_and_none_of_who_has_left() -> None:
    known = Completion()
    for version in range(1, MAX_VERSIONS + 2):
        write(known, A, version)
    write(known, B, 1)
    write(known, C, 1)
    assert known.complete(PLAN, 0) is None
    write(known, A, 1)
    assert known.complete(PLAN, 0) is not None
    known.forget_all_but({A, C})
    assert known.complete(PLAN, 0) is None
