"""Whole scenarios: seconds and bytes as the cost model says, and what is told of them."""

import dataclasses
import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from protocol.records import PlanBody
from swarm.cli import main
from swarm.core.scheduling.cost import predict
from swarm.core.scheduling.problem import Assignment, Standby
from swarm.errors import ConfigError, SimulationError
from swarm.peer import feeder, pipeline
from swarm.simulation.conditions import Conditions
from swarm.simulation.report import Report, told
from swarm.simulation.scenario import Scenario
from swarm.simulation.simulate import Simulated, simulate
from swarm.simulation.upper_bound import UpperBounds
from tests.simulation.scenes import SMALL, small

AGREES = 0.12
"""Simulated and predicted seconds of a step may differ by so much: the model counts the whole way
of one microbatch besides all the others', and no sharing between reduction and microbatches."""


def step_seconds(report: Report) -> float:
    """Return the mean seconds of a step; the first two come while peers still join the council."""
    steps = [after - before for before, after in pairwise(report.commits[1:])]
    assert len(steps) >= 2
    return sum(steps) / len(steps)


def predicted_seconds(scenario: Scenario, report: Report) -> float:
    """Return what the cost model says of the plan that was at work, with true figures."""
    plan = report.plans[-1]
    problem = UpperBounds(scenario).problem(Conditions(scenario).state, range(len(scenario.peers)))
    groups = tuple(tuple(sorted(group)) for group in plan.stages)
    idle = sorted(set(range(len(scenario.peers))) - {peer for group in groups for peer in group})
    assignment = Assignment(
        tuple(plan.ranges), groups, groups[0], tuple(Standby(peer, "") for peer in idle)
    )
    return predict(problem, assignment).step_seconds


