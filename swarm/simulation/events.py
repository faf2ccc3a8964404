"""What happens to the peers of a scenario while it runs: its events, its churn, and their ends.

The rule: chance comes from a generator of its own, so that one scenario with another rule, or with
faster peers, meets the same misfortunes.
"""

import random
from collections.abc import Callable, Iterable, Sequence

import trio

from swarm.simulation.account import Account
from swarm.simulation.conditions import Conditions
from swarm.simulation.scenario import Scenario, limit_of, ways_between
from swarm.simulation.scenario_tables import EventTable
from swarm.simulation.world import World

FIRST_PLAN_SECONDS = 120.0
"""Whoever goes within so long is not waited for."""

Undo = Callable[[], None]


class Events:
    """Performs what a scenario says."""

    def __init__(self, scenario: Scenario, conditions: Conditions, account: Account) -> None:
        self._scenario = scenario
        self._conditions = conditions
        self._account = account
        self._tell = account.tell
        self._rng = random.Random(f"{scenario.seed}/events")
        self._nodes: dict[str, int] = {}
        """Which peer is which machine of the churn trace now."""
        self._founders = self._present()

    async def run(self, world: World) -> None:
        """Start who is there from the start, then let everything happen in its time."""
        for number in self._founders:
            world.start(number)
        async with trio.open_nursery() as nursery:
            for number, peer in enumerate(self._scenario.peers):
                if peer.joins_at_seconds:
                    nursery.start_soon(self._join_later, world, number, peer.joins_at_seconds)
            for event in self._scenario.events:
                nursery.start_soon(self._repeat, world, event)
            nursery.start_soon(self._churn, world)

    def wait_for_peers(self) -> int:
        """Return how many peers the first plan waits for: all that are there from the start, but
        for machines that go before there is one."""
        early = {
            self._nodes[line.node]
            for line in self._scenario.churn
            if not line.is_there and line.at_seconds < FIRST_PLAN_SECONDS
            if line.node in self._nodes
        }
        return max(1, len(self._founders) - len(early - {0}))

    # --- once, or again and again ---------------------------------------------------------

    async def _join_later(self, world: World, number: int, seconds: float) -> None:
        await trio.sleep(seconds)
        self._start(world, [number], "started")

    async def _repeat(self, world: World, event: EventTable) -> None:
        async with trio.open_nursery() as nursery:
            await trio.sleep(event.at_seconds)
            while True:
                nursery.start_soon(self._happen, world, event)
                if not event.every_seconds:
                    return
                await trio.sleep(event.every_seconds)
                if event.until_seconds and trio.current_time() > event.until_seconds:
                    return

    async def _happen(self, world: World, event: EventTable) -> None:
        undo = self._perform(world, event)
        if undo is not None and event.seconds:
            await trio.sleep(event.seconds)
            undo()

    def _perform(self, world: World, event: EventTable) -> Undo | None:
        victims = self._victims(world, event)
        match event.action:
            case "join":
                self._start(world, victims, "started")
                return None
            case "leave" | "kill" | "power_failure" | "freeze":
                return self._end(world, event.action, victims)
            case "slow":
                return self._slow(victims, event.factor)
            case "partition":
                return self._part(world, victims)
            case "link":
                return self._change(world, event, victims)

    def _victims(self, world: World, event: EventTable) -> list[int]:
        """Return who is meant; of a random choice only those to whom it can happen."""
        peers = self._scenario.peers
        meant = [
            number
            for number, peer in enumerate(peers)
            if (not event.peers or number in event.peers)
            and event.group in ("", peer.group)
            and event.region in ("", peer.region)
        ]
        if not event.random:
            return meant
        able = [number for number in meant if world.is_alive(number) == (event.action != "join")]
        return sorted(self._rng.sample(able, min(event.random, len(able))))

    # --- what happens -----------------------------------------------------------------------

    def _start(self, world: World, numbers: Iterable[int], what: str) -> None:
        started = [number for number in numbers if not world.is_alive(number)]
        for number in started:
            world.start(number)
        if started:
            self._tell(f"{what}: {_names(started)}")

    def _end(self, world: World, action: str, victims: Sequence[int]) -> Undo:
        victims = [number for number in victims if world.is_alive(number)]
        words = {"leave": "told to leave", "kill": "killed", "freeze": "frozen"}
        if victims:
            self._tell(f"{words.get(action, 'without power')}: {_names(victims)}")
        for number in victims:
            match action:
                case "leave":
                    world.stop(number)
                case "freeze":
                    world.freeze(number)
                case _:
                    world.kill(number, silent=action == "power_failure")

        def undo() -> None:
            if action == "freeze":
                self._tell(f"goes on: {_names(victims)}")
                for number in victims:
                    world.thaw(number)
            else:
                self._start(world, victims, "started again")

        return undo

    def _slow(self, victims: Sequence[int], factor: float) -> Undo:
        self._tell(f"{factor:g} times slower: {_names(victims)}")

        def scale(by: float) -> None:
            for number in victims:
                self._conditions.slowness[number] *= by
            self._conditions.changed()
            self._account.note_alive()

        def undo() -> None:
            self._tell(f"as fast as before: {_names(victims)}")
            scale(1 / factor)

        scale(factor)
        return undo

    def _part(self, world: World, victims: Sequence[int]) -> Undo:
        others = [number for number in range(len(self._scenario.peers)) if number not in victims]
        self._tell(f"cut off from all others: {_names(victims)}")
        world.cut(victims, others)

        def undo() -> None:
            self._tell(f"reached again: {_names(victims)}")
            world.heal(victims, others)

        return undo

    def _change(self, world: World, event: EventTable, victims: Sequence[int]) -> Undo:
        country = self._conditions.country
        before = country.copy()
        ways = ways_between(self._scenario.peers, event.regions) if event.regions else []
        for i, j in ways:
            if event.latency_ms >= 0:
                country.latencies_seconds[i][j] = event.latency_ms / 1000
            if event.bandwidth_mbps >= 0:
                country.bandwidths[i][j] = limit_of(event.bandwidth_mbps)
        for number in () if event.regions else victims:
            if event.uplink_mbps >= 0:
                country.uplinks[number] = limit_of(event.uplink_mbps)
            if event.downlink_mbps >= 0:
                country.downlinks[number] = limit_of(event.downlink_mbps)
        where = " and ".join(event.regions) or _names(victims)
        self._tell(f"other links: {where}")
        self._survey(world)

        def undo() -> None:
            self._tell(f"links as before: {where}")
            for i, j in ways:
                country.latencies_seconds[i][j] = before.latencies_seconds[i][j]
                country.bandwidths[i][j] = before.bandwidths[i][j]
            for number in victims:
                country.uplinks[number] = before.uplinks[number]
                country.downlinks[number] = before.downlinks[number]
            self._survey(world)

        return undo

    def _survey(self, world: World) -> None:
        self._conditions.changed()
        self._account.note_alive()
        world.network.survey()

    # --- churn --------------------------------------------------------------------------------

    def _present(self) -> list[int]:
        """Return who is there from the start."""
        scenario = self._scenario
        if not scenario.churn:
            return list(scenario.founders)
        present = [n for n in scenario.founders if scenario.peers[n].steady]
        for line in scenario.churn:
            if line.at_seconds <= 0 and line.is_there and line.node not in self._nodes:
                number = self._free_place(present)
                if number is not None:
                    self._nodes[line.node] = number
                    present.append(number)
        return sorted({0, *present})

    def _free_place(self, taken: Sequence[int]) -> int | None:
        """Return a peer that can be a machine of the trace: the first that is none now."""
        used = set(self._nodes.values()).union(taken)
        return next(
            (
                number
                for number, peer in enumerate(self._scenario.peers)
                if not peer.steady and number not in used
            ),
            None,
        )

    async def _churn(self, world: World) -> None:
        for line in self._scenario.churn:
            if line.at_seconds <= 0:
                continue
            await trio.sleep_until(line.at_seconds)
            if line.is_there and line.node not in self._nodes:
                number = self._free_place([])
                if number is not None:
                    self._nodes[line.node] = number
                    self._start(world, [number], "started")
            elif not line.is_there and line.node in self._nodes:
                self._end(world, "kill", [self._nodes.pop(line.node)])


def _names(numbers: Sequence[int]) -> str:
    if len(numbers) > 6:
        return f"{len(numbers)} peers"
    return ", ".join(f"p{number}" for number in numbers) or "nobody"
