"""Scenario files: what is meant, and what is refused in which words."""

import json
import math
import re
from pathlib import Path

import pytest

from swarm.errors import ConfigError
from swarm.simulation.physics import MEMORY_BYTES
from swarm.simulation.scenario import ChurnLine
from swarm.simulation.scenario_file import Overrides, duration_of, parse_scenario, read_scenario
from swarm.simulation.scenario_inputs import read_churn
from tests.simulation.scenes import SMALL, small

EXAMPLES = sorted((Path(__file__).parents[2] / "docs" / "scenarios").glob("*.toml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_can_be_read(path: Path) -> None:
    scenario = read_scenario(path)
    assert scenario.duration_seconds > 0 or scenario.training.steps > 0
    assert len(scenario.peers) > 3


def test_figures_are_turned_into_seconds_and_bytes() -> None:
    scenario = small()
    layer = scenario.costs.layers[0]
    assert (layer.forward_seconds, layer.backward_seconds) == (0.05, 0.1)
    assert (layer.parameter_bytes, layer.output_bytes) == (10_000_000, 1_000_000)
    assert scenario.work_seconds == pytest.approx(1.2)
    assert scenario.country.uplink(0) == 125e6
    assert scenario.country.latency_seconds(0, 1) == 0.01
    assert scenario.country.bytes_per_second(0, 1) == math.inf
    assert scenario.peers[0].memory_bytes == MEMORY_BYTES


def test_seconds_of_the_whole_model_say_the_speed() -> None:
    assert small({"count = 4": "count = 4\nseconds = 0.6"}).peers[3].speed == pytest.approx(2.0)


def test_ways_between_regions_are_theirs_in_both_directions() -> None:
    scenario = small(
        {"count = 4": 'count = 2\nregion = "a"'},
        '[[peers]]\ncount = 2\nregion = "b"\n'
        '[[network.between]]\nregions = ["a", "b"]\nlatency_ms = 80\nbandwidth_mbps = 8\n',
    )
    country = scenario.country
    assert country.latency_seconds(0, 3) == country.latency_seconds(3, 0) == 0.08
    assert country.bytes_per_second(1, 2) == 1e6
    assert country.latency_seconds(0, 1) == 0.01
    assert country.bytes_per_second(2, 3) == math.inf


@pytest.mark.parametrize(
    ("line", "other", "what", "evidence", "hint"),
    [
        ("count = 4", "cuont = 4", "unknown key `cuont` in [peers[0]]", "", "did you mean `count`"),
        ("count = 4", "count = 0", "peers[0].count = 0 cannot be used", "from 1 to 100000", ""),
        ("count = 4", "seconds = 1\nspeed = 2", "peers[0].seconds", "either speed or seconds", ""),
        ("microbatches = 32", "", "training.microbatches is missing", "from 1 to 65536", ""),
        ("duration_seconds = 120", "", "would never end", "neither duration", "--duration 10m"),
        ("duration_seconds = 120", 'rule = "owrs"', "rule", "one of", "did you mean"),
        ("latency_ms = 10", "latency = 10", "unknown key `latency`", "", "`latency_ms`"),
        (
            "parameter_mb = 10",
            "parameter_mb = -1",
            "model.layers[0].parameter_mb",
            "from 0 to 1000000000",
            "",
        ),
        ("forward_seconds = 0.05", "forward_seconds = inf", "forward_seconds = inf", "to 10", ""),
        ("count = 4", "count = 4\nspeed = inf", "peers[0].speed = inf", "from 1e-06 to", ""),
    ],
)
def test_mistakes_are_named(line: str, other: str, what: str, evidence: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        small({line: other})
    assert what in caught.value.what
    assert evidence in " ".join(caught.value.evidence)
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("more", "what", "evidence"),
    [
        ('[[events]]\naction = "kil"\n', "events[0].action", "one of"),
        ('[[events]]\naction = "kill"\nfactor = 2\n', "events[0].factor", 'action = "slow"'),
        ('[[events]]\naction = "slow"\n', "events[0].factor is missing", "how many times"),
        ('[[events]]\naction = "kill"\npeers = [4]\n', "events[0].peers", "from 0 to 3"),
        ('[[events]]\naction = "kill"\nregion = "x"\n', "events[0].region", "a region"),
        ('[[network.between]]\nregions = ["x", "y"]\n', "network.between[0].regions", "a region"),
        ("[churn]\nfile = 3\n", "churn.file = 3", "a text"),
        ("[[peers]]\njoins_at_seconds = 5\n[[swarms]]\n", "unknown key `swarms`", "model"),
    ],
)
def test_mistakes_in_events_are_named(more: str, what: str, evidence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        small(None, more)
    assert what in caught.value.what
    assert evidence in " ".join(caught.value.evidence)


def test_the_founder_is_there_from_the_start() -> None:
    with pytest.raises(ConfigError, match="joins_at_seconds"):
        small({"count = 4": "count = 4\njoins_at_seconds = 3"})


def network_file(folder: Path, **changes: object) -> Path:
    count = 4
    found = {
        "n": count,
        "regions": ["a", "a", "b", "b"],
        "delay_ms": [[10.0 * (i + j) for j in range(count)] for i in range(count)],
        "bandwidth_gbps": [[1.0 if i != j else 0.0 for j in range(count)] for i in range(count)],
    }
    path = folder / "network.json"
    path.write_text(json.dumps(found | changes))
    return path


def test_a_matrix_gives_ways_and_regions(tmp_path: Path) -> None:
    scenario = small(network=network_file(tmp_path))
    assert [peer.region for peer in scenario.peers] == ["a", "a", "b", "b"]
    assert scenario.country.latency_seconds(1, 3) == pytest.approx(0.04)
    assert scenario.country.bytes_per_second(1, 3) == 125e6


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"bandwidth_gbps": [[0.0] * 4] * 4}, "nothing can go"),
        ({"delay_ms": [[1.0] * 3] * 4}, "is no network"),
        ({"n": 3}, "list of 3 rows"),
        ({"regions": ["a"]}, "regions for 4 hosts"),
    ],
)
def test_a_matrix_that_makes_no_sense_is_refused(
    tmp_path: Path, changes: dict[str, object], what: str
) -> None:
    with pytest.raises(ConfigError, match=what):
        small(network=network_file(tmp_path, **changes))


