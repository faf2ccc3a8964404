"""Writes the versions that are due to this peer's disk, one after the other.

The rule: it belongs to the daemon, not to an epoch. Neither a step nor a change of plan waits for
the disk, and what the disk refuses is said, and tried again, while training goes on. At most one
copy is being written and one waits: a newer one takes the place of that.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import trio

from protocol.records import Training
from swarm.core.holding import Holding
from swarm.errors import HomeError
from swarm.peer.versions import whole_on_disk
from swarm.ports import Buffer, Checkpoints, StageExecutor

log = logging.getLogger(__name__)

RETRY_SECONDS = 10.0
"""The final version is tried again so long after the disk has refused it."""
MAX_WRITTEN = 4
"""So many versions are known to be written, the newest: the leader may lack more than one."""


@dataclass(frozen=True, slots=True)
class Written:
    """Layers [first, last) of a version that lie on this disk."""

    lineage: int
    version: int
    first: int
    last: int
    layer_hashes: tuple[bytes, ...]
    """SHA-256 of each layer's weights."""


@dataclass(frozen=True, slots=True)
class _Copy:
    """What is to be written of a version."""

    holding: Holding
    weights: dict[int, Buffer]
    states: dict[int, Buffer]


class Writer:
    """One peer's versions, on their way to its disk."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        training: Training,
        completed: Callable[[], int],
        on_written: Callable[[], None],
    ) -> None:
        """`completed` returns the newest version that a certified plan names complete, 0 before
        there is one; `on_written` is called when there is more in `written`."""
        self.trouble = ""
        """Why the last version is not on this disk; "" if it is."""
        self.written: list[Written] = []
        """Oldest first."""
        self._checkpoints = checkpoints
        self._training = training
        self._completed = completed
        self._on_written = on_written
        self._waiting: _Copy | None = None
        self._in_hand: Holding | None = None
        self._news = trio.Event()

    def wants(self, holding: Holding) -> bool:
        """Return whether this version is due to be written, and has not been taken yet."""
        every, version = self._training.checkpoints.every_steps, holding.version
        is_due = version == self._training.steps or (every and version and version % every == 0)
        return bool(is_due) and not self._has_taken(holding)

    async def take(self, holding: Holding, executor: StageExecutor) -> None:
        """Copy what the executor holds, if that is due and not taken yet; write it later.

        Ends when the copy has been taken: until then the executor must not commit."""
        if not self.wants(holding):
            return
        if self._waiting is not None:  # dropped before there is another: two copies at most
            log.warning("not written version=%d: the disk is slow", self._waiting.holding.version)
            self._waiting = None
        weights = {
            layer: await executor.layer_state(layer) for layer in range(holding.first, holding.last)
        }
        states = await executor.snapshot(holding.version)
        if states is not None:
            self._waiting = _Copy(holding, weights, states)
            self._news.set()

    async def run(self) -> None:
        """Write what is taken, until cancelled."""
        while True:
            self._news = trio.Event()
            if self._waiting is None:
                await self._news.wait()
                continue
            copy, self._waiting = self._waiting, None
            self._in_hand = copy.holding
            while not await self._try(copy):
                is_final = copy.holding.version == self._training.steps
                if not is_final or self._waiting is not None:
                    break
                await trio.sleep(RETRY_SECONDS)
            self._in_hand = None

    def _has_taken(self, holding: Holding) -> bool:
        taken = [self._in_hand, self._waiting.holding if self._waiting is not None else None]
        place = holding.lineage, holding.version, *holding.range
        return any(
            place == (each.lineage, each.version, *each.range) for each in taken if each is not None
        ) or any(
            place == (each.lineage, each.version, each.first, each.last) for each in self.written
        )

    async def _try(self, copy: _Copy) -> bool:
        """Return whether the disk has taken it."""
        try:
            hashes = await self._write(copy)
        except HomeError as error:
            self.trouble = f"version {copy.holding.version} is not on this disk: {error.what}"
            log.error("%s evidence=%r", self.trouble, error.evidence)
            return False
        self.trouble = ""
        if hashes is not None:
            self._note(copy.holding, hashes)
        return True

    def _note(self, held: Holding, hashes: tuple[bytes, ...]) -> None:
        log.info("durable version=%d layers=%d-%d", held.version, held.first, held.last - 1)
        place = held.lineage, held.version
        others = [each for each in self.written if (each.lineage, each.version) != place]
        others.append(Written(*place, held.first, held.last, hashes))
        self.written = others[-MAX_WRITTEN:]
        self._on_written()

    async def _write(self, copy: _Copy) -> tuple[bytes, ...] | None:
        """Return the hashes of the layers' weights once they are durable; what is so already is
        not written again. None if other layers of a complete version lie where these would.

        Raises HomeError."""
        await self._forget_old()
        held, checkpoints = copy.holding, self._checkpoints
        there = await whole_on_disk(checkpoints, held.version, *held.range, held.state_hash)
        if there is not None:
            return there
        if held.version <= self._completed():
            for each in await checkpoints.held():
                place = each.lineage, each.version
                if place == (held.lineage, held.version) and not set(each.layers) <= set(
                    range(*held.range)
                ):
                    return None
        return await checkpoints.write(
            held.lineage, held.version, copy.weights, copy.states, held.state_hash
        )

    async def _forget_old(self) -> None:
        """Keep the last versions, and whatever is not below the newest complete one."""
        complete, keep = self._completed(), self._training.checkpoints.keep
        old = [each for each in await self._checkpoints.held() if each.version < complete]
        for each in old[: max(0, len(old) + 1 - keep)]:
            await self._checkpoints.forget(each.lineage, each.version)
