"""Every point of a daemon's life at which it may be killed, for every role that reaches it.

`python -m tests.simulation.kill_points` runs the whole table; with numbers, these rows of it; with
a point, a role and a turn, one cell. The rule: a disturbance is lived through once without a kill,
which tells who reaches which point in which roles; a cell is the same run again up to that moment,
at which that peer is killed.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from swarm.core.chain import HARD_STATE
from swarm.simulation.network import Weather
from swarm.simulation.physics import Physics, integer_training
from swarm.simulation.trace import SimulationFailure
from swarm.simulation.world import Options, World
from tests.simulation.disturbances import (
    DISTURBANCES,
    FIRST_PEERS,
    JOINER,
    SUBSTITUTE,
    Moment,
    Watch,
    hung_leader,
)

LONG_SECONDS = 300.0
MODULE = "tests.simulation.kill_points"

AGREEMENT = (
    *("PreVote", "PreVoteAnswer", "RequestVote", "Vote", "Stand", "Review", "VerdictAnswer"),
    *("Propose", "Accepted", "Certified", "Consented", "LeaderBeat"),
)
REPAIR = ("Report", "Resume", "Suspect", "PingFor", "PingResult", "LostWork")
STEP = (
    *("Forward", "Backward", "LedgerReport", "StartReduction", "ReduceShard", "GatherShard"),
    *("Prepared", "Commit", "Durable"),
)
TRANSFER = ("GetListing", "Listing", "GetState", "StateChunk")
TASKS = (
    *("forward", "backward", "turn", "part", "reduce", "gather", "square_norms", "commit"),
    *("snapshot", "load", "load_gradient", "gradient"),
)
POINTS = (
    *(
        f"{when} {what}"
        for what in (
            f"save {HARD_STATE}",
            *(f"send {name}" for name in (*AGREEMENT, *REPAIR, *STEP, *TRANSFER)),
            *TASKS,
        )
        for when in ("before", "after")
    ),
    "after receive Listing",
    "after receive StateChunk",
)
ROLES = ("leader", "voter", "coordinator", "feeder", "replica", "standby")


# --- cells ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of the table: who is killed where, and what comes after."""

    point: str
    role: str
    turn: int
    disturbance: str
    moment: Moment

    @property
    def replay(self) -> str:
        """Return the command that runs this cell alone."""
        return f'python -m {MODULE} "{self.point}" {self.role} {self.turn}'

    def __str__(self) -> str:
        roles = "+".join(sorted(self.moment.roles))
        return (
            f"{self.disturbance}: {self.moment.process} ({roles}) killed {self.point}, "
            f"{TURNS[self.turn][1]}"
        )


TURNS = ((0.0, "restart"), (0.5, "newcomer"), (1.0, "restart"))
"""Of all moments at which a peer of the role is at the point: the first, the middle and the last
one, and what follows the kill: the peer starts again, or another one comes in its place (but who is
the only voter does start again: nobody can decide without it)."""


def cell(point: str, role: str, turn: int) -> Cell | None:
    """Return a cell of the table; None if no peer of that role reaches that point.

    Cells of different points take turns at the disturbances; of the moments those count at which
    the peer has the fewest other roles."""
    found = {name: _candidates(name, point, role) for name in DISTURBANCES}
    reaching = [name for name in DISTURBANCES if found[name]]
    if not reaching:
        return None
    cheap = [name for name in reaching if name != hung_leader.__name__] or reaching
    name = cheap[POINTS.index(point) % len(cheap)]
    chosen = found[name][round(TURNS[turn][0] * (len(found[name]) - 1))]
    return Cell(point, role, turn, name, chosen)


SAMPLE = tuple(
    point
    for number, point in enumerate(POINTS)
    if number % 4 in (0, 3) or " save " in point or " receive " in point
)
"""Of everything that is done a moment before or one after it, by turns; of a save both."""


def sampled(point: str) -> Cell:
    """Return one cell of a point: different points have different roles and turns.

    Raises LookupError if nobody reaches the point."""
    turns = range(len(TURNS))
    found = [each for role in ROLES for turn in turns if (each := cell(point, role, turn))]
    if not found:
        raise LookupError(f"nobody is ever {point}")
    return found[POINTS.index(point) * 5 % len(found)]


def run_cell(chosen: Cell, *, whole_trace: bool = False) -> None:
    """Live through a cell. Raises SimulationFailure unless it ends with the right weights."""
    world = World(_seed(chosen.disturbance), options(chosen.replay, whole_trace=whole_trace))
    watch = Watch(world, frozenset(POINTS), chosen.moment, TURNS[chosen.turn][1] == "newcomer")
    _run(world, watch, chosen.disturbance)
    assert watch.killed >= 0, f"{chosen}: was not killed"


