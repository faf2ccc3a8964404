"""What the chaos demo shows: a line for each event, one that moves with the run, and a table.

The rule: seconds that were not measured are shown as such, never as zero.
"""

import contextlib
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

STEPS_PER_LINE = 10


@dataclass
class Outcome:
    """What came of one event. Seconds are None where it did not recover."""

    event: str
    is_kill: bool
    who: str
    step: int
    seconds_to_step: float | None = None
    """To the next step that was committed."""
    seconds_to_whole: float | None = None
    """Until every stage had its replicas again."""
    replayed: int | None = None
    """Microbatches that were computed once more."""
    stages: str = ""


class Screen:
    """Draws what happens: a line for each event, and one that moves with the run."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, soft_wrap=True)
        self._live: Live | None = None
        self._printed = -1
        if self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=5, transient=True)

    @contextlib.contextmanager
    def drawing(self) -> Iterator["Screen"]:
        """Have the moving line at the bottom."""
        with self._live or contextlib.nullcontext():
            yield self

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._console.print(Text(text))

    def show(self, step: int, text: str) -> None:
        """Move the moving line; without a terminal, print it now and then."""
        if self._live is not None:
            self._live.update(Text(text))
        elif step // STEPS_PER_LINE != self._printed:
            self._printed = step // STEPS_PER_LINE
            self.say(text)

    def table(self, table: Table) -> None:
        """Print a table."""
        self._console.print(table)


MEASURED = ("seconds_to_step", "seconds_to_whole")


def table_of(outcomes: Sequence[Outcome]) -> Table:
    """Return one row for each event."""
    table = Table("#", "step", "event", "who", "next step s", "whole s", "replayed")
    for number, outcome in enumerate(outcomes, start=1):
        table.add_row(
            str(number),
            str(outcome.step),
            outcome.event,
            outcome.who,
            seconds(outcome.seconds_to_step),
            seconds(outcome.seconds_to_whole),
            "-" if outcome.replayed is None else str(outcome.replayed),
        )
    return table


def medians_of(outcomes: Sequence[Outcome]) -> dict[str, dict[str, float | None]]:
    """Return the median of what was measured, after kills and after joins; None if nothing was."""
    return {
        name: {
            "kill": _median(outcomes, name, is_kill=True),
            "join": _median(outcomes, name, is_kill=False),
        }
        for name in MEASURED
    }


def as_json(seed: int, outcomes: Sequence[Outcome], failures: Sequence[str]) -> dict[str, object]:
    """Return the whole report."""
    return {
        "seed": seed,
        "events": [asdict(outcome) for outcome in outcomes],
        "medians": medians_of(outcomes),
        "failures": list(failures),
    }


def seconds(value: float | None) -> str:
    """Return seconds for people."""
    return "-" if value is None else f"{value:.1f}"


def _median(outcomes: Sequence[Outcome], name: str, *, is_kill: bool) -> float | None:
    of_kind = (getattr(each, name) for each in outcomes if each.is_kill == is_kill)
    values = [value for value in of_kind if value is not None]
    return statistics.median(values) if values else None
