"""The command line: arguments, error text, exit codes (docs/cli.md)."""

import argparse
import contextlib
import json
import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import trio

from protocol.records import Training
from swarm import __version__
from swarm.adapters.control_socket import call
from swarm.adapters.disk import KEY_BYTES, Home
from swarm.config import PeerSettings, read_training, settings_of
from swarm.errors import (
    DataError,
    ExportError,
    HomeError,
    JoinError,
    NoFeasiblePlan,
    NotRunning,
    RecoveryError,
    SwarmError,
)
from swarm.homes import Overrides, create_home, invitation_of, join_home, parse_invitation
from swarm.local import LocalOptions, run_local
from swarm.node import Node, advertised_hosts
from swarm.peer.discovery import with_port

INTERRUPTED, BUG = 130, 70
EXPORT_SECONDS = 24 * 3600.0
DEFAULT_LISTEN = "127.0.0.1:31337"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code."""
    _open_standard_streams()
    options = _parser().parse_args(arguments)
    logging.basicConfig(
        level=(options.log_level or ("info" if options.command is _run else "warning")).upper(),
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
        stream=sys.stderr,
    )
    command: Callable[[argparse.Namespace], int] = options.command
    try:
        code = command(options)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BaseExceptionGroup as group:
        return _report_group(group)
    except SwarmError as error:
        return _report(error)
    except BrokenPipeError:  # whoever reads has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _open_standard_streams() -> None:
    """A daemon may be started with closed standard streams; libraries expect that they exist."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w"))


def _report(error: SwarmError) -> int:
    print(f"error: {error}", file=sys.stderr)
    return error.exit_code


def _report_group(group: BaseExceptionGroup[BaseException]) -> int:
    """Tell a person's mistake in a sentence, and our own with everything that helps."""
    theirs, ours = group.split((SwarmError, KeyboardInterrupt))
    if ours is None and theirs is not None:
        leaf: BaseException = theirs
        while isinstance(leaf, BaseExceptionGroup):
            leaf = leaf.exceptions[0]
        return _report(leaf) if isinstance(leaf, SwarmError) else INTERRUPTED
    traceback.print_exception(group)
    print("error: this is a defect of swarm; please report the lines above", file=sys.stderr)
    return BUG


# --- commands ---------------------------------------------------------------------------


def _create(options: argparse.Namespace) -> int:
    training = read_training(options.manifest)
    _check_shape(training, options)
    settings = settings_of(
        {
            "listen": options.listen,
            "advertise": options.advertise,
            "wait_for_peers": options.peers,
            "stages": options.stages,
            "data_dir": str(options.data_dir.resolve()),
        },
        "command line",
    )
    manifest = create_home(options.home, training, settings)
    with Home.open(options.home) as home:
        print(invitation_of(home, _addresses(settings)).encode())
    print(
        f"run {manifest.run.hex()} is made; start it with `swarm run --home {options.home}`",
        file=sys.stderr,
    )
    if settings.listen.endswith(":0"):
        print("its port is chosen then: `swarm invite` has the invitation to use", file=sys.stderr)
    return 0


def _run(options: argparse.Namespace) -> int:
    overrides = Overrides(
        listen=options.listen,
        device=options.device,
        data_dir=str(options.data_dir.resolve()) if options.data_dir else None,
        threads=options.threads,
        host_label=options.host_label,
        advertise=options.advertise,
    )
    folder = options.home
    if options.join is not None:
        folder = folder or default_home(options.join)
        _prepare_join(folder, options.join, overrides)
    elif folder is None:
        raise HomeError("which home?", hint="name it with --home, or join with --join INVITATION")
    with Home.open(folder) as home:
        trio.run(_run_home, home, overrides, options.with_parent)
    return 0


