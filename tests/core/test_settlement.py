"""Reports merged into one Resume: what counts, what is missing, and who can give the rest.

The invariant is A5 of the design: in every stage the ledgers that count and the missing indices
partition {0 .. M-1}, unless somebody holds the whole reduced gradient.
"""

from collections.abc import Mapping

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.messages import Account, Flag, Held, Report, Settlement, Totals
from protocol.records import Member, PlanBody
from protocol.signing import PeerId
from swarm.core.ledger import bitmap_of, indices_of, mask_of
from swarm.core.settlement import NoHolder, Settled, replayed_indices, settle
from swarm.core.step import replicas_of
from tests.core.plans import body
from tests.core.steps import ACCOUNT, HASH, MICROBATCHES, OTHER_HASH, TOTALS, held, report

PLAN = body([["a", "b"], ["c", "d"]])
NOTHING = report()
STAGES = {"a": 0, "b": 0, "c": 1, "d": 1}
EVERYTHING = (0, 1, 2, 3)


def settled(
    reports: Mapping[PeerId, Report],
    plan: PlanBody = PLAN,
    tied: tuple[tuple[int, ...], ...] = (),
    lineage: int = 0,
) -> Settled:
    found = settle(plan, lineage, MICROBATCHES, reports, tied)
    assert isinstance(found, Settled)
    return found


def missing(settlement: Settlement) -> tuple[int, ...]:
    return indices_of(settlement.missing, MICROBATCHES)


def leaving(*leavers: PeerId) -> PlanBody:
    """Return PLAN after these have left it: they are still donors."""
    return msgspec.structs.replace(PLAN, leavers=tuple(Member(peer, 1) for peer in leavers))


def all_at(version: int, **changed: Held) -> dict[PeerId, Report]:
    """Return the Reports of four replicas at a version; `changed` is what some hold instead."""
    what = {peer: held(stage, version, totals=TOTALS) for peer, stage in STAGES.items()}
    return {peer: report(each) for peer, each in (what | changed).items()}


# --- the step in hand -----------------------------------------------------------------------------


def test_at_the_start_everything_is_missing_everywhere() -> None:
    found = settled({peer: report(held(stage)) for peer, stage in STAGES.items()})
    stage = Settlement(HASH, bitmap_of(EVERYTHING, 4), ("a", "b"), (), None, ())
    other = Settlement(HASH, bitmap_of(EVERYTHING, 4), ("c", "d"), (), None, ())
    assert found == Settled(0, None, (stage, other), ())


def test_ledgers_of_the_step_in_hand_count_and_the_rest_is_missing() -> None:
    found = settled(
        all_at(
            3,
            a=held(0, 3, indices=[0], totals=TOTALS),
            b=held(0, 3, indices=[2, 3]),
            d=held(1, 3, indices=[1]),
        )
    )
    assert (found.step, found.totals, found.errors) == (3, TOTALS, ())
    assert [missing(stage) for stage in found.stages] == [(1,), (0, 2, 3)]
    assert [stage.discards for stage in found.stages] == [(), ()]


def test_who_is_one_behind_and_prepared_commits_and_is_a_donor() -> None:
    """The Commit reached one stage and not the other: its totals are in the Reports."""
    behind = held(1, 2, prepared=ACCOUNT, indices=EVERYTHING, state_hash=OTHER_HASH)
    found = settled(all_at(3, c=behind, d=behind))
    assert (found.step, found.totals) == (3, TOTALS)
    assert found.stages[1].donors == ("c", "d")
    assert found.stages[1].state_hash == bytes(32)  # that of their commit, whatever it is
    # What they have accumulated is of the step before.
    assert missing(found.stages[1]) == EVERYTHING
    assert found.stages[1].prepared == ()


def test_the_totals_are_those_that_made_the_step_in_hand() -> None:
    """Who is one behind knows others: those of the step before."""
    older = held(0, 2, prepared=ACCOUNT, totals=Totals(9, 9.0, (), "skip", None))
    assert settled(all_at(3, a=older, b=older)).totals == TOTALS


def test_the_hash_of_those_that_have_committed_counts_where_some_are_behind() -> None:
    behind = held(1, 2, prepared=ACCOUNT, state_hash=OTHER_HASH)
    found = settled(all_at(3, c=behind))
    assert (found.stages[1].state_hash, found.stages[1].donors) == (HASH, ("c", "d"))
    assert found.errors == ()


