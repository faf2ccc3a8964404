"""Runs a program so that it does not outlive the process that started it.

Usage: `orphan_guard.py PARENT_PID PROGRAM ARGUMENT...`

The rule: however our process ends, by SIGKILL too, its libp2p daemon ends with it. On Linux the
kernel sees to that (prctl(2), PR_SET_PDEATHSIG): it kills the program when the thread that
started it ends. The program also gets a session of its own, so that a Ctrl-C in the terminal
does not reach it before us. This file runs as a script of its own and imports nothing of ours.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(parent: int, program: list[str]) -> None:
    """Become `program`, unless `parent` is gone already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL.value, 0, 0, 0)
    if os.getppid() == parent:  # otherwise it ended before the kernel watched
        os.setsid()
        os.execv(program[0], program)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
