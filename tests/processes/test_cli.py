"""What a person meets who makes a mistake: what, evidence, next step, and an exit code."""

import os
import select
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from protocol.invitation import Invitation, parse
from swarm.errors import (
    AddressError,
    ConfigError,
    DataError,
    ExportError,
    HomeError,
    JoinError,
    ModelError,
    NotRunning,
    RecoveryError,
    RunHalted,
)
from tests.processes.swarms import (
    GPT,
    SGD,
    Finished,
    Peer,
    command,
    environment,
    found,
    hash_in,
    manifest,
    pids_naming,
    swarm,
)

pytestmark = pytest.mark.processes


def told(finished: Finished, *texts: str) -> None:
    """The error is for a person: it says these things, has a next step and no traceback."""
    assert "Traceback" not in finished.err
    assert "error: " in finished.err and "try: " in finished.err
    for text in texts:
        assert text in finished.err


def test_a_typing_error_in_the_manifest(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(manifest(GPT).replace("microbatch_size", "microbatch_sise"))
    finished = swarm("local", path)
    assert finished.code == ConfigError.exit_code
    told(finished, "microbatch_sise", "microbatch_size")


def test_a_model_that_does_not_import(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(manifest(GPT).replace("swarm.models.gpt:layers", "no.such.model:layers"))
    for arguments in (("reference",), ("local", "--peers", "1")):
        finished = swarm(arguments[0], path, *arguments[1:])
        assert finished.code == ModelError.exit_code
        told(finished, "no.such.model")


def test_data_that_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(manifest(GPT).replace("${stdlib}", "/nowhere/at/all"))
    for arguments in (("reference",), ("local", "--peers", "1")):
        finished = swarm(arguments[0], path, *arguments[1:])
        assert finished.code == DataError.exit_code
        told(finished, "/nowhere/at/all")


def test_an_output_that_cannot_be_written_is_told_before_anything_is_trained(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(manifest(GPT, steps=10**6))
    finished = swarm("reference", path, "--out", tmp_path / "no" / "weights")
    assert finished.code == ExportError.exit_code
    told(finished, str(tmp_path / "no" / "weights"))


def test_a_recovery_key_that_is_not_there(tmp_path: Path) -> None:
    home = found(tmp_path / "home", manifest(GPT), peers=1)
    finished = swarm("recover", "--home", home, "--key", tmp_path / "no.key")
    assert finished.code == RecoveryError.exit_code
    told(finished, str(tmp_path / "no.key"))


def test_nobody_has_to_read_what_a_command_says(tmp_path: Path) -> None:
    home = found(tmp_path / "home", manifest(GPT), peers=1)
    (home / "peer.toml").write_text(
        (home / "peer.toml").read_text().replace("127.0.0.1:0", "127.0.0.1:31337")
    )
    asked = subprocess.Popen(
        command("invite", "--home", home),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    assert asked.stdout is not None
    asked.stdout.close()
    _, complaint = asked.communicate(timeout=60)
    assert (asked.returncode, complaint) == (0, b"")


def test_hints_of_an_earlier_start_that_are_damaged_are_not_used(tmp_path: Path) -> None:
    home = found(tmp_path / "home", manifest(GPT, steps=1), peers=1)
    (home / "state" / "dht-port").write_bytes(b"\xff")
    (home / "state" / "invitation").write_bytes(b"\xff")
    (home / "dht-sockets").write_bytes(b"\xff")
    with Peer(home).ready() as peer:
        peer.status_when(lambda status: status["phase"] == "ended")


def test_a_port_in_use(tmp_path: Path) -> None:
    home = found(tmp_path / "home", manifest(GPT), peers=1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        finished = swarm("run", "--home", home, "--listen", address)
    assert finished.code == AddressError.exit_code
    told(finished, address, "--listen")
    assert not (home / "control.sock").exists()


def test_a_second_daemon_in_one_home(tmp_path: Path) -> None:
    home = found(tmp_path / "home", manifest(GPT), peers=2)
    with Peer(home).ready() as peer:
        finished = swarm("run", "--home", home)
        assert finished.code == HomeError.exit_code
        told(finished, "in use", str(peer.process.pid))
        assert peer.status()["phase"] in ("measuring", "joining", "waiting for peers")


def test_no_daemon(tmp_path: Path) -> None:
    home = found(tmp_path / "home", manifest(GPT), peers=1)
    for name in ("status", "stop"):
        finished = swarm(name, "--home", home)
        assert finished.code == NotRunning.exit_code
        told(finished, str(home))


def test_wrong_invitations(tmp_path: Path) -> None:
    home = found(tmp_path / "home", manifest(GPT), peers=2)
    with Peer(home).ready() as founder:
        good = parse(founder.invitation())
        newcomer = tmp_path / "newcomer"
        wrong_key = Invitation(good.run, bytes(32), good.addresses, good.dht_addresses)
        finished = swarm("run", "--home", newcomer, "--join", wrong_key.encode())
        assert finished.code == JoinError.exit_code
        told(finished, "certificate is not of this swarm", good.addresses[0])

        other_run = Invitation(bytes(32), good.swarm_key, good.addresses, ())
        finished = swarm("run", "--home", newcomer, "--join", other_run.encode())
        assert finished.code == JoinError.exit_code
        told(finished, "another run", good.run.hex()[:16])

        finished = swarm("run", "--home", newcomer, "--join", good.encode()[:-3])
        assert finished.code == JoinError.exit_code
        told(finished, "invitation")

        nobody = Invitation(good.run, good.swarm_key, ("127.0.0.1:1",), ())
        finished = swarm("run", "--home", newcomer, "--join", nobody.encode())
        assert finished.code == JoinError.exit_code
        told(finished, "127.0.0.1:1", "refused")
        assert not newcomer.exists()
        assert founder.status()["members"] is not None


def test_exact_mode_refuses_a_peer_with_two_threads(tmp_path: Path) -> None:
    home = found(tmp_path / "home", manifest(GPT), peers=2)
    with Peer(home).ready() as founder:
        finished = swarm(
            *("run", "--home", tmp_path / "other", "--join", founder.invitation()),
            *("--listen", "127.0.0.1:0", "--threads", "2"),
        )
        assert finished.code == JoinError.exit_code
        told(finished, "numerics fingerprint", "threads=1", "threads=2")
        assert founder.status()["phase"] == "waiting for peers"


def test_numbers_that_stop_being_finite_halt_the_run_and_name_the_layer(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    wild = SGD.replace("0.05", "1e30")
    path.write_text(manifest(GPT, wild, steps=4))
    finished = swarm("local", path, "--peers", "2", "--stages", "2")
    assert finished.code == RunHalted.exit_code
    assert "Traceback" not in finished.err
    assert "non-finite numbers" in finished.err and "layer" in finished.err
    reference = swarm("reference", path)
    assert reference.code == RunHalted.exit_code


def test_a_run_is_watched_and_exported_from_any_peer(tmp_path: Path) -> None:
    text = manifest(GPT, steps=8)
    home = found(tmp_path / "founder", text, peers=2, stages=2)
    out = tmp_path / "weights.safetensors"
    other = tmp_path / "other"
    with Peer(home).ready() as founder:
        joining = ("--join", founder.invitation(), "--listen", "127.0.0.1:0")
        with Peer(other, *joining).ready() as peer:
            for each in (founder, peer):
                status = each.status_when(ended_and_counted)
                assert status["epoch"] == 2 and status["completed_version"] == 8
                assert status["version"] == 8 and status["loss"] > 0
                assert [len(stage["replicas"]) for stage in status["stages"]] == [1, 1]
                assert status["leader"] == founder.status()["peer"]["id"]
            exported = swarm("export", out, "--home", other)
            reference = swarm("reference", tmp_path / "founder.toml")
            assert hash_in(exported) == hash_in(reference)
            assert swarm("stop", "--home", other).code == 0
            assert peer.ended() == 0
        # Both again, in other places: the completed version is still there.
        assert swarm("stop", "--home", home).code == 0
        assert founder.ended() == 0
    with Peer(home).ready() as founder, Peer(other, "--listen", "127.0.0.1:0").ready():
        founder.status_when(lambda status: status["peer"]["dht"]["peers_found"])
        again = swarm("export", tmp_path / "again.safetensors", "--home", home)
        assert hash_in(again) == hash_in(exported)


def test_a_founder_that_starts_again_before_the_first_plan_is_joined_again(
    tmp_path: Path,
) -> None:
    home = found(tmp_path / "founder", manifest(GPT, steps=2), peers=3, stages=3)
    with Peer(home).ready() as founder:
        invitation = founder.invitation()
        joining = ("--join", invitation, "--listen", "127.0.0.1:0")
        with Peer(tmp_path / "second", *joining).ready() as second:
            second.status_when(lambda status: status["phase"] == "waiting for peers")
            founder.process.kill()
            founder.ended()
            second.status_when(lambda status: status["phase"] == "joining")
            address = parse(invitation).addresses[0]
            with (
                Peer(home, "--listen", address).ready() as again,
                Peer(tmp_path / "third", *joining).ready() as third,
            ):
                for peer in (again, second, third):
                    peer.status_when(lambda status: status["phase"] == "ended")


def ended_and_counted(status: dict[str, Any]) -> bool:
    """Whether the run has ended and the last heartbeats have told what was sent."""
    counts = status["bytes_by_kind"]
    return status["phase"] == "ended" and counts.get("Forward", {"sent": 0})["sent"] > 0


def start_local(tmp_path: Path) -> "subprocess.Popen[str]":
    """Start a long run of two peers in a temporary folder of its own; return once it trains."""
    path = tmp_path / "run.toml"
    path.write_text(manifest(GPT, steps=100_000))
    process = subprocess.Popen(
        command("local", path, "--peers", "2", "--stages", "2"),
        env=environment() | {"TMPDIR": str(tmp_path)},
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "samples/s" in line and "loss -" not in line:
            break
    return process


def test_ctrl_c_leaves_no_process_no_socket_no_file(tmp_path: Path) -> None:
    with start_local(tmp_path) as process:
        assert len(pids_naming(tmp_path)) >= 3
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    assert pids_naming(tmp_path) == []
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]


def test_daemons_leave_when_the_command_that_started_them_is_killed(tmp_path: Path) -> None:
    with start_local(tmp_path) as process:
        process.kill()
        process.wait()
        for pid in pids_naming(tmp_path):
            wait_for_end(pid)
    assert pids_naming(tmp_path) == []


def test_a_killed_worker_stops_the_run_with_a_clear_error(tmp_path: Path) -> None:
    with start_local(tmp_path) as process:
        (victim,) = pids_naming(f"run --home {tmp_path}", "peer-1")
        os.kill(victim, signal.SIGKILL)
        assert process.stderr is not None
        text = process.stderr.read()
        assert process.wait(60) != 0
    assert "peer 1 ended" in text and "Traceback" not in text
    assert pids_naming(tmp_path) == []


def wait_for_end(pid: int) -> None:
    """Wait until a process that is not our child has ended."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        assert poll.poll(60_000), f"process {pid} has not ended"
    finally:
        os.close(handle)