def test_who_is_one_behind_and_not_prepared_or_further_behind_is_no_donor() -> None:
    found = settled(all_at(3, a=held(0, 2), c=held(1, 1, prepared=ACCOUNT)))
    assert [stage.donors for stage in found.stages] == [("b",), ("d",)]


def test_without_totals_nobody_can_commit() -> None:
    reports = {
        "a": report(held(0, 3)),
        "b": report(held(0, 3)),
        "c": report(held(1, 2, prepared=ACCOUNT)),
        "d": NOTHING,
    }
    assert settle(PLAN, 0, MICROBATCHES, reports) == NoHolder(1, 3)


# --- prepared -------------------------------------------------------------------------------------


def test_where_somebody_is_prepared_nothing_is_missing() -> None:
    """The other has lost its part: the reduced gradient has it."""
    account = Account(10, (Flag(1, "layer"),), 2.5)
    found = settled(all_at(3, a=held(0, 3, prepared=account, indices=[0, 1], totals=TOTALS)))
    first, second = found.stages
    assert (missing(first), first.prepared, first.account) == ((), ("a",), account)
    assert (missing(second), second.prepared, second.account) == (EVERYTHING, (), None)


def test_a_leaver_that_is_prepared_spares_its_stage_the_step() -> None:
    plan = leaving("x")
    found = settled(all_at(3) | {"x": report(held(0, 3, prepared=ACCOUNT))}, plan)
    assert (found.stages[0].prepared, missing(found.stages[0])) == (("x",), ())


@pytest.mark.parametrize(("other", "prepared"), [(None, [(), ()]), (ACCOUNT, [("a",), ("c",)])])
def test_stages_with_a_common_tensor_are_prepared_together_or_not_at_all(
    other: Account | None, prepared: list[tuple[PeerId, ...]]
) -> None:
    reports = all_at(
        3,
        a=held(0, 3, prepared=ACCOUNT, indices=[0, 1], totals=TOTALS),
        c=held(1, 3, prepared=other, indices=[2]),
    )
    found = settled(reports, tied=((0, 1),))
    assert [stage.prepared for stage in found.stages] == prepared
    lacking = [(2, 3), (0, 1, 3)] if other is None else [(), ()]
    assert [missing(stage) for stage in found.stages] == lacking


def test_stages_without_a_common_tensor_are_prepared_each_on_its_own() -> None:
    plan = body([["a"], ["b"], ["c"]])
    reports = {
        "a": report(held(0, prepared=ACCOUNT)),
        "b": report(held(1, prepared=ACCOUNT)),
        "c": report(held(2)),
    }
    found = settled(reports, plan, tied=((0, 2),))
    assert [stage.prepared for stage in found.stages] == [(), ("b",), ()]


def test_what_is_prepared_does_not_hang_on_the_order_of_the_ties() -> None:
    """0 reduces with 1, and 1 with 2, which is not prepared: so none of them is."""
    plan = body([["a"], ["b"], ["c"]])
    reports = {
        "a": report(held(0, prepared=ACCOUNT)),
        "b": report(held(1, prepared=ACCOUNT)),
        "c": report(held(2)),
    }
    for tied in (((0, 1), (1, 2)), ((1, 2), (0, 1))):
        found = settled(reports, plan, tied=tied)
        assert [stage.prepared for stage in found.stages] == [(), (), ()], tied


def test_a_gradient_of_another_state_prepares_no_stage_that_is_tied_to_it() -> None:
    reports = all_at(
        3,
        a=held(0, 3, prepared=ACCOUNT, totals=TOTALS),
        c=held(1, 3, state_hash=OTHER_HASH, prepared=ACCOUNT),
        d=held(1, 3),
    ) | {"e": report(held(1, 3))}
    found = settled(reports, leaving("e"), tied=((0, 1),))
    assert [stage.prepared for stage in found.stages] == [(), ()]


# --- ledgers that do not fit together -------------------------------------------------------------


