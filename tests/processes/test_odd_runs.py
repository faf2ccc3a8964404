"""Runs that go wrong, or are odd: they end with the right weights, or say why not; nobody hangs."""

import json
import signal
import subprocess
from pathlib import Path

import pytest

from swarm.core.silence import SUSPICION_LEAST_SECONDS
from swarm.errors import ExportError, HomeError, ModelError, NotRunning, RunHalted
from tests.processes.swarms import (
    GPT,
    Peer,
    command,
    environment,
    found,
    hash_in,
    manifest,
    swarm,
)

pytestmark = pytest.mark.processes

ODD = """
[model]
factory = "tests.processes.odd_models:{name}"
[data]
source = "text"
files = ["${{stdlib}}/[a-d]*.py"]
sequence_length = 16
[slicing]
cuts = {cuts}
"""


def odd(name: str, cuts: list[int], **changes: object) -> str:
    model = ODD.format(name=name, cuts=cuts).replace("{", "{{").replace("}", "}}")
    return manifest(model, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "cuts", "steps"), [("silent_middle", [1, 3], 4), ("chatty", [1], 40)]
)
def test_odd_models_are_trained_as_in_one_process(
    name: str, cuts: list[int], steps: int, tmp_path: Path
) -> None:
    """A stage without parameters has no gradient to wait for; what is printed fills no pipe."""
    path = tmp_path / "run.toml"
    path.write_text(odd(name, cuts, steps=steps))
    trained = swarm("local", path, "--peers", str(len(cuts) + 1))
    reference = swarm("reference", path)
    # What the model prints comes before the hash.
    assert reference.code == 0, reference.err
    assert hash_in(trained) == reference.out.splitlines()[-1].split()[0]


def test_a_model_that_fails_halts_the_run_and_names_layer_and_microbatch(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(odd("failing", [1], steps=20))
    finished = swarm("local", path, "--peers", "2")
    assert finished.code == RunHalted.exit_code
    assert "layer '1' does not run: RuntimeError: enough is enough" in finished.err
    assert "mb=" in finished.err and "Traceback" not in finished.err
    reference = swarm("reference", path)
    assert reference.code == ModelError.exit_code
    assert "enough is enough" in reference.err and "Traceback" not in reference.err


def training(tmp_path: Path) -> tuple[Peer, Peer]:
    """Start two peers that train for long."""
    home = found(tmp_path / "founder", manifest(GPT, steps=100_000), peers=2, stages=2)
    founder = Peer(home).ready()
    joining = ("--join", founder.invitation(), "--listen", "127.0.0.1:0")
    return founder, Peer(tmp_path / "other", *joining).ready()


def test_without_the_only_voter_nothing_is_decided_and_with_it_back_training_goes_on(
    tmp_path: Path,
) -> None:
    """Two peers are a council of one, and each is the only one to hold its stage: what had been
    trained is lost with it, so that all start from the beginning in a new lineage."""
    founder, other = training(tmp_path)
    with founder, other:
        council = other.status_when(lambda status: status["version"] > 1)["council"]
        founder.process.kill()
        founder.ended()
        status = other.status_when(lambda status: bool(status["planning_trouble"]))
        assert "nobody leads for" in status["planning_trouble"]
        assert f"not reached: {council[0]}" in status["planning_trouble"]
        assert "0 of the council's 1 voters" in status["planning_trouble"]
        with Peer(founder.home).ready() as again:
            for peer in (again, other):
                status = peer.status_when(
                    lambda status: (
                        status["phase"] == "training"
                        and status["version"] > 1
                        and status["lineage"] == 1
                        and not status["planning_trouble"]
                    )
                )
                assert status["trouble"] == ""
                boots = {
                    replica["peer"]: replica["boot"]
                    for stage in status["stages"]
                    for replica in stage["replicas"]
                }
                assert boots[council[0]] == 2


def test_a_stopped_leader_is_noticed_by_the_others_and_by_who_asks_it(tmp_path: Path) -> None:
    founder, other = training(tmp_path)
    with founder, other:
        led = other.status_when(lambda status: status["version"] > 1 and status["leader"])
        leader = led["leader"]
        founder.process.send_signal(signal.SIGSTOP)
        status = other.status_when(lambda status: bool(status["planning_trouble"]))
        assert "nobody leads for" in status["planning_trouble"]
        assert leader in status["planning_trouble"]
        silent = {each["peer"]: each["silent_seconds"] for each in status["members"]}
        assert silent[leader] > SUSPICION_LEAST_SECONDS
        asked = swarm("status", "--home", founder.home)
        assert asked.code == NotRunning.exit_code and "does not answer" in asked.err
        founder.process.send_signal(signal.SIGCONT)
        version = other.status_when(lambda status: not status["planning_trouble"])["version"]
        other.status_when(lambda status: status["version"] > version)


def test_a_key_without_its_hard_state_refuses_to_start(tmp_path: Path) -> None:
    home = found(tmp_path / "home", manifest(GPT), peers=1)
    state = home / "state" / "agreement"
    good = state.read_bytes()
    for damage in (b"", good[:-1], b"\xff" + good[1:]):
        state.write_bytes(damage)
        finished = swarm("run", "--home", home)
        assert finished.code == HomeError.exit_code
        assert "is damaged" in finished.err and "Traceback" not in finished.err
    state.unlink()
    finished = swarm("run", "--home", home)
    assert finished.code == HomeError.exit_code and "is missing" in finished.err


def test_an_export_to_no_file_is_refused_and_ends_nobody(tmp_path: Path) -> None:
    home = found(tmp_path / "home", manifest(GPT, steps=1), peers=1)
    with Peer(home).ready() as peer:
        peer.status_when(lambda status: status["phase"] == "ended")
        for path in ("/", str(tmp_path)):
            finished = swarm("export", path, "--home", home)
            assert finished.code == ExportError.exit_code, finished.err
        good = swarm("export", tmp_path / ("n" * 250), "--home", home)
        assert good.code == 0, good.err


def test_names_are_shown_as_they_are(tmp_path: Path) -> None:
    text = manifest(GPT).replace('name = "small"', 'name = "[/x] \\u001b[31m red"')
    home = found(tmp_path / "home", text, peers=2)
    with Peer(home).ready() as peer:
        finished = swarm("status", "--home", peer.home)
        assert finished.code == 0, finished.err
        assert "[/x]" in finished.out and "\x1b[31m" not in finished.out


def test_a_daemon_with_closed_standard_streams(tmp_path: Path) -> None:
    home = found(tmp_path / "home", manifest(GPT, steps=1), peers=1)
    words = command("run", "--home", home)
    process = subprocess.Popen(
        ["/bin/sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *words], env=environment()
    )
    try:
        ended = False
        while not ended:
            assert process.poll() is None
            finished = swarm("status", "--json", "--home", home)
            ended = finished.code == 0 and json.loads(finished.out)["phase"] == "ended"
        assert swarm("stop", "--home", home).code == 0
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
