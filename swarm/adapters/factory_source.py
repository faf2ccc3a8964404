"""Samples from the owner's own code: a map-style dataset by import path.

The rule: faults of that code, and samples that are not what the manifest says, are DataError
with the sample's number; they reach nobody else.
"""

import hashlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from protocol.records import Argument, DataSpec, LossSpec, SampleSpec
from swarm.adapters.author_code import FAULTS, import_function
from swarm.errors import DataError, ModelError
from swarm.ports import Buffer

IGNORED_TARGET = -100
"""torch's default `ignore_index`: such a target counts in no loss and no weight."""
DIGEST_SAMPLES = 1024

Array = npt.NDArray[Any]


class FactorySource:
    """A map-style dataset from the owner's own code: `dataset[i]` is a pair (input, target).

    A pair's parts are tensors, arrays or numbers of the manifest's dtype and shape; the first
    sample is looked at when the source is opened.
    """

    def __init__(self, data: DataSpec, loss: LossSpec) -> None:
        if data.sample is None or data.target is None:
            raise DataError("a factory's data.sample and data.target are not given")
        self._specs = (data.sample, data.target)
        self._weighs_samples = loss.weight == "samples"
        self._factory = data.factory
        make = _imported(data.factory)
        self._dataset = self._guard("makes no dataset", lambda: make(**_plain(data.arguments)))
        self._samples: int = self._guard("has no length", lambda: len(self._dataset))
        if not self._samples:
            self._fail("is empty", "its dataset has no samples")
        self._sample(0)

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._samples

    def digest(self) -> bytes:
        """Return SHA-256 of the length and of up to 1024 evenly spread samples (32 bytes).

        Raises DataError if one of them is not what the manifest says.
        """
        digest = hashlib.sha256(b"factory %d\n" % self._samples)
        count = min(self._samples, DIGEST_SAMPLES)
        for number in range(count):
            for part in self._sample(number * self._samples // count):
                digest.update(f"{part.dtype.name} {part.shape}\n".encode())
                digest.update(raw_bytes(part))
        return digest.digest()

    def microbatch(self, sample_ids: Sequence[int]) -> tuple[Buffer, Buffer, int]:
        """Return the stacked inputs (B, *sample.shape) and targets (B, *target.shape).

        The weight is the number of samples, or of target elements that are not ignored.
        Raises DataError if a sample is not what the manifest says.
        """
        pairs = [self._sample(sample) for sample in sample_ids]
        inputs = np.stack([pair[0] for pair in pairs])
        targets = np.stack([pair[1] for pair in pairs])
        weight = len(pairs)
        if not self._weighs_samples:
            ignored = targets == IGNORED_TARGET if targets.dtype.kind == "i" else False
            weight = targets.size - int(np.count_nonzero(ignored))
        return raw_bytes(inputs), raw_bytes(targets), weight

    def _sample(self, sample: int) -> tuple[Array, Array]:
        check_id(sample, self._samples)
        pair = self._guard(f"has no sample {sample}", lambda: self._dataset[sample])
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            found = f"{type(pair).__name__} {str(pair)[:80]}"
            self._fail(f"gives no pair as sample {sample}", f"found {found}")
        return self._part(sample, "sample", pair[0]), self._part(sample, "target", pair[1])

    def _part(self, sample: int, name: str, value: object) -> Array:
        spec = self._specs[name == "target"]
        what = f"has no usable sample {sample}"
        found = self._guard(what, lambda: _described(value, spec))
        if found != (spec.dtype, spec.shape):
            self._fail(
                f"gives another {name} than the manifest says",
                f"sample {sample}: {name} is {found[0]} {list(found[1])}",
                f"data.{name} is {spec.dtype} {list(spec.shape)}",
            )
        array: Array = self._guard(what, lambda: _array(value, spec.dtype))
        if spec.dtype == "int64" and array.size:
            kept = array[array != IGNORED_TARGET] if name == "target" else array
            wrong = kept[(kept < 0) | (kept >= spec.high)]
            if wrong.size:
                self._fail(
                    f"gives a {name} out of bounds",
                    f"sample {sample}: {name} has {wrong.flat[0]}",
                    f"data.{name}.high = {spec.high}: values lie in [0, {spec.high})",
                )
        return array

    def _guard(self, what: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except FAULTS as fault:
            raise DataError(
                f"dataset {self._factory} {what}",
                evidence=(f"{type(fault).__name__}: {fault}",),
                hint="data.factory returns a dataset with __len__ and __getitem__",
            ) from fault

    def _fail(self, what: str, *evidence: str) -> NoReturn:
        raise DataError(
            f"dataset {self._factory} {what}",
            evidence=evidence,
            hint="see [data] in docs/manifest.md",
        )


def check_id(sample: int, samples: int) -> None:
    """Raise ValueError if there is no such sample."""
    if not 0 <= sample < samples:
        raise ValueError(f"sample {sample} is not in 0..{samples - 1}")


def raw_bytes(array: Array) -> Buffer:
    """Return the raw bytes of a contiguous copy of `array`."""
    return array.copy(order="C").reshape(-1).data.cast("B")


def _imported(import_path: str) -> Callable[..., Any]:
    try:
        return import_function(import_path, "dataset factory")
    except ModelError as error:
        raise DataError(error.what, evidence=error.evidence, hint=error.hint) from error


def _plain(arguments: dict[str, Argument]) -> dict[str, Any]:
    return {
        name: list(value) if isinstance(value, list) else value for name, value in arguments.items()
    }


def _described(value: Any, spec: SampleSpec) -> tuple[str, tuple[int, ...]]:
    """Return dtype and shape; a bare Python number takes the nearest dtype that can hold it."""
    match value:
        case bool():
            return "bool", ()
        case int():
            return "int64", ()
        case float():
            return (spec.dtype if spec.dtype != "int64" else "float64"), ()
        case _:
            return str(value.dtype).removeprefix("torch."), tuple(value.shape)


def _array(value: Any, dtype: str) -> Array:
    torch = sys.modules.get("torch")  # a tensor cannot exist before torch is imported
    if torch is not None and isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    return np.asarray(value, np.dtype(dtype).newbyteorder("<"))
