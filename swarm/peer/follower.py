"""A standby's part: it holds its stage's state and follows it, step by step, without work.

It downloads a snapshot from the stage's replicas while they go on, collects the reduced gradients
of the steps that pass meanwhile, applies them in order, and then stays at the group's version. The
rule: what it applies is what the replicas applied, so its state is theirs; after a gap it begins
anew.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import trio

from protocol.messages import Commit, GetListing, Resume, Totals
from protocol.records import PlanBody
from swarm.core.holding import Holding
from swarm.core.step import ranges_of_stages, replicas_of
from swarm.peer.links import Links
from swarm.peer.state import RETRY_SECONDS, NobodyHas, fetch
from swarm.ports import Buffer, StageExecutor

log = logging.getLogger(__name__)

MAX_COLLECTED_STEPS = 8


@dataclass(frozen=True, slots=True)
class _Step:
    """A step that the group has committed; no gradient where none was applied."""

    totals: Totals
    gradient: dict[int, Buffer] | None


class Follower:
    """What one standby does in one epoch."""

    def __init__(
        self,
        *,
        stage: int,
        body: PlanBody,
        lineage: int,
        holding: Holding | None,
        executor: StageExecutor,
        links: Links,
        is_leaver: bool,
        on_step: Callable[[], None],
    ) -> None:
        """`is_leaver`: what this peer holds is others' to fetch until the next commit; `on_step`
        is called when the version that is held has changed."""
        self.stage = stage
        self.holding = holding
        self._ranges = ranges_of_stages(body)
        self._donors = replicas_of(body, stage)
        self._lineage = lineage
        self._executor = executor
        self._links = links
        self._is_free = not is_leaver
        self._on_step = on_step
        self._group_version = -1
        self._steps: dict[int, _Step] = {}
        self._collected = -1
        self._commits_send, self._commits = trio.open_memory_channel[tuple[int, Totals]](10_000)
        self._news = trio.Event()

    @property
    def is_ready(self) -> bool:
        """Return whether this peer holds the group's version, or is about to."""
        return self._holds_stage and self.version >= self._group_version - 1 >= -1

    @property
    def version(self) -> int:
        """Return the version that is held; 0 if none is."""
        return self.holding.version if self.holding is not None else 0

    def resume(self, message: Resume) -> None:
        """The group goes on from this step."""
        self._group_version = message.step
        self._collected = message.step - 1  # what passed before is not collected any more
        self._wake()

    def commit(self, message: Commit) -> None:
        """The group has committed a step."""
        if message.totals.verdict == "halt":
            return
        self._group_version = message.step + 1
        self._is_free = True
        self._commits_send.send_nowait((message.step, message.totals))
        self._wake()

    async def run(self) -> None:
        """Follow until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._collect)
            while True:
                self._news = trio.Event()
                if not self._is_free or self._group_version < 0:
                    await self._news.wait()
                elif not self._holds_stage or self._has_gap():
                    await self._download()
                elif self.version in self._steps:
                    await self._advance(self._steps.pop(self.version))
                else:
                    await self._news.wait()

    @property
    def _holds_stage(self) -> bool:
        held = self.holding
        return (
            held is not None
            and held.lineage == self._lineage
            and held.range == self._ranges[self.stage]
        )

    def _has_gap(self) -> bool:
        """Return whether the step that is needed next has passed and was not collected."""
        behind = self.version < self._group_version and self.version not in self._steps
        return behind and self._collected >= self.version

    def _wake(self) -> None:
        self._news.set()

    def _wanted(self, kind: str, version: int) -> GetListing:
        first, last = self._ranges[self.stage]
        return GetListing(
            kind="gradient" if kind == "gradient" else "state",
            lineage=self._lineage,
            version=version,
            first=first,
            last=last,
        )

    async def _download(self) -> None:
        version = self._group_version
        try:
            fetched = await fetch(self._links, self._donors, self._wanted("state", version))
        except NobodyHas as fault:
            log.info("state not fetched version=%d reason=%r", version, str(fault))
            await trio.sleep(RETRY_SECONDS)
            return
        self.holding = None
        first, last = self._ranges[self.stage]
        await self._executor.load(self._ranges, self.stage, version, fetched.pieces)
        listing = fetched.listing
        self.holding = Holding(
            self._lineage, first, last, version, listing.state_hash, listing.totals
        )
        self._steps = {step: each for step, each in self._steps.items() if step >= version}
        self._on_step()
        log.info("joined stage=%d version=%d donors=%d", self.stage, version, len(fetched.donors))

    async def _advance(self, step: _Step) -> None:
        assert self.holding is not None
        version = self.holding.version
        if step.gradient is not None:
            await self._executor.load_gradient(version, step.gradient)
        await self._executor.commit(version, step.totals)
        self.holding = self.holding.after(step.totals)
        self._on_step()

    async def _collect(self) -> None:
        """Fetch the gradient of every step that is committed, as soon as it is."""
        turn = 0
        async for step, totals in self._commits:
            turn += 1
            gradient = None
            if totals.verdict == "apply":
                gradient = await self._gradient(step, turn)
            if gradient is not None or totals.verdict != "apply":
                self._steps[step] = _Step(totals, gradient)
            while len(self._steps) > MAX_COLLECTED_STEPS:
                del self._steps[min(self._steps)]
            self._collected = step
            self._wake()

    async def _gradient(self, step: int, turn: int) -> dict[int, Buffer] | None:
        """Return the reduced gradient of a step from one of the replicas, or None."""
        donors: Sequence[str] = self._donors
        for number in range(len(donors)):
            donor = donors[(turn + number) % len(donors)]
            try:
                return (await fetch(self._links, [donor], self._wanted("gradient", step))).pieces
            except NobodyHas as fault:
                log.info("gradient not fetched step=%d reason=%r", step, str(fault))
        return None
