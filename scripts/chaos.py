"""Six daemons train the demo's model while one after the other is killed and newcomers join; then
the weights are compared with those of one process, bit by bit.

The rule: the next event comes when the swarm has recovered from the last. What does not recover in
time, or ends in other weights, is a failure, and then the logs are kept. Started by
`scripts/demo --chaos`, in the project's root.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from scripts.chaos_events import LEAST_KILLS, Event, Victims, is_whole, script
from scripts.chaos_report import Outcome, Screen, as_json, medians_of, seconds, table_of
from swarm.errors import NotRunning, SwarmError
from tests.processes.director import FOUNDER, Director, Roles, Status
from tests.processes.swarms import hash_in, pids_naming, swarm

PEERS, STAGES = 6, 3
RECOVERY_SECONDS = 120.0
REFERENCE_SECONDS = 3600.0
POLL_SECONDS = 0.1
ASKED = 2
"""Daemons that are asked at a time."""
MANIFEST = Path(__file__).with_name("demo.toml")


class Failure(Exception):
    """Something is not as promised."""


class Recovery:
    """Sees when the swarm goes on after an event."""

    def __init__(self, outcome: Outcome, begun: float) -> None:
        self.begun = begun
        self._outcome = outcome
        self._base = outcome.step

    def note(self, status: Status, peer: str, now: float) -> None:
        """Take in a status: the next step is one that a plan without the dead peer brings.

        One that was about to be committed when it died does not count."""
        roles, version = Roles.of(status), int(status["version"])
        if self._outcome.is_kill and peer in (*roles.replicas, *roles.feeders):
            self._base = max(self._base, version)
        elif self._outcome.seconds_to_step is None and version > self._base:
            self._outcome.seconds_to_step = now - self.begun


class Chaos:
    """One run and what happens to it."""

    def __init__(self, director: Director, screen: Screen, seed: int) -> None:
        self.outcomes: list[Outcome] = []
        self._director = director
        self._screen = screen
        self._seed = seed
        self._killed: set[str] = set()
        self._newest: Status = {}

    def begin(self) -> None:
        """Start the daemons and wait until they train."""
        self._director.start()
        self._victims = Victims(self._seed, self._director.id_of(FOUNDER))
        self._wait("the first step", lambda status: self._is_whole(status, 1))

    def happen(self, event: Event) -> None:
        """Make an event happen; return when the swarm has recovered. Raises Failure."""
        if event.is_kill:
            self._recover(event, self._kill(event))
        else:
            self._recover(event, self._director.begin_to_join())

    def finish(self) -> Status:
        """Wait until the run has ended; return the last status. Raises Failure."""
        while self._newest["phase"] != "ended":
            self._wait_for_a_step_after(self._step())
        return self._newest

    def _wait_for_a_step_after(self, step: int) -> None:
        def moved(status: Status) -> bool:
            return status["phase"] == "ended" or self._step() > step

        self._wait(f"a step after {step}", moved, may_end=True)

    # --- one event --------------------------------------------------------------------------

    def _kill(self, event: Event) -> str:
        chosen: list[str] = []

        def choose(status: Status) -> bool:
            chosen[:] = [
                peer
                for peer in [self._victims.choose(event.target, Roles.of(status), self._living())]
                if peer is not None
            ]
            return bool(chosen)

        self._wait(f"somebody to be {event.target}", choose)
        name = self._director.name_of(chosen[0])
        self._killed.add(name)
        self._director.kill(name)
        return name

    def _recover(self, event: Event, name: str) -> None:
        before, replayed = self._step(), self._newest.get("replayed")
        outcome = Outcome(str(event), event.is_kill, name, before)
        self.outcomes.append(outcome)
        self._screen.say(f"{len(self.outcomes):3}  step {before:4}  {event}: {name}")
        recovery = Recovery(outcome, time.monotonic())

        def recovered(status: Status) -> bool:
            recovery.note(status, self._director.id_of(name), time.monotonic())
            if outcome.seconds_to_step is None or not self._is_whole(status, before):
                return False
            return event.is_kill or self._is_member(status, name)

        status = self._wait(f"recovery after: {event}", recovered)
        outcome.seconds_to_whole = time.monotonic() - recovery.begun
        if isinstance(replayed, int) and isinstance(status.get("replayed"), int):
            outcome.replayed = max(0, status["replayed"] - replayed)
        outcome.stages = self._stages(status)
        self._screen.say(
            f"     recovered: next step after {seconds(outcome.seconds_to_step)} s, whole after "
            f"{seconds(outcome.seconds_to_whole)} s, stages {outcome.stages}"
        )

    def _is_member(self, status: Status, name: str) -> bool:
        return any(member["peer"] == self._director.id_of(name) for member in status["members"])

    # --- looking ----------------------------------------------------------------------------

    def _wait(
        self, what: str, condition: Callable[[Status], bool], *, may_end: bool = False
    ) -> Status:
        """Look again and again until the condition holds. Raises Failure."""
        deadline = time.monotonic() + RECOVERY_SECONDS
        while True:
            status = self._look()
            if status is not None:
                if condition(status):
                    return status
                if status["phase"] == "halted":
                    raise Failure(f"the run is halted: {status['trouble']}")
                if status["phase"] == "ended" and not may_end:
                    raise Failure("the run ended before all had happened: raise --steps")
            if time.monotonic() > deadline:
                trouble = self._newest.get("trouble") or "no trouble is told"
                seen = self._line() if self._newest else "nobody answers"
                raise Failure(f"not within {RECOVERY_SECONDS:g} s: {what}; {trouble}; {seen}")
            time.sleep(POLL_SECONDS)

    def _look(self) -> Status | None:
        """Ask some daemons; return the status of who has seen most."""
        self._check_processes()
        seen = []
        for name in self._director.living:
            with contextlib.suppress(NotRunning):
                status = self._director.meet(name)
                if status["peer"]["state"] not in ("starting", "measuring", "joining"):
                    seen.append(status)
            if len(seen) == ASKED:
                break
        for name in self._director.living[-1:]:  # a newcomer gets a name as soon as it answers
            with contextlib.suppress(NotRunning):
                self._director.meet(name)
        if not seen:
            return None
        self._newest = max(seen, key=lambda status: (status["epoch"], status["version"]))
        self._screen.show(self._step(), self._line())
        return self._newest

    def _check_processes(self) -> None:
        for name in self._director.names:
            if name not in self._killed and not self._director.is_alive(name):
                code = self._director.wait_for_end(name)
                raise Failure(f"{name} ended by itself with exit code {code}")

    def _step(self) -> int:
        return int(self._newest.get("version", 0))

    def _living(self) -> list[str]:
        """Return the peer ids of the living that we have met."""
        return [peer for name in self._director.living if (peer := self._director.id_of(name))]

    def _is_whole(self, status: Status, version: int) -> bool:
        return is_whole(status, self._living(), version)

    def _stages(self, status: Status) -> str:
        groups = ([replica["peer"] for replica in stage["replicas"]] for stage in status["stages"])
        return " | ".join(" ".join(self._director.names_of(group)) for group in groups)

    def _line(self) -> str:
        status = self._newest
        loss = "-" if status["loss"] is None else f"{status['loss']:.3f}"
        leader = self._director.name_of(status["leader"]) if status["leader"] else "nobody"
        return (
            f"step {status['version']}/{status['steps']}  loss {loss}  epoch {status['epoch']}  "
            f"term {status['term']}  council {len(status['council'])}  leader {leader}  "
            f"[{self._stages(status)}]"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo, as often as asked; return 1 as soon as anything is not as promised."""
    options = _options(arguments)
    references: dict[int, str] = {}
    for number in range(options.runs):
        if options.runs > 1:
            print(f"== run {number + 1} of {options.runs}", flush=True)
        if _main(options, options.seed + number, references):
            return 1
    return 0


