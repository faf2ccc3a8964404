"""Daemons whose training fence has a rule broken do not get away with it; the shipped ones do.

Each rule is broken in the situation that it is for. What notices it:

- `without_fence`: what was in flight by the plan before is accumulated beside what is fed again; an
  index is in two ledgers of a stage, which halts the run; it does not end (A7).
- `resume_early`: links are broken again and again by frames that cannot be; it does not end (A7).
- `without_boots`: nobody leaves out who has lost its state and waits; the run does not end (A7).
- `count_again`: at commit the sums are compared with the plain loop's, which names the index (A5).
- `overlap_ignored`: an index is in two ledgers, which halts the run; it does not end (A7).
- `prepared_ignored`: the swarm goes back although every stage has a holder (lineage).
"""

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

import pytest
import trio

from protocol.messages import Backward, Forward, Microbatch
from protocol.signing import PeerId
from swarm.core.ledger import Ledger
from swarm.core.step import Effect, ReplicaStep
from swarm.peer.feeder import Feeder, _Read
from swarm.simulation.network import Weather
from swarm.simulation.physics import Physics, integer_training
from swarm.simulation.trace import SimulationFailure
from swarm.simulation.world import Options, World
from tests.simulation import mutants
from tests.simulation.disturbances import Watch, body_of, group_of, stage_of

PEERS = 5
WITHIN_SECONDS = 90.0
SEEDS = (0, 1)


@dataclass(frozen=True)
class Case:
    """A rule that is broken, and where."""

    mutant: Callable[[pytest.MonkeyPatch], None]
    situation: Callable[[World, Watch], Awaitable[None]]
    rule: str
    """What it violates."""
    faults: Callable[[pytest.MonkeyPatch], None] = lambda patch: None
    """What a peer does wrong for the situation to come about, with and without the mutant."""
    stages: int = 2
    chances: int = 1
    """Of so many seeds one at least notices it, where what is late has to come at a bad moment."""
    microbatches: int = 8
    """Of a step: with more of them a step lasts longer than what is late in it."""
    without_data: tuple[int, ...] = ()
    """Peers that others feed."""

    @property
    def name(self) -> str:
        """Return the mutant's name."""
        return self.mutant.__name__


def live(seed: int, case: Case) -> None:
    """Live through the situation. Raises SimulationFailure."""
    training = integer_training(steps=3, microbatches=case.microbatches)
    options = Options(
        Physics(training, layers=4),
        peers=PEERS,
        stages=case.stages,
        weather=Weather(0.02, 0.01),
        speeds=(0.2,) * PEERS,
        without_data=case.without_data,
    )
    world = World(f"mutants/{seed}", options)
    watch = Watch(world, frozenset())
    world.on_point = watch.reached

    async def scenario(world: World) -> None:
        for number in range(PEERS):
            world.start(number)
        await watch.once("coordinator", "after commit", nothing)
        await case.situation(world, watch)
        await world.ended(WITHIN_SECONDS)
        if any(header.lineage for header in world.invariants._headers.values()):
            world.violate("lineage", "the swarm went back although every stage had a holder")

    world.run(scenario)


def nothing(number: int) -> None:
    """Only wait for this moment."""


# --- situations -----------------------------------------------------------------------------


async def slow_replica(world: World, watch: Watch) -> None:
    """All frames of a replica take two seconds, and two others lose their link."""
    slow: list[int] = []

    def strike(number: int) -> None:
        slow.append(number)
        set_latency(world, number, 2.0, range(PEERS))
        others = [each for each in group_of(world, number) if each != number]
        world.reset(others[0], others[1], 0)

    await watch.once("replica", "after send LedgerReport", strike, lambda n: of_three(world, n))
    await trio.sleep(8)
    for number in slow:
        set_latency(world, number, 0.02, range(PEERS))


async def late_forward(world: World, watch: Watch) -> None:
    """What a replica sends down the pipeline takes two seconds for a moment, and two of the stage
    below lose their link: what is under way is fed again by the next plan before it arrives."""

    def strike(number: int) -> None:
        below = stage_of(world, body_of(world, number), 1)
        set_latency(world, number, 2.0, below)
        world.network.after(0.5, lambda: set_latency(world, number, 0.02, below))
        world.reset(below[0], below[1], 0)

    def is_above(number: int) -> bool:
        executor = world.peers[number].executor
        is_first = number in stage_of(world, body_of(world, number), 0)
        return is_first and executor is not None and executor.version == 2

    await watch.once("replica", "before send Forward", strike, is_above)
    await trio.sleep(8)


async def quick_restart(world: World, watch: Watch) -> None:
    """A replica starts again at once, in the middle of a step, when no plan is on its way."""

    def strike(number: int) -> None:
        def again() -> None:
            world.start(number)

        world.kill(number)
        world.network.after(0.005, again)

    def is_late(number: int) -> bool:
        executor = world.peers[number].executor
        return executor is not None and executor.version == 2

    await watch.once("replica", "after send LedgerReport", strike, is_late)
    await trio.sleep(1)


