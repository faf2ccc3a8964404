"""What a simulated swarm costs as it grows: messages per peer, processor seconds, plans.

Daemons as they ship, on a virtual clock, in long steps; in a reduction everybody of a stage sends
to everybody, since every tensor has an element for each. While it is measured, one virtual hour,
peers are killed and others join. The rule: what is control is told apart from what carries tensors;
times are processor seconds of this one process, and `wall_s` is all that a swarm's simulation took,
its start included.
"""

import resource
import time
from collections import Counter
from dataclasses import dataclass, field

import trio

from benchmarks.report import Report, Row
from protocol.messages import BY_NUMBER, TABLE
from protocol.signing import PeerId
from swarm.simulation.physics import Physics, integer_training
from swarm.simulation.process import Process
from swarm.simulation.world import Options, World

PEERS, QUICK_PEERS = (10, 100, 1000), (10, 20)
HOUR_SECONDS = 3600.0
VIRTUAL_SECONDS, QUICK_VIRTUAL_SECONDS = HOUR_SECONDS, 90.0
LAYERS = 10
SPEED, QUICK_SPEED = 0.002, 0.01
"""A layer takes 15 s, or 3 s, there and back."""
ROUNDS, QUICK_ROUNDS = 60, 2
"""Microbatches of a step for every replica of a stage. A step of ten stages takes 18 minutes, and
longer where peers die, since each death takes what is under way with it."""
CHANGES_PER_PEER_AND_HOUR = 0.02
LATER = 0.05
"""Part of the peers that join while it is measured."""
START_SECONDS = 0.01
LOOK_SECONDS = 12.0
"""A change of plan and all that follows from it is over within so long."""


@dataclass
class Seen:
    """What was counted while it was measured."""

    sent: Counter[int] = field(default_factory=Counter)
    began: float = 0.0
    ended: float = 0.0
    cpu_seconds: float = 0.0
    quiet: list[float] = field(default_factory=list)
    """Processor seconds of each look in which no plan was made."""
    changed: list[float] = field(default_factory=list)
    plans: int = 0
    steps: int = 0
    wall_seconds: float = 0.0
    """Of everything."""

    @property
    def virtual_seconds(self) -> float:
        """How long it was measured."""
        return self.ended - self.began


class CountingWorld(World):
    """A world that counts what its daemons send."""

    seen: Seen

    def frame(
        self, sending: bool, process: Process, other: PeerId, number: int, header: bytes
    ) -> None:
        """Count a frame that is sent."""
        if sending:
            self.seen.sent[number] += 1
        super().frame(sending, process, other, number, header)


def measure(*, quick: bool) -> Report:
    """Simulate swarms of several sizes."""
    sizes = QUICK_PEERS if quick else PEERS
    rows = [_row(size, _lived(size, quick=quick)) for size in sizes]
    largest = rows[-1]
    keys = ("control_per_peer_second", "wall_s", "cpu_seconds_per_hour", "plan_ms_per_peer")
    return Report("scale", rows, {key: largest[key] for key in keys})


def _lived(peers: int, *, quick: bool) -> Seen:
    stages = min(LAYERS, max(2, peers // 10))
    rounds = QUICK_ROUNDS if quick else ROUNDS
    training = integer_training(steps=1000, microbatches=rounds * (peers // stages))
    options = Options(
        physics=Physics(training, layers=LAYERS, elements=max(3, peers // stages)),
        peers=peers,
        stages=stages,
        speeds=((QUICK_SPEED if quick else SPEED) * LAYERS / stages,) * peers,
        wait_for_peers=peers - max(1, round(LATER * peers)),
    )
    began = time.perf_counter()
    world = CountingWorld(1, options)
    world.seen = Seen()
    seconds = QUICK_VIRTUAL_SECONDS if quick else VIRTUAL_SECONDS

    async def scenario(world: World) -> None:
        assert isinstance(world, CountingWorld)
        for number in range(options.wait_for_peers):
            world.start(number)
            await trio.sleep(START_SECONDS)
        while world.newest_epoch() < 1:  # noqa: ASYNC110 - seconds are virtual
            await trio.sleep(1.0)
        await _watch(world, seconds)

    world.run(scenario)
    world.seen.wall_seconds = time.perf_counter() - began
    return world.seen


async def _watch(world: CountingWorld, seconds: float) -> None:
    """Let peers come and go, and count."""
    seen, peers = world.seen, world.options.peers
    seen.sent.clear()
    seen.began, began_cpu = trio.current_time(), time.process_time()
    first_epoch = epoch = world.newest_epoch()
    every = max(LOOK_SECONDS, HOUR_SECONDS / (CHANGES_PER_PEER_AND_HOUR * peers))
    next_change, joins = seen.began + every / 2, False
    newcomers = iter(range(world.options.wait_for_peers, peers))
    while trio.current_time() < seen.began + seconds:
        cpu = time.process_time()
        await trio.sleep(LOOK_SECONDS)
        spent, before, epoch = time.process_time() - cpu, epoch, world.newest_epoch()
        (seen.quiet if epoch == before else seen.changed).append(spent)
        if trio.current_time() >= next_change:
            next_change += every
            newcomer = next(newcomers, None) if joins else None
            if newcomer is not None:
                world.start(newcomer)
            else:
                world.kill(world.rng.randrange(1, world.options.wait_for_peers))
            joins = not joins
    seen.ended, seen.cpu_seconds = trio.current_time(), time.process_time() - began_cpu
    seen.plans = world.newest_epoch() - first_epoch
    versions = [peer.executor.version for peer in world.peers if peer.executor is not None]
    seen.steps = max(versions, default=0)


def _row(peers: int, seen: Seen) -> Row:
    each = 1 / (peers * seen.virtual_seconds)
    control = sum(count for number, count in seen.sent.items() if not _carries_tensors(number))
    data = sum(seen.sent.values()) - control
    quiet = sum(seen.quiet) / len(seen.quiet) if seen.quiet else 0.0
    for_plans = sum(seen.changed) - quiet * len(seen.changed)
    return {
        "peers": peers,
        "virtual_s": seen.virtual_seconds,
        "wall_s": seen.wall_seconds,
        "cpu_s": seen.cpu_seconds,
        "cpu_seconds_per_hour": seen.cpu_seconds * HOUR_SECONDS / seen.virtual_seconds,
        "control_per_peer_second": control * each,
        "data_per_peer_second": data * each,
        "steps": seen.steps,
        "plans": seen.plans,
        "plan_ms_per_peer": 1000 * for_plans / (peers * seen.plans) if seen.plans else 0.0,
        "memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "most_sent": ", ".join(
            f"{BY_NUMBER[number].__name__} {count * each:.3f}"
            for number, count in seen.sent.most_common(6)
        ),
    }


def _carries_tensors(number: int) -> bool:
    return TABLE[BY_NUMBER[number]].has_payload
