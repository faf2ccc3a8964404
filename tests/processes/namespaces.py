"""A network namespace for each daemon, joined by a bridge, with links that can be cut.

The rule: nothing of it is seen outside, and nothing is left behind: the bridge has a namespace of
its own too. Every host knows the others' hardware addresses by heart, so that a direction is cut by
giving the sender a wrong one: its packets leave, and nobody takes them. No filter of the kernel is
needed, only the right to make namespaces.
"""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator

from tests.processes.places import Place, ways_between

PORT = 31337
NOBODY = 0
"""The number of no host."""


def why_not() -> str:
    """Return why namespaces cannot be had here; empty if they can."""
    if shutil.which("ip") is None:
        return "the program ip (iproute2) is not installed"
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    name = f"swarm-try-{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if tried.returncode != 0:
        return f"network namespaces are not allowed here: {tried.stderr.strip()}"
    try:
        words = ["ip", "-n", name, "link", "add", "br0", "type", "bridge"]
        tried = subprocess.run(words, capture_output=True, text=True)
    finally:
        _ip("netns", "delete", name)
    return f"no bridges here: {tried.stderr.strip()}" if tried.returncode != 0 else ""


class Namespaces:
    """A network of namespaces; `with` removes them."""

    def __init__(self) -> None:
        self._prefix = f"swarm-{os.getpid()}"
        self._hub = f"{self._prefix}-hub"
        self._numbers: dict[str, int] = {}
        self._cut: frozenset[tuple[str, str]] = frozenset()

    def __enter__(self) -> "Namespaces":
        _ip("netns", "add", self._hub)
        _ip("-n", self._hub, "link", "add", "br0", "type", "bridge")
        _ip("-n", self._hub, "link", "set", "br0", "up")
        return self

    def __exit__(self, *exception: object) -> None:
        for name in (*map(self.namespace, self._numbers), self._hub):
            _ip("netns", "delete", name)

    def namespace(self, name: str) -> str:
        """Return the name by which `ip netns` knows the host of a daemon."""
        return f"{self._prefix}-{self._numbers[name]}"

    def address(self, name: str) -> str:
        """Return the address of a daemon's host."""
        return _address(self._numbers[name])

    def place(self, name: str) -> Place:
        """Make the host of a daemon, unless it is there."""
        if name not in self._numbers:
            self._numbers[name] = len(self._numbers) + 1
            self._make(name)
        prefix = ("ip", "netns", "exec", self.namespace(name))
        return Place(listen=f"{self.address(name)}:{PORT}", prefix=prefix)

    def running(self, name: str, pid: int) -> None:
        """Nothing depends on the process here."""

    def cut(self, ones: Iterable[str], others: Iterable[str], *, one_way: bool = False) -> None:
        """Deliver nothing from `ones` to `others` any more; unless `one_way`, nor back."""
        self._change(self._cut | ways_between(ones, others, one_way))

    def heal(self) -> None:
        """End all cuts."""
        self._change(frozenset())

    @contextlib.contextmanager
    def unplugged(self, name: str) -> Iterator[None]:
        """Take the cable of a host out, and put it in again."""
        cable = ("-n", self._hub, "link", "set", f"v{self._numbers[name]}")
        _ip(*cable, "down")
        try:
            yield
        finally:
            _ip(*cable, "up")

    def _make(self, name: str) -> None:
        number, host = self._numbers[name], self.namespace(name)
        _ip("netns", "add", host)
        cable = ("peer", "name", f"v{number}", "netns", self._hub)
        _ip("-n", host, "link", "add", "eth0", "address", _hardware(number), "type", "veth", *cable)
        _ip("-n", host, "address", "add", f"{_address(number)}/24", "dev", "eth0")
        _ip("-n", self._hub, "link", "set", f"v{number}", "master", "br0", "up")
        for device in ("lo", "eth0"):
            _ip("-n", host, "link", "set", device, "up")
        for other in self._numbers:
            if other != name:
                self._teach(name, other)
                self._teach(other, name)

    def _change(self, cut: frozenset[tuple[str, str]]) -> None:
        before, self._cut = self._cut, cut
        for source, target in sorted(before ^ cut):
            self._teach(source, target)

    def _teach(self, source: str, target: str) -> None:
        """Tell `source` the hardware address of `target`, or a wrong one."""
        number = self._numbers[target]
        hardware = _hardware(NOBODY if (source, target) in self._cut else number)
        known = (_address(number), "lladdr", hardware, "nud", "permanent", "dev", "eth0")
        _ip("-n", self.namespace(source), "neighbour", "replace", *known)


def _address(number: int) -> str:
    return f"10.77.0.{number}"


def _hardware(number: int) -> str:
    return f"02:77:00:00:00:{number:02x}"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
