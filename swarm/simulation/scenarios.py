"""Storms: faults drawn from a seed strike a training swarm, which then has to finish its run.

`python -m swarm.simulation.scenarios SEED [COUNT]` runs seeds one after the other. The rule: a
storm is drawn as a whole before anything happens, so it can be read, and replayed without some of
its faults.
"""

import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import trio

from swarm.simulation.network import Weather
from swarm.simulation.physics import Physics, integer_training
from swarm.simulation.trace import SimulationFailure
from swarm.simulation.world import Options, Outcome, World

STEPS, MICROBATCHES, LAYERS = 8, 6, 6
STORM_SECONDS = 12.0
"""Faults begin within so many seconds after the start; a quiet run takes about six."""
CALM_SECONDS = 300.0
"""After the last fault a run must end within so many virtual seconds."""
MAX_FAULTS = 6
MODULE = "swarm.simulation.scenarios"


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that happens to `victim` (and `other`) at a time, and is undone later."""

    kind: str
    at: float
    seconds: float
    victim: int
    other: int
    size: int
    """Bytes, saves or halves, as the kind needs it."""

    def __str__(self) -> str:
        return (
            f"{self.kind} p{self.victim} p{self.other} {self.size} "
            f"from {self.at:.3f} for {self.seconds:.3f}"
        )


@dataclass(frozen=True, slots=True)
class Storm:
    """A swarm and what happens to it."""

    options: Options
    faults: tuple[Fault, ...]


Stroke = Callable[[World, Fault], Callable[[], None] | None]
"""Does a fault; returns what undoes it."""


def draw_storm(seed: int, kinds: Sequence[str] = ()) -> Storm:
    """Return the storm of a seed; `kinds` restricts it to some kinds of faults."""
    rng = random.Random(f"{seed}/storm")
    peers = rng.randint(4, 6)
    flag = (rng.randrange(STEPS), rng.randrange(MICROBATCHES), rng.randrange(LAYERS))
    options = Options(
        Physics(
            integer_training(
                steps=STEPS,
                microbatches=MICROBATCHES,
                checkpoint_every=rng.choice((0, 2, 3)),
                max_replicas=rng.choice((0, 0, 1, 2)),
            ),
            layers=LAYERS,
            tied=rng.random() < 0.5,
            nonfinite=frozenset({flag} if rng.random() < 0.2 else ()),
        ),
        peers=peers,
        stages=rng.randint(2, 3),
        weather=Weather(rng.choice((0.002, 0.02, 0.1)), rng.choice((0.0, 0.01, 0.05))),
        speeds=tuple(rng.choice((0.5, 1.0, 1.0, 2.0)) for _ in range(peers)),
        without_data=tuple(n for n in range(1, peers) if rng.random() < 0.2),
        replay=f"python -m {MODULE} {seed}",
    )
    faults = [
        _draw_fault(rng, peers, kinds or tuple(STROKES)) for _ in range(rng.randint(1, MAX_FAULTS))
    ]
    return Storm(options, tuple(sorted(faults, key=lambda fault: fault.at)))


def run_storm(seed: int, storm: Storm, *, whole_trace: bool = False) -> Outcome:
    """Let a storm pass. Raises SimulationFailure."""
    options = replace(storm.options, whole_trace=whole_trace)
    world = World(seed, options)

    async def scenario(world: World) -> None:
        for number in range(options.peers):
            world.start(number)
        async with trio.open_nursery() as nursery:
            for fault in storm.faults:
                nursery.start_soon(_strike, world, fault)
        _calm(world)
        await world.ended(CALM_SECONDS)

    return world.run(scenario)


def run_seed(seed: int, *, whole_trace: bool = False) -> Outcome:
    """Draw a storm and let it pass. Raises SimulationFailure, which tells how to replay it."""
    return run_storm(seed, draw_storm(seed), whole_trace=whole_trace)


def smallest(seed: int, storm: Storm, rule: str) -> Storm:
    """Return a storm that breaks `rule` as `storm` does, with as few of its faults."""
    faults = list(storm.faults)
    for fault in storm.faults:
        fewer = [each for each in faults if each is not fault]
        try:
            run_storm(seed, Storm(storm.options, tuple(fewer)))
        except SimulationFailure as failure:
            if failure.rule == rule:
                faults = fewer
    return Storm(storm.options, tuple(faults))


def told_failure(seed: int) -> str:
    """Run the storm of a seed; return how it failed, with as few of its faults as fail, or ""."""
    storm = draw_storm(seed)
    try:
        run_storm(seed, storm)
    except SimulationFailure as failure:
        return _told(seed, storm, failure)
    return ""


def _told(seed: int, storm: Storm, failure: SimulationFailure) -> str:
    faults = smallest(seed, storm, failure.rule).faults
    alone = [f"  {fault}" for fault in faults] or ["  none at all"]
    return "\n".join([str(failure), "it also fails with these faults alone:", *alone])


def main(arguments: Sequence[str]) -> int:
    """Run seeds FIRST to FIRST + COUNT - 1; stop at the first that fails, and print it."""
    first = int(arguments[0]) if arguments else 0
    count = int(arguments[1]) if len(arguments) > 1 else 1
    began, virtual = time.process_time(), 0.0
    for seed in range(first, first + count):
        storm = draw_storm(seed)
        try:
            virtual += run_storm(seed, storm).virtual_seconds
        except SimulationFailure as failure:
            print(_told(seed, storm, failure))
            return 1
    seconds = time.process_time() - began
    print(
        f"{count} seeds in {seconds:.1f} s of CPU: {count / seconds:.1f} seeds/s, "
        f"{virtual / seconds:.0f} virtual seconds per second"
    )
    return 0


# --- faults --------------------------------------------------------------------------------


def _kill(world: World, fault: Fault) -> Callable[[], None]:
    world.kill(fault.victim)
    return lambda: _start(world, fault.victim)


def _power(world: World, fault: Fault) -> Callable[[], None]:
    world.kill(fault.victim, silent=True)
    return lambda: _start(world, fault.victim)


def _stage(world: World, fault: Fault) -> Callable[[], None]:
    """Kill everybody who hosts one of the stages."""
    hosts = world.hosts()
    victims = hosts[fault.size % len(hosts)] if hosts else []
    for number in victims:
        world.kill(number)

    def undo() -> None:
        for number in victims:
            _start(world, number)

    return undo


def _everybody(world: World, fault: Fault) -> Callable[[], None]:
    for peer in world.peers:
        world.kill(peer.number)

    def undo() -> None:
        for peer in world.peers:
            _start(world, peer.number)

    return undo


def _damage(world: World, fault: Fault) -> None:
    world.damage(fault.victim)


def _recover(world: World, fault: Fault) -> None:
    world.recover(fault.victim)


def _crash(world: World, fault: Fault) -> Callable[[], None]:
    world.crash_at_save(fault.victim, 1 + fault.size % 3, kept=fault.size % 2 == 0)
    return lambda: _start(world, fault.victim)


def _leave(world: World, fault: Fault) -> Callable[[], None]:
    world.stop(fault.victim)
    return lambda: _start(world, fault.victim)


def _freeze(world: World, fault: Fault) -> Callable[[], None]:
    world.freeze(fault.victim)
    return lambda: world.thaw(fault.victim)


def _cut(world: World, fault: Fault) -> Callable[[], None]:
    pair = [fault.victim], [fault.other]
    world.cut(*pair, both=fault.size % 2 == 0)
    return lambda: world.heal(*pair)


def _isolate(world: World, fault: Fault) -> Callable[[], None]:
    others = [peer.number for peer in world.peers if peer.number != fault.victim]
    world.cut([fault.victim], others)
    return lambda: world.heal([fault.victim], others)


def _split(world: World, fault: Fault) -> Callable[[], None]:
    half = [peer.number for peer in world.peers if fault.size >> peer.number & 1]
    rest = [peer.number for peer in world.peers if peer.number not in half]
    world.cut(half, rest)
    return lambda: world.heal(half, rest)


def _reset(world: World, fault: Fault) -> None:
    world.reset(fault.victim, fault.other, fault.size)


def _delay(world: World, fault: Fault) -> Callable[[], None]:
    path = world.network.path(fault.victim, fault.other)
    before = path.latency_seconds
    path.latency_seconds = before + fault.size / 4096
    world.note(f"delay p{fault.victim} > p{fault.other} {path.latency_seconds:.3f} s")

    def undo() -> None:
        path.latency_seconds = before

    return undo


def _hang(world: World, fault: Fault) -> Callable[[], None] | None:
    executor = world.peers[fault.victim].executor
    if executor is None:
        return None
    world.note(f"hang the executor of p{fault.victim}")
    executor.hang()
    return executor.go_on


def _dht(world: World, fault: Fault) -> Callable[[], None]:
    mood = ("empty", "dead", "poisoned")[fault.size % 3]
    world.note(f"the DHT is {mood}")
    world.board.mood = mood  # type: ignore[assignment]

    def undo() -> None:
        world.board.mood = "good"

    return undo


def _clock(world: World, fault: Fault) -> None:
    world.note(f"the clock of p{fault.victim} jumps by {fault.size - 1000} s")
    world.board.wall_offset_seconds[fault.victim] = fault.size - 1000.0


STROKES: dict[str, Stroke] = {
    "kill": _kill,
    "power": _power,
    "stage": _stage,
    "everybody": _everybody,
    "damage": _damage,
    "recover": _recover,
    "crash": _crash,
    "leave": _leave,
    "freeze": _freeze,
    "cut": _cut,
    "isolate": _isolate,
    "split": _split,
    "reset": _reset,
    "delay": _delay,
    "hang": _hang,
    "dht": _dht,
    "clock": _clock,
}
"""All kinds of faults."""


def _draw_fault(rng: random.Random, peers: int, kinds: Sequence[str]) -> Fault:
    victim, other = rng.sample(range(peers), 2)
    return Fault(
        kind=rng.choice(kinds),
        at=rng.uniform(0.0, STORM_SECONDS),
        seconds=rng.choice((0.2, 1.0, 4.0, 8.0, 40.0)) * rng.uniform(0.5, 1.5),
        victim=victim,
        other=other,
        size=rng.randint(1, 2000),
    )


async def _strike(world: World, fault: Fault) -> None:
    await trio.sleep(fault.at)
    undo = STROKES[fault.kind](world, fault)
    if undo is not None:
        await trio.sleep(fault.seconds)
        undo()


def _start(world: World, number: int) -> None:
    if not world.is_alive(number):
        world.start(number)


def _calm(world: World) -> None:
    """All faults are over: everybody runs, and everybody reaches everybody."""
    world.note("calm")
    everybody = [peer.number for peer in world.peers]
    for peer in world.peers:
        world.thaw(peer.number)
        if peer.executor is not None:
            peer.executor.go_on()
        if peer.storage is not None:
            peer.storage.behave()
        _start(world, peer.number)
    world.heal(everybody, everybody)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
