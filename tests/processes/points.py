"""The test's side of a daemon with named points (pointed_daemon.py).

The rule: an order given before the daemon starts counts from the daemon's start, any other from
about now on; what has been announced has been reached, even if the daemon died there.
"""

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from tests.processes.pointed_daemon import ANNOUNCED, CLOCK_VARIABLE, FOLDER_VARIABLE, GO, ORDERS

Action = Literal["kill", "stop", "hold"]


class PointsOf:
    """Orders to one daemon, and what it announces."""

    def __init__(self, folder: Path, *, clock_shift_seconds: float = 0.0) -> None:
        """`folder` is made, or taken over with what an earlier start has left. The daemon's wall
        clock is wrong by `clock_shift_seconds`."""
        self._folder = folder
        self._clock_shift_seconds = clock_shift_seconds
        folder.mkdir(exist_ok=True)
        for name in (ORDERS, ANNOUNCED):
            (folder / name).touch()
        if not (folder / GO).exists():
            os.mkfifo(folder / GO)
        self._go = os.open(folder / GO, os.O_RDWR)  # both ends: neither side waits for the other

    def __enter__(self) -> "PointsOf":
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._go)

    @property
    def start(self) -> tuple[str, ...]:
        """Return the words that start the daemon."""
        return (sys.executable, "-m", "tests.processes.pointed_daemon")

    @property
    def variables(self) -> Mapping[str, str]:
        """Return what the daemon must find in its environment."""
        return {
            FOLDER_VARIABLE: str(self._folder),
            CLOCK_VARIABLE: str(self._clock_shift_seconds),
        }

    def order(self, action: Action, point: str, occurrence: int = 1) -> None:
        """Have something done at the next, or a later, occurrence of a point."""
        with (self._folder / ORDERS).open("a") as orders:
            orders.write(f"{action} {point} {occurrence}\n")

    def forget_orders(self) -> None:
        """Have the next start begin without orders; the daemon must not be running."""
        (self._folder / ORDERS).write_text("")

    def go_on(self) -> None:
        """Let the daemon go on from a point where it holds."""
        os.write(self._go, b".")

    def reached(self, point: str) -> int:
        """Return how often a point has been reached."""
        lines = (self._folder / ANNOUNCED).read_text().splitlines()
        return sum(point in (line, line.partition(":")[0]) for line in lines)

    def wait_for(self, point: str, times: int = 1, seconds: float = 60) -> None:
        """Wait until a point has been reached so often."""
        deadline = time.monotonic() + seconds
        while self.reached(point) < times:
            assert time.monotonic() < deadline, f"{point} reached {self.reached(point)} times"
            time.sleep(0.02)
