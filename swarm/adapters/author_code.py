"""The author's own code: found by import path, from the peer's own environment.

The rule: whatever it raises while it is looked up or called becomes a ModelError that says where.
"""

import importlib
import os
import sys
from collections.abc import Callable
from typing import cast

from swarm.errors import ModelError

FAULTS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    BufferError,
    ImportError,
    LookupError,
    NameError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)
"""What an author's code may raise by mistake."""


def import_function(path: str, purpose: str) -> Callable[..., object]:
    """Return the callable at `package.module:function`; the working folder is searched too.

    `purpose` says in messages what it is for. Raises ModelError.
    """
    module_name, colon, attribute = path.partition(":")
    if not colon or not module_name or not attribute:
        raise ModelError(
            f"the {purpose} {path!r} is no import path", hint="write it as package.module:function"
        )
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        found: object = importlib.import_module(module_name)
    except FAULTS as fault:
        raise ModelError(
            f"the {purpose} {path!r} does not import",
            evidence=(describe(fault), f"working folder {folder}"),
            hint="install the package here, or start from the folder that holds it",
        ) from fault
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ModelError(
                f"the {purpose} {path!r} does not exist",
                evidence=(f"{module_name} was imported, but has no {attribute!r}",),
                hint="check the spelling, and that this is the version of the package you mean",
            )
        found = getattr(found, part)
    if not callable(found):
        raise ModelError(
            f"the {purpose} {path!r} cannot be called",
            evidence=(f"it is a {type(found).__name__}",),
            hint="name a function or a class",
        )
    return cast(Callable[..., object], found)


def describe(fault: BaseException) -> str:
    """Return one line that says what was raised."""
    lines = str(fault).strip().splitlines()
    return f"{type(fault).__name__}: {lines[0][:300] if lines else ''}"
