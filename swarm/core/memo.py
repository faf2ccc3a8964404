"""What is computed once of a value that never changes, however often it is asked for.

The rule: values are told apart by identity, not by comparing them: a plan's body has thousands of
parts. Only the last few are kept.
"""

from collections.abc import Callable
from typing import Generic, TypeVar

A = TypeVar("A")
R = TypeVar("R")

B = TypeVar("B")

KEPT = 16


class by_identity(Generic[A, R]):
    """A function of one immutable argument that remembers its last answers.

    Nobody may change what it returns."""

    def __init__(self, function: Callable[[A], R]) -> None:
        self._function = function
        self._known: dict[int, tuple[A, R]] = {}
        self.__doc__ = function.__doc__

    def __call__(self, value: A) -> R:
        """Return the function's answer."""
        known = self._known.get(id(value))
        if known is not None and known[0] is value:
            return known[1]
        answer = self._function(value)
        if len(self._known) >= KEPT:
            del self._known[next(iter(self._known))]
        self._known[id(value)] = value, answer
        return answer


class by_pair(Generic[A, B, R]):
    """The same of two immutable arguments."""

    def __init__(self, function: Callable[[A, B], R]) -> None:
        self._function = function
        self._known: dict[tuple[int, int], tuple[A, B, R]] = {}
        self.__doc__ = function.__doc__

    def __call__(self, one: A, two: B) -> R:
        """Return the function's answer."""
        key = id(one), id(two)
        known = self._known.get(key)
        if known is not None and known[0] is one and known[1] is two:
            return known[2]
        answer = self._function(one, two)
        if len(self._known) >= KEPT:
            del self._known[next(iter(self._known))]
        self._known[key] = one, two, answer
        return answer
