"""Runs seeds on all cores: worlds of the pure agreement, and storms over whole simulated swarms.

`agreement` runs each seed in the world of the core, and every tenth as a storm, too; `storms`
runs storms only. The rule: a seed that fails comes with its transcript and the command that
replays it, and the exit code is 1.
"""

import argparse
import concurrent.futures
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from swarm.simulation.scenarios import told_failure
from tests.core.agreement_world import run_seed

STORM_EVERY = 10
"""Of how many seeds `agreement` runs one as a storm: a storm takes some ten times as long."""
PROGRESS_SECONDS = 5.0

Job = tuple[str, int]
"""Kind ("agreement" or "storm") and seed."""


def main(arguments: Sequence[str]) -> int:
    """Run the seeds; return 1 if one of them fails."""
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__)
    parser.add_argument("what", choices=("agreement", "storms"))
    parser.add_argument("--seeds", type=int, required=True, metavar="N", help="how many")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="the first of them")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), metavar="N", help="processes")
    parser.add_argument(
        "--transcripts", type=Path, metavar="DIR", help="write transcripts there, one file a seed"
    )
    options = parser.parse_args(arguments)
    seeds = range(options.first, options.first + options.seeds)
    began = time.monotonic()
    failed = []
    for done, (job, text) in enumerate(_results(_jobs(options.what, seeds), options.jobs), 1):
        if text:
            failed.append(job)
            _tell(job, text, options.transcripts)
        seconds = time.monotonic() - began
        _progress(done, len(failed), seconds)
    _sum_up(len(_jobs(options.what, seeds)), failed, time.monotonic() - began)
    return 1 if failed else 0


def _jobs(what: str, seeds: range) -> list[Job]:
    if what == "storms":
        return [("storm", seed) for seed in seeds]
    worlds: list[Job] = [("agreement", seed) for seed in seeds]
    return worlds + [("storm", seed) for seed in seeds if seed % STORM_EVERY == 0]


def _results(jobs: Sequence[Job], processes: int) -> Iterator[tuple[Job, str]]:
    """Yield every job with its failure, as text; "" for a job that has passed."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(processes, mp_context=context) as pool:
        running = {pool.submit(_run, job): job for job in jobs}
        for done in concurrent.futures.as_completed(running):
            yield running[done], done.result()


def _run(job: Job) -> str:
    kind, seed = job
    if kind == "storm":
        return told_failure(seed)
    try:
        run_seed(seed)
    except AssertionError as failure:
        return str(failure)
    return ""


def _tell(job: Job, text: str, folder: Path | None) -> None:
    kind, seed = job
    if folder is None:
        print(f"\n{text}", flush=True)
        return
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{kind}-{seed}.txt"
    path.write_text(text + "\n")
    print(f"{kind} {seed} fails: {text.splitlines()[0]}  ({path})", flush=True)


_told_at = 0.0


def _progress(done: int, failed: int, seconds: float) -> None:
    global _told_at
    if seconds - _told_at >= PROGRESS_SECONDS:
        _told_at = seconds
        print(f"{done} seeds, {failed} failed, {done / seconds:.1f} seeds/s", flush=True)


def _sum_up(done: int, failed: Sequence[Job], seconds: float) -> None:
    print(f"{done} seeds in {seconds:.0f} s: {done / seconds:.1f} seeds/s, {len(failed)} failed")
    for kind, seed in sorted(failed):
        module = "swarm.simulation.scenarios" if kind == "storm" else "tests.core.agreement_world"
        print(f"  {kind} {seed}: .venv/bin/python -m {module} {seed} 1")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
