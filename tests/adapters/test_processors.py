"""How much of the processors a process may use: affinity, and the quotas of control groups."""

import os
from pathlib import Path

import pytest

from swarm.adapters.processors import available_processors, stretch_of

ALL = float(len(os.sched_getaffinity(0)))


def put(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def own(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "own"
    path.write_text(text)
    return path


def test_without_control_groups_all_processors_may_be_used(tmp_path: Path) -> None:
    assert available_processors(tmp_path / "none", tmp_path / "missing") == ALL
    assert available_processors(tmp_path, own(tmp_path, "0::/user.slice\n")) == ALL


def test_the_least_quota_above_a_process_counts(tmp_path: Path) -> None:
    root = tmp_path / "fs"
    put(root / "a", cpu__max="25000 100000\n")
    put(root / "a" / "b", cpu__max="max 100000\n")
    put(root / "a" / "b" / "c", cpu__max="50000 100000\n")
    put(root / "d", cpu__max="10000 100000\n")  # not ours
    assert available_processors(root, own(tmp_path, "0::/a/b/c\n")) == 0.25


def test_in_a_container_the_root_is_its_own(tmp_path: Path) -> None:
    root = tmp_path / "fs"
    put(root, cpu__max="50000 100000\n")
    assert available_processors(root, own(tmp_path, "0::/docker/1234\n")) == 0.5


@pytest.mark.parametrize("controllers", ["cpu", "cpu,cpuacct"])
def test_version_1(tmp_path: Path, controllers: str) -> None:
    root = tmp_path / "fs"
    put(root / controllers / "x", cpu__cfs_quota_us="10000\n", cpu__cfs_period_us="100000\n")
    put(root / controllers, cpu__cfs_quota_us="-1\n", cpu__cfs_period_us="100000\n")
    lines = f"9:memory:/x\n2:cpuset:/y\n1:{controllers}:/x\n0::/\n"
    assert available_processors(root, own(tmp_path, lines)) == 0.1
    assert available_processors(root, own(tmp_path, f"1:{controllers}:/\n")) == ALL


def test_what_makes_no_sense_is_no_limit(tmp_path: Path) -> None:
    root = tmp_path / "fs"
    for number, text in enumerate(["", "x y", "1 0", "5", "0 100000", "-5 100"]):
        put(root / str(number), cpu__max=text)
        assert available_processors(root, own(tmp_path, f"0::/{number}\n")) == ALL


def test_more_threads_than_processors_take_turns() -> None:
    here = available_processors()
    assert stretch_of(256) == max(1.0, 256 / here)
    assert stretch_of(int(here) if here >= 1 else 0) == 1.0
