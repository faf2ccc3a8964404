"""`scripts/bench NAME [--json] [--quick]`: run one benchmark and print what it found."""

import argparse
import importlib
import sys

NAMES = ("optimality", "overhead", "recovery", "transport")


def main() -> int:
    """Run the benchmark that the command line names; return the exit code."""
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--quick", action="store_true", help="see that it runs; the numbers mean nothing"
    )
    options = parser.parse_args()
    report = importlib.import_module(f"benchmarks.{options.name}").measure(quick=options.quick)
    print(report.as_json() if options.json else report.as_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