def _main(options: argparse.Namespace, seed: int, references: dict[int, str]) -> int:
    """Run it once; `references` has the hashes of one process that are known, by steps."""
    work = Path(tempfile.mkdtemp(prefix="swarm-chaos-"))
    os.environ["TMPDIR"] = str(work / "tmp")
    (work / "tmp").mkdir()
    director = Director(work, _manifest(options.steps), peers=PEERS, stages=STAGES)
    screen = Screen()
    chaos = Chaos(director, screen, seed)
    failures = ["this script has a defect"]
    _on_signals(signal.default_int_handler)
    try:
        failures = _run(options, seed, references, chaos, director, screen)
    except (Failure, SwarmError, AssertionError, subprocess.TimeoutExpired) as error:
        failures = [str(error)]
    except KeyboardInterrupt:
        failures = ["interrupted"]
    finally:
        _on_signals(signal.SIG_IGN)  # who is impatient must not keep us from tidying up
        director.end()
        failures += _left_behind(work, keep_logs=bool(failures))
    screen.table(table_of(chaos.outcomes))
    for name, medians in medians_of(chaos.outcomes).items():
        told = ", ".join(f"{seconds(value)} after a {kind}" for kind, value in medians.items())
        screen.say(f"median {name}: {told}")
    if options.json is not None:
        found = as_json(seed, chaos.outcomes, failures)
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    for failure in failures:
        print(f"error: {failure}", file=sys.stderr)
    if not failures:
        screen.say("equal, bit by bit; no process and no file was left")
    return 1 if failures else 0


