"""Runs a scenario: daemons of the shipped code, on a virtual clock, in a modelled world.

The rule: the same scenario and seed give the same trace, to the byte.
"""

import math
import random
import time
from dataclasses import dataclass

import trio

from swarm.errors import SimulationError
from swarm.simulation.account import Account
from swarm.simulation.conditions import Conditions
from swarm.simulation.events import Events
from swarm.simulation.executor import Machine
from swarm.simulation.network import LEAST_PACE
from swarm.simulation.physics import Physics
from swarm.simulation.report import Report, make_report
from swarm.simulation.scenario import Scenario
from swarm.simulation.trace import SimulationFailure
from swarm.simulation.upper_bound import UpperBounds
from swarm.simulation.world import Options, Outcome, World

LOOK_SECONDS = 60.0
STANDSTILL_SECONDS = 3600.0
"""Without a commit, where nothing else ends a simulation."""
LAST_LINES = 20
"""Of the trace, told with a failure."""


@dataclass(frozen=True)
class Simulated:
    """A scenario that has been run."""

    report: Report
    trace: list[str]
    cpu_seconds: float
    """What it took here."""


def simulate(scenario: Scenario, *, whole_trace: bool = False) -> Simulated:
    """Run a scenario to its end. Raises SimulationError if the swarm breaks one of its promises,
    or does not complete its steps."""
    conditions = Conditions(scenario)
    account = Account(scenario, conditions)
    events = Events(scenario, conditions, account)
    world = World(scenario.seed, _options(scenario, conditions, account, events, whole_trace))
    account.world = world
    began = time.process_time()

    async def run(world: World) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(events.run, world)
            with trio.move_on_after(scenario.duration_seconds or math.inf):
                while not (world.has_ended() or _is_hopeless(scenario, account)):
                    with trio.move_on_after(LOOK_SECONDS):
                        await world.changed.wait()
            nursery.cancel_scope.cancel()
        account.close()

    try:
        outcome = world.run(run)
    except SimulationFailure as failure:
        raise _told(scenario, failure) from failure
    if not scenario.duration_seconds and account.stands_still:
        raise SimulationError(
            f"the swarm has stood still for {STANDSTILL_SECONDS / 60:.0f} minutes",
            evidence=(account.trouble or "its leader gives no reason",),
            hint="--duration 10m ends it earlier, with a report",
        )
    return _simulated(scenario, account, outcome, began)


def _is_hopeless(scenario: Scenario, account: Account) -> bool:
    """Return whether the swarm stands still for long and nothing else would end the simulation."""
    idle_seconds = account.idle_seconds(trio.current_time())
    return not scenario.duration_seconds and idle_seconds >= STANDSTILL_SECONDS


def _simulated(scenario: Scenario, account: Account, outcome: Outcome, began: float) -> Simulated:
    cpu_seconds = time.process_time() - began
    bounds = UpperBounds(scenario)
    report = make_report(scenario, account, bounds)
    return Simulated(report, outcome.trace, cpu_seconds)


def _options(
    scenario: Scenario,
    conditions: Conditions,
    account: Account,
    events: Events,
    whole_trace: bool,
) -> Options:
    draws = [random.Random(f"{scenario.seed}/{n}/pace") for n in range(len(scenario.peers))]

    def machine(number: int) -> Machine:
        spec, rng = scenario.peers[number], draws[number]

        def pace() -> float:
            noise = max(LEAST_PACE, rng.gauss(1.0, scenario.noise)) if scenario.noise else 1.0
            return conditions.slowness[number] * noise

        return Machine(
            spec.speed,
            spec.memory_bytes,
            scenario.checked,
            pace,
            lambda seconds: account.worked(number, seconds),
            lambda step: account.committed(number, step),
        )

    return Options(
        Physics(scenario.training, costs=scenario.costs),
        peers=len(scenario.peers),
        wait_for_peers=events.wait_for_peers(),
        stages=scenario.stages,
        without_data=tuple(n for n, peer in enumerate(scenario.peers) if not peer.has_data),
        country=conditions.country,
        noise=scenario.noise,
        machines=machine,
        rule=scenario.rule,
        solver=scenario.solver,
        watcher=account,
        checked=scenario.checked,
        whole_trace=whole_trace,
    )


def _told(scenario: Scenario, failure: SimulationFailure) -> SimulationError:
    return SimulationError(
        f"the simulation of {scenario.name} stopped: {failure.what.splitlines()[0]}",
        evidence=(
            *failure.what.splitlines()[1:],
            *(line for line in failure.lines[-LAST_LINES:] if "VIOLATION" not in line),
        ),
        hint="this is a defect of swarm; please report it with the scenario and its seed",
    )
