"""CPU time of processes and their threads, from /proc (Linux).

The rule: what has ended counts too: a thread's time stays with its process.
"""

import os
from dataclasses import astuple, dataclass
from pathlib import Path

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class DaemonTime:
    """CPU seconds, user and system, of one or more daemons by what they were spent on."""

    executor: float = 0.0
    """The thread in which the stage computes: the one that is niced."""
    event_loop: float = 0.0
    other_threads: float = 0.0
    """The DHT's loop, and threads that read data and files."""
    libp2p: float = 0.0
    """The daemon's child processes."""

    @property
    def total(self) -> float:
        """Return all of it."""
        return sum(astuple(self))

    def __add__(self, other: "DaemonTime") -> "DaemonTime":
        return DaemonTime(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: "DaemonTime") -> "DaemonTime":
        return DaemonTime(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True, slots=True)
class _Stat:
    parent: int
    seconds: float
    nice: int


def process_seconds(pid: int) -> float:
    """Return the CPU seconds of a process, user and system. Raises OSError if there is none."""
    return _stat(Path(f"/proc/{pid}/stat")).seconds


def children(pid: int) -> list[int]:
    """Return the child processes of a process."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdecimal() and _stat(folder / "stat").parent == pid:
                found.append(int(folder.name))
        except OSError:
            continue  # it has ended meanwhile
    return sorted(found)


def daemon_time(pid: int) -> DaemonTime:
    """Return what a daemon has used so far. Raises OSError if there is none."""
    whole = _stat(Path(f"/proc/{pid}/stat"))
    executor = event_loop = 0.0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        stat = _stat(thread / "stat")
        if int(thread.name) == pid:
            event_loop = stat.seconds
        elif stat.nice > whole.nice:
            executor += stat.seconds
    libp2p = sum(process_seconds(child) for child in children(pid))
    return DaemonTime(executor, event_loop, whole.seconds - executor - event_loop, libp2p)


def _stat(path: Path) -> _Stat:
    # proc(5): fields after the name, which is in parentheses and may contain anything
    rest = path.read_text().rpartition(")")[2].split()
    user, system = int(rest[11]), int(rest[12])
    return _Stat(int(rest[1]), (user + system) / _TICKS_PER_SECOND, int(rest[16]))