@pytest.fixture
def wide_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let replicas take as many microbatches as come: the cost model knows no windows, and what a
    plan grants follows from what its leader has measured by then."""

    def wide(body: PlanBody, stage: int) -> tuple[tuple[int, ...], ...]:
        sources = len(body.stages[stage - 1].replicas) if stage else len(body.feeders)
        return ((64,) * len(body.stages[stage].replicas),) * sources

    for module in (pipeline, feeder):
        monkeypatch.setattr(module, "credit_windows", wide)


def peers(count: int, mbps: float) -> dict[str, str]:
    """Return the change of a scenario to so many peers with such links."""
    return {
        "count = 4": f"count = {count}",
        "uplink_mbps = 1000": f"uplink_mbps = {mbps}",
        "downlink_mbps = 1000": f"downlink_mbps = {mbps}",
    }


@pytest.mark.usefixtures("wide_windows")
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"duration_seconds = 120": "duration_seconds = 70"}, id="compute"),
        pytest.param(
            peers(8, 1000) | {"duration_seconds = 120": "duration_seconds = 50"}, id="groups"
        ),
        pytest.param(peers(4, 40), id="uplinks"),
        pytest.param({"latency_ms = 10": "latency_ms = 400"}, id="latency"),
        pytest.param(
            peers(4, 400) | {"stages = 4": "stages = 1", "parameter_mb = 10": "parameter_mb = 60"},
            id="reduction",
        ),
    ],
)
def test_steps_take_what_the_cost_model_says(changes: dict[str, str]) -> None:
    scenario = small(changes)
    report = simulate(scenario).report
    assert step_seconds(report) == pytest.approx(predicted_seconds(scenario, report), rel=AGREES)


def test_bytes_are_those_of_the_scenarios_tensors() -> None:
    """Over each of three cuts goes an output of 1 MB, there and back, with targets of 10 kB; who
    feeds is stage 0 itself."""
    report = run_small().report
    count = report.summary.microbatches
    assert report.bytes["Forward"] == pytest.approx(count * 3 * 1.01e6, rel=0.1)
    assert report.bytes["Backward"] == pytest.approx(count * 3 * 1e6, rel=0.1)
    assert report.bytes["Forward"] > count * 3 * 1.01e6


_SMALL: list[Simulated] = []


def run_small() -> Simulated:
    """Run the small scenario, once for all who look at it."""
    if not _SMALL:
        _SMALL.append(simulate(small()))
    return _SMALL[0]


def test_an_undisturbed_swarm_loses_nothing_and_is_held_to_its_bound() -> None:
    summary = run_small().report.summary
    assert summary.lost_microbatches == pytest.approx(0.0, abs=1e-6)
    assert summary.repairs == 0
    assert summary.upper_bound == pytest.approx(4 / 1.2)
    assert 0.5 < summary.fraction_of_upper_bound < 1.0
    assert summary.steps * 32 == summary.microbatches
    assert summary.virtual_seconds == 120.0


def test_the_series_adds_up_to_what_was_committed() -> None:
    report = run_small().report
    began = report.summary.began_at_seconds
    assert began is not None
    width = (report.summary.measured_until_seconds - began) / len(report.series)
    total = sum(point.microbatches_per_second for point in report.series) * width
    assert total == pytest.approx(report.summary.microbatches)


def test_the_same_seed_gives_the_same_trace_to_the_byte(tmp_path: Path) -> None:
    """Also in another process, where sets have another order."""
    kill = '[[events]]\naction = "kill"\nat_seconds = 20\nrandom = 1\nseconds = 10\n'
    text = SMALL.replace("count = 4\n", "count = 5\n") + kill
    text = text.replace("duration_seconds = 120", "duration_seconds = 45")
    path = tmp_path / "scenario.toml"
    path.write_text(text)
    traces = []
    for number in range(2):
        trace = tmp_path / f"{number}.txt"
        subprocess.run(
            [
                sys.executable,
                "-m",
                "swarm.cli",
                "simulate",
                path,
                "--duration=45",
                "--trace",
                trace,
            ],
            check=True,
            capture_output=True,
            env=os.environ | {"PYTHONHASHSEED": str(number)},
        )
        traces.append(trace.read_bytes())
    assert traces[0] == traces[1]
    assert b"kill p" in traces[0]


def test_other_seeds_are_other_worlds() -> None:
    trace = simulate(small(seed=2, duration_seconds=10.0), whole_trace=True).trace
    other = simulate(small(seed=3, duration_seconds=10.0), whole_trace=True).trace
    assert trace != other


def test_a_run_with_steps_ends_with_them_and_its_weights_are_checked() -> None:
    report = simulate(
        small(
            {
                "microbatches = 32": "microbatches = 8\nsteps = 3",
                "duration_seconds = 120": "duration_seconds = 0",
            }
        )
    ).report
    assert report.summary.steps == 3
    assert "the run has ended" in report.plans[-1].reason


# --- what happens to peers -----------------------------------------------------------------------


def test_a_killed_peer_costs_work_and_its_stages_state_moves() -> None:
    """It hosts two layers of 10 MB; when it comes back it fetches their weights and two moments
    from the other one of its group."""
    killed = small(
        {"count = 4": "count = 8", "duration_seconds = 120": "duration_seconds = 75"},
        '[[events]]\naction = "kill"\nat_seconds = 40\npeers = [5]\nseconds = 10\n',
    )
    report = simulate(killed).report
    assert report.summary.repairs >= 1
    assert [event.what for event in report.events] == ["killed: p5", "started again: p5"]
    assert [event.seconds for event in report.events] == [40.0, 50.0]
    state = 3 * 2 * 10e6
    assert report.bytes["StateChunk"] > 0.9 * state
    assert report.summary.lost_microbatches > 0
    alive = [point.peers_alive for point in report.series]
    assert (min(alive), max(alive)) == (7, 8)
    assert any("p5 is gone" in plan.reason for plan in report.plans)


def test_a_slow_peer_slows_everybody_and_the_bound_knows_it() -> None:
    slow = small(None, '[[events]]\naction = "slow"\nfactor = 4\nat_seconds = 60\npeers = [1]\n')
    report = simulate(slow).report
    before = [point for point in report.series if 20 < point.seconds < 50]
    after = [point for point in report.series if 90 < point.seconds < 110]
    assert before[0].upper_bound == pytest.approx(4 / 1.2)
    assert after[0].upper_bound == pytest.approx(3.25 / 1.2)
    assert after[0].microbatches_per_second < 0.5 * before[0].microbatches_per_second


def test_a_partition_heals_and_training_goes_on() -> None:
    parted = small(
        None, '[[events]]\naction = "partition"\nat_seconds = 40\npeers = [3]\nseconds = 10\n'
    )
    report = simulate(parted).report
    assert max(report.commits) > 90
    assert any(40 < plan.seconds < 80 and plan.kind == "repair" for plan in report.plans)


def test_a_link_that_goes_bad_is_slower_until_it_is_as_before() -> None:
    bad = small(
        {"duration_seconds = 120": "duration_seconds = 200"},
        '[[events]]\naction = "link"\nat_seconds = 50\nseconds = 80\npeers = [0, 1, 2, 3]\n'
        "uplink_mbps = 8\ndownlink_mbps = 8\n",
    )
    report = simulate(bad).report
    steps = [(after, after - before) for before, after in pairwise(report.commits)]
    quick = [seconds for at, seconds in steps if 25 < at < 50]
    slow = [seconds for at, seconds in steps if 80 < at < 130]
    again = [seconds for at, seconds in steps if at > 175]
    assert min(slow) > 1.8 * max(quick)  # an output of 1 MB takes 1 s, a stage computes 0.3 s
    assert max(again) == pytest.approx(max(quick), rel=0.1)


def test_who_joins_later_is_there_from_then_on() -> None:
    joining = small(None, "[[peers]]\ncount = 1\njoins_at_seconds = 30\nspeed = 3\n")
    report = simulate(joining).report
    alive = {point.seconds: point.peers_alive for point in report.series}
    assert {count for at, count in alive.items() if at < 30} == {4}
    assert {count for at, count in alive.items() if at > 31} == {5}
    assert any("p4" in plan.reason for plan in report.plans)


def test_a_churn_trace_kills_and_starts_but_for_who_is_steady(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("0,add,one\n50000,remove,one\n60000,add,two\n61000,add,three\n")
    churned = small({"count = 4": "count = 4\nsteady = true"}, "[[peers]]\ncount = 1\n", churn=path)
    report = simulate(churned).report
    assert [event.what for event in report.events] == ["killed: p4", "started: p4"]


def test_with_noise_steps_differ() -> None:
    noisy = simulate(small({"duration_seconds = 120": "duration_seconds = 60\nnoise = 0.05"}))
    lengths = {round(after - before, 3) for before, after in pairwise(noisy.report.commits[1:])}
    assert len(lengths) > 1


# --- what is told --------------------------------------------------------------------------------


def test_people_are_told_rates_plans_and_bytes() -> None:
    text = told(run_small().report)
    summary = run_small().report.summary
    assert f"{summary.steps} steps, {summary.microbatches} microbatches" in text
    assert "% of the upper bound of 3.333" in text
    assert "first plan: 4 peers, 4 stages" in text
    assert "Forward" in text


def scenario_file(folder: Path) -> Path:
    path = folder / "small.toml"
    path.write_text(SMALL)
    return path


def test_programs_are_told_the_same_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = scenario_file(tmp_path)
    assert main(["simulate", str(path), "--json", "--duration", "30", "--seed", "7"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["summary"]["seed"] == 7
    assert found["summary"]["virtual_seconds"] == 30.0
    names = {"fraction_of_upper_bound", "plans", "lost_microbatches", "bytes_moved"}
    assert names <= found["summary"].keys()
    assert set(found) == {field.name for field in dataclasses.fields(Report)}


def test_mistakes_have_codes_and_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = scenario_file(tmp_path)
    path.write_text(SMALL.replace("microbatches", "microbatchs"))
    assert main(["simulate", str(path)]) == ConfigError.exit_code
    assert "did you mean `microbatches`?" in capsys.readouterr().err
    nowhere = str(tmp_path / "no" / "trace.txt")
    assert main(["simulate", str(path), "--trace", nowhere]) == SimulationError.exit_code
    assert "is not a folder" in capsys.readouterr().err


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "picture.png"
    path = scenario_file(tmp_path)
    assert main(["simulate", str(path), "--duration", "20", "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--trace", "{folder}"], "is a folder"),
        (["--trace", "{folder}/small.toml"], "names the same file"),
        (["--trace", "{folder}/one.png", "--plot", "{folder}/one.png"], "names the same file"),
        (["--plot", "{folder}/picture"], "does not end with one of .png, .svg, .pdf"),
    ],
)
def test_what_cannot_be_written_is_refused_before_anything_is_simulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], why: str
) -> None:
    pytest.importorskip("matplotlib")
    path = scenario_file(tmp_path)
    wanted = [each.format(folder=tmp_path) for each in options]
    assert main(["simulate", str(path), *wanted]) == SimulationError.exit_code
    assert why in capsys.readouterr().err
    assert path.read_text() == SMALL


# --- what comes to nothing -----------------------------------------------------------------------

FIVE_STAGES = {"stages = 4": "stages = 5"}


def test_a_swarm_that_never_begins_says_why() -> None:
    report = simulate(small(FIVE_STAGES)).report
    assert "5 stages need 5 peers, 4 have joined" in report.summary.trouble
    assert "it stood still at the end: 5 stages need 5 peers" in told(report)


def test_a_swarm_that_never_ends_is_given_up() -> None:
    endless = {"duration_seconds = 120\n": "", "stages = 4": "stages = 5\nsteps = 4"}
    with pytest.raises(SimulationError, match="stood still for 60 minutes") as failed:
        simulate(small(endless))
    assert "5 stages need 5 peers" in failed.value.evidence[0]


def test_a_step_under_way_at_the_end_does_not_count() -> None:
    """However short the simulation, rates are those of whole steps."""
    rates = []
    for seconds in (60, 90):
        report = simulate(small({"duration_seconds = 120": f"duration_seconds = {seconds}"})).report
        assert report.summary.measured_until_seconds == report.commits[-1]
        rates.append(report.summary.microbatches_per_second)
    assert rates[0] == pytest.approx(rates[1], rel=0.05)


def test_links_without_a_limit_are_as_good_as_ever() -> None:
    event = '[[events]]\naction = "link"\nat_seconds = 20\npeers = [0]\nuplink_mbps = 0\n'
    report = simulate(small({"duration_seconds = 120": "duration_seconds = 60"}, event)).report
    assert report.events[0].what == "other links: p0"
    assert report.commits[-1] > 40


def test_whoever_interrupts_is_told_nothing_of_defects(tmp_path: Path) -> None:
    """The process is interrupted as by Ctrl-C once its first task is computed."""
    path = scenario_file(tmp_path)
    path.write_text(SMALL.replace("duration_seconds = 120", "duration_seconds = 1000000"))
    program = (
        "import os, signal, sys\n"
        "from swarm.cli import main\n"
        "from swarm.simulation.account import Account\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored\n"
        "Account.worked = lambda *_: os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    command = [sys.executable, "-c", program, "simulate", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
