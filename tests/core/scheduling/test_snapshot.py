"""The problem of a plan: the same for all who have the same signed records."""

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from protocol.records import (
    ESTIMATES_PURPOSE,
    DataSpec,
    Estimates,
    LinkEstimate,
    Manifest,
    SampleSpec,
    Signed,
    sign_record,
)
from swarm.core.scheduling.planning import Candidate, first_plan, problem_for
from swarm.core.scheduling.snapshot import assignment_of, flow_of
from tests.core.drafts import FOUR, FOUR_LAYERS, RUN, member
from tests.core.plans import PEOPLE, candidate, candidates, manifest, request, training

replace = msgspec.structs.replace


def estimates(
    number: int,
    of: Manifest = RUN,
    *,
    boot: int = 1,
    sequence: int = 1,
    slowdown: float = 1.0,
    uplink: float = 0.0,
    links: Sequence[tuple[int, float, float]] = (),
) -> Signed:
    """What the peer of this number has measured; links are (peer, bytes per second, seconds)."""
    who = PEOPLE[number]
    told = Estimates(
        run=of.run,
        peer=who.peer,
        boot=boot,
        sequence=sequence,
        slowdown=slowdown,
        slowdown_spread=0.1,
        uplink=uplink,
        uplink_spread=0.1,
        downlink=0.0,
        downlink_spread=1.0,
        links=tuple(
            LinkEstimate(PEOPLE[other].peer, bandwidth, seconds, 0.05)
            for other, bandwidth, seconds in links
        ),
    )
    return sign_record(who, ESTIMATES_PURPOSE, told)


def uneven() -> list[Candidate]:
    """Three peers, of which the second takes twice as long, and the third four times."""
    return [
        candidate(who, RUN, request(who, RUN.run, seconds=[factor * 1.0, factor * 3.0]))
        for who, factor in zip(PEOPLE[:3], (1, 2, 4), strict=True)
    ]


def test_layers_are_the_medians_and_speeds_are_relative_to_them() -> None:
    problem = problem_for(RUN.training, uneven(), {})
    assert [problem.seconds(n, n + 1) for n in range(2)] == [2.0, 6.0]
    assert problem.speed.tolist() == [2.0, 1.0, 0.5]


def test_what_work_takes_corrects_what_a_peer_has_said_when_it_joined() -> None:
    told = {PEOPLE[0].peer: estimates(0, slowdown=4.0)}
    assert problem_for(RUN.training, uneven(), told).speed.tolist() == [0.5, 1.0, 0.5]


def test_estimates_of_another_start_do_not_count() -> None:
    told = {PEOPLE[0].peer: estimates(0, boot=2, slowdown=4.0)}
    assert problem_for(RUN.training, uneven(), told).speed.tolist() == [2.0, 1.0, 0.5]


def test_links_are_those_that_were_measured() -> None:
    told = {PEOPLE[0].peer: estimates(0, links=[(1, 5e6, 0.02), (2, 7e6, 0.1)])}
    problem = problem_for(RUN.training, uneven(), told)
    assert problem.link[0, 1] == pytest.approx(5e6)
    assert problem.link[0, 2] == pytest.approx(7e6)
    assert problem.latency[0, 1] == pytest.approx(0.02)


@pytest.mark.parametrize(
    ("determinism", "state", "reduced"), [("standard", 6.0, 1.0), ("exact", 8.0, 2.0)]
)
def test_bytes_are_those_of_the_manifest(determinism: str, state: float, reduced: float) -> None:
    """AdamW: weights, gradient and two moments; sums and sums received: of 4 bytes, or of 8."""
    run = manifest(run=training(determinism=determinism))  # type: ignore[arg-type]
    terms = problem_for(run.training, candidates(2, run), {}).terms
    assert (terms.state_ratio, terms.reduction_ratio, terms.moved_ratio) == (state, reduced, 3.0)
    assert (terms.input_bytes, terms.target_bytes) == (8 * 8 * 2, 8 * 8 * 2)


def test_samples_of_a_factory_have_the_size_that_the_manifest_says() -> None:
    data = DataSpec(
        "factory",
        factory="some:data",
        sample=SampleSpec("float32", (3, 4, 4)),
        target=SampleSpec("int64", high=10),
    )
    run = manifest(run=replace(training(), data=data))
    terms = problem_for(run.training, candidates(2, run), {}).terms
    assert (terms.input_bytes, terms.target_bytes) == (2 * 48 * 4, 2 * 8)


def test_the_stages_of_the_plan_before_are_kept_and_held() -> None:
    problem = problem_for(RUN.training, candidates(4, RUN, FOUR_LAYERS), {}, before=FOUR.body)
    assert problem.terms.cuts == (2,)
    assert problem.current is not None
    assert problem.current.groups == ((0, 1), (2, 3))
    assert [(each.peer, each.first, each.last) for each in problem.holdings] == [
        (0, 0, 2),
        (1, 0, 2),
        (2, 2, 4),
        (3, 2, 4),
    ]


def test_who_is_gone_is_not_in_the_problem_and_a_newcomer_holds_nothing() -> None:
    three = [*candidates(4, RUN, FOUR_LAYERS)[1:], candidates(5, RUN, FOUR_LAYERS)[4]]
    problem = problem_for(RUN.training, three, {}, before=FOUR.body)
    assert problem.current is not None
    assert problem.current.groups == ((0,), (1, 2))
    assert [each.peer for each in problem.current.standby] == [3]
    assert {each.peer for each in problem.holdings} == {0, 1, 2}


def test_the_same_records_give_the_same_problem_at_no_cost() -> None:
    first = problem_for(RUN.training, uneven(), {PEOPLE[0].peer: estimates(0)})
    again = problem_for(RUN.training, uneven(), {PEOPLE[0].peer: estimates(0)})
    assert again is first


def test_a_plan_says_who_does_what_whatever_the_order_of_its_replicas() -> None:
    """Stage 1 lists its replicas the other way round, and so does the wiring into it."""
    body = first_plan(RUN.training, candidates(4, RUN, FOUR_LAYERS), 2)
    one, two = body.stages
    turned = replace(
        body,
        stages=(one, replace(two, replicas=(member(3), member(2)))),
        wiring=(body.wiring[0], ((0.75, 0.25), (0.5, 0.5))),
    )
    assert assignment_of(turned) == assignment_of(body)
    assert assignment_of(body).groups == ((0, 1), (2, 3))
    assert np.array_equal(flow_of(turned).wiring[1], [[0.25, 0.75], [0.5, 0.5]])
    assert flow_of(turned).feeder_shares.tolist() == [0.5, 0.5]
