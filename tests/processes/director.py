"""A swarm of real daemons, and one who starts, stops, kills and watches them.

The rule: what a director started is gone when it ends, whatever happened; it names processes by
their ids and nothing else. It waits for what it then relies on, by asking the daemons.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarm.adapters.control_socket import call
from swarm.adapters.hivemind_dht import remove_sockets
from swarm.errors import NotRunning
from tests.processes.paced_models import PACE_VARIABLE, set_pace
from tests.processes.places import Loopback, Network
from tests.processes.points import PointsOf
from tests.processes.swarms import Peer, command, found

Status = dict[str, Any]
Condition = Callable[[Status], bool]

FOUNDER = "peer-0"
WAIT_SECONDS = 120.0
ASK_SECONDS = 5.0
POLL_SECONDS = 0.1
LEAVE_SECONDS = 10.0
HANG_SECONDS = 1e6
LOG_LINES = 30


@dataclass(frozen=True)
class Roles:
    """Who does what in a swarm, as one peer's status tells it. Values are peer ids."""

    leader: str
    council: tuple[str, ...]
    coordinator: str
    """Of the steps; empty without a plan."""
    feeders: tuple[str, ...]
    stages: tuple[tuple[str, ...], ...]
    """Replicas, by stage."""
    standbys: tuple[str, ...]
    """Members without a role in the plan."""

    @classmethod
    def of(cls, status: Status) -> "Roles":
        """Read the roles from a status."""
        stages = tuple(
            tuple(replica["peer"] for replica in stage["replicas"]) for stage in status["stages"]
        )
        placed = {peer for stage in stages for peer in stage} | set(status["feeders"])
        members = [member["peer"] for member in status["members"]]
        return cls(
            leader=status["leader"] or "",
            council=tuple(status["council"]),
            coordinator=stages[0][0] if stages else "",
            feeders=tuple(status["feeders"]),
            stages=stages,
            standbys=tuple(sorted(peer for peer in members if peer not in placed)),
        )

    @property
    def replicas(self) -> tuple[str, ...]:
        """Return everybody who holds a stage, by stage."""
        return tuple(peer for stage in self.stages for peer in stage)

    @property
    def plain_replicas(self) -> tuple[str, ...]:
        """Return the replicas that are nothing else; who also votes, if there are none."""
        busy = {self.leader, self.coordinator, *self.feeders}
        free = [peer for peer in self.replicas if peer not in busy]
        return tuple(peer for peer in free if peer not in self.council) or tuple(free)

    @property
    def plain_voters(self) -> tuple[str, ...]:
        """Return the voters that do not lead."""
        return tuple(peer for peer in self.council if peer != self.leader)

    def stage_of(self, peer: str) -> int | None:
        """Return the stage that a peer holds a replica of."""
        holds = (number for number, stage in enumerate(self.stages) if peer in stage)
        return next(holds, None)