@pytest.mark.parametrize(
    ("of_a", "of_b", "discarded", "lacking"),
    [
        ([0, 1, 2], [2, 3], "b", (3,)),
        ([2], [1, 2, 3], "a", (0,)),
        ([0, 1], [1, 2], "b", (2, 3)),  # as large: the later in order of peers
        ([0, 1, 2, 3], [0, 1, 2, 3], "b", ()),
    ],
)
def test_where_ledgers_overlap_the_smaller_is_discarded_and_said_to_be(
    of_a: list[int], of_b: list[int], discarded: PeerId, lacking: tuple[int, ...]
) -> None:
    found = settled(
        all_at(
            1,
            a=held(0, 1, indices=of_a, totals=TOTALS),
            b=held(0, 1, indices=of_b, totals=TOTALS),
        )
    )
    assert found.stages[0].discards == (discarded,)
    assert missing(found.stages[0]) == lacking
    assert found.errors == (f"stage 0: the ledger of {discarded} overlaps with another's",)


def test_only_ledgers_of_the_new_plans_replicas_count() -> None:
    """A leaver takes its accumulator with it; its state is there for others to fetch."""
    reports = all_at(3) | {"x": report(held(0, 3, indices=[0, 1]))}
    found = settled(reports, leaving("x"))
    assert found.stages[0].donors == ("a", "b", "x")
    assert missing(found.stages[0]) == EVERYTHING


def test_a_ledger_of_the_step_before_does_not_count() -> None:
    found = settled(all_at(3, a=held(0, 2, indices=[0, 1])))
    assert missing(found.stages[0]) == EVERYTHING


def test_nothing_of_another_lineage_or_another_range_counts() -> None:
    wide = Held(0, 0, 2, 5, HASH, bitmap_of([0], 4), ACCOUNT, TOTALS)
    of_another = held(0, 7, lineage=1, prepared=ACCOUNT, totals=TOTALS)
    reports = all_at(3) | {"a": report(wide, of_another, held(0, 3, indices=[1], totals=TOTALS))}
    found = settled(reports)
    assert found.step == 3
    assert (found.stages[0].donors, missing(found.stages[0])) == (("a", "b"), (0, 2, 3))
    assert found.stages[0].prepared == ()
    again = settled(
        {peer: report(held(stage, lineage=4)) for peer, stage in STAGES.items()},
        lineage=4,
    )
    assert (again.step, again.stages[1].donors) == (0, ("c", "d"))


# --- who can give ---------------------------------------------------------------------------------


def test_the_state_of_most_counts_and_another_is_no_donor() -> None:
    odd = held(0, 3, state_hash=OTHER_HASH, indices=[0, 1], totals=TOTALS)
    reports = all_at(3, a=odd) | {"x": report(held(0, 3))}
    found = settled(reports, leaving("x"))
    assert (found.stages[0].state_hash, found.stages[0].donors) == (HASH, ("b", "x"))
    assert missing(found.stages[0]) == EVERYTHING  # what was computed with other weights is void
    assert found.errors == ("replicas of stage 0 hold different weights at version 3",)


def test_where_as_many_hold_two_states_everybody_decides_for_the_same() -> None:
    odd = held(0, 3, state_hash=OTHER_HASH, totals=TOTALS)
    reports = all_at(3, b=odd)
    found = settled(reports)
    assert found.stages[0].donors == ("a",)
    assert settled(dict(reversed(reports.items()))) == found


def test_who_holds_nothing_of_its_stage_fetches_from_the_others() -> None:
    found = settled(all_at(3) | {"b": NOTHING, "d": report(held(0, 3))})
    assert [stage.donors for stage in found.stages] == [("a", "d"), ("c",)]


@pytest.mark.parametrize(
    ("reports", "lost"),
    [
        (dict.fromkeys("abcd", NOTHING), NoHolder(0, 0)),
        (all_at(3) | {"c": NOTHING, "d": NOTHING}, NoHolder(1, 3)),
        (all_at(3, c=held(1, 2), d=held(1, 1, prepared=ACCOUNT)), NoHolder(1, 3)),
        (all_at(3, a=held(0, 2), b=held(0, 2)), NoHolder(0, 3)),
    ],
)
def test_a_stage_that_nobody_holds_at_the_step_in_hand_is_lost(
    reports: dict[PeerId, Report], lost: NoHolder
) -> None:
    assert settle(PLAN, 0, MICROBATCHES, reports) == lost


# --- whatever has happened ------------------------------------------------------------------------


