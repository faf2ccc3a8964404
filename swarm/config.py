"""A run's manifest and a peer's own settings, from TOML.

The rule: nothing is guessed. An unknown key, a value of the wrong type and a key that has no
effect are errors that name the key, its table and what was expected (docs/manifest.md).
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, inspect

from protocol.errors import RemoteProtocolError
from protocol.records import DataSpec, Hash, Manifest, SampleSpec, Training
from protocol.signing import PeerId, public_key_of
from swarm.errors import ConfigError
from swarm.tables import Reader, choices, fields_of, parse_toml, read_text, toml

BYTE_VALUES = 256
BUILT_IN_LOSSES = ("cross_entropy", "mse")


@dataclass(frozen=True, slots=True)
class PeerSettings:
    """What one peer's owner decides: nothing in here changes what is trained."""

    listen: Annotated[str, Meta(min_length=1, max_length=200)] = "127.0.0.1:0"
    device: Annotated[str, Meta(pattern=r"^(cpu|cuda:\d{1,3})$")] = "cpu"
    host_label: Annotated[str, Meta(max_length=200)] = ""
    advertise: Annotated[str, Meta(max_length=200)] = ""
    data_dir: Annotated[str, Meta(min_length=1, max_length=4096)] = "."
    threads: Annotated[int, Meta(ge=0, le=256)] = 0
    wait_for_peers: Annotated[int, Meta(ge=1, le=65536)] = 1
    stages: Annotated[int, Meta(ge=0, le=65536)] = 0
    allowed_peers: tuple[PeerId, ...] = ()


SETTING_COMMENTS = {
    "listen": "HOST:PORT to listen on. Loopback, because opening to a network is a choice;\n"
    "port 0 takes a free one.",
    "device": 'What computes: "cpu" or "cuda:N". The CPU, because every machine has one.',
    "host_label": "Peers with one label are expected to fail together. Empty: the host's name.",
    "advertise": "Host name or address under which others reach this peer. Empty: the one that it\n"
    "listens on, or the machine's own where it listens on all.",
    "data_dir": "Folder that relative paths in the manifest's [data] start from. A relative one\n"
    "starts where the daemon is started.",
    "threads": "Threads that compute. 0 takes the manifest's number: in exact mode another\n"
    "number gives other bits, and the swarm refuses this peer.",
    "wait_for_peers": "Peers, this one included, that the founder waits for before the first\n"
    "plan. 1 starts at once; others join later.",
    "stages": "Stages into which the founder cuts the model. 0 lets measured times decide.",
    "allowed_peers": "Peer ids that may connect. Empty: everyone who holds the swarm's key.",
}


def read_training(path: Path) -> Training:
    """Return what the file `path` defines. Raises ConfigError."""
    return parse_training(read_text(path), path.name)


def parse_training(text: str, source: str = "RUN.toml") -> Training:
    """Return what the TOML `text` defines; `source` names it in errors. Raises ConfigError."""
    raw = parse_toml(text, source)
    reader = Reader(source, "docs/manifest.md", root="run")
    run_keys, tables = _layout()
    reader.refuse_unknown(raw, ("run", *tables), "", tables | {"run": run_keys})
    run = reader.table(raw.get("run", {}), "run")
    reader.refuse_unknown(run, run_keys, "run", tables)
    parts = {name: reader.table(raw[name], name) for name in tables if name in raw}
    _refuse_useless(reader, parts)
    training = reader.build(run | parts, Training, "")
    for path, expected in _contradictions(training):
        reader.fail(path, _value_at(parts | {"run": run}, path), expected)
    return training


def manifest_of(training: Training, founder: PeerId, recovery: PeerId, nonce: Hash) -> Manifest:
    """Return the manifest of a new run; `nonce` (32 random bytes) makes its id unique."""
    return Manifest(training, founder, recovery, nonce)


def read_settings(path: Path) -> PeerSettings:
    """Return the settings in the file `path`. Raises ConfigError."""
    return parse_settings(read_text(path), path.name)


def parse_settings(text: str, source: str = "peer.toml") -> PeerSettings:
    """Return the settings in the TOML `text`. Raises ConfigError."""
    return settings_of(parse_toml(text, source), source)


def settings_of(values: Mapping[str, object], source: str) -> PeerSettings:
    """Return checked settings; `source` says where `values` are from. Raises ConfigError."""
    reader = Reader(source, "the comments in peer.toml")
    settings = reader.build(values, PeerSettings, "")
    if not is_listen_address(settings.listen):
        reader.fail("listen", settings.listen, "HOST:PORT, with a port from 0 to 65535")
    for peer in settings.allowed_peers:
        try:
            public_key_of(peer)
        except RemoteProtocolError:
            reader.fail("allowed_peers", peer, "peer ids, as `swarm status` prints them")
    return settings


def render_settings(settings: PeerSettings) -> str:
    """Return TOML text that parses to `settings`, with a comment for every key."""
    lines = ["# Settings of this peer. What is trained is in the manifest, not here."]
    for field in fields(PeerSettings):
        comment = SETTING_COMMENTS[field.name].replace("\n", "\n# ")
        lines += ["", f"# {comment}", f"{field.name} = {toml(getattr(settings, field.name))}"]
    return "\n".join(lines) + "\n"


def is_listen_address(text: str) -> bool:
    """Return whether `text` is HOST:PORT; an IPv6 host stands in brackets."""
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.%\w]+\]|[^\s:\[\]]+):(\d{1,5})", text, re.ASCII)
    return match is not None and int(match[2]) <= 65535


