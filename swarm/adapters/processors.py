"""How much of the machine's processors this process may use for good.

The rule: what is not found out is not a limit. Linux limits a process by the set of processors that
it may run on, and by the quotas of its control group and of those above it (cgroups(7); of version
2 in `cpu.max`, of version 1 in `cpu.cfs_quota_us` and `cpu.cfs_period_us`): a container with "two
processors" has such a quota.
"""

import os
from pathlib import Path, PurePosixPath

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


def available_processors(root: Path = ROOT, own: Path = OWN) -> float:
    """Return how many processors this process may use at the same time, on average; a part of one
    where a quota says so. `root` is where control groups are mounted, and `own` lists those of the
    process."""
    quotas = [quota for folder in _folders(root, own) if (quota := _quota_of(folder)) is not None]
    return min([float(_count()), *quotas])


def stretch_of(threads: int) -> float:
    """Return how many times as long as with enough processors so many threads that compute at the
    same time take for good; 1 at least."""
    return max(1.0, threads / available_processors())


def _count() -> int:
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return max(1, len(os.sched_getaffinity(0)))
    return os.cpu_count() or 1


def _folders(root: Path, own: Path) -> list[Path]:
    """Return the folders of this process's control groups for processors, and of those above.

    In a container the paths may be those outside; what is mounted at the root is its own then."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return []
    folders = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        named = controllers.split(",") if controllers else []
        if named and "cpu" not in named:
            continue
        mounts = [root / controllers, root / "cpu"] if named else [root, root / "unified"]
        for mount in mounts:
            inside = PurePosixPath(path.lstrip("/"))
            folders += [mount / inside, *(mount / above for above in inside.parents)]
    return folders


def _quota_of(folder: Path) -> float | None:
    """Return the quota of a control group, in processors; None if it has none."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text()
            period = (folder / "cpu.cfs_period_us").read_text()
        made = int(quota) / int(period)  # "max", or -1, without a limit
    except (OSError, ValueError, ZeroDivisionError):
        return None
    return made if made > 0 else None
