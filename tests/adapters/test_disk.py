import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.packing import canonical
from protocol.records import DataSpec, Manifest, ModelSpec, Training, sha256
from protocol.signing import Identity
from swarm.adapters.disk import (
    DiskStorage,
    Home,
    write_file_durably,
)
from swarm.config import PeerSettings
from swarm.core.chain import HARD_STATE, HardState
from swarm.errors import ConfigError, HomeError
from swarm.ports import Storage
from tests.adapters.file_limits import largest_file

SEED = bytes(range(32))
TRAINING = Training("t", 1, 1, 1, ModelSpec("a:b"), DataSpec("text", ("a",), 1))
RECOVERY_SEED = b"r" * 32
RECOVERY = Identity.from_seed(RECOVERY_SEED).peer
MANIFEST = Manifest(TRAINING, Identity.from_seed(SEED).peer, RECOVERY, bytes(32))


def create(folder: Path, recovery_seed: bytes | None = RECOVERY_SEED) -> Home:
    return Home.create(
        folder,
        manifest=MANIFEST,
        swarm_key=b"k" * 32,
        settings=PeerSettings(threads=3),
        seed=SEED,
        recovery_seed=recovery_seed,
    )


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- home ---------------------------------------------------------------------------------


def test_a_home_holds_what_it_was_made_with(tmp_path: Path):
    folder = tmp_path / "new" / "home"
    with create(folder) as home:
        peer = home.identity().peer
    with Home.open(folder) as home:
        assert home.identity().peer == peer == Identity.from_seed(SEED).peer
        assert home.swarm_key() == b"k" * 32
        assert home.manifest() == MANIFEST
        assert home.run_id() == MANIFEST.run
        assert home.settings() == PeerSettings(threads=3)


def test_secrets_are_for_the_owner_only(tmp_path: Path):
    create(tmp_path / "home").close()
    for name in ("identity.key", "swarm.key", "recovery.key", "state/boot", "state/agreement"):
        assert (tmp_path / "home" / name).stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "home").stat().st_mode & 0o777 == 0o700


def test_the_recovery_key_is_in_the_home_that_was_made_with_it(tmp_path: Path):
    with create(tmp_path / "founder") as home:
        recovery = home.recovery()
        assert recovery is not None and recovery.peer == RECOVERY == home.manifest().recovery
    with create(tmp_path / "member", recovery_seed=None) as home:
        assert home.recovery() is None
        assert "recovery.key" not in names(tmp_path / "member")


def test_a_recovery_key_may_be_taken_away_and_brought_back(tmp_path: Path):
    """Its owner keeps it elsewhere: the home is whole without it."""
    create(tmp_path).close()
    key = tmp_path / "recovery.key"
    kept = key.read_bytes()
    key.unlink()
    with Home.open(tmp_path) as home:
        assert home.recovery() is None
        key.write_bytes(kept)
        key.chmod(0o600)
        found = home.recovery()
        assert found is not None and found.peer == RECOVERY


@pytest.mark.parametrize(
    ("content", "mode", "words"),
    [(b"short", 0o600, "has 5 bytes, not 32"), (RECOVERY_SEED, 0o640, "others can read")],
)
def test_a_recovery_key_that_is_damaged_or_no_secret_is_refused(
    tmp_path: Path, content: bytes, mode: int, words: str
):
    with create(tmp_path) as home:
        (tmp_path / "recovery.key").write_bytes(content)
        (tmp_path / "recovery.key").chmod(mode)
        with pytest.raises(HomeError, match=words):
            home.recovery()


def test_a_new_home_knows_the_genesis_and_has_not_voted(tmp_path: Path):
    with create(tmp_path) as home:
        agreement = home.agreement(lambda: 0.5)
    assert agreement.newest.header.epoch == 0
    assert agreement.newest.header.run == MANIFEST.run
    assert agreement.newest.header.council == (MANIFEST.founder,)


def test_what_was_voted_and_accepted_is_there_after_a_restart(tmp_path: Path):
    with create(tmp_path) as home:
        home.storage.save(HARD_STATE, canonical(HardState(term=7, voted_for="somebody")))
    with Home.open(tmp_path) as home:
        assert home.agreement(lambda: 0.5).term == 7