def is_import_path(text: str) -> bool:
    """Return whether `text` has the form `package.module:function`."""
    module, colon, name = text.partition(":")
    parts = [*module.split("."), *name.split(".")]
    return bool(colon) and all(part.isidentifier() for part in parts)


# --- what cannot be seen from one value --------------------------------------------------

# (table, selecting key, its value): keys that then have no effect
_USELESS = {
    ("data", "source", "text"): ("dtype", "factory", "arguments", "sample", "target"),
    ("data", "source", "tokens"): ("factory", "arguments", "sample", "target"),
    ("data", "source", "factory"): ("files", "sequence_length", "vocabulary", "dtype"),
    ("optimiser", "name", "sgd"): ("betas", "eps"),
    ("optimiser", "name", "adam"): ("momentum", "nesterov"),
    ("optimiser", "name", "adamw"): ("momentum", "nesterov"),
    ("optimiser", "schedule", "constant"): ("final_fraction",),
    ("execution", "determinism", "standard"): ("fraction_bits",),
    ("checkpoints", "every_steps", 0): ("keep",),
}


def _refuse_useless(reader: Reader, parts: Mapping[str, Mapping[str, object]]) -> None:
    defaults = {field.name: field.default for field in fields_of(Training)}
    for (table, key, value), useless in _USELESS.items():
        given = parts.get(table, {})
        unused = [name for name in useless if name in given]
        if unused and given.get(key, getattr(defaults[table], key, None)) == value:
            raise ConfigError(
                f"{reader.source}: {table}.{unused[0]} has no effect",
                evidence=(f"{table}.{key} is {toml(value)}",),
                hint=f"remove `{unused[0]}`, or change {table}.{key}",
            )


def _contradictions(training: Training) -> Iterator[tuple[str, str]]:
    """Yield (key path, what is expected there) for every rule that `training` breaks."""
    optimiser, cuts = training.optimiser, training.slicing.cuts
    if not is_import_path(training.model.factory):
        yield "model.factory", "an import path, `package.module:function`"
    yield from _data_contradictions(training.data)
    if training.loss.function not in BUILT_IN_LOSSES and not is_import_path(training.loss.function):
        yield "loss.function", f"{choices(BUILT_IN_LOSSES)}, or `package.module:function`"
    if training.loss.function == "mse" and training.data.source != "factory":
        yield "loss.function", "a loss over integer targets: token ids are what this data gives"
    if optimiser.nesterov and not optimiser.momentum:
        yield "optimiser.momentum", "more than 0, because nesterov = true"
    if max(optimiser.betas) >= 1:
        yield "optimiser.betas", "two numbers from 0 to below 1"
    if optimiser.warmup_steps > training.steps:
        yield "optimiser.warmup_steps", f"at most run.steps = {training.steps}"
    yield from _infinities(optimiser)
    spare_bits = 62 - training.execution.fraction_bits - _bits(training.microbatches_per_step)
    if training.execution.determinism == "exact" and spare_bits < 0:
        most = training.execution.fraction_bits + spare_bits
        yield "execution.fraction_bits", f"at most {most}, or gradients of 1 overflow the sum"
    if training.checkpoints.every_steps > training.steps:
        yield "checkpoints.every_steps", f"at most run.steps = {training.steps}"
    if any(low >= high for low, high in pairwise(cuts)):
        yield "slicing.cuts", "strictly increasing layer indices"


def _data_contradictions(data: DataSpec) -> Iterator[tuple[str, str]]:
    if data.source == "factory":
        if not is_import_path(data.factory):
            yield "data.factory", "an import path, `package.module:function`"
        for path, spec in (("data.sample", data.sample), ("data.target", data.target)):
            yield from _sample_contradictions(path, spec)
        return
    if not data.files:
        yield "data.files", "at least one file or pattern"
    if data.source == "tokens" and len(data.files) > 1:
        yield "data.files", "exactly one file of token ids"
    if not data.sequence_length:
        yield "data.sequence_length", "at least 1 token per sample"
    if data.source == "text" and data.vocabulary < BYTE_VALUES:
        yield "data.vocabulary", "at least 256: text is read as bytes"
    if not data.vocabulary:
        yield "data.vocabulary", "at least 1"


def _sample_contradictions(path: str, spec: SampleSpec | None) -> Iterator[tuple[str, str]]:
    if spec is None:
        yield path, 'a table with dtype and shape, because data.source = "factory"'
    elif spec.dtype == "int64" and not spec.high:
        yield f"{path}.high", "at least 1: int64 values lie in [0, high)"
    elif spec.dtype != "int64" and spec.high:
        yield f"{path}.high", "nothing: only int64 values are bounded"


def _infinities(record: msgspec.Struct) -> Iterator[tuple[str, str]]:
    for name in record.__struct_fields__:
        value = getattr(record, name)
        if isinstance(value, float) and not math.isfinite(value):
            yield f"optimiser.{name}", "a finite number"


def _bits(count: int) -> int:
    return (count - 1).bit_length()


def _layout() -> tuple[tuple[str, ...], dict[str, tuple[str, ...]]]:
    """Return the keys of [run], and every other table with its keys."""
    run_keys = []
    tables = {}
    for field in fields_of(Training):
        if isinstance(field.type, inspect.StructType):
            tables[field.name] = tuple(inner.name for inner in field.type.fields)
        else:
            run_keys.append(field.name)
    return tuple(run_keys), tables


def _value_at(tables: Mapping[str, Any], path: str) -> object:
    value: Any = tables
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value
