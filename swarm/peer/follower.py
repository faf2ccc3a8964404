"""A standby's part: it holds its stage's state and follows it, step by step, without work.

It downloads a snapshot from the stage's replicas while they go on, collects the reduced gradients
of the steps that pass meanwhile, applies them in order, and then stays at the group's version. The
rule: what it applies is what the replicas applied, so its state is theirs; after a gap it begins
anew.
"""

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import trio

from protocol.messages import Commit, GetListing, Resume, Totals
from protocol.records import PlanBody
from swarm.core.holding import Holding
from swarm.core.model import ModelShape
from swarm.core.step import ranges_of_stages, replicas_of
from swarm.peer.links import Links
from swarm.peer.state import RETRY_SECONDS, NobodyHas, fetch, fetch_into, largest_pieces
from swarm.ports import Buffer, StageExecutor

log = logging.getLogger(__name__)

MAX_COLLECTED_STEPS = 8
"""So many gradients are kept while the state is fetched, and so many commits while one is."""


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
        shape: ModelShape,
        lineage: int,
        holding: Holding | None,
        executor: StageExecutor,
        links: Links,
        is_leaver: bool,
        on_step: Callable[[], None],
        begins_at: int = -1,
    ) -> None:
        """`is_leaver`: what this peer holds is others' to fetch until they hold it, too; `on_step`
        is called when the version that is held has changed. `begins_at`: the version that the group
        has while this plan waits for the end of a step; -1 if that is not known."""
        self.stage = stage
        self.holding = holding
        self._ranges = ranges_of_stages(body)
        self._replicas = [replicas_of(body, number) for number in range(len(body.stages))]
        self._donors = self._replicas[stage]
        self._largest_states = largest_pieces("state", body, links.me, shape, stage)
        self._largest_gradients = largest_pieces("gradient", body, links.me, shape, stage)
        self._lineage = lineage
        self._executor = executor
        self._links = links
        self._is_free = not is_leaver
        self._on_step = on_step
        self._group_version = begins_at
        self._steps: dict[int, _Step] = {}
        self._collected = -1
        self._commits: deque[tuple[int, Totals]] = deque(maxlen=MAX_COLLECTED_STEPS)
        """Whose gradients are still to be fetched: who is too late for the oldest leaves a gap."""
        self._committed = trio.Event()
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
        """The group goes on from this step: what passed before is not collected any more, but for
        the last one, with which who has begun before gets there."""
        self._group_version = message.step
        self._is_free = self._is_free or self._is_spared(message)
        self._collected = message.step - 1
        totals = message.totals
        if totals is not None and self._holds_stage and self.version == self._collected:
            self._collected -= 1
            self._commits.append((self.version, totals))
            self._committed.set()
        self._wake()

    def _is_spared(self, message: Resume) -> bool:
        """Return whether two replicas at least host the stage that is held, and all of them hold
        what may be fetched of it. Until the next commit they may not."""
        held = self.holding
        if held is None or held.range not in self._ranges:
            return False
        stage = self._ranges.index(held.range)
        settlement, replicas = message.stages[stage], set(self._replicas[stage])
        has_state = replicas <= set(settlement.donors)
        has_gradient = not settlement.prepared or replicas <= set(settlement.prepared)
        return len(replicas) > 1 and has_state and has_gradient

    def commit(self, message: Commit) -> None:
        """The group has committed a step."""
        if message.totals.verdict == "halt":
            return
        self._group_version = message.step + 1
        self._is_free = True
        self._commits.append((message.step, message.totals))
        self._committed.set()
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
        wanted = self._wanted("state", version)

        async def load(pieces: Mapping[int, Buffer]) -> None:
            self.holding = None
            await self._executor.load(self._ranges, self.stage, version, pieces)

        try:
            fetched = await fetch_into(
                load, self._links, self._donors, wanted, self._largest_states
            )
        except NobodyHas as fault:
            log.info("state not fetched version=%d reason=%r", version, str(fault))
            await trio.sleep(RETRY_SECONDS)
            return
        first, last = self._ranges[self.stage]
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
            try:
                await self._executor.load_gradient(version, step.gradient)
            except ValueError as error:  # whoever gave it: this is a gap
                log.warning("gradient does not fit step=%d fault=%r", version, str(error))
                return
        await self._executor.commit(version, step.totals)
        self.holding = self.holding.after(step.totals)
        self._on_step()

    async def _collect(self) -> None:
        """Fetch the gradient of every step that is committed, as soon as it is.

        Who is late leaves out what the group, which keeps the last one, does not have any more."""
        turn = 0
        while True:
            while not self._commits:
                self._committed = trio.Event()
                await self._committed.wait()
            step, totals = self._commits.popleft()
            turn += 1
            gradient = None
            if totals.verdict == "apply" and step == self._group_version - 1:
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
        wanted = self._wanted("gradient", step)
        for number in range(len(donors)):
            donor = donors[(turn + number) % len(donors)]
            try:
                return (await fetch(self._links, [donor], wanted, self._largest_gradients)).pieces
            except NobodyHas as fault:
                log.info("gradient not fetched step=%d reason=%r", step, str(fault))
        return None