async def _run_home(home: Home, overrides: Overrides, with_parent: bool) -> None:
    def ready(address: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # nobody may read it
            print(f"ready {address}", flush=True)

    await Node(home, overrides).run(with_parent=with_parent, ready=ready)


def default_home(invitation: str) -> Path:
    """Return the home of this user in the run of an invitation: one for each run."""
    folder = Path(os.environ.get("SWARM_HOME") or Path.home() / ".swarm")
    return folder / parse_invitation(invitation).run.hex()[:16]


def _prepare_join(folder: Path, text: str, overrides: Overrides) -> None:
    """Make the home of a newcomer, unless it is one of this run already."""
    invitation = parse_invitation(text)
    if not Home.exists(folder):
        join_home(folder, invitation, overrides.apply(PeerSettings()))
        return
    with Home.open(folder) as home:
        if home.run_id() != invitation.run:
            raise HomeError(
                f"{folder} is the home of another run",
                evidence=(
                    f"home: {home.run_id().hex()}",
                    f"invitation: {invitation.run.hex()}",
                ),
                hint="choose another folder with --home",
            )
        if home.swarm_key() != invitation.swarm_key:
            raise JoinError(
                "the invitation has another swarm key than the home",
                hint="ask a running peer for a fresh invitation with `swarm invite`",
            )


def _invite(options: argparse.Namespace) -> int:
    try:
        print(call(options.home, "invite")["invitation"])
    except NotRunning as error:
        if not Home.exists(options.home):
            raise
        with Home.open(options.home) as home:
            settings = home.settings()
            if settings.listen.endswith(":0"):
                raise error from None
            print(invitation_of(home, _addresses(settings)).encode())
    return 0


def _addresses(settings: PeerSettings) -> tuple[str, ...]:
    """Return where a peer will be reached once it runs."""
    return with_port(advertised_hosts(settings), settings.listen) or (settings.listen,)


def _status(options: argparse.Namespace) -> int:
    status = call(options.home, "status")
    if options.json:
        print(json.dumps(status, indent=2))
    else:
        # Imported here: the table's library is not needed by daemons.
        from swarm.show import print_status

        print_status(status)
    return 0


def _plan(options: argparse.Namespace) -> int:
    # Imported here: the solver is not needed by daemons, nor the table's library.
    from swarm.show_plan import print_plan, print_what_if, what_if, write_problem

    if options.what_if is None and options.home is None:
        options.usage("name a home with --home, or a problem file with --what-if")
    if options.what_if is not None and (options.home or options.problem):
        options.usage("--what-if is about a file, --home and --problem about a peer that runs")
    if options.what_if is not None:
        answer = what_if(options.what_if)
        print(json.dumps(answer, indent=2)) if options.json else print_what_if(answer)
        return 0
    plan = call(options.home, "plan")
    if options.problem is not None:
        write_problem(options.problem, plan)
    if options.json:
        print(json.dumps(plan, indent=2))
    else:
        print_plan(plan)
    return 0


def _stop(options: argparse.Namespace) -> int:
    call(options.home, "stop")
    return 0


def _recover(options: argparse.Namespace) -> int:
    try:
        key = options.key.read_bytes() if options.key is not None else b""
    except OSError as error:
        raise RecoveryError(
            f"cannot read {options.key}",
            evidence=(str(error),),
            hint="it is the file recovery.key in the founder's home",
        ) from error
    if options.key is not None and len(key) != KEY_BYTES:
        raise RecoveryError(
            f"{options.key} is not a recovery key",
            evidence=(f"it has {len(key)} bytes, a key has {KEY_BYTES}",),
            hint="it is the file recovery.key in the founder's home",
        )
    result = call(options.home, "recover", key=key.hex())
    print(f"generation {result['generation']}: this peer decides alone until others consent")
    return 0


def _export(options: argparse.Namespace) -> int:
    result = call(options.home, "export", seconds=EXPORT_SECONDS, path=str(options.out.resolve()))
    print(f"{result['sha256']}  {options.out}")
    return 0


def _local(options: argparse.Namespace) -> int:
    training = read_training(options.manifest)
    _check_shape(training, options)
    return run_local(
        LocalOptions(
            training=training,
            peers=options.peers,
            stages=options.stages,
            home=options.home,
            data_dir=options.data_dir.resolve(),
            out=options.out,
            report=options.report,
        )
    )


def _reference(options: argparse.Namespace) -> int:
    _check_paths(options)
    # Imported here: torch takes seconds, and other commands do not need it.
    from swarm.show import run_reference_command

    return run_reference_command(
        read_training(options.manifest), options.data_dir.resolve(), options.device, options.out
    )


def _simulate(options: argparse.Namespace) -> int:
    # Imported here: daemons need nothing of it, and it takes a second.
    from swarm.simulation import command

    return command.simulate_command(
        command.Wanted(
            scenario=options.scenario,
            seed=options.seed,
            duration=options.duration,
            network=options.network,
            churn=options.churn,
            as_json=options.json,
            trace=options.trace,
            plot=options.plot,
        )
    )


def _check_shape(training: Training, options: argparse.Namespace) -> None:
    """Refuse what cannot become a plan, before anything is started."""
    stages = len(training.slicing.cuts) + 1 if training.slicing.cuts else options.stages
    if options.peers < 1:
        raise NoFeasiblePlan(
            f"--peers is {options.peers}: a swarm has one peer at least", hint="raise --peers"
        )
    if stages > options.peers:
        raise NoFeasiblePlan(
            f"{stages} stages need as many peers, --peers is {options.peers}",
            hint="raise --peers, or lower --stages (or slicing.cuts in the manifest)",
        )
    _check_paths(options)


def _check_paths(options: argparse.Namespace) -> None:
    """Refuse what would only be noticed at the end, or far from where it was said."""
    for path in (getattr(options, "out", None), getattr(options, "report", None)):
        if path is not None and not path.parent.is_dir():
            raise ExportError(
                f"{path} cannot be written",
                evidence=(f"{path.parent} is not a folder",),
                hint="name a file in a folder that exists",
            )
    if not options.data_dir.is_dir():
        raise DataError(
            f"{options.data_dir} is not a folder",
            hint="name the folder where relative paths of the manifest's [data] start",
        )


# --- arguments ---------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="swarm",
        description="Train one PyTorch model together, on machines that nobody owns together.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"swarm {__version__}")
    parser.add_argument(
        "--log-level",
        choices=["debug", "info", "warning", "error"],
        help="what is logged to standard error; default: info for `run`, else warning",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    create = _command(commands, "create", _create, "make a new run and print its invitation")
    _manifest(create)
    _home(create)
    create.add_argument("--peers", type=int, default=1, help="peers that the first plan waits for")
    create.add_argument("--stages", type=int, default=0, help="stages; 0 chooses by measured time")
    create.add_argument("--listen", default=DEFAULT_LISTEN, metavar="HOST:PORT")
    create.add_argument(
        "--advertise", default="", metavar="HOST", help="how others reach this peer"
    )
    _data_dir(create, Path())

    run = _command(commands, "run", _run, "run the daemon of a home until it is stopped")
    run.add_argument(
        "--home",
        type=Path,
        metavar="DIR",
        help="default with --join: ~/.swarm/RUN",
    )
    run.add_argument("--join", metavar="INVITATION", help="make the home by joining a swarm")
    run.add_argument("--listen", metavar="HOST:PORT", help="where to listen; default loopback")
    run.add_argument("--advertise", metavar="HOST", help="where others reach it")
    run.add_argument("--device", metavar="cpu|cuda:N")
    run.add_argument("--threads", type=int, help="computing threads (default: the manifest's)")
    run.add_argument("--host-label", help="peers with one label are expected to fail together")
    _data_dir(run, None)
    run.add_argument(
        "--with-parent", action="store_true", help="stop when standard input is closed"
    )

    _home(_command(commands, "invite", _invite, "print an invitation"))
    status = _command(commands, "status", _status, "show the swarm as this peer knows it")
    _home(status)
    status.add_argument("--json", action="store_true")
    plan = _command(commands, "plan", _plan, "show the plan, why it was chosen, and what limits it")
    plan.add_argument("--home", type=Path, metavar="DIR", help="of a peer that runs")
    plan.add_argument(
        "--what-if", type=Path, metavar="FILE", help="solve the problem in this file instead"
    )
    plan.add_argument("--problem", type=Path, metavar="FILE", help="write the plan's problem, too")
    plan.set_defaults(usage=plan.error)
    plan.add_argument("--json", action="store_true")
    _home(_command(commands, "stop", _stop, "let the daemon of a home leave"))
    recover = _command(
        commands, "recover", _recover, "start a new council when its majority is lost for good"
    )
    _home(recover)
    recover.add_argument("--key", type=Path, metavar="FILE", help="default: the home's own")
    export = _command(commands, "export", _export, "write the trained weights")
    export.add_argument("out", type=Path, metavar="OUT.safetensors")
    _home(export)

    local = _command(commands, "local", _local, "run a whole swarm on this machine")
    _manifest(local)
    local.add_argument("--peers", type=int, default=2, help="daemons to start; default 2")
    local.add_argument("--stages", type=int, default=0, help="stages; 0 chooses by measured time")
    local.add_argument("--home", type=Path, help="keep the peers' homes in this folder")
    local.add_argument("--out", type=Path, help="write the trained weights to this file")
    local.add_argument("--report", type=Path, help="write the last status to this file, as JSON")
    _data_dir(local, Path())

    simulate = _command(
        commands, "simulate", _simulate, "run a whole swarm on a virtual clock, from a file"
    )
    simulate.add_argument("scenario", type=Path, metavar="SCENARIO.toml")
    simulate.add_argument("--seed", type=int, metavar="N", help="instead of the scenario's")
    simulate.add_argument(
        "--duration", metavar="TIME", help="virtual time: 90s, 10m, 2h or 7d; the scenario's if not"
    )
    simulate.add_argument(
        "--network", type=Path, metavar="FILE", help="latency and bandwidth of every pair, as JSON"
    )
    simulate.add_argument(
        "--churn", type=Path, metavar="FILE", help="lines of milliseconds,add|remove,node"
    )
    simulate.add_argument("--json", action="store_true", help="print figures for programs")
    simulate.add_argument("--trace", type=Path, metavar="FILE", help="write all that happens")
    simulate.add_argument("--plot", type=Path, metavar="FILE", help="draw throughput over time")

    reference = _command(commands, "reference", _reference, "train in one process, print the hash")
    _manifest(reference)
    reference.add_argument("--device", default="cpu", metavar="cpu|cuda:N")
    reference.add_argument("--out", type=Path, help="write the trained weights to this file")
    _data_dir(reference, Path())
    return parser


def _command(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    function: Callable[[argparse.Namespace], int],
    text: str,
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
    parser.set_defaults(command=function)
    return parser


def _manifest(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("manifest", type=Path, metavar="RUN.toml")


def _home(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--home", type=Path, required=True, metavar="DIR")


def _data_dir(parser: argparse.ArgumentParser, default: Path | None) -> None:
    parser.add_argument(
        "--data-dir",
        type=Path,
        default=default,
        help="where relative paths of the manifest's [data] start",
    )


if __name__ == "__main__":
    sys.exit(main())