def test_more_peers_than_hosts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="peers = 5"):
        small({"count = 4": "count = 5"}, network=network_file(tmp_path))


def test_a_churn_trace_begins_in_its_middle(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("0,add,one\n1000,add,two\n5000,remove,one\n9000,add,three\n")
    assert read_churn(path)[2] == ChurnLine(5.0, False, "one")
    text = f'{SMALL}[churn]\nfile = "trace.csv"\nstart_seconds = 6\n'
    scenario = parse_scenario(text, "small.toml", tmp_path, Overrides())
    assert scenario.churn == (ChurnLine(0.0, True, "two"), ChurnLine(3.0, True, "three"))


def test_a_line_that_is_no_churn_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("0,add,one\nsoon,add,two\n")
    with pytest.raises(ConfigError) as caught:
        read_churn(path)
    assert caught.value.evidence == ("line 2: soon,add,two",)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("1.5m", 90), ("2h", 7200), ("7d", 604800)]
)
def test_times_are_read(text: str, seconds: float) -> None:
    assert duration_of(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "-5", "0", "1w", "inf"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is no time"):
        duration_of(text)


@pytest.mark.parametrize(
    ("event", "what"),
    [
        ('action = "kill"\nevery_seconds = 1e-9', "events[0].every_seconds"),
        ('action = "link"\npeers = [0]', "events[0].latency_ms"),
        ('action = "link"\nregions = ["a"]\nuplink_mbps = 1', "events[0].regions"),
    ],
)
def test_events_that_mean_nothing_are_refused(event: str, what: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(what)):
        small({"count = 4": 'count = 4\nregion = "a"'}, f"[[events]]\n{event}\n")


@pytest.mark.parametrize("line", ["nan,add,a", "-5,add,a", "1e999,remove,a", "5,add,", ""])
def test_a_trace_with_a_line_that_means_nothing_is_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(line)
    with pytest.raises(ConfigError, match="trace.csv is"):
        read_churn(path)
