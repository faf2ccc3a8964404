"""What came of a simulation: for programs as JSON, for people as text.

The rule: rates are microbatches of committed steps per virtual second, from the first plan on to
the last commit, and stand beside what the peers alive at that time could have carried.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from swarm.simulation.account import Account, Happened, PlanMade, Span
from swarm.simulation.scenario import Scenario
from swarm.simulation.upper_bound import UpperBounds

ROWS = 24
"""Lines of the table for people."""
POINTS = 240
"""Of the series."""
BAR_CHARACTERS = 30
MOST_PLANS = 40
MOST_EVENTS = 40
MOST_KINDS = 10


@dataclass(frozen=True, slots=True)
class Point:
    """A while, up to `seconds`."""

    seconds: float
    peers_alive: int
    microbatches_per_second: float
    """Of steps that were committed, now or later: a step counts evenly over the time it took."""
    upper_bound: float
    best_plan: float | None


@dataclass(frozen=True, slots=True)
class Summary:
    """A simulation in a few figures."""

    name: str
    seed: int
    rule: str
    virtual_seconds: float
    began_at_seconds: float | None
    """When the first plan was certified: rates count from then on."""
    measured_until_seconds: float
    """Up to then: the last commit, or the end if the swarm stands still."""
    trouble: str
    """Why it stands still at the end, in its leader's words; "" if it does not."""
    steps: int
    microbatches: int
    microbatches_per_second: float
    upper_bound: float
    """Mean over the same time, in microbatches per second."""
    fraction_of_upper_bound: float
    best_plan: float | None
    fraction_of_best_plan: float | None
    plans: int
    repairs: int
    lost_microbatches: float
    """Work that is in no committed step, as so many microbatches of the whole model."""
    lost_fraction: float
    """The same as a part of all work."""
    bytes_moved: int


@dataclass(frozen=True, slots=True)
class Report:
    """All of it."""

    summary: Summary
    series: list[Point]
    plans: list[PlanMade]
    events: list[Happened]
    bytes: dict[str, int]
    commits: list[float]
    """When each step was committed."""

    def to_json(self) -> dict[str, Any]:
        """Return plain dictionaries and lists."""
        return asdict(self)


def make_report(scenario: Scenario, account: Account, bounds: UpperBounds) -> Report:
    """Return what came of a simulation."""
    begin, end = account.began_at, account.measured_until
    first = end if begin is None else begin
    spans = account.spans(0.0, end)
    moved = account.bytes_by_kind()
    return Report(
        _summary(scenario, account, bounds, spans, (begin, end)),
        _series(account, bounds, spans, (first, end)),
        account.plans,
        account.happened,
        moved,
        [commit.seconds for commit in account.commits],
    )


def _summary(
    scenario: Scenario,
    account: Account,
    bounds: UpperBounds,
    spans: Sequence[Span],
    when: tuple[float | None, float],
) -> Summary:
    begin, end = when
    first = end if begin is None else begin
    done = account.microbatches(first, end)
    rate = done / (end - first) if end > first else 0.0
    bound = _mean(spans, lambda span: bounds.rate(span.state, span.alive), first, end) or 0.0
    planned = _mean(spans, lambda span: bounds.best_plan(span.state, span.alive), first, end)
    work = scenario.work_seconds
    return Summary(
        name=scenario.name,
        seed=scenario.seed,
        rule=scenario.rule,
        virtual_seconds=account.ended_at,
        measured_until_seconds=end,
        trouble=account.trouble if account.stands_still else "",
        began_at_seconds=begin,
        steps=len(account.commits),
        microbatches=len(account.commits) * scenario.training.microbatches_per_step,
        microbatches_per_second=rate,
        upper_bound=bound,
        fraction_of_upper_bound=rate / bound if bound else 0.0,
        best_plan=planned,
        fraction_of_best_plan=rate / planned if planned else None,
        plans=len(account.plans),
        repairs=sum(plan.kind == "repair" for plan in account.plans),
        lost_microbatches=account.lost_seconds / work,
        lost_fraction=account.lost_seconds / account.worked_seconds
        if account.worked_seconds
        else 0.0,
        bytes_moved=sum(account.bytes_by_kind().values()),
    )


def _series(
    account: Account, bounds: UpperBounds, spans: Sequence[Span], when: tuple[float, float]
) -> list[Point]:
    begin, end = when
    size = account.scenario.training.microbatches_per_step
    made = []
    for number in range(POINTS if end > begin else 0):
        since = begin + (end - begin) * number / POINTS
        until = begin + (end - begin) * (number + 1) / POINTS
        done = account.steps_until(until) - account.steps_until(since)
        here = [span for span in spans if span.until > since and span.since < until]
        made.append(
            Point(
                until,
                len(here[-1].alive) if here else 0,
                size * done / (until - since),
                _mean(here, lambda each: bounds.rate(each.state, each.alive), since, until) or 0.0,
                _mean(here, lambda each: bounds.best_plan(each.state, each.alive), since, until),
            )
        )
    return made


