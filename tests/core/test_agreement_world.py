"""Worlds of agreeing peers: seeds, rules in any order, and every order within small bounds."""

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from swarm.core.agreement import Agreement
from tests.core.agreement_world import (
    NAMES,
    Faults,
    Violation,
    World,
    remembered_signatures,
    run_seed,
)
from tests.core.explore_agreement import Bounds, Explorer
from tests.core.test_agreement_mutants import ForgetsTheAcceptedPlan, SkipsTheFsync, VotesTwice


@pytest.mark.parametrize("seed", range(0, 300, 10))
def test_faults_break_no_invariant_and_without_them_plans_follow(seed: int) -> None:
    for each in range(seed, seed + 10):
        run_seed(each)


def test_a_seed_replays_identically() -> None:
    first, again = run_seed(7), run_seed(7)
    assert first.transcript(10**6) == again.transcript(10**6)
    assert first.events > 100


def test_a_violation_comes_with_its_transcript_and_how_to_see_it_again() -> None:
    with pytest.raises(AssertionError) as caught:
        for seed in range(20):
            run_seed(seed, VotesTwice)
    message = str(caught.value)
    assert message.startswith("A4: ")
    assert "RequestVote" in message
    assert "replay: python -m tests.core.agreement_world " in message


class AnyOrder(RuleBasedStateMachine):
    """What may go wrong, in any order; the world checks A1 to A4 and A6 after each event."""

    @initialize(council=st.sampled_from(["A", "ABC", "ABCDE"]), seed=st.integers(0, 2**32))
    def begin(self, council: str, seed: int) -> None:
        self.world = World(
            random.Random(seed), peers=NAMES[:5], council=council, faults=Faults(slow=0.2)
        )

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.run(seconds)

    @rule(name=st.sampled_from(NAMES[:5]))
    def crash_or_restart(self, name: str) -> None:
        if name in self.world.up:
            self.world.crash(name)
        else:
            self.world.restart(name)

    @rule(probability=st.sampled_from([0.0, 0.02, 0.2]))
    def crash_between_effects(self, probability: float) -> None:
        self.world.faults.crash = probability

    @rule(drop=st.sampled_from([0.0, 0.3]), duplicate=st.sampled_from([0.0, 0.3]))
    def network_changes(self, drop: float, duplicate: float) -> None:
        self.world.faults.drop, self.world.faults.duplicate = drop, duplicate

    @rule(side=st.sets(st.sampled_from(NAMES[:5])), both=st.booleans())
    def partition(self, side: set[str], both: bool) -> None:
        ends = [(a, b) for a in sorted(side) for b in NAMES[:5] if b not in side]
        self.world.cut = {*ends, *((b, a) for a, b in ends if both)}

    @rule(name=st.sampled_from(NAMES[:5]), seconds=st.floats(0.0, 20.0))
    def clock_jumps(self, name: str, seconds: float) -> None:
        self.world.nodes[name].clock += seconds

    @rule(name=st.sampled_from(NAMES[:5]))
    def another_draft(self, name: str) -> None:
        if name in self.world.up and self.world.nodes[name].up.may_lead:
            self.world.lead(name)

    @precondition(lambda self: self.world.up)
    @rule(data=st.data())
    def stand(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.world.up))
        node = self.world.nodes[name]
        if node.up.is_voter and not node.up.is_leader:
            self.world._perform(name, node.up.stand(self.world.now + node.clock))

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        """A7: when faults stop, plans follow."""
        if not hasattr(self, "world"):
            return
        world = self.world
        world.heal()
        before = max(node.up.newest.key for node in world.nodes.values())
        world.run(45.0)
        after = min(node.up.newest.key for node in world.nodes.values())
        assert after >= (before[0], before[1] + 1), world.transcript()


def test_no_order_of_faults_breaks_an_invariant() -> None:
    with remembered_signatures():
        run_state_machine_as_test(
            AnyOrder,
            settings=settings(
                max_examples=40,
                stateful_step_count=20,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )


@pytest.mark.parametrize(
    ("bounds", "complete"),
    [
        (Bounds(terms=2, epochs=1, crashes=0), True),
        (Bounds(terms=1, epochs=1, crashes=2, drafts="same,leader,next"), True),
        (Bounds(terms=2, epochs=2, crashes=1, states=40_000), False),
    ],
)
def test_every_order_of_three_voters(bounds: Bounds, complete: bool) -> None:
    with remembered_signatures():
        result = Explorer(bounds).explore()
    print(bounds, result)
    assert result.complete is complete
    assert result.decided > 1


@pytest.mark.parametrize(
    ("mutant", "violation"),
    [
        (SkipsTheFsync, "votes"),
        (ForgetsTheAcceptedPlan, "A1: two plans decided"),
        (VotesTwice, "votes"),
    ],
)
def test_the_explorer_notices_a_broken_rule(mutant: type[Agreement], violation: str) -> None:
    with remembered_signatures(), pytest.raises(Violation, match=violation):
        Explorer(Bounds(crashes=1, states=100_000), mutant).explore()
