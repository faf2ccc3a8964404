"""A full solve in a process of its own, so that neither training nor the event loop waits for it.

The rule: it is a nicety. Its process is as nice as can be and does not outlive the daemon; if it
fails, that is logged, and plans are greedy ones. Run as a program it reads a problem (JSON) and
writes an assignment: `python -m swarm.adapters.solver_process SEED`.
"""

import contextlib
import logging
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import trio

from swarm.core.scheduling.problem import Assignment, Problem, problem_from_json, problem_to_json
from swarm.core.scheduling.solver import solve
from swarm.errors import NoFeasiblePlan

log = logging.getLogger(__name__)

NICENESS = 19
_GUARD = Path(__file__).with_name("orphan_guard.py")
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class ProcessSolver:
    """`ports.Solver` by a child process, one for each solve."""

    async def solve(self, problem: Problem, seed: int) -> Assignment | None:
        """Return the best assignment found; None if none is feasible, or if the child fails."""
        try:
            child = _started(seed)
        except OSError as error:
            log.warning("no full solve: %s", error)
            return None
        try:
            answer, told = await trio.to_thread.run_sync(
                child.communicate, problem_to_json(problem), abandon_on_cancel=True
            )
        finally:
            child.kill()  # if it was cancelled
            child.wait()
        if child.returncode == 0:
            with contextlib.suppress(msgspec.DecodeError):
                return msgspec.json.decode(answer, type=Assignment | None)
        reason = told.decode(errors="replace").strip().rpartition("\n")[2]
        log.warning("no full solve: exit status %d: %s", child.returncode, reason)
        return None


def _started(seed: int) -> "subprocess.Popen[bytes]":
    """Start the child from this thread, which lives as long as the daemon: the kernel ends it with
    the thread that started it, and a thread of trio's that has nothing to do ends soon."""
    guard = [sys.executable, "-I", "-S", str(_GUARD), str(os.getpid())]
    return subprocess.Popen(
        [*guard, sys.executable, "-m", __name__, str(seed)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **_ONE_THREAD},
    )


def main(seed: int) -> None:
    """Solve the problem on standard input."""
    os.nice(NICENESS)
    problem = problem_from_json(sys.stdin.buffer.read())
    try:
        found: Assignment | None = solve(problem, seed=seed).assignment
    except NoFeasiblePlan as error:
        print(error.what, file=sys.stderr)
        found = None
    sys.stdout.buffer.write(msgspec.json.encode(found))


if __name__ == "__main__":
    main(int(sys.argv[1]))