async def half_committed(world: World, watch: Watch) -> None:
    """The step coordinator dies when its stage has committed and the other is only prepared."""
    dead: list[int] = []

    def cut(number: int) -> None:
        dead.append(number)
        world.cut([number], stage_of(world, body_of(world, number), 1), both=False)

    def is_below(number: int) -> bool:
        return number in stage_of(world, body_of(world, number), 0)

    await watch.once("coordinator", "before send Commit", cut)
    await watch.once("replica", "after commit", lambda _: world.kill(dead[0]), is_below)
    await trio.sleep(6)
    world.heal(dead, range(PEERS))
    world.start(dead[0])


async def undisturbed(world: World, watch: Watch) -> None:
    """Nothing happens but what the feeder does."""
    await watch.once("coordinator", "after send Commit", nothing)


def of_three(world: World, number: int) -> bool:
    """Return whether a peer's stage has three replicas."""
    return len(group_of(world, number)) == 3


def set_latency(world: World, number: int, seconds: float, others: Iterable[int]) -> None:
    """Set how long frames of a peer take to others."""
    for other in others:
        if other != number:
            world.network.path(number, other).latency_seconds = seconds


# --- what a feeder may do wrong ---------------------------------------------------------------


def feeds_twice(patch: pytest.MonkeyPatch) -> None:
    """Once, a feeder sends a microbatch that has come back once more to the same replica."""
    inject, backward = Feeder._inject, Feeder.backward
    sent: dict[Microbatch, Forward] = {}
    again: list[Microbatch] = []

    def remember(self: Feeder, read: _Read, target: PeerId) -> None:
        inject(self, read, target)
        if read.mb.step == 1:
            sent[read.mb] = _forward(self, read)
            _payloads[read.mb] = (read.inputs, read.targets)

    def repeat(self: Feeder, sender: PeerId, message: Backward) -> None:
        backward(self, sender, message)
        mb = message.microbatch
        if mb in sent and sender != self._me and not again:
            again.append(mb)
            self._sent_to[mb] = sender
            self._links.post(sender, sent[mb], _payloads[mb])

    patch.setattr(Feeder, "_inject", remember)
    patch.setattr(Feeder, "backward", repeat)


def feeds_two(patch: pytest.MonkeyPatch) -> None:
    """Once, a feeder sends a microbatch to two replicas, and loses its link to the second, which
    answers it. By that plan no coordinator hears what is in the ledgers: it would halt the run."""
    inject, accounted = Feeder._inject, ReplicaStep.accounted
    epochs: list[int] = []

    def twice(self: Feeder, read: _Read, target: PeerId) -> None:
        inject(self, read, target)
        others = [each for each in self._router._targets if each != target]
        if read.mb.step == self._first == 1 and not epochs and others:
            epochs.append(self._fence.epoch)
            self._links.post(others[0], _forward(self, read), (read.inputs, read.targets))

    def unheard(self: ReplicaStep, ledger: Ledger) -> list[Effect]:
        return [] if self._role.fence.epoch in epochs else accounted(self, ledger)

    patch.setattr(Feeder, "_inject", twice)
    patch.setattr(ReplicaStep, "accounted", unheard)


_payloads: dict[Microbatch, tuple[memoryview, memoryview]] = {}


def _forward(feeder: Feeder, read: _Read) -> Forward:
    return Forward(
        fence=feeder._fence,
        microbatch=read.mb,
        weight=read.weight,
        path=(feeder._me,),
        tensors=feeder._tensors,
    )


# --- tests ----------------------------------------------------------------------------------

CASES = (
    Case(
        mutants.without_fence,
        late_forward,
        "A7",
        chances=8,
        microbatches=32,
        without_data=(1, 2, 3),
    ),
    Case(mutants.without_boots, quick_restart, "A7"),
    Case(mutants.resume_early, slow_replica, "A7"),
    Case(mutants.count_again, undisturbed, "A5", feeds_twice, stages=1, without_data=(1, 2)),
    Case(mutants.overlap_ignored, undisturbed, "A7", feeds_two, stages=1),
    Case(mutants.prepared_ignored, half_committed, "lineage"),
)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_broken_rule_is_noticed(case: Case, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case.faults(monkeypatch)
    case.mutant(monkeypatch)
    rules = (
        rule_broken(chance, case) for chance in range(seed, len(SEEDS) * case.chances, len(SEEDS))
    )
    assert next(filter(None, rules), "") == case.rule


def rule_broken(seed: int, case: Case) -> str:
    """Return what a run violates; "" if nothing."""
    try:
        live(seed, case)
    except SimulationFailure as failure:
        return failure.rule
    return ""


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_shipped_rule_holds(case: Case, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case.faults(monkeypatch)
    live(seed, case)