class Director:
    """Starts the daemons of one run; `with` ends them. Daemons have names: peer-0 is the founder,
    the others are numbered in the order in which they join."""

    def __init__(
        self,
        folder: Path,
        text: str,
        *,
        peers: int,
        stages: int = 0,
        network: Network | None = None,
    ) -> None:
        """`text` is the manifest; the first plan waits for `peers` daemons."""
        self.folder = folder
        self._pace_seconds = 0.0
        self.network = network or Loopback()
        self.text = text
        self._shape = (text, peers, stages)
        self._peers: dict[str, Peer] = {}
        self._points: dict[str, PointsOf] = {}
        self._ids: dict[str, str] = {}
        self._stopped: set[str] = set()

    def __enter__(self) -> "Director":
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is not None:
            self.print_logs()
        self.end()

    # --- starting ---------------------------------------------------------------------------

    def start(self) -> None:
        """Start the founder, and as many others as the first plan waits for."""
        self.found()
        self.join_many([None] * (self._shape[1] - 1))

    def found(self, *, points: PointsOf | None = None) -> str:
        """Make the run and start its founder; return its name."""
        text, peers, stages = self._shape
        found(self.home(FOUNDER), text, peers=peers, stages=stages)
        self._launch(FOUNDER, points)
        return self._wait_ready(FOUNDER)

    def join(self, *, points: PointsOf | None = None) -> str:
        """Start a newcomer with a new home; return its name once it listens."""
        return self._wait_ready(self.begin_to_join(points=points))

    def join_many(self, points: Sequence[PointsOf | None]) -> list[str]:
        """Start newcomers at the same time, one for each of `points`; return their names."""
        begun = [self.begin_to_join(points=each) for each in points]
        return [self._wait_ready(name) for name in begun]

    def begin_to_join(self, *, points: PointsOf | None = None, invitation: str = "") -> str:
        """Start a newcomer, who needs some seconds; return its name at once. It is invited by
        one of the living, unless it has an `invitation`."""
        name = f"peer-{len(self._peers)}"
        self._launch(name, points, "--join", invitation or self.invitation(self.living[0]))
        return name

    def invitation(self, name: str) -> str:
        """Return an invitation by a daemon."""
        return str(self.ask(name, "invite")["invitation"])

    def restart(self, name: str) -> None:
        """Start a daemon again that has ended, in the same home: its next boot."""
        assert not self.is_alive(name), f"{name} is running"
        self._peers[name].__exit__()
        self._launch(name, self._points.get(name))
        self._wait_ready(name)

    def _launch(self, name: str, points: PointsOf | None, *arguments: str) -> None:
        place = self.network.place(name)
        program: Sequence[str] = command()
        set_pace(self._pace_file(name), self._pace_seconds)
        variables: Mapping[str, str] = {PACE_VARIABLE: str(self._pace_file(name))}
        if points is not None:
            self._points[name] = points
            program, variables = points.start, {**variables, **points.variables}
        peer = Peer(
            self.home(name),
            *arguments,
            *place.arguments(),
            *("--host-label", name),
            start=(*place.prefix, *program),
            variables=variables,
        )
        self._peers[name] = peer
        self._stopped.discard(name)
        self.network.running(name, peer.process.pid)

    def _wait_ready(self, name: str) -> str:
        self._peers[name].ready()
        self.meet(name)
        return name

    def meet(self, name: str) -> Status:
        """Ask a daemon for its status, and remember its peer id. Raises NotRunning."""
        status = self.status(name)
        self._ids[name] = status["peer"]["id"]
        return status

    # --- what happens to them ---------------------------------------------------------------

    def kill(self, name: str) -> None:
        """End a daemon as a power cut would."""
        self._peers[name].process.kill()
        self._peers[name].process.wait()
        self._stopped.discard(name)

    def stop(self, name: str) -> None:
        """Freeze a daemon's process; return when all of it stands still."""
        self._peers[name].process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid(name), os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        self._stopped.add(name)

    def wait_for_stop(self, name: str) -> None:
        """Wait until a daemon has frozen itself."""
        os.waitid(os.P_PID, self.pid(name), os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        assert self.is_alive(name), f"{name} has ended"
        self._stopped.add(name)

    def resume(self, name: str) -> None:
        """Let a frozen process go on."""
        self._peers[name].process.send_signal(signal.SIGCONT)
        self._stopped.discard(name)

    def leave(self, name: str) -> int:
        """Have a daemon leave in order; return its exit code."""
        self.ask(name, "stop")
        return self._peers[name].process.wait(LEAVE_SECONDS)

    def wait_for_end(self, name: str) -> int:
        """Wait until a daemon has ended by itself; return its exit code."""
        return self._peers[name].ended()

    def pace(self, seconds: float) -> None:
        """Have a microbatch of a paced model take so long at least, at every daemon."""
        self._pace_seconds = seconds
        for name in self._peers:
            set_pace(self._pace_file(name), seconds)

    def hang(self, name: str) -> None:
        """Have one daemon's executor compute for ever, until there is a new pace."""
        set_pace(self._pace_file(name), HANG_SECONDS)

    def _pace_file(self, name: str) -> Path:
        return self.folder / f"{name}.pace"

    def cut(self, ones: Collection[str], others: Collection[str], *, one_way: bool = False) -> None:
        """Cut the links between two groups of daemons (Network.cut)."""
        self.network.cut(ones, others, one_way=one_way)

    def heal(self) -> None:
        """End all cuts."""
        self.network.heal()

    # --- who is there -----------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """Return all daemons that were ever started, oldest first."""
        return list(self._peers)

    @property
    def living(self) -> list[str]:
        """Return the daemons that have not ended and are not frozen."""
        return [name for name in self._peers if self.is_alive(name) and name not in self._stopped]

    def is_alive(self, name: str) -> bool:
        """Whether the process exists; a frozen one does."""
        return self._peers[name].process.poll() is None

    def pid(self, name: str) -> int:
        """Return the process id of a daemon's newest start."""
        return self._peers[name].process.pid

    def home(self, name: str) -> Path:
        """Return a daemon's home."""
        return self.folder / name

    def id_of(self, name: str) -> str:
        """Return a daemon's peer id; empty while it has not been met."""
        return self._ids.get(name, "")

    def name_of(self, peer: str) -> str:
        """Return the daemon of a peer id; the id's end if we have not met it."""
        names = (name for name, known in self._ids.items() if known == peer)
        return next(names, f"…{peer[-6:]}")

    def names_of(self, peers: Sequence[str]) -> list[str]:
        """Return the daemons of peer ids, in their order."""
        return [self.name_of(peer) for peer in peers]

    # --- asking -----------------------------------------------------------------------------

    def ask(self, name: str, command: str, seconds: float = ASK_SECONDS, **given: object) -> Status:
        """Ask a daemon over its control socket. Raises NotRunning."""
        return call(self.home(name), command, seconds=seconds, **given)

    def status(self, name: str) -> Status:
        """Return a daemon's status."""
        return self.ask(name, "status")

    def wait_until(
        self,
        condition: Condition,
        names: Collection[str] | None = None,
        seconds: float = WAIT_SECONDS,
    ) -> Status:
        """Wait until the condition holds for the status of one of `names`, or of any living
        daemon; return that status."""
        last: Status = {}
        deadline = time.monotonic() + seconds
        while True:
            for name in self.living:
                if names is None or name in names:
                    with contextlib.suppress(NotRunning):
                        last = self.status(name)
                        if condition(last):
                            return last
            assert time.monotonic() < deadline, f"not within {seconds:g} s: {last}"
            time.sleep(POLL_SECONDS)

    def wait_until_all(
        self,
        condition: Condition,
        names: Collection[str] | None = None,
        seconds: float = WAIT_SECONDS,
    ) -> dict[str, Status]:
        """Wait until the condition holds for each of `names`, or of the living, once."""
        deadline = time.monotonic() + seconds
        left = {}
        for name in self.living if names is None else names:
            left[name] = self.wait_until(condition, [name], deadline - time.monotonic())
        return left

    def wait_for_version(self, version: int, names: Collection[str] | None = None) -> Status:
        """Wait until so many steps are committed."""
        return self.wait_until(lambda status: int(status["version"]) >= version, names)

    def roles(self, name: str | None = None) -> Roles:
        """Return who does what, as one daemon knows it."""
        return Roles.of(self.status(name or self.living[0]))

    def export(self, name: str, out: Path) -> str:
        """Have a daemon export the weights to a file; return their SHA-256."""
        return str(self.ask(name, "export", WAIT_SECONDS, path=str(out.resolve()))["sha256"])

    # --- the end ----------------------------------------------------------------------------

    def print_logs(self) -> None:
        """Print the ends of all logs: pytest shows them where a test has failed."""
        for name, peer in self._peers.items():
            lines = peer.log.read_text(errors="replace").splitlines()[-LOG_LINES:]
            state = "alive" if self.is_alive(name) else f"exit {peer.process.returncode}"
            print(f"--- {name} ({state}, pid {peer.process.pid}, {self._ids.get(name, '?')})")
            print("\n".join(lines))

    def end(self) -> None:
        """Let the living leave, kill who does not, and remove what the killed have left."""
        self.network.heal()
        for name in sorted(self._stopped):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid(name), signal.SIGCONT)
        peers = list(self._peers.values())
        if peers:
            with ThreadPoolExecutor(len(peers)) as pool:
                list(pool.map(_end, peers))


def _end(peer: Peer) -> None:
    process = peer.process
    if process.poll() is None and process.stdin is not None:
        process.stdin.close()  # daemons leave with their parent
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LEAVE_SECONDS)
    with peer:
        pass
    if peer.home.exists():
        remove_sockets(peer.home)