def _run(
    options: argparse.Namespace,
    seed: int,
    references: dict[int, str],
    chaos: Chaos,
    director: Director,
    screen: Screen,
) -> list[str]:
    """Do everything; return what is not as promised. Raises Failure, SwarmError."""
    events = script(seed, options.kills, options.joins)
    screen.say(f"{PEERS} daemons, {STAGES} stages, {len(events)} events, seed {seed}")
    with screen.drawing():
        chaos.begin()
        for event in events:
            chaos.happen(event)
        screen.say("all has happened; the run goes on to its end")
        last = chaos.finish()
    survivor = director.living[-1]
    digest = director.export(survivor, director.folder / "swarm.safetensors")
    screen.say(f"step {last['version']}: {digest}  {survivor}")
    if options.steps not in references:
        screen.say("the same run in one process")
        manifest = director.home(FOUNDER).with_suffix(".toml")
        finished = swarm("reference", manifest, deadline=REFERENCE_SECONDS)
        references[options.steps] = hash_in(finished)
    reference = references[options.steps]
    screen.say(f"step {last['steps']}: {reference}  one process")
    return [] if reference == digest else ["the swarm's weights are not those of one process"]


def _on_signals(handler: Callable[[int, FrameType | None], Any] | signal.Handlers) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)


def _manifest(steps: int) -> str:
    """Return the demo's manifest with other steps."""
    return re.sub(r"(?m)^steps = \d+$", f"steps = {steps}", MANIFEST.read_text())


def _left_behind(work: Path, *, keep_logs: bool) -> list[str]:
    """Remove what the daemons left, but for their logs if asked; return what should not be."""
    failures = []
    alive = pids_naming(work)
    if alive:
        failures.append(f"processes were left: {', '.join(map(str, alive))}")
    for path in work.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif not (keep_logs and path.suffix in (".log", ".toml")):
            path.unlink()
    if keep_logs:
        failures.append(f"logs are kept in {work}")
    else:
        work.rmdir()
    return failures


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/demo --chaos",
        description="Kill daemons while they train.",
        allow_abbrev=False,
    )
    parser.add_argument("--seed", type=int, default=1, help="chooses order and victims; default 1")
    parser.add_argument("--kills", type=int, default=10, help=f"at least {LEAST_KILLS}; default 10")
    parser.add_argument("--joins", type=int, default=10, help="at least as many; default 10")
    parser.add_argument("--steps", type=int, default=200, help="steps of the run; default 200")
    parser.add_argument(
        "--runs", type=int, default=1, help="so many runs, each with the next seed; default 1"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there too")
    options = parser.parse_args(arguments)
    try:
        for number in range(options.runs):
            script(options.seed + number, options.kills, options.joins)
    except ValueError as error:
        parser.error(str(error))
    return options


if __name__ == "__main__":
    sys.exit(main())
