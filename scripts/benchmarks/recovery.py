"""How long a swarm stands still when a daemon is killed, and what of it goes where.

The rule: the clock runs from the kill to the next step that anybody tells to be committed, as
`swarm status` shows it; the parts are the daemons' own words, and what they do not name is the time
until somebody noticed.
"""

import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.report import Report, Row
from tests.processes.director import Director, Roles, Status
from tests.processes.swarms import GPT, SGD, manifest
from tests.processes.trials import may_lose_one

PEERS, STAGES = 4, 2
KILLS, QUICK_KILLS = 10, 1
TEXT = manifest(GPT, SGD, steps=100_000, microbatches=6)
POLL_SECONDS = 0.02
PARTS = ("detect", "agree", "report", "replay")


def measure(*, quick: bool) -> Report:
    """Kill leaders and plain replicas in turns; after each a newcomer joins."""
    with TemporaryDirectory(prefix="swarm-bench-") as folder:
        with Director(Path(folder), TEXT, peers=PEERS, stages=STAGES) as director:
            director.start()
            rows = [_kill(director, number) for number in range(QUICK_KILLS if quick else KILLS)]
    totals = [float(row["total_ms"] or 0.0) for row in rows]
    summary: Row = {"kills": len(rows), "total_median_ms": statistics.median(totals)}
    for part in PARTS:
        values = [float(value) for row in rows if (value := row[f"{part}_ms"]) is not None]
        summary[f"{part}_median_ms"] = statistics.median(values) if values else None
    summary["total_most_ms"] = max(totals)
    return Report("recovery", rows, summary)


def _kill(director: Director, number: int) -> Row:
    roles = Roles.of(director.wait_until(may_lose_one))
    who = "plain replica" if number % 2 else "leader"
    peer = roles.plain_replicas[0] if number % 2 else roles.leader
    victim = director.name_of(peer)
    witness = next(name for name in director.living if name != victim)
    before = director.status(witness)
    director.kill(victim)
    killed = time.monotonic()
    after, seconds = _next_step(director, before, killed)
    row = _row(who, seconds, _course(director, before["epoch"], after))
    director.join()
    return row


def _next_step(director: Director, before: Status, killed: float) -> tuple[Status, float]:
    """Return a status after the first step by a newer plan, and the seconds since the kill."""
    while True:
        for name in director.living:
            status = director.status(name)
            newer = status["epoch"] > before["epoch"]
            if newer and any(_has_gone_on(plan, before) for plan in status["plans"]):
                return status, time.monotonic() - killed
        time.sleep(POLL_SECONDS)


def _has_gone_on(plan: dict[str, Any], before: Status) -> bool:
    return bool(plan["epoch"] > before["epoch"] and plan["replay_seconds"] is not None)


def _course(director: Director, epoch: int, after: Status) -> dict[str, float]:
    """Return the longest of what the living say of the plans since `epoch`, by part."""
    told = [plan for plan in after["plans"] if plan["epoch"] > epoch]
    for name in director.living:
        told += [plan for plan in director.status(name)["plans"] if plan["epoch"] > epoch]
    newest = min(plan["epoch"] for plan in told if plan["replay_seconds"] is not None)
    ours = [plan for plan in told if plan["epoch"] <= newest]
    return {
        part: max((plan[f"{part}_seconds"] or 0.0 for plan in ours), default=0.0)
        for part in PARTS[1:]
    }


def _row(who: str, seconds: float, course: dict[str, float]) -> Row:
    detect = max(seconds - sum(course.values()), 0.0)
    parts = {"detect": detect, **course}
    shown = {f"{part}_ms": 1000 * parts[part] for part in PARTS}
    return {"killed": who, "total_ms": 1000 * seconds, **shown}
