import hashlib
import sys
import sysconfig
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from protocol.records import DataSpec, LossSpec, ModelSpec, SampleSpec, Training
from swarm.adapters.datasets import (
    Piece,
    SampleReader,
    ThreadedSource,
    WindowSource,
    open_source,
)
from swarm.errors import DataError
from swarm.ports import DataSource

DATASETS = """
import numpy as np
import torch

class Listed:
    def __init__(self, pairs):
        self.pairs = pairs
    def __len__(self):
        return len(self.pairs)
    def __getitem__(self, index):
        return self.pairs[index]

def tensors(count=5, width=3):
    return Listed([(torch.full((width,), float(i)), torch.tensor(i)) for i in range(count)])

def arrays(count=5, width=3):
    return Listed([(np.full(width, i, np.float32), np.int64(i)) for i in range(count)])

def numbers():
    return Listed([(float(i), i) for i in range(5)])

def ignored():
    return Listed([(torch.zeros(3), torch.tensor([i, -100, -100])) for i in range(4)])

def regression():
    return Listed([(torch.zeros(3), torch.ones(2)) for i in range(4)])

def wrong_dtype():
    return Listed([(torch.zeros(3, dtype=torch.float64), torch.tensor(0))])

def uneven():
    return Listed([(torch.zeros(3 + i), torch.tensor(0)) for i in range(2)])

def single():
    return Listed([torch.zeros(3)])

def objects():
    return Listed([("text", 3)])

def large():
    return Listed([(torch.zeros(3), 2**70)])

def empty():
    return Listed([])

def endless():
    return iter([])

def broken():
    raise KeyError("weights.bin")

not_callable = 3
"""
SAMPLE = SampleSpec("float32", (3,))
TARGET = SampleSpec("int64", (), 5)


def training_of(data: DataSpec, weight: str = "targets") -> Training:
    return Training("test", 1, 1, 2, ModelSpec("a:b"), data, loss=LossSpec(weight=weight))


def text_source(
    folder: Path, *files: str, length: int = 4, weight: str = "targets"
) -> SampleReader:
    return open_source(training_of(DataSpec("text", files, length), weight), folder)


def token_source(
    folder: Path, file: str, dtype="uint16", vocabulary=1000, length=4
) -> SampleReader:
    data = DataSpec("tokens", (file,), length, vocabulary, dtype)
    return open_source(training_of(data), folder)


def ids(buffer: memoryview, *shape: int) -> list:
    return np.frombuffer(buffer, np.int64).reshape(shape).tolist()


