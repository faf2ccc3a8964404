"""A whole swarm on this machine: N daemons, N processes, until the run is done.

The rule: whatever ends this command ends its daemons, and a temporary home goes with it. The
daemons watch their standard input: however this process goes, they leave.
"""

import contextlib
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE

import trio

from protocol.records import Training
from swarm.adapters.control_socket import ANSWER_SECONDS, call
from swarm.adapters.durable import make_folder, write_file_durably
from swarm.adapters.hivemind_dht import remove_sockets
from swarm.config import PeerSettings
from swarm.errors import NotRunning, RunHalted, SwarmError
from swarm.homes import create_home
from swarm.show import Progress

POLL_SECONDS = 0.5
MAX_REFUSALS = 3
EXPORT_SECONDS = 24 * 3600.0
LEAVE_SECONDS = 15.0
ANY_PORT = "127.0.0.1:0"


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """What `swarm local` was asked to do."""

    training: Training
    peers: int
    stages: int
    home: Path | None
    data_dir: Path
    out: Path | None
    """Where to write the trained weights."""
    report: Path | None
    """Where to write the last status, as JSON."""


class PeerDied(SwarmError):
    """A daemon ended by itself while the run was going."""

    exit_code = 14


def run_local(options: LocalOptions) -> int:
    """Run the swarm to its end; return the exit code. Raises SwarmError."""
    with _homes(options.home) as homes:
        return trio.run(_run, options, homes)


@contextlib.contextmanager
def _homes(kept: Path | None) -> Iterator[Path]:
    if kept is not None:
        make_folder(kept)
        yield kept
        return
    temporary = Path(tempfile.mkdtemp(prefix="swarm-local-"))
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary)


class _Child:
    """One daemon's process."""

    def __init__(self, number: int, home: Path, process: trio.Process, log: Path) -> None:
        self.number = number
        self.home = home
        self.process = process
        self._log = log

    @classmethod
    async def start(cls, number: int, homes: Path, arguments: list[str]) -> "_Child":
        """Start the daemon of `homes`/peer-N and return at once."""
        home = homes / f"peer-{number}"
        log = homes / f"peer-{number}.log"
        command = [sys.executable, "-m", "swarm.cli", "--log-level", "info", "run"]
        with log.open("ab") as stderr:
            process = await trio.lowlevel.open_process(
                [*command, "--home", str(home), "--with-parent", *arguments],
                stdin=PIPE,
                stdout=PIPE,
                stderr=stderr,
                # Ctrl-C is for this process: the daemons are told to leave in order.
                start_new_session=True,
            )
        return cls(number, home, process, log)

    async def ready(self) -> None:
        """Wait until the daemon listens. Raises PeerDied if it ends instead."""
        assert self.process.stdout is not None
        said = b""
        while not said.startswith(b"ready ") and b"\nready " not in said:
            data = await self.process.stdout.receive_some(4096)
            if not data:
                await self.process.wait()
                raise self.died()
            said += data

    async def keep_output(self) -> None:
        """Move what the model prints into the log: a full pipe would stop the daemon."""
        assert self.process.stdout is not None
        with (
            self._log.open("ab", buffering=0) as log,
            contextlib.suppress(trio.ClosedResourceError),
        ):
            while data := await self.process.stdout.receive_some(65536):
                log.write(data)

    def died(self) -> PeerDied:
        """Return what there is to say about a daemon that has ended."""
        lines = self._log.read_text(errors="replace").splitlines()
        told = [n for n, line in enumerate(lines) if line.startswith("error: ")]
        last = lines[told[-1] :] if told else lines[-5:]
        error = PeerDied(
            f"peer {self.number} ended with exit code {self.process.returncode}",
            evidence=tuple(last),
            hint="with --home DIR the peers' logs are kept in DIR",
        )
        if told and self.process.returncode and self.process.returncode > 0:
            error.exit_code = self.process.returncode
        return error

    async def leave(self) -> None:
        """Let the daemon leave in order; kill it if it does not."""
        with trio.CancelScope(shield=True):
            assert self.process.stdin is not None
            await self.process.stdin.aclose()
            with trio.move_on_after(LEAVE_SECONDS):
                await self.process.wait()
            if self.process.returncode is None:
                print(f"peer {self.number} did not leave and is killed", file=sys.stderr)
                self.process.kill()
                await self.process.wait()
                remove_sockets(self.home)
            if self.process.stdout is not None:
                await self.process.stdout.aclose()


async def _run(options: LocalOptions, homes: Path) -> int:
    settings = PeerSettings(
        listen=ANY_PORT,
        data_dir=str(options.data_dir),
        wait_for_peers=options.peers,
        stages=options.stages,
    )
    create_home(homes / "peer-0", options.training, settings)
    children: list[_Child] = []
    result = 130
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_cancel_on_signal, nursery.cancel_scope)
        try:
            await _start_all(options, homes, children, nursery)
            result = await _watch(options, children)
        finally:
            async with trio.open_nursery() as leaving:
                for child in children:
                    leaving.start_soon(child.leave)
        nursery.cancel_scope.cancel()
    return result


async def _cancel_on_signal(scope: trio.CancelScope) -> None:
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            scope.cancel()


async def _start_all(
    options: LocalOptions, homes: Path, children: list[_Child], nursery: trio.Nursery
) -> None:
    founder = await _Child.start(0, homes, ["--host-label", "local-0"])
    children.append(founder)
    await founder.ready()
    nursery.start_soon(founder.keep_output)
    invitation = str((await _call(founder.home, "invite"))["invitation"])
    for number in range(1, options.peers):
        arguments = ["--join", invitation, "--listen", ANY_PORT]
        arguments += ["--data-dir", str(options.data_dir), "--host-label", f"local-{number}"]
        children.append(await _Child.start(number, homes, arguments))
    for child in children[1:]:
        await child.ready()
        nursery.start_soon(child.keep_output)


async def _watch(options: LocalOptions, children: list[_Child]) -> int:
    """Show progress until the run has ended; export. Raises RunHalted, PeerDied, NotRunning."""
    refusals = 0
    with Progress(options.training) as progress:
        while True:
            for child in children:
                if child.process.poll() is not None:
                    raise child.died()
            try:
                status = await _call(children[0].home, "status")
            except NotRunning:
                refusals += 1
                if refusals > MAX_REFUSALS:
                    raise
                await trio.sleep(POLL_SECONDS)
                continue
            refusals = 0
            progress.update(status)
            if status["phase"] == "ended":
                break
            if status["phase"] == "halted":
                raise RunHalted("training has stopped", evidence=(str(status["trouble"]),))
            await trio.sleep(POLL_SECONDS)
    out = options.out or children[0].home / "weights.safetensors"
    result = await _call(children[0].home, "export", EXPORT_SECONDS, path=str(out.resolve()))
    print(f"{result['sha256']}  {options.out or 'not kept: no --out'}")
    if options.report is not None:
        write_file_durably(options.report, json.dumps(status, indent=2).encode() + b"\n")
    return 0


async def _call(
    home: Path, command: str, seconds: float = ANSWER_SECONDS, **arguments: object
) -> dict[str, object]:
    return await trio.to_thread.run_sync(
        lambda: call(home, command, seconds=seconds, **arguments), abandon_on_cancel=True
    )
