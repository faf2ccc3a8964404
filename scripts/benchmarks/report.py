"""What a benchmark found, as a table or as one JSON object.

The rule: rows are what was measured; the summary is what is asked of the measurements.
"""

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

Value = str | int | float | None
Row = dict[str, Value]


@dataclass(slots=True)
class Report:
    """Rows of one or more kinds, and a summary of named numbers."""

    name: str
    rows: list[Row] = field(default_factory=list)
    summary: Row = field(default_factory=dict)

    def as_json(self) -> str:
        """Return {"name", "rows", "summary"} on one line."""
        return json.dumps({"name": self.name, "rows": self.rows, "summary": self.summary})

    def as_text(self) -> str:
        """Return one table for every kind of rows, and the summary."""
        parts = [_table(group) for group in _grouped(self.rows)]
        width = max(map(len, self.summary), default=0)
        lines = [f"{key:<{width}}  {_cell(value)}" for key, value in self.summary.items()]
        return "\n\n".join([*parts, "\n".join(lines)])


def percentile(values: Sequence[float], percent: int) -> float:
    """Return the value below which `percent` of the values lie; at least two are needed."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def _grouped(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the rows grouped by their keys, in order of appearance."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row), []).append(row)
    return list(groups.values())


def _table(rows: Sequence[Row]) -> str:
    columns = list(rows[0])
    cells = [columns, *([_cell(row[column]) for column in columns] for row in rows)]
    widths = [max(len(line[number]) for line in cells) for number in range(len(columns))]
    numeric = [not isinstance(rows[0][column], str) for column in columns]
    return "\n".join(
        "  ".join(
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in cells
    )


def _cell(value: Value) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