def test_every_home_gets_its_own_identity(tmp_path: Path):
    peers = set()
    for name in ("a", "b"):
        with Home.create(
            tmp_path / name, manifest=MANIFEST, swarm_key=bytes(32), settings=PeerSettings()
        ) as home:
            peers.add(home.identity().peer)
    assert len(peers) == 2


def test_boots_are_counted_across_starts(tmp_path: Path):
    with create(tmp_path) as home:
        assert home.boot() == 0
        assert home.next_boot() == 1
    with Home.open(tmp_path) as home:
        assert [home.next_boot(), home.next_boot()] == [2, 3]
    with Home.open(tmp_path) as home:
        assert home.boot() == 3


def test_a_home_is_used_by_one_at_a_time(tmp_path: Path):
    with create(tmp_path), pytest.raises(HomeError) as caught:
        Home.open(tmp_path)
    assert "in use" in caught.value.what
    assert f"process {os.getpid()} " in caught.value.evidence[0]
    Home.open(tmp_path).close()


def test_the_holder_in_another_process_is_named_and_its_death_frees_the_home(tmp_path: Path):
    create(tmp_path).close()
    code = (
        "import sys; from pathlib import Path; from swarm.adapters.disk import Home\n"
        "home = Home.open(Path(sys.argv[1])); print('open', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        with pytest.raises(HomeError) as caught:
            Home.open(tmp_path)
        process.kill()
    assert f"process {process.pid} " in caught.value.evidence[0]
    Home.open(tmp_path).close()


def test_a_home_is_not_made_twice(tmp_path: Path):
    create(tmp_path).close()
    with pytest.raises(HomeError, match="already"):
        create(tmp_path)
    Home.open(tmp_path).close()


def test_an_interrupted_create_is_no_home_and_can_be_done_again(tmp_path: Path):
    create(tmp_path).close()
    (tmp_path / "identity.key").unlink()
    assert not Home.exists(tmp_path)
    with pytest.raises(HomeError, match="not the home of a peer"):
        Home.open(tmp_path)
    create(tmp_path).close()
    assert Home.exists(tmp_path)


def test_opening_nothing_makes_nothing(tmp_path: Path):
    with pytest.raises(HomeError, match="not the home"):
        Home.open(tmp_path / "absent")
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("state/boot", "is missing"),
        ("state/agreement", "is missing"),
        ("swarm.key", "is missing"),
        ("manifest", "is missing"),
        ("run", "is missing"),
    ],
)
def test_a_key_without_its_state_does_not_start(tmp_path: Path, name: str, words: str):
    create(tmp_path).close()
    (tmp_path / name).unlink()
    with pytest.raises(HomeError) as caught:
        Home.open(tmp_path)
    assert f"{name} {words}" in caught.value.what
    with pytest.raises(HomeError) as again:
        Home.open(tmp_path)
    assert again.value.what == caught.value.what


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("state/boot", b"many", "is damaged"),
        ("state/agreement", b"\x81", "is damaged"),
        ("identity.key", bytes(32), "is not of identity.key and swarm.key"),
        ("swarm.key", bytes(32), "is not of identity.key and swarm.key"),
        ("identity.key", b"short", "has 5 bytes, not 32"),
        ("swarm.key", bytes(33), "has 33 bytes"),
        (
            "manifest",
            canonical(Manifest(TRAINING, "x", RECOVERY, bytes(32))),
            "not the manifest of the run",
        ),
        ("run", b"0" * 63, "64 hexadecimal digits"),
    ],
)
def test_damage_is_told(tmp_path: Path, name: str, content: bytes, words: str):
    create(tmp_path).close()
    (tmp_path / name).write_bytes(content)
    with pytest.raises(HomeError, match=words):
        Home.open(tmp_path)


def test_bytes_with_the_right_hash_must_still_be_a_manifest(tmp_path: Path):
    create(tmp_path).close()
    (tmp_path / "manifest").write_bytes(b"\x80")
    (tmp_path / "run").write_text(sha256(b"\x80").hex())
    with pytest.raises(HomeError, match="does not decode"):
        Home.open(tmp_path)


def test_a_key_that_others_can_read_is_refused(tmp_path: Path):
    create(tmp_path).close()
    (tmp_path / "identity.key").chmod(0o644)
    with pytest.raises(HomeError) as caught:
        Home.open(tmp_path)
    assert "0644" in caught.value.evidence[0]
    assert "chmod 600" in caught.value.hint


