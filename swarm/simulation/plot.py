"""A picture of a simulation: throughput over time against the upper bound, events marked.

The rule: matplotlib is needed here only; whoever wants no picture needs none (`swarmd[plot]`).
"""

import importlib.util
from pathlib import Path

from swarm.errors import SimulationError
from swarm.simulation.report import Report

MOST_MARKS = 60
"""More events than this are not marked one by one."""


KINDS = (".png", ".svg", ".pdf")


def check_drawing(path: Path) -> None:
    """Raise SimulationError if pictures cannot be drawn here, or not in a file of that name."""
    if path.suffix.lower() not in KINDS:
        raise SimulationError(
            f"{path} names no kind of picture",
            evidence=(f"it does not end with one of {', '.join(KINDS)}",),
            hint="call it something.png",
        )
    if importlib.util.find_spec("matplotlib") is None:
        raise SimulationError(
            "a picture needs matplotlib, which is not installed",
            hint="pip install 'swarmd[plot]', or leave --plot out: --json has the same figures",
        )


def draw(report: Report, path: Path) -> None:
    """Write a picture to a file; its name says of which kind (.png, .svg, .pdf).

    Raises SimulationError if matplotlib is not installed, or the file cannot be written."""
    check_drawing(path)
    # Imported here: it is optional, and takes a second.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    seconds = [point.seconds for point in report.series]
    unit, name = (3600.0, "hours") if seconds and seconds[-1] > 7200 else (60.0, "minutes")
    times = [each / unit for each in seconds]
    rates = [point.microbatches_per_second for point in report.series]
    axes.step(
        times, [each.upper_bound for each in report.series], color="grey", label="upper bound"
    )
    if all(point.best_plan is not None for point in report.series):
        planned = [point.best_plan or 0.0 for point in report.series]
        axes.step(times, planned, color="tab:green", label="best plan found")
    axes.step(times, rates, color="tab:blue", label="committed")
    if len(report.events) <= MOST_MARKS:
        for event in report.events:
            axes.axvline(event.seconds / unit, color="tab:red", linewidth=0.5)
    for plan in report.plans:
        axes.plot(plan.seconds / unit, 0.0, "^", color="black", markersize=3)
    axes.set_xlabel(name)
    axes.set_ylabel("microbatches per second")
    axes.set_ylim(bottom=0.0)
    axes.set_title(
        f"{report.summary.name}: {100 * report.summary.fraction_of_upper_bound:.1f} % of the bound"
    )
    axes.legend()
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise SimulationError(
            f"{path} cannot be written",
            evidence=(str(error),),
            hint="name a .png, .svg or .pdf file in a folder that exists",
        ) from error
