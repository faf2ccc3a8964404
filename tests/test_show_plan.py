"""`swarm plan`: what a person sees, and the problem files that it reads and writes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from swarm.cli import main
from swarm.core.scheduling.problem import problem_from_json, problem_to_json
from swarm.core.scheduling.solver import solve
from swarm.errors import ConfigError
from swarm.peer.plan_view import plan_of
from swarm.show_plan import what_if, write_problem
from tests.core.drafts import FOUR, RUN
from tests.core.plans import PEOPLE
from tests.core.problems import assignment_of, plain_problem
from tests.core.scheduling.test_snapshot import estimates

UNEVEN = plain_problem([1.0, 1.0, 4.0, 1.0], layers=2)
"""Two layers of 3 s."""


def problem_file(folder: Path, text: bytes) -> Path:
    path = folder / "problem.json"
    path.write_bytes(text)
    return path


def test_what_if_solves_the_problem_and_compares_it_with_what_is(tmp_path: Path) -> None:
    now = assignment_of(UNEVEN, [1], [[0], [1]])
    path = problem_file(tmp_path, problem_to_json(replace(UNEVEN, current=now)))
    answer = what_if(path)
    assert answer["current"]["step_seconds"]["predicted"] == pytest.approx(2 * 3 + 10 * 3)
    best = solve(replace(UNEVEN, current=now)).prediction
    assert answer["step_seconds"]["predicted"] == pytest.approx(best.kept_seconds)
    assert answer["is_worth_it"]


def test_what_if_is_not_worth_it_where_nothing_gets_better(tmp_path: Path) -> None:
    best = solve(UNEVEN).assignment
    answer = what_if(problem_file(tmp_path, problem_to_json(replace(UNEVEN, current=best))))
    assert not answer["is_worth_it"]


def test_the_command_prints_tables_for_people_and_json_for_programs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = problem_file(tmp_path, problem_to_json(UNEVEN))
    assert main(["plan", "--what-if", str(path)]) == 0
    text = capsys.readouterr().out
    assert "a step takes" in text and "peer002" in text and "compute" in text
    assert main(["plan", "--what-if", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["stages"]


@pytest.mark.parametrize("text", [b"", b"{", b"{}", b'{"layers": 3}', b"\xff\xff"])
def test_a_file_that_holds_no_problem_says_what_is_wrong(tmp_path: Path, text: bytes) -> None:
    with pytest.raises(ConfigError, match="holds no problem"):
        what_if(problem_file(tmp_path, text))


def test_mistakes_have_an_exit_code_and_a_next_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--what-if", str(tmp_path / "nowhere")]) == ConfigError.exit_code
    assert "swarm plan --problem" in capsys.readouterr().err
    for wanted in (["plan"], ["plan", "--what-if", "a", "--home", "b"]):
        with pytest.raises(SystemExit) as ended:
            main(wanted)
        assert ended.value.code == 2
        assert "--home" in capsys.readouterr().err


def test_the_plan_at_work_says_what_it_promised_and_what_is_measured(tmp_path: Path) -> None:
    """Commits at 0, 10, 12 and 14 s, of which the first two are not of successive steps."""
    known = {PEOPLE[2].peer: estimates(2, slowdown=2.0)}
    commits = [(0, 0.0), (3, 10.0), (4, 12.0), (5, 14.0)]
    told = plan_of(FOUR, RUN.training, known, commits)  # type: ignore[arg-type]
    assert told["measured_step_seconds"] == 2.0
    assert told["claimed_step_seconds"] == FOUR.body.step_seconds
    assert told["estimates"] == {"members": 4, "known": 1}
    [slow] = [
        replica
        for stage in told["stages"]  # type: ignore[attr-defined]
        for replica in stage["replicas"]
        if replica["peer"] == PEOPLE[2].peer
    ]
    assert (slow["speed"], slow["limited_by"], slow["busy"]) == (0.5, "compute", 1.0)
    path = tmp_path / "problem.json"
    write_problem(path, told)
    assert problem_from_json(path.read_bytes()).current is not None


def test_before_two_commits_nothing_is_measured() -> None:
    told = plan_of(FOUR, RUN.training, {}, [(3, 1.0)])  # type: ignore[arg-type]
    assert told["measured_step_seconds"] is None