def test_missing_settings_are_a_config_error(tmp_path: Path):
    with create(tmp_path) as home:
        home.settings_path.unlink()
        with pytest.raises(ConfigError, match="cannot read"):
            home.settings()


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"")
    for folder in (tmp_path / "file", tmp_path / "file" / "home"):
        with pytest.raises(HomeError) as caught:
            create(folder)
        assert str(tmp_path / "file") in caught.value.what
        assert caught.value.evidence[0].startswith("errno ")


def test_leftovers_of_a_crash_are_removed_when_the_home_opens(tmp_path: Path):
    create(tmp_path).close()
    before = names(tmp_path), names(tmp_path / "state")
    (tmp_path / ".manifest.0123abcd.tmp").write_bytes(b"half")
    (tmp_path / "state" / ".boot.0123abcd.tmp").write_bytes(b"half")
    Home.open(tmp_path).close()
    assert (names(tmp_path), names(tmp_path / "state")) == before


# --- storage -------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["vote", "plan.1", "chain"]), st.binary(max_size=99))))
def test_storage_returns_what_was_saved_last(tmp_path_factory, saves):
    folder = tmp_path_factory.mktemp("state")
    storage: Storage = DiskStorage(folder)
    for name, data in saves:
        storage.save(name, data)
    again = DiskStorage(folder)
    for name in ("vote", "plan.1", "chain"):
        assert again.load(name) == dict(saves).get(name)
    assert set(names(folder)) == set(dict(saves))


@given(data=st.binary(max_size=40), at=st.integers(0, 10_000))
@settings(max_examples=50, deadline=None)
def test_no_bit_of_what_was_saved_may_change(tmp_path_factory, data: bytes, at: int):
    storage = DiskStorage(tmp_path_factory.mktemp("state"))
    storage.save("vote", data)
    (path,) = storage._folder.iterdir()
    content = bytearray(path.read_bytes())
    content[at % len(content)] ^= 1 << at % 8
    path.write_bytes(content)
    with pytest.raises(HomeError, match="is damaged"):
        storage.load("vote")


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "A", "x" * 101])
def test_storage_refuses_names_that_are_paths(tmp_path: Path, name: str):
    with pytest.raises(ValueError, match="not a name"):
        DiskStorage(tmp_path).save(name, b"")


def test_a_full_disk_leaves_the_old_state_and_no_half_file(tmp_path: Path):
    storage = DiskStorage(tmp_path)
    storage.save("vote", b"old")
    with largest_file(1000), pytest.raises(HomeError) as caught:
        storage.save("vote", bytes(5000))
    assert "cannot write" in caught.value.what
    assert errno.errorcode[errno.EFBIG] in caught.value.evidence[0]
    assert "bytes are free" in caught.value.evidence[1]
    assert storage.load("vote") == b"old"
    assert names(tmp_path) == ["vote"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_no_space_is_told_with_what_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    real = os.open

    def full(path, flags, mode=0o777, **rest):
        made = real(path, flags, mode, **rest)
        if str(path).endswith(".tmp"):
            os.close(made)
            return real("/dev/full", os.O_WRONLY)
        return made

    monkeypatch.setattr(os, "open", full)
    with pytest.raises(HomeError) as caught:
        write_file_durably(tmp_path / "out", bytes(100))
    assert "ENOSPC" in caught.value.evidence[0]
    assert "free some space" in caught.value.hint
    assert names(tmp_path) == []


def test_an_interrupt_leaves_no_half_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupted(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_file_durably(tmp_path / "out", bytes(100))
    assert names(tmp_path) == []


def test_bytes_are_synced_before_they_get_their_name(tmp_path: Path, monkeypatch):
    events = []
    sync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        kind = "folder" if Path(f"/proc/self/fd/{descriptor}").is_dir() else "file"
        events.append(f"fsync {kind}")
        sync(descriptor)

    def replaced(source: Path, target: Path) -> None:
        assert Path(source).read_bytes() == b"data"
        events.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    write_file_durably(tmp_path / "out", b"data")
    assert events == ["fsync file", "rename", "fsync folder"]


def test_a_durable_file_has_the_returned_hash_and_ordinary_rights(tmp_path: Path):
    data = os.urandom((2 << 20) + 7)
    before = os.umask(0o027)
    try:
        digest = write_file_durably(tmp_path / "out", memoryview(data))
    finally:
        os.umask(before)
    assert (tmp_path / "out").read_bytes() == data
    assert digest == sha256(data)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o640
