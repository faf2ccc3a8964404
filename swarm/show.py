"""What a person sees: progress, status tables, the reference's progress and hash."""

import os
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from protocol.records import Training

LINES_WITHOUT_TERMINAL = 10


class Progress:
    """A progress bar on standard error; some plain lines where that is no terminal."""

    def __init__(self, training: Training) -> None:
        self._steps = training.steps
        self._console = Console(stderr=True)
        self._bar: Bar | None = None
        self._printed = ""
        if self._console.is_terminal:
            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.completed}/{task.total} steps"),
                TimeElapsedColumn(),
                console=self._console,
            )
            self._task = self._bar.add_task(escape(training.name), total=training.steps)

    def __enter__(self) -> "Progress":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, status: dict[str, Any]) -> None:
        """Show the state of the swarm (daemon.status)."""
        peers = f"{len(status['members'])} {'peer' if len(status['members']) == 1 else 'peers'}"
        if status["phase"] not in ("training", "ended"):
            text = f"{status['phase']}, {peers}"
        else:
            loss = "-" if status["loss"] is None else f"{status['loss']:.4f}"
            text = f"loss {loss}  {status['samples_per_second']:.1f} samples/s  {peers}"
        self.show(int(status["version"]), text)

    def show(self, version: int, text: str) -> None:
        """Show that `version` steps are done."""
        if self._bar is not None:
            self._bar.update(self._task, completed=version, description=escape(text))
            return
        every = max(1, self._steps // LINES_WITHOUT_TERMINAL)
        key = f"{version // every} {text.partition(' ')[0] if version == 0 else ''}"
        if key != self._printed:
            self._printed = key
            print(f"step {version}/{self._steps}  {text}", file=sys.stderr, flush=True)


def print_status(status: dict[str, Any]) -> None:
    """Print `swarm status` for a person."""
    console = Console(soft_wrap=True, highlight=False)
    loss = "-" if status["loss"] is None else f"{status['loss']:.4f}"
    lines = [
        f"run {status['run'][:16]}… {status['name']}: {status['phase']}",
        f"step {status['version']}/{status['steps']}, loss {loss}, "
        f"{status['samples_per_second']:.1f} samples/s",
        f"epoch {status['epoch']}: {status['plan_reason']}",
        f"leader {status['leader']}",
    ]
    if status["waiting_for_peers"]:
        lines.append(f"waiting for {status['waiting_for_peers']} more peer(s)")
    troubles = ("trouble", "planning_trouble", "disk_trouble", "council_note")
    lines += [status[key] for key in troubles if status[key]]
    for line in lines:
        console.print(plain(line))
    console.print(_members_table(status))


def _members_table(status: dict[str, Any]) -> Table:
    """One row for each replica of the plan, then one for every other member."""
    table = Table("stage", "layers", "peer", "state", "version", "queue", "heard", "rtt")
    members = {member["peer"]: member for member in status["members"]}
    rows = [
        (str(stage["stage"]), f"{stage['first_layer']}-{stage['last_layer']}", replica["peer"])
        for stage in status["stages"]
        for replica in stage["replicas"]
    ]
    placed = {peer for _, _, peer in rows}
    rows += [("-", "-", peer) for peer in members if peer not in placed]
    for stage_number, layers, peer in rows:
        peer_cell, member = plain(short(peer)), members.get(peer)
        if member is None:
            table.add_row(stage_number, layers, peer_cell, "not heard of", "-", "-", "-", "-")
            continue
        table.add_row(
            stage_number,
            layers,
            peer_cell,
            plain(member["state"]),
            str(member["version"]),
            str(member["queue_length"]),
            f"{member['silent_seconds']:.1f} s ago",
            f"{1000 * member['rtt_seconds']:.1f} ms",
        )
    return table


def short(peer: str) -> str:
    """Return the end of a peer id: all begin alike, and lines are short."""
    return f"…{peer[-8:]}" if len(peer) > 9 else peer


def plain(text: str) -> Text:
    """Return text as it is: others have written it, so nothing in it is markup or control."""
    return Text("".join(character if character.isprintable() else "?" for character in text))


def run_reference_command(training: Training, data_dir: Path, device: str, out: Path | None) -> int:
    """Train in this one process, print the SHA-256 of the exported weights."""
    # Imported here: torch takes seconds, and other commands do not need it.
    from swarm.adapters.datasets import open_source
    from swarm.adapters.durable import write_file_durably
    from swarm.adapters.reference import run_reference
    from swarm.adapters.weights import weights_hash
    from swarm.core.dataorder import sample_ids

    source = open_source(training, data_dir)
    samples = len(source)

    def ids(step: int, index: int) -> tuple[int, ...]:
        return sample_ids(
            training.seed,
            step,
            index,
            microbatches=training.microbatches_per_step,
            microbatch_size=training.microbatch_size,
            samples=samples,
        )

    with Progress(training) as progress:

        def show(step: int, loss: float | None) -> None:
            progress.show(step, "loss -" if loss is None else f"loss {loss:.4f}")

        with tempfile.TemporaryDirectory(prefix="swarm-reference-") as scratch:
            # torch's compiler makes this folder as soon as an optimiser exists.
            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", scratch)
            exported = run_reference(training, source, ids, show, device)
    if out is not None:
        write_file_durably(out, exported)
    print(f"{weights_hash(exported)}  {out or 'not kept: no --out'}")
    return 0