@cache
def moments(disturbance: str) -> tuple[Moment, ...]:
    """Return who reaches which point when nobody is killed."""
    world = World(_seed(disturbance), options(f"python -m {MODULE}"))
    watch = Watch(world, frozenset(POINTS))
    _run(world, watch, disturbance)
    return tuple(watch.moments)


@cache
def _candidates(disturbance: str, point: str, role: str) -> list[Moment]:
    found = [each for each in moments(disturbance) if each.point == point and role in each.roles]
    fewest = min((len(each.roles) for each in found), default=0)
    return [each for each in found if len(each.roles) == fewest]


# --- runs -------------------------------------------------------------------------------------


def options(replay: str, *, whole_trace: bool = False) -> Options:
    """Return the swarm of the table."""
    training = integer_training(steps=4, microbatches=5, checkpoint_every=2)
    return Options(
        Physics(training, layers=4),
        peers=SUBSTITUTE + 1,
        wait_for_peers=FIRST_PEERS,
        stages=2,
        weather=Weather(0.02, 0.01),
        speeds=(0.2,) * (SUBSTITUTE + 1),
        without_data=(4,),
        replay=replay,
        whole_trace=whole_trace,
    )


def _seed(disturbance: str) -> str:
    return f"kill points/{disturbance}"


def _run(world: World, watch: Watch, disturbance: str) -> None:
    """Live through a disturbance, and a kill if there is a victim.

    Up to the kill a run is the same with and without one: nothing here has a task for it."""
    world.on_point = watch.reached

    async def scenario(world: World) -> None:
        for number in range(FIRST_PEERS):
            world.start(number)
        await DISTURBANCES[disturbance](world, watch)
        watch.start(*range(FIRST_PEERS), JOINER)
        await world.ended(LONG_SECONDS)
        if watch.killed >= 0:
            await watch.returned.wait()
            await world.ended(LONG_SECONDS)

    world.run(scenario)


# --- the table --------------------------------------------------------------------------------


def table(rows: Sequence[int] = ()) -> Iterator[tuple[str, dict[str, str]]]:
    """Run the table, or some rows of it; yield each point with what became of it by role.

    "ok" if all of its cells end with the reference's weights, "-" if the role never reaches the
    point, else the rule that is broken, with the commands that show it."""
    for row in rows or range(len(POINTS)):
        yield POINTS[row], {role: _result(POINTS[row], role) for role in ROLES}


def _result(point: str, role: str) -> str:
    cells = [cell(point, role, turn) for turn in range(len(TURNS))]
    if None in cells:
        return "-"
    failed = []
    for each in dict.fromkeys(cells):
        try:
            if each is not None:
                run_cell(each)
        except SimulationFailure as failure:
            failed.append(f"{failure.rule}: {each.replay if each is not None else ''}")
    return "; ".join(failed) or "ok"


def main(arguments: Sequence[str]) -> int:
    """Run the whole table, some rows by number, or one cell (POINT ROLE TURN) with its trace."""
    if len(arguments) == 3 and not arguments[0].isdigit():
        return _show(arguments[0], arguments[1], int(arguments[2]))
    began = time.process_time()
    results: list[str] = []
    print(" " * 28 + "".join(f"{role:<12}" for role in ROLES))
    for point, row in table([int(each) for each in arguments]):
        results += row.values()
        marks = (each if each in ("ok", "-") else "FAILS" for each in row.values())
        print(f"{point:<28}" + "".join(f"{mark:<12}" for mark in marks), flush=True)
        for failed in (each for each in row.values() if each not in ("ok", "-")):
            print(f"    {failed}", flush=True)
    empty, good = results.count("-"), results.count("ok")
    print(
        f"{len(results) - empty} cells in up to {len(TURNS)} runs each: {good} end right, "
        f"{len(results) - empty - good} do not; {empty} are not reached; "
        f"{time.process_time() - began:.0f} s of CPU"
    )
    return 0 if good + empty == len(results) else 1


def _show(point: str, role: str, turn: int) -> int:
    chosen = cell(point, role, turn)
    if chosen is None:
        print(f"no {role} is ever {point}")
        return 1
    print(chosen)
    try:
        run_cell(chosen)
    except SimulationFailure as failure:
        print(failure)
        return 1
    print("ends with the reference's weights")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
