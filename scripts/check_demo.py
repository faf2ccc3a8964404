"""Looks at what the demo left: equal weights, a loss that fell, and nothing else."""

import hashlib
import json
import sys
from pathlib import Path

LEAST_FALL_NATS = 2.0


def main(work: Path) -> int:
    """Print what was found; return 1 if anything is not as promised."""
    failures = []
    names = ("swarm.safetensors", "reference.safetensors")
    hashes = [hashlib.sha256((work / name).read_bytes()).hexdigest() for name in names]
    report = json.loads((work / "report.json").read_text())
    losses = [loss for _, loss in report["peer"]["losses"]]
    fall = losses[0] - losses[-1]
    replicas = [len(stage["replicas"]) for stage in report["stages"]]
    print(f"stages x replicas   {len(replicas)} x {replicas}, {len(report['members'])} daemons")
    print(f"loss                {losses[0]:.3f} -> {losses[-1]:.3f} in {report['version']} steps")
    for name, digest in zip(names, hashes, strict=True):
        print(f"{name:24}{digest}")
    if hashes[0] != hashes[1]:
        failures.append("the swarm's weights are not those of one process")
    if fall <= LEAST_FALL_NATS:
        failures.append(f"the loss fell by {fall:.3f} nats, not by more than {LEAST_FALL_NATS}")
    left = sorted(path.name for path in work.iterdir() if path.name not in (*names, "report.json"))
    if left:
        failures.append(f"temporary files were left: {', '.join(left)}")
    alive = _processes_naming(str(work))
    if alive:
        failures.append(f"processes were left: {', '.join(alive)}")
    for failure in failures:
        print(f"error: {failure}", file=sys.stderr)
    if not failures:
        print("equal, bit by bit; no process and no file was left")
    return 1 if failures else 0


def _processes_naming(text: str) -> list[str]:
    """Return living processes, this one aside, that have `text` in their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except (OSError, ValueError):
            continue
        if text in line and "check_demo" not in line:
            found.append(f"{entry.name} {line}")
    return found


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
