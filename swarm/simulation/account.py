"""What a simulated swarm has done: steps, plans, work, bytes, and who was alive when.

The rule: only committed steps count, each once. Work that is not in one of them was lost, or has
been done again.
"""

from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import pairwise

import trio

from protocol.messages import BY_NUMBER
from protocol.records import PlanBody
from swarm.simulation.conditions import Conditions, State
from swarm.simulation.scenario import Scenario
from swarm.simulation.world import World


@dataclass(frozen=True, slots=True)
class PlanMade:
    """A plan, when the first peer held it for certified."""

    seconds: float
    epoch: int
    kind: str
    reason: str
    predicted_step_seconds: float
    stages: list[list[int]]
    """Peers that host each stage."""
    ranges: list[tuple[int, int]]
    """Layers [first, last) of each stage."""
    standby: list[int]


@dataclass(frozen=True, slots=True)
class Happened:
    """Something that was done to the swarm."""

    seconds: float
    what: str


@dataclass(frozen=True, slots=True)
class Committed:
    """A step, when the first peer applied it."""

    seconds: float
    step: int
    worked_seconds: float
    """All tasks of microbatches so far, at speed 1."""


@dataclass
class Account:
    """Keeps account of one world (`world.Watcher`)."""

    scenario: Scenario
    conditions: Conditions
    commits: list[Committed] = field(default_factory=list)
    plans: list[PlanMade] = field(default_factory=list)
    happened: list[Happened] = field(default_factory=list)
    alive: list[tuple[float, State, tuple[int, ...]]] = field(default_factory=list)
    """(since when, how things are, who), each until the next."""
    worked_seconds: float = 0.0
    ended_at: float = 0.0
    trouble: str = ""
    """What the leader said at the end of why nothing goes on."""
    world: World | None = None
    _here: set[int] = field(default_factory=set)
    _key: tuple[int, int] = (-1, 0)
    _closed: bool = False

    # --- what the world tells --------------------------------------------------------------

    def started(self, number: int) -> None:
        """A peer's daemon begins."""
        self._here.add(number)
        self.note_alive()

    def ended(self, number: int) -> None:
        """A peer's daemon has ended."""
        if not self._closed and (self.world is None or not self.world.is_alive(number)):
            self._here.discard(number)
            self.note_alive()

    def close(self) -> None:
        """The simulation is over: who ends now does not matter."""
        self._closed = True
        self.ended_at = trio.current_time()
        self.trouble = self._trouble()

    def worked(self, number: int, seconds: float) -> None:
        """A peer has computed a task of a microbatch."""
        self.worked_seconds += seconds

    def committed(self, number: int, step: int) -> None:
        """A peer has applied a step."""
        if not self.commits or step > self.commits[-1].step:
            self.commits.append(Committed(trio.current_time(), step, self.worked_seconds))

    def saved(self, number: int) -> None:
        """Something has become durable, perhaps a plan."""
        assert self.world is not None
        newest = self.world.invariants.newest(number)
        if newest is None or newest[1] is None:
            return
        header, body = newest[0], newest[1]
        key = (header.generation.number, header.epoch)
        if key > self._key:
            self._key = key
            self.plans.append(self._plan(self.world, header.epoch, header.kind, body))

    def tell(self, what: str) -> None:
        """Something is done to the swarm."""
        self.happened.append(Happened(trio.current_time(), what))

    def note_alive(self) -> None:
        """Note who is alive, and how things are, from now on."""
        now = trio.current_time()
        if self.alive and self.alive[-1][0] == now:
            del self.alive[-1]
        self.alive.append((now, self.conditions.state, tuple(sorted(self._here))))

    def _plan(self, world: World, epoch: int, kind: str, body: PlanBody) -> PlanMade:
        numbers = {peer.identity.peer: peer.number for peer in world.peers}
        reason = body.reason
        for peer in world.peers:
            reason = reason.replace(peer.identity.peer, peer.name)
        return PlanMade(
            trio.current_time(),
            epoch,
            kind,
            reason,
            body.step_seconds,
            [[numbers[each.peer] for each in stage.replicas] for stage in body.stages],
            [(stage.first, stage.last) for stage in body.stages],
            [numbers[each.member.peer] for each in body.standby],
        )

    def _trouble(self) -> str:
        assert self.world is not None
        living = [peer for peer in self.world.peers if self.world.is_alive(peer.number)]
        controls = [peer.daemon.control for peer in living if peer.daemon is not None]
        told = [each.trouble for each in controls if each.is_leader and each.trouble]
        told += [each.trouble for each in controls if each.trouble]
        text = told[0] if told else "" if controls else "nobody is left"
        for peer in self.world.peers:
            text = text.replace(peer.identity.peer, peer.name)
        return text

    # --- what comes of it ------------------------------------------------------------------

    def idle_seconds(self, now: float) -> float:
        """Return for how long nothing has been committed, from the first plan, or the start, on."""
        return now - (self.commits[-1].seconds if self.commits else self.began_at or 0.0)

    @property
    def stands_still(self) -> bool:
        """Return whether a step was under way at the end for longer than any step took, or none
        ever was complete."""
        times = [self.began_at or 0.0, *(commit.seconds for commit in self.commits)]
        longest = max((late - early for early, late in pairwise(times)), default=0.0)
        return self.idle_seconds(self.ended_at) > longest

    @property
    def measured_until(self) -> float:
        """Return the end of the time to which rates refer: the last commit, since nobody knows how
        much of the next step is done; the end, where the swarm stands still."""
        if self.stands_still or not self.commits:
            return self.ended_at
        return self.commits[-1].seconds

    @property
    def began_at(self) -> float | None:
        """Return when the first plan with stages was certified."""
        return next((plan.seconds for plan in self.plans if plan.stages), None)

    def microbatches(self, begin: float, end: float) -> int:
        """Return how many microbatches' steps were committed in (begin, end]."""
        times = [commit.seconds for commit in self.commits]
        steps = bisect_right(times, end) - bisect_right(times, begin)
        return steps * self.scenario.training.microbatches_per_step

    def steps_until(self, seconds: float) -> float:
        """Return how many steps were done by then: a step grows evenly from the commit before."""
        times = [commit.seconds for commit in self.commits]
        done = bisect_right(times, seconds)
        if done == len(times):
            return float(done)
        since = times[done - 1] if done else self.began_at or 0.0
        return done + max(0.0, seconds - since) / (times[done] - since)

    @property
    def lost_seconds(self) -> float:
        """Return what was computed up to the last commit and is in no step, at speed 1."""
        if not self.commits:
            return 0.0
        useful = len(self.commits) * self.scenario.training.microbatches_per_step
        return max(0.0, self.commits[-1].worked_seconds - useful * self.scenario.work_seconds)

    def bytes_by_kind(self) -> dict[str, int]:
        """Return bytes that were sent of each kind of message, as they count on the wire."""
        assert self.world is not None
        found: dict[str, int] = {}
        for number, size in self.world.network.sent_bytes.items():
            kind = BY_NUMBER.get(number)
            name = kind.__name__ if kind is not None else f"type {number}"
            found[name] = found.get(name, 0) + round(size)
        return dict(sorted(found.items(), key=lambda each: (-each[1], each[0])))

    def spans(self, begin: float, end: float) -> list["Span"]:
        """Return who was alive when, and how things were, within [begin, end]."""
        ends = [since for since, _, _ in self.alive[1:]] + [end]
        return [
            Span(max(since, begin), min(until, end), state, who)
            for (since, state, who), until in zip(self.alive, ends, strict=True)
            if min(until, end) > max(since, begin)
        ]


@dataclass(frozen=True, slots=True)
class Span:
    """A time in which the same peers were alive, and things were the same."""

    since: float
    until: float
    state: State
    alive: tuple[int, ...]
