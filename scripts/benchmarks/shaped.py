"""Two hosts of their own, joined by a cable that carries so many bytes per second and no more.

Each host is a network namespace; token buckets of the kernel (tc-tbf) shape what leaves. It needs
root.
"""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator

BURST_BYTES = 32 * 1024
QUEUE_MILLISECONDS = 100
ADDRESSES = ("10.78.0.1", "10.78.0.2")


def why_not() -> str:
    """Return why there can be no such hosts here; empty if there can."""
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"{' and '.join(missing)} (iproute2) not installed"
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    try:
        with cable(100.0):
            return ""
    except subprocess.CalledProcessError as fault:
        return f"{' '.join(fault.cmd)} failed"


@contextlib.contextmanager
def cable(megabits_per_second: float) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Make both hosts, which have ADDRESSES; yield the words before a command that runs on each."""
    names = [f"swarm-cable-{os.getpid()}-{number}" for number in range(2)]
    made: list[str] = []
    try:
        for name in names:
            _run("ip", "netns", "add", name)
            made.append(name)
        other = ("peer", "name", "eth0", "netns", names[1])
        _run("ip", "-n", names[0], "link", "add", "eth0", "type", "veth", *other)
        for name, address in zip(names, ADDRESSES, strict=True):
            _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _run("ip", "-n", name, "link", "set", device, "up")
            rate = ("rate", f"{megabits_per_second}mbit", "burst", str(BURST_BYTES))
            queue = ("latency", f"{QUEUE_MILLISECONDS}ms")
            _run("tc", "-n", name, "qdisc", "add", "dev", "eth0", "root", "tbf", *rate, *queue)
        first, second = (("ip", "netns", "exec", name) for name in names)
        yield first, second
    finally:
        for name in made:
            _run("ip", "netns", "delete", name)


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)
