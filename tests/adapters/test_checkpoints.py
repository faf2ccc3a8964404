"""Checkpoints are whole or not there, and what is damaged is never data."""

import errno
import json
import os
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.records import sha256
from swarm.adapters.checkpoints import DiskCheckpoints
from swarm.errors import HomeError
from swarm.ports import Checkpoints
from tests.adapters.file_limits import largest_file

T = TypeVar("T")
STATE_HASH = bytes(range(32))


def do(call: Callable[[], Awaitable[T]]) -> T:
    async def main() -> T:
        return await call()

    return trio.run(main)


def write(
    store: Checkpoints, version: int, layers: dict[int, bytes], lineage: int = 0
) -> tuple[bytes, ...]:
    weights = {layer: memoryview(data) for layer, data in layers.items()}
    states = {layer: memoryview(data + b"+") for layer, data in layers.items()}
    return do(lambda: store.write(lineage, version, weights, states, STATE_HASH))


def read(
    store: Checkpoints, version: int, layer: int, kind: str = "weights", lineage: int = 0
) -> bytes | None:
    found = do(lambda: store.read(kind, lineage, version, layer))  # type: ignore[arg-type]
    return None if found is None else bytes(found)


def held(store: Checkpoints) -> list[tuple[int, int]]:
    return [(each.lineage, each.version) for each in do(store.held)]


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_a_checkpoint_gives_back_what_was_written(tmp_path: Path) -> None:
    store = DiskCheckpoints(tmp_path / "new")
    assert do(store.held) == ()
    hashes = write(store, 12, {3: b"three" * 1000, 1: b"one"}, lineage=2)
    assert hashes == (sha256(b"one"), sha256(b"three" * 1000))
    for again in (store, DiskCheckpoints(tmp_path / "new")):
        for _ in range(2):
            assert read(again, 12, 3, "weights", 2) == b"three" * 1000
            assert read(again, 12, 3, "state", 2) == b"three" * 1000 + b"+"
            assert read(again, 12, 1, "weights", 2) == b"one"
        assert do(again.held) == ((2, 12, STATE_HASH, (1, 3), hashes),)
        for kind, lineage, version, layer in (
            ("weights", 2, 12, 2),
            ("weights", 2, 13, 1),
            ("state", 1, 12, 1),
            ("gradient", 2, 12, 1),
        ):
            assert read(again, version, layer, kind, lineage) is None


def test_the_list_is_plain_json(tmp_path: Path) -> None:
    write(DiskCheckpoints(tmp_path), 7, {0: b"zero"}, lineage=1)
    assert json.loads((tmp_path / "1-0000000007" / "checkpoint.json").read_text()) == {
        "lineage": 1,
        "version": 7,
        "state_hash": STATE_HASH.hex(),
        "files": [
            {
                "layer": 0,
                "kind": "weights",
                "file": "layer-00000.weights.safetensors",
                "nbytes": 4,
                "sha256": sha256(b"zero").hex(),
            },
            {
                "layer": 0,
                "kind": "state",
                "file": "layer-00000.state.safetensors",
                "nbytes": 5,
                "sha256": sha256(b"zero+").hex(),
            },
        ],
    }


def test_versions_are_held_when_they_are_whole_oldest_first(tmp_path: Path) -> None:
    store = DiskCheckpoints(tmp_path)
    for lineage, version in ((0, 20), (10, 3), (2, 15), (0, 3)):
        write(store, version, {0: b"x"}, lineage)
    with largest_file(2), pytest.raises(HomeError):
        write(store, 30, {0: b"x", 1: b"too long"})
    assert held(store) == [(0, 3), (0, 20), (2, 15), (10, 3)]
    assert read(store, 30, 0) is None
    (tmp_path / "0-0000000003" / "layer-00000.state.safetensors").write_bytes(b"")
    (tmp_path / "2-0000000015" / "layer-00000.weights.safetensors").unlink()
    assert held(store) == [(0, 20), (10, 3)]


def test_what_a_crash_left_is_removed_at_the_next_start(tmp_path: Path) -> None:
    store = DiskCheckpoints(tmp_path)
    write(store, 5, {0: b"a"})
    before = names(tmp_path)
    for version in (5, 6):
        (tmp_path / f"0-{version:010d}").mkdir(exist_ok=True)
    half = tmp_path / "0-0000000006"
    (half / "layer-00000.weights.safetensors").write_bytes(b"a")
    (half / ".0123456789abcdef.tmp").write_bytes(b"half")
    others = tmp_path / "my-notes"
    others.mkdir()
    again = DiskCheckpoints(tmp_path)
    others.rmdir()
    assert names(tmp_path) == before
    assert held(again) == [(0, 5)]