@pytest.fixture
def factory_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "my_datasets.py").write_text(DATASETS, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_datasets", raising=False)

    def make(name, sample=SAMPLE, target=TARGET, weight="targets", **arguments):
        path = f"my_datasets:{name}"
        data = DataSpec("factory", factory=path, arguments=arguments, sample=sample, target=target)
        return open_source(training_of(data, weight), tmp_path)

    yield make
    sys.modules.pop("my_datasets", None)


# --- text ---------------------------------------------------------------------------------


def test_text_windows_reach_across_files(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(b"abcde")
    (tmp_path / "b.txt").write_bytes(b"")
    (tmp_path / "c.txt").write_bytes(b"fghijk")
    source = text_source(tmp_path, "*.txt")
    assert len(source) == 2
    inputs, targets, weight = source.microbatch([1, 0])
    assert ids(inputs, 2, 4) == [list(b"efgh"), list(b"abcd")]
    assert ids(targets, 2, 4) == [list(b"fghi"), list(b"bcde")]
    assert weight == 8
    assert inputs.format == "B"
    assert inputs.contiguous
    assert not inputs.readonly


def test_inputs_and_targets_share_no_memory(tmp_path: Path):
    (tmp_path / "a").write_bytes(b"abcdef")
    inputs, targets, _ = text_source(tmp_path, "a").microbatch([0])
    inputs[:] = bytes(len(inputs))
    assert ids(targets, 1, 4) == [list(b"bcde")]


def test_weight_counts_samples_if_the_loss_says_so(tmp_path: Path):
    (tmp_path / "a").write_bytes(bytes(20))
    assert text_source(tmp_path, "a", weight="samples").microbatch([0, 1, 2])[2] == 3


@given(st.lists(st.binary(max_size=30), min_size=1, max_size=6), st.integers(1, 9))
def test_windows_are_slices_of_the_files_end_to_end(tmp_path_factory, contents, length):
    folder = tmp_path_factory.mktemp("text")
    pieces = []
    for number, content in enumerate(contents):
        path = folder / str(number)
        path.write_bytes(b"head" + content)
        pieces.append(Piece(path, 4, len(content)))
    whole = b"".join(contents)
    data = DataSpec("text", ("*",), length)
    if len(whole) < length + 1:
        with pytest.raises(DataError, match="too few"):
            WindowSource(data, LossSpec(), pieces, np.dtype("u1"))
        return
    source = WindowSource(data, LossSpec(), pieces, np.dtype("u1"))
    assert len(source) == (len(whole) - 1) // length
    for sample in range(len(source)):
        inputs, targets, _ = source.microbatch([sample])
        start = sample * length
        assert ids(inputs, length) == list(whole[start : start + length])
        assert ids(targets, length) == list(whole[start + 1 : start + length + 1])


def test_patterns_keep_their_order_and_files_come_once(tmp_path: Path):
    for name in ("b", "a", "sub/c", "sub/deep/d"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(name[-1:].encode() * 4)
    source = text_source(tmp_path, "sub/**/*", "b", "*", "./a", length=3)
    inputs, _, _ = source.microbatch(range(5))
    assert bytes(np.frombuffer(inputs, np.int64).astype(np.uint8)) == b"ccccddddbbbbaaa"


def test_a_file_whose_name_looks_like_a_pattern_is_taken_literally(tmp_path: Path):
    (tmp_path / "a[1].txt").write_bytes(b"12345")
    assert len(text_source(tmp_path, "a[1].txt")) == 1


def test_the_standard_library_is_there_without_installed_packages():
    stdlib = sysconfig.get_path("stdlib")
    source = open_source(
        training_of(DataSpec("text", ("${stdlib}/json/**/*.py", "${stdlib}/abc.py"), 8)), Path(".")
    )
    files = [*sorted(Path(stdlib, "json").glob("*.py")), Path(stdlib, "abc.py")]
    size = sum(path.stat().st_size for path in files)
    assert len(source) == (size - 1) // 8
    with pytest.raises(DataError, match="no file matches"):
        text_source(Path("."), "${stdlib}/site-packages/**/*.py")


def test_the_home_directory_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine").write_bytes(b"12345")
    assert len(text_source(Path("/"), "~/mine")) == 1


def test_a_pattern_without_a_match_is_named_with_where_it_was_looked_for(tmp_path: Path):
    (tmp_path / "folder").mkdir()
    for pattern in ("*.txt", "folder", "missing"):
        with pytest.raises(DataError) as caught:
            text_source(tmp_path, pattern)
        assert pattern in caught.value.what
        assert str(tmp_path / pattern) in caught.value.evidence[0]


def test_too_little_text_says_how_much_is_needed(tmp_path: Path):
    (tmp_path / "a").write_bytes(b"1234")
    with pytest.raises(DataError) as caught:
        text_source(tmp_path, "a")
    assert "4 tokens" in caught.value.what
    assert "needs 5" in caught.value.evidence[0]


def test_a_file_that_shrinks_is_an_error(tmp_path: Path):
    (tmp_path / "a").write_bytes(bytes(100))
    source = text_source(tmp_path, "a")
    (tmp_path / "a").write_bytes(bytes(50))
    assert source.microbatch([0])[2] == 4
    with pytest.raises(DataError, match="shorter"):
        source.microbatch([20])
    with pytest.raises(DataError, match="shorter"):
        source.digest()
    (tmp_path / "a").unlink()
    with pytest.raises(DataError, match="cannot read"):
        source.microbatch([0])


def test_the_digest_is_of_the_content_and_not_of_names(tmp_path: Path):
    (tmp_path / "a").write_bytes(b"hello ")
    (tmp_path / "b").write_bytes(b"world")
    (tmp_path / "c").write_bytes(b"hello world")
    (tmp_path / "d").write_bytes(b"hello worle")
    digest = text_source(tmp_path, "c").digest()
    assert digest == hashlib.sha256(b"tokens uint8 11\nhello world").digest()
    assert text_source(tmp_path, "a", "b").digest() == digest
    assert text_source(tmp_path, "d").digest() != digest


def test_a_digest_of_several_chunks(tmp_path: Path):
    content = np.random.default_rng(0).bytes((1 << 20) + 12345)
    (tmp_path / "a").write_bytes(content)
    expected = hashlib.sha256(b"tokens uint8 %d\n" % len(content) + content).digest()
    assert text_source(tmp_path, "a").digest() == expected


def test_there_is_no_sample_beyond_the_last(tmp_path: Path):
    (tmp_path / "a").write_bytes(bytes(9))
    source = text_source(tmp_path, "a")
    for sample in (-1, 2):
        with pytest.raises(ValueError, match="sample"):
            source.microbatch([sample])


# --- tokens ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int32", "int64"])
def test_raw_and_npy_tokens_give_the_same(tmp_path: Path, dtype: str):
    tokens = np.arange(21, dtype=dtype)
    tokens.tofile(tmp_path / "raw.bin")
    np.save(tmp_path / "array.npy", tokens)
    raw = token_source(tmp_path, "raw.bin", dtype)
    npy = token_source(tmp_path, "array.npy", dtype)
    assert len(raw) == len(npy) == 5
    for source in (raw, npy):
        inputs, targets, weight = source.microbatch([4, 0])
        assert ids(inputs, 2, 4) == [[16, 17, 18, 19], [0, 1, 2, 3]]
        assert ids(targets, 2, 4) == [[17, 18, 19, 20], [1, 2, 3, 4]]
        assert weight == 8
    assert raw.digest() == npy.digest()


@pytest.mark.parametrize(("dtype", "wrong"), [("uint16", 1000), ("int32", -1), ("int64", 2**40)])
def test_a_token_outside_the_vocabulary_is_found_with_its_position(tmp_path, dtype, wrong):
    tokens = np.zeros(600_000, dtype)
    tokens[500_001] = wrong
    tokens.tofile(tmp_path / "tokens")
    source = token_source(tmp_path, "tokens", dtype)
    assert source.microbatch([0])[2] == 4
    for read in (source.digest, lambda: source.microbatch([125_000])):
        with pytest.raises(DataError) as caught:
            read()
        assert str(wrong) in caught.value.what
        assert "position 500001 of 600000" in caught.value.evidence[0]


def test_a_vocabulary_beyond_the_dtype_is_never_left(tmp_path: Path):
    np.full(9, 65535, np.uint16).tofile(tmp_path / "tokens")
    source = token_source(tmp_path, "tokens", vocabulary=100_000)
    assert ids(source.microbatch([1])[0], 4) == [65535] * 4


def test_files_that_are_no_such_array_are_refused(tmp_path: Path):
    (tmp_path / "odd").write_bytes(bytes(11))
    np.save(tmp_path / "wide.npy", np.zeros(20, np.int64))
    np.save(tmp_path / "flat.npy", np.zeros((4, 5), np.uint16))
    np.save(tmp_path / "big.npy", np.zeros(20, ">u2"))
    (tmp_path / "fake.npy").write_bytes(b"nothing of the kind")
    (tmp_path / "empty.npy").write_bytes(b"")
    for name, words in [
        ("odd", "multiple of 2"),
        ("wide.npy", "<i8"),
        ("flat.npy", "2 dimensions"),
        ("big.npy", ">u2"),
        ("fake.npy", "no .npy array"),
        ("empty.npy", "no .npy array"),
        ("missing", "No such file"),
        ("missing.npy", "No such file"),
    ]:
        with pytest.raises(DataError) as caught:
            token_source(tmp_path, name)
        assert words in str(caught.value)


def test_a_pickle_inside_npy_is_not_loaded(tmp_path: Path):
    np.save(tmp_path / "objects.npy", np.array([{}], object), allow_pickle=True)
    with pytest.raises(DataError, match="objects.npy"):
        token_source(tmp_path, "objects.npy")


# --- factory --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tensors", "arrays"])
def test_samples_are_stacked(factory_source, name):
    source = factory_source(name)
    assert len(source) == 5
    inputs, targets, weight = source.microbatch([4, 1])
    assert np.frombuffer(inputs, np.float32).tolist() == [4.0] * 3 + [1.0] * 3
    assert ids(targets, 2) == [4, 1]
    assert weight == 2
    assert torch.frombuffer(inputs, dtype=torch.float32).sum() == 15


def test_numbers_are_samples_too(factory_source):
    source = factory_source("numbers", sample=SampleSpec("float64"))
    inputs, targets, _ = source.microbatch([3])
    assert np.frombuffer(inputs, np.float64).tolist() == [3.0]
    assert ids(targets, 1) == [3]


def test_ignored_targets_have_no_weight(factory_source):
    target = SampleSpec("int64", (3,), 5)
    assert factory_source("ignored", target=target).microbatch([0, 1])[2] == 2
    assert factory_source("ignored", target=target, weight="samples").microbatch([0, 1])[2] == 2
    assert factory_source("ignored", target=target).microbatch([0, 1, 2])[2] == 3


def test_real_valued_targets_all_count(factory_source):
    target = SampleSpec("float32", (2,))
    assert factory_source("regression", target=target).microbatch([0, 1, 2])[2] == 6


def test_arguments_reach_the_factory(factory_source):
    assert len(factory_source("tensors", count=7)) == 7


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("wrong_dtype", ["sample 0", "float64 [3]", "float32 [3]"]),
        ("single", ["no pair"]),
        ("objects", ["sample 0", "AttributeError"]),
        ("large", ["sample 0", "OverflowError"]),
    ],
)
def test_a_first_sample_that_is_not_as_said_is_named_at_once(factory_source, name, words):
    with pytest.raises(DataError) as caught:
        factory_source(name)
    assert all(word in str(caught.value) for word in words)


def test_a_later_sample_that_is_not_as_said_is_named_when_it_is_read(factory_source):
    source = factory_source("uneven")
    for read in (lambda: source.microbatch([0, 1]), source.digest):
        with pytest.raises(DataError) as caught:
            read()
        assert "sample 1: sample is float32 [4]" in caught.value.evidence


def test_a_wrong_shape_and_a_value_out_of_bounds_are_named(factory_source):
    with pytest.raises(DataError) as caught:
        factory_source("tensors", width=4)
    assert "sample 0: sample is float32 [4]" in caught.value.evidence
    assert "data.sample is float32 [3]" in caught.value.evidence
    with pytest.raises(DataError) as caught:
        factory_source("tensors", count=6).microbatch([5])
    assert "sample 5: target has 5" in caught.value.evidence


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("missing", "has no 'missing'"),
        ("not_callable", "cannot be called"),
        ("broken", "KeyError"),
        ("empty", "no samples"),
        ("endless", "has no length"),
    ],
)
def test_factories_that_do_not_work_are_data_errors(factory_source, name, words):
    with pytest.raises(DataError) as caught:
        factory_source(name)
    assert f"my_datasets:{name}" in caught.value.what
    assert words in str(caught.value)


