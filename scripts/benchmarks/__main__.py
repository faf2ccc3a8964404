"""`scripts/bench NAME [--json] [--quick]`: run one benchmark and print what it found."""

import argparse
import importlib
import os
import sys

NAMES = (
    "ablations",
    "estimates",
    "growth",
    "optimality",
    "overhead",
    "recovery",
    "scale",
    "scheduler",
    "transport",
)
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def main() -> int:
    """Run the benchmark that the command line names; return the exit code."""
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--quick", action="store_true", help="see that it runs; the numbers mean nothing"
    )
    scheduler = parser.add_argument_group("scheduler")
    scheduler.add_argument("--case", action="append", metavar="FILE", help="a network to plan for")
    scheduler.add_argument("--seeds", type=int, metavar="NUMBER", help="searches of each network")
    options = parser.parse_args()
    given = {name: vars(options)[name] for name in ("case", "seeds") if vars(options)[name]}
    if given and options.name != "scheduler":
        parser.error(f"{options.name} has no --{next(iter(given))}")
    if options.name in ("ablations", "growth", "optimality", "scale", "scheduler"):
        os.environ.update(dict.fromkeys(THREADS, "1"))  # before NumPy is imported
    benchmark = importlib.import_module(f"benchmarks.{options.name}")
    report = benchmark.measure(quick=options.quick, **given)
    print(report.as_json() if options.json else report.as_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