def test_a_fault_at_any_point_of_writing_leaves_no_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list is the last of five files: whichever is refused, there is no version."""
    rename = os.replace
    store = DiskCheckpoints(tmp_path)
    for refused in range(5):
        written: list[str] = []

        def refusing(source: Path, target: Path, written: list[str] = written) -> None:
            if len(written) == refused:  # noqa: B023
                raise OSError(errno.EIO, "no more")
            written.append(target.name)
            rename(source, target)

        monkeypatch.setattr(os, "replace", refusing)
        with pytest.raises(HomeError, match="no more"):
            write(store, 5, {0: b"a", 1: b"b"})
        assert len(written) == refused and "checkpoint.json" not in written
        assert held(store) == [] and read(store, 5, 0) is None
        assert names(tmp_path) == []
    monkeypatch.undo()
    write(store, 5, {0: b"a", 1: b"b"})
    assert held(store) == [(0, 5)]


def test_weights_and_states_are_of_the_same_layers(tmp_path: Path) -> None:
    store = DiskCheckpoints(tmp_path)
    with pytest.raises(ValueError, match=r"weights of layers \[0\], states of \[\]"):
        do(lambda: store.write(0, 1, {0: memoryview(b"")}, {}, STATE_HASH))
    assert names(tmp_path) == []


def test_writing_a_version_again_replaces_it(tmp_path: Path) -> None:
    store = DiskCheckpoints(tmp_path)
    write(store, 5, {0: b"a", 1: b"b"})
    assert read(store, 5, 1) == b"b"
    write(store, 5, {1: b"c"})
    assert (read(store, 5, 0), read(store, 5, 1)) == (None, b"c")
    assert len(list(tmp_path.glob("*/layer-*"))) == 2


def test_a_version_stays_until_it_is_replaced(tmp_path: Path) -> None:
    """Whatever fails of the new one, the disk has the old one, and nothing else."""
    store = DiskCheckpoints(tmp_path)
    write(store, 5, {0: b"a"})
    before = names(tmp_path)
    with largest_file(2), pytest.raises(HomeError):
        write(store, 5, {0: b"too long", 1: b"x"})
    for each in (store, DiskCheckpoints(tmp_path)):
        assert (read(each, 5, 0), read(each, 5, 0, "state")) == (b"a", b"a+")
        assert read(each, 5, 1) is None
        assert names(tmp_path) == before
    for content in (b"b", b"c", b"d"):
        write(store, 5, {0: content})
        assert read(DiskCheckpoints(tmp_path), 5, 0) == content
        assert len(names(tmp_path)) == len(before)


def test_what_a_crash_left_of_a_replacement_is_removed_at_the_next_start(tmp_path: Path) -> None:
    write(DiskCheckpoints(tmp_path), 5, {0: b"a"})
    before = names(tmp_path)
    place = tmp_path / "0-0000000005"
    (place / "layer-00000.weights.again.safetensors").write_bytes(b"half")
    (place / ".0123456789abcdef.tmp").write_bytes(b"half")
    assert read(DiskCheckpoints(tmp_path), 5, 0) == b"a"
    assert names(tmp_path) == before


def test_a_version_is_forgotten_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DiskCheckpoints(tmp_path)
    for version in (5, 6):
        write(store, version, {0: b"a"})
    assert read(store, 5, 0) == b"a"
    removed = []
    unlink = Path.unlink

    def unlinking(path: Path, missing_ok: bool = False) -> None:
        removed.append(path.name)
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", unlinking)
    do(lambda: store.forget(0, 5))
    monkeypatch.undo()
    assert removed[0] == "checkpoint.json"
    assert read(store, 5, 0) is None
    assert held(store) == [(0, 6)]
    assert [path.name for path in tmp_path.iterdir()] == ["0-0000000006"]
    do(lambda: store.forget(0, 5))
    do(lambda: store.forget(1, 6))
    assert read(store, 6, 0) == b"a"


def test_a_home_that_was_removed_does_not_come_back_half(tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / "checkpoints").mkdir(parents=True)
    store = DiskCheckpoints(home / "checkpoints")
    write(store, 5, {0: b"a"})
    shutil.rmtree(home)
    with pytest.raises(HomeError, match="is gone"):
        write(store, 6, {0: b"a"})
    assert not home.exists()


def test_damage_is_never_data(tmp_path: Path) -> None:
    store = DiskCheckpoints(tmp_path)
    write(store, 5, {0: b"aaaa", 1: b"bbbb"})
    path = tmp_path / "0-0000000005" / "layer-00001.weights.safetensors"
    path.write_bytes(b"bbbc")
    assert read(store, 5, 0) == b"aaaa"
    assert read(store, 5, 1, "state") == b"bbbb+"
    with pytest.raises(HomeError) as caught:
        read(store, 5, 1)
    assert sha256(b"bbbb").hex() in caught.value.evidence[0]
    path.unlink()
    with pytest.raises(HomeError, match="does not exist"):
        read(store, 5, 1)


LISTS = [
    b"",
    b"{}",
    b'{"lineage": 0, "version": 6, "state_hash": "", "files": []}',
    b'{"lineage": 1, "version": 5, "state_hash": "", "files": []}',
    b'{"lineage": 0, "version": 5, "state_hash": "no", "files": []}',
]


@pytest.mark.parametrize("content", LISTS)
def test_a_list_that_is_none_is_damage(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    store = DiskCheckpoints(tmp_path)
    write(store, 5, {0: b"a"})
    (tmp_path / "0-0000000005" / "checkpoint.json").write_bytes(content)
    with pytest.raises(HomeError, match="is damaged"):
        read(store, 5, 0)
    assert held(store) == []
    assert "checkpoint left out" in caplog.text
    write(store, 5, {0: b"b"})
    assert read(store, 5, 0) == b"b"


PLACES = st.tuples(st.integers(0, 2), st.integers(0, 2))


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.booleans(), PLACES), max_size=8))
def test_what_is_held_is_what_was_written_and_not_forgotten(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[bool, tuple[int, int]]]
) -> None:
    folder = tmp_path_factory.mktemp("checkpoints")
    store = DiskCheckpoints(folder)
    expected: dict[tuple[int, int], bytes] = {}
    for number, (writes, place) in enumerate(changes):
        if writes:
            expected[place] = b"%d" % number
            write(store, place[1], {0: expected[place]}, place[0])
        else:
            expected.pop(place, None)
            do(lambda: store.forget(*place))  # noqa: B023
    for each in (store, DiskCheckpoints(folder)):
        assert held(each) == sorted(expected)
        for lineage in range(3):
            for version in range(3):
                wanted = expected.get((lineage, version))
                assert read(each, version, 0, lineage=lineage) == wanted