def test_a_module_that_is_not_there_is_a_data_error(tmp_path: Path):
    data = DataSpec("factory", factory="no_such_package.x:y", sample=SAMPLE, target=TARGET)
    with pytest.raises(DataError, match="ModuleNotFoundError"):
        open_source(training_of(data), tmp_path)


def test_the_digest_tells_content_and_length(factory_source):
    digests = {
        factory_source("tensors").digest(),
        factory_source("tensors", count=4).digest(),
        factory_source("regression", target=SampleSpec("float32", (2,))).digest(),
    }
    assert len(digests) == 3
    assert factory_source("arrays").digest() == factory_source("tensors").digest()


def test_the_digest_of_many_samples_reads_1024_of_them(factory_source):
    source = factory_source("tensors", target=SampleSpec("int64", (), 5000), count=5000)
    digest = hashlib.sha256(b"factory 5000\n")
    for sample in (number * 5000 // 1024 for number in range(1024)):
        digest.update(b"float32 (3,)\n" + np.full(3, sample, "<f4").tobytes())
        digest.update(b"int64 ()\n" + np.int64(sample).tobytes())
    assert source.digest() == digest.digest()


# --- in a thread --------------------------------------------------------------------------


def test_the_source_gives_what_its_reader_gives(tmp_path: Path):
    (tmp_path / "a").write_bytes(b"abcdefghi")
    reader = text_source(tmp_path, "a")
    source: DataSource = ThreadedSource(reader)

    async def main():
        assert len(source) == len(reader) == 2
        assert await source.digest() == reader.digest()
        assert await source.microbatch([1, 0]) == reader.microbatch([1, 0])
        with pytest.raises(ValueError, match="sample 2"):
            await source.microbatch([2])
        (tmp_path / "a").write_bytes(b"")
        with pytest.raises(DataError, match="became shorter"):
            await source.digest()

    trio.run(main)


class Waiting:
    """A reader that waits for the test, and counts how many are in it at once."""

    def __init__(self):
        self.begun, self.go = threading.Event(), threading.Event()
        self.inside, self.most = 0, 0
        self.threads = set()

    def __len__(self):
        return 3

    def digest(self):
        self.microbatch([0])
        return bytes(32)

    def microbatch(self, sample_ids):
        self.inside += 1
        self.most = max(self.most, self.inside)
        self.threads.add(threading.get_ident())
        self.begun.set()
        assert self.go.wait(10)
        self.inside -= 1
        return memoryview(b""), memoryview(b""), 1


def test_reading_does_not_hold_up_the_loop_and_is_done_by_one_thread_at_a_time():
    reader = Waiting()
    source = ThreadedSource(reader)

    async def main():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(source.digest)
            nursery.start_soon(source.microbatch, [1])
            nursery.start_soon(source.microbatch, [2])
            await trio.testing.wait_all_tasks_blocked()
            assert await trio.to_thread.run_sync(reader.begun.wait, 10)
            assert reader.inside == 1
            reader.go.set()

    trio.run(main)
    assert reader.most == 1
    assert threading.get_ident() not in reader.threads
