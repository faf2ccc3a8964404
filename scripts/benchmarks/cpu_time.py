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
    """In Python, TLS and the libraries."""
    event_loop_in_kernel: float = 0.0
    """TCP, mostly: copying and waking."""
    other_threads: float = 0.0
    """The DHT's loop, and threads that read data and files."""
    libp2p: float = 0.0
    """The daemon's child processes."""

    @property
    def total(self) -> float:
        """Return all of it."""
        return sum(astuple(self), 0.0)

    def __add__(self, other: "DaemonTime") -> "DaemonTime":
        return DaemonTime(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: "DaemonTime") -> "DaemonTime":
        return DaemonTime(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True, slots=True)
class _Stat:
    parent: int
    user: float
    system: float
    nice: int

    @property
    def seconds(self) -> float:
        return self.user + self.system


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
    loop = _stat(Path(f"/proc/{pid}/task/{pid}/stat"))
    executor = 0.0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        stat = _stat(thread / "stat")
        if stat.nice > loop.nice:
            executor += stat.seconds
    libp2p = sum(process_seconds(child) for child in children(pid))
    others = whole.seconds - executor - loop.seconds
    return DaemonTime(executor, loop.user, loop.system, others, libp2p)


def _stat(path: Path) -> _Stat:
    # proc(5): fields after the name, which is in parentheses and may contain anything
    rest = path.read_text().rpartition(")")[2].split()
    user, system = (int(ticks) / _TICKS_PER_SECOND for ticks in rest[11:13])
    return _Stat(int(rest[1]), user, system, int(rest[16]))