@st.composite
def histories(draw: st.DrawFn) -> tuple[PlanBody, dict[PeerId, Report]]:
    """Return a plan and the Reports of who is left: replicas, leavers and who held the stage once.

    In every stage each index of the step is in the ledger of at most one of them."""
    groups, leavers, reports = [], [], {}
    for stage in range(draw(st.integers(1, 3))):
        group = [f"s{stage}r{number}" for number in range(draw(st.integers(1, 3)))]
        gone = [f"s{stage}x{number}" for number in range(draw(st.integers(0, 2)))]
        groups.append(group)
        leavers += gone
        everybody = [*group, *gone, "nobody"]
        hosts = draw(st.lists(st.sampled_from(everybody), min_size=4, max_size=4))
        for peer in [*group, *gone]:
            indices = [index for index, host in enumerate(hosts) if host == peer]
            match draw(
                st.sampled_from(["current", "current", "prepared", "behind", "odd", "dead"])
            ):
                case "current":
                    each = held(stage, 5, indices=indices, totals=TOTALS)
                case "prepared":
                    each = held(stage, 5, indices=indices, totals=TOTALS, prepared=ACCOUNT)
                case "behind":
                    each = held(stage, 4, indices=EVERYTHING, prepared=ACCOUNT)
                case "odd":
                    each = held(stage, 5, indices=indices, totals=TOTALS, state_hash=OTHER_HASH)
                case _:
                    continue
            reports[peer] = report(each)
    plan = body(groups)
    return msgspec.structs.replace(
        plan, leavers=tuple(Member(each, 1) for each in leavers)
    ), reports


@given(histories())
def test_ledgers_that_count_and_what_is_missing_partition_the_step(
    history: tuple[PlanBody, dict[PeerId, Report]],
) -> None:
    plan, reports = history
    found = settle(plan, 0, MICROBATCHES, reports)
    if isinstance(found, NoHolder):
        holders = [
            each
            for each in (of for said in reports.values() for of in said.held)
            if each.first == found.stage and each.version == found.version
        ]
        assert holders == []
        return
    assert found.step == max(each.version for said in reports.values() for each in said.held)
    for number, stage in enumerate(found.stages):
        counted = [
            each
            for peer in replicas_of(plan, number)
            for each in (reports[peer].held if peer in reports else ())
            if (each.version, each.state_hash) == (found.step, stage.state_hash)
        ]
        entered = [index for each in counted for index in indices_of(each.bitmap, MICROBATCHES)]
        if stage.prepared:
            assert (missing(stage), stage.account) == ((), ACCOUNT)
            assert set(stage.prepared) <= set(stage.donors)
        else:
            assert sorted([*entered, *missing(stage)]) == list(EVERYTHING)
        assert stage.discards == ()
        states = {
            each.state_hash
            for peer in stage.donors
            for each in reports[peer].held
            if each.version == found.step
        }
        assert states <= {stage.state_hash}
        assert list(stage.donors) == sorted(stage.donors) != []


@given(
    st.lists(st.lists(st.sets(st.integers(0, 3)), min_size=2, max_size=2), min_size=1, max_size=3)
)
def test_whatever_overlaps_what_is_kept_and_what_is_missing_partition_the_step(
    ledgers: list[list[set[int]]],
) -> None:
    plan = body([[f"s{stage}a", f"s{stage}b"] for stage in range(len(ledgers))])
    reports = {
        peer: report(held(stage, 2, indices=indices, totals=TOTALS))
        for stage, both in enumerate(ledgers)
        for peer, indices in zip(replicas_of(plan, stage), both, strict=True)
    }
    found = settled(reports, plan)
    for number, stage in enumerate(found.stages):
        kept = [
            index
            for peer, indices in zip(replicas_of(plan, number), ledgers[number], strict=True)
            if peer not in stage.discards
            for index in indices
        ]
        assert sorted([*kept, *missing(stage)]) == list(EVERYTHING)
    assert len(found.errors) == sum(len(stage.discards) for stage in found.stages)
    assert found.errors == () or any(set.intersection(*both) for both in ledgers)


@given(st.lists(st.integers(0, 15), min_size=1, max_size=4))
def test_replayed_is_what_some_stage_computes_that_another_has(masks: list[int]) -> None:
    stages = [Settlement(HASH, mask.to_bytes(1, "little"), ("a",), (), None, ()) for mask in masks]
    lacking = [set(indices_of(stage.missing, MICROBATCHES)) for stage in stages]
    replayed = set.union(*lacking) - set.intersection(*lacking)
    assert replayed_indices(stages, MICROBATCHES) == len(replayed)
    assert mask_of(stages[0].missing) == masks[0]
