"""Where the daemons of a test live, and who can reach whom.

The rule: a director needs nothing else to know of a network, so a test runs on any of them.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Place:
    """Where one daemon lives."""

    listen: str
    """HOST:PORT."""
    advertise: str = ""
    """The host under which others reach it; empty for the one that it listens on."""
    prefix: tuple[str, ...] = ()
    """Words before those that start it."""

    def arguments(self) -> tuple[str, ...]:
        """Return the options of `swarm run`."""
        advertise = ("--advertise", self.advertise) if self.advertise else ()
        return ("--listen", self.listen, *advertise)


class Network(Protocol):
    """Places for daemons, and links between them. Names are the director's."""

    def place(self, name: str) -> Place:
        """Return where this daemon lives: always the same place."""
        ...

    def running(self, name: str, pid: int) -> None:
        """Take note which process is this daemon now."""
        ...

    def cut(self, ones: Iterable[str], others: Iterable[str], *, one_way: bool = False) -> None:
        """Deliver nothing from `ones` to `others` any more; unless `one_way`, nor back."""
        ...

    def heal(self) -> None:
        """End all cuts."""
        ...


class Loopback:
    """The plain network of this machine: nothing can be cut."""

    def place(self, name: str) -> Place:
        return Place("127.0.0.1:0")

    def running(self, name: str, pid: int) -> None:
        pass

    def cut(self, ones: Iterable[str], others: Iterable[str], *, one_way: bool = False) -> None:
        raise NotImplementedError("the links of this network cannot be cut")

    def heal(self) -> None:
        pass


def ways_between(
    ones: Iterable[str], others: Iterable[str], one_way: bool
) -> frozenset[tuple[str, str]]:
    """Return the (source, target) pairs from `ones` to `others`, and back unless `one_way`."""
    there = [way for way in itertools.product(list(ones), list(others)) if way[0] != way[1]]
    back = [] if one_way else [(target, source) for source, target in there]
    return frozenset([*there, *back])
