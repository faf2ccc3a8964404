"""`scripts/bench NAME [--json] [--quick]`: run one benchmark and print what it found."""

import argparse
import importlib
import os
import sys

NAMES = (
    "ablations",
    "churn",
    "estimates",
    "growth",
    "optimality",
    "overhead",
    "prediction",
    "recovery",
    "scale",
    "scheduler",
    "stability",
    "transport",
)
OWNERS = {
    "case": "scheduler",
    "seeds": "scheduler",
    "first": "optimality",
    **dict.fromkeys(("scenario", "trace", "duration", "rule"), "churn"),
}
"""Options that only one benchmark has."""
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
    optimality = parser.add_argument_group("optimality")
    optimality.add_argument("--first", type=int, metavar="SEED", help="of the problems' seeds")
    churn = parser.add_argument_group("churn")
    churn.add_argument("--scenario", action="append", metavar="FILE", help="instead of our own")
    churn.add_argument("--trace", metavar="FILE.csv", help="of machines that come and go")
    churn.add_argument("--duration", metavar="TIME", help="virtual time, instead of the scenario's")
    churn.add_argument("--rule", action="append", metavar="RULE", help="only this one")
    options = parser.parse_args()
    given = {name: vars(options)[name] for name in OWNERS if vars(options)[name]}
    for name in given:
        if options.name != OWNERS[name]:
            parser.error(f"{options.name} has no --{name}")
    if options.name in ("ablations", "growth", "optimality", "scale", "scheduler", "stability"):
        os.environ.update(dict.fromkeys(THREADS, "1"))  # before NumPy is imported
    benchmark = importlib.import_module(f"benchmarks.{options.name}")
    report = benchmark.measure(quick=options.quick, **given)
    print(report.as_json() if options.json else report.as_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