def _mean(
    spans: Sequence[Span], value: Callable[[Span], float | None], begin: float, end: float
) -> float | None:
    """Return the mean over time; None where a value is not known."""
    total = 0.0
    for span in spans:
        seconds = min(span.until, end) - max(span.since, begin)
        if seconds > 0:
            known = value(span)
            if known is None:
                return None
            total += seconds * known
    return total / (end - begin) if end > begin else 0.0


# --- for people --------------------------------------------------------------------------------


def told(report: Report) -> str:
    """Return the report as text."""
    parts = [_told_summary(report.summary), _told_series(report.series)]
    parts += [_told_plans(report.plans), _told_events(report.events), _told_bytes(report.bytes)]
    return "\n\n".join(part for part in parts if part)


def _told_summary(summary: Summary) -> str:
    began = summary.began_at_seconds
    lines = [
        f"{summary.name}  seed {summary.seed}  {span_of(summary.virtual_seconds)} of virtual time",
        f"  {summary.steps} steps, {summary.microbatches} microbatches; the first plan came "
        + (f"after {began:.1f} s" if began is not None else "never"),
        f"  {summary.microbatches_per_second:.4g} microbatches/s, "
        f"{100 * summary.fraction_of_upper_bound:.1f} % of the upper bound of "
        f"{summary.upper_bound:.4g}",
    ]
    if summary.best_plan is not None and summary.fraction_of_best_plan is not None:
        lines.append(
            f"  {100 * summary.fraction_of_best_plan:.1f} % of what the best plans that were found "
            f"promise, {summary.best_plan:.4g}"
        )
    idle = summary.virtual_seconds - summary.measured_until_seconds
    if idle > 0:
        lines.append(f"  a step was under way at the end, for {span_of(idle)}: it does not count")
    if summary.trouble:
        lines.append(f"  it stood still at the end: {summary.trouble}")
    lines += [
        f"  {summary.plans} plans, {summary.repairs} of them repairs",
        f"  {summary.lost_microbatches:.1f} microbatches of work lost or repeated, "
        f"{100 * summary.lost_fraction:.2f} % of all",
        f"  {size_of(summary.bytes_moved)} moved",
    ]
    return "\n".join(lines)


def _told_series(series: Sequence[Point]) -> str:
    if not series:
        return ""
    step = -(-len(series) // ROWS)
    rows = [_merged(series[i : i + step]) for i in range(0, len(series), step)]
    most = max(max(row.upper_bound, row.microbatches_per_second) for row in rows) or 1.0
    lines = ["      until  peers   mb/s  bound"]
    for row in rows:
        filled = round(BAR_CHARACTERS * row.microbatches_per_second / most)
        limit = round(BAR_CHARACTERS * row.upper_bound / most)
        bar = "#" * filled + "." * max(0, limit - filled)
        lines.append(
            f"{span_of(row.seconds):>11}  {row.peers_alive:5d} {row.microbatches_per_second:6.4g} "
            f"{row.upper_bound:6.4g}  {bar}"
        )
    return "\n".join(lines)


def _merged(points: Sequence[Point]) -> Point:
    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    planned = [point.best_plan for point in points if point.best_plan is not None]
    return Point(
        points[-1].seconds,
        points[-1].peers_alive,
        mean([point.microbatches_per_second for point in points]),
        mean([point.upper_bound for point in points]),
        mean(planned) if planned else None,
    )


def _told_plans(plans: Sequence[PlanMade]) -> str:
    lines = [f"plans ({len(plans)})"]
    for plan in plans[:MOST_PLANS]:
        sizes = "+".join(str(len(hosts)) for hosts in plan.stages)
        lines.append(
            f"{span_of(plan.seconds):>11}  {plan.epoch:4d} {plan.kind:<7} {sizes:<14} {plan.reason}"
        )
    return "\n".join(lines + _more(len(plans) - MOST_PLANS))


def _told_events(events: Sequence[Happened]) -> str:
    if not events:
        return ""
    lines = [f"events ({len(events)})"]
    lines += [f"{span_of(event.seconds):>11}  {event.what}" for event in events[:MOST_EVENTS]]
    return "\n".join(lines + _more(len(events) - MOST_EVENTS))


def _more(count: int) -> list[str]:
    return [f"             and {count} more: --json has them all"] if count > 0 else []


def _told_bytes(moved: dict[str, int]) -> str:
    kinds = list(moved.items())
    lines = ["bytes by kind"]
    lines += [f"{size_of(size):>11}  {kind}" for kind, size in kinds[:MOST_KINDS]]
    others = sum(size for _, size in kinds[MOST_KINDS:])
    if others:
        lines.append(f"{size_of(others):>11}  {len(kinds) - MOST_KINDS} other kinds")
    return "\n".join(lines)


def span_of(seconds: float) -> str:
    """Return a time as people read it."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    hours, rest = divmod(round(seconds), 3600)
    days, hours = divmod(hours, 24)
    text = f"{hours:02d}:{rest // 60:02d}:{rest % 60:02d}"
    return f"{days} d {text}" if days else text


def size_of(size: float) -> str:
    """Return bytes as people read them."""
    units = ["B", "kB", "MB", "GB", "TB", "PB"]
    while size >= 1000 and len(units) > 1:
        size /= 1000
        del units[0]
    return f"{size:.4g} {units[0]}"
