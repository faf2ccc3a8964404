"""Which samples a microbatch holds, and who feeds it.

The rule: data order is a function of (seed, step, index) alone, and needs no memory: whoever
asks, whenever, gets the same ids, and every pass over the data visits every sample once.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

ROUNDS = 8
"""Feistel rounds: twice the four that make a strong permutation of ideal round functions
(Luby and Rackoff, 1988)."""
BLOCK_TURNS = 256
"""Turns of feeders that are worked out and remembered together."""


def sample_ids(
    seed: int,
    step: int,
    index: int,
    *,
    microbatches: int,
    microbatch_size: int,
    samples: int,
) -> tuple[int, ...]:
    """Return the `microbatch_size` sample ids of microbatch (step, index).

    Microbatches are consecutive slices of an endless stream: pass after pass over the
    `samples`, each in an order of its own. Raises ValueError if `index` is not below
    `microbatches` or there are no samples.
    """
    if not 0 <= index < microbatches:
        raise ValueError(f"index {index} is not in 0..{microbatches - 1}")
    first = (step * microbatches + index) * microbatch_size
    places = (divmod(first + offset, samples) for offset in range(microbatch_size))
    return tuple(permuted(place, samples, f"{seed}/{turn}") for turn, place in places)


def permuted(place: int, size: int, key: str) -> int:
    """Return where the permutation of [0, size) that belongs to `key` sends `place`.

    A Feistel network over pairs (left, right) in Z_a x Z_b, with a and b about the root of
    `size`, walked until it lands below `size` (Black and Rogaway, Ciphers with Arbitrary
    Finite Domains, 2002). Since a * b < size + a, the walk hardly ever takes a second turn.
    """
    if not 0 <= place < size:
        raise ValueError(f"place {place} is not in 0..{size - 1}")
    left_size = math.isqrt(size - 1) + 1
    right_size = -(-size // left_size)
    keyed = hashlib.blake2b(key.encode(), digest_size=8)
    while True:
        left, right = divmod(place, right_size)
        for turn in range(0, ROUNDS, 2):
            left = (left + _mix(keyed, turn, right)) % left_size
            right = (right + _mix(keyed, turn + 1, left)) % right_size
        place = left * right_size + right
        if place < size:
            return place


def feeder_of(step: int, index: int, shares: Sequence[int]) -> int:
    """Return which feeder (an index into `shares`) feeds microbatch (step, index).

    A step is a window of one endless sequence in which the turns of each feeder come at even
    distances. Windows of successive steps begin far apart, so remainders alternate; over as
    many steps in a row as the shares (without their common divisor) sum to, every feeder feeds
    each index exactly as often as its share says.
    """
    reduced, total = _reduced(tuple(shares))
    block, place = divmod(step * _stride(total) % total + index, BLOCK_TURNS)
    return _turns(block * BLOCK_TURNS, reduced)[place]


@lru_cache(maxsize=16)
def _reduced(shares: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    """Return shares without their common divisor, and their sum."""
    divisor = math.gcd(*shares)
    reduced = tuple(share // divisor for share in shares)
    return reduced, sum(reduced)


@lru_cache(maxsize=4)
def _feeders_of(step: int, count: int, shares: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(feeder_of(step, place, shares) for place in range(count))


class Turns:
    """Who feeds which microbatch by one plan.

    Of the step in hand at its Resume only what some stage lacks is fed. That is dealt anew, in even
    parts: what was left of everybody's turns is not even when feeders have come or gone, and the
    step would wait for who has most of it.
    """

    def __init__(self, shares: Sequence[int], microbatches: int) -> None:
        self._shares = tuple(shares)
        self._microbatches = microbatches
        self._first = -1
        self._places: dict[int, int] = {}

    def resume(self, step: int, needs: Mapping[int, int]) -> None:
        """Take `step` up again: `needs` are the indices that are missing, each with a number for
        the stages that lack it. Those of one number are dealt evenly, since they cost the same."""
        self._first = step
        ordered = sorted(needs, key=lambda index: (needs[index], index))
        self._places = {index: place for place, index in enumerate(ordered)}

    def feeder_of(self, step: int, index: int) -> int | None:
        """Return which feeder feeds microbatch (step, index); None if nobody does."""
        place = self._places.get(index) if step == self._first else index
        return None if place is None else self._feeders(step)[place]

    def indices_of(self, step: int, feeder: int) -> list[int]:
        """Return what one feeder feeds in a step, in order."""
        indices = self._places if step == self._first else range(self._microbatches)
        dealt = zip(indices, self._feeders(step), strict=False)
        return [index for index, number in dealt if number == feeder]

    def _feeders(self, step: int) -> tuple[int, ...]:
        return _feeders_of(step, self._microbatches, self._shares)


@lru_cache(maxsize=64)
def _turns(first: int, shares: tuple[int, ...]) -> tuple[int, ...]:
    """Return whose turns `first` to `first + BLOCK_TURNS` (exclusive) are.

    Turn j of a feeder comes at time (2j + 1) / (2 * share); ties go to the lower feeder. So
    before time t a feeder has had share * t turns, give or take a half, and the turns wanted
    lie within one turn per feeder of where they are on average.
    """
    total = sum(shares)
    scale = math.lcm(*shares)
    early, late = first - len(shares), first + BLOCK_TURNS + len(shares)
    turns = []
    before = 0
    for feeder, share in enumerate(shares):
        begin, end = (
            max(0, -((total - 2 * share * place) // (2 * total))) for place in (early, late)
        )
        before += begin
        turns += [((2 * turn + 1) * (scale // share), feeder) for turn in range(begin, end)]
    block = sorted(turns)[first - before : first - before + BLOCK_TURNS]
    return tuple(feeder for _, feeder in block)


def _stride(total: int) -> int:
    """Return a number without a common factor with `total`, near its golden section."""
    stride = total * 618_033_988_749 // 10**12
    while math.gcd(stride, total) != 1:
        stride += 1
    return stride


def _mix(keyed: hashlib.blake2b, turn: int, value: int) -> int:
    state = keyed.copy()
    state.update(b"%d/%d" % (turn, value))
    return int.from_bytes(state.digest(), "little")
