"""What disturbs a small swarm so that it elects, repairs, joins, rolls back; and who sees it.

The rule: a disturbance strikes when a peer of a role is at a point, not at a time, so that it
finds what it needs; where nobody comes there in time, it goes on.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import trio

from protocol.records import Member, PlanBody
from swarm.simulation.process import Process
from swarm.simulation.world import World

FIRST_PEERS, JOINER, SUBSTITUTE = 5, 5, 6
"""So many peers start at once; the two others come later, if at all."""
PAUSE_SECONDS = 1.5
"""From a kill to the restart, or to the start of the newcomer."""
PATIENCE_SECONDS = 20.0
"""For so long a disturbance waits for its moment."""
HUNG_SECONDS = 35.0


# --- who is where ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Moment:
    """A peer is at a point; `number` counts such moments from the start of a run."""

    number: int
    process: str
    point: str
    roles: frozenset[str]


def roles_of(world: World, number: int) -> frozenset[str]:
    """Return the roles that a peer has at this moment, as far as it knows them itself.

    leader; voter: in the council, not leading; coordinator: of a stage's group, or of the steps;
    replica: one that coordinates nothing; feeder; standby."""
    daemon = world.peers[number].daemon
    if daemon is None:
        return frozenset()
    control, roles = daemon.control, set()
    if control.is_leader:
        roles.add("leader")
    elif daemon.me.peer in control.plan.header.council:
        roles.add("voter")
    return frozenset(roles | _training_roles(daemon.me, control.agreement.active.body))


def _training_roles(me: Member, body: PlanBody) -> set[str]:
    roles = set()
    for stage in body.stages:
        if me in stage.replicas:
            roles.add("coordinator" if me == stage.replicas[0] else "replica")
    if any(me == feeder.member for feeder in body.feeders):
        roles.add("feeder")
    if any(me == standby.member for standby in body.standby):
        roles.add("standby")
    return roles


def anybody(number: int) -> bool:
    """Return True."""
    return True


@dataclass
class _Trigger:
    role: str
    point: str
    is_meant: Callable[[int], bool]
    strike: Callable[[int], None]
    struck: trio.Event = field(default_factory=trio.Event)


@dataclass
class Watch:
    """Sees every moment of a run, and kills at one of them."""

    world: World
    points: frozenset[str]
    """What counts as a moment."""
    victim: Moment | None = None
    replaced: bool = False
    """Another peer comes in place of the killed one, which stays dead if that may be."""
    moments: list[Moment] = field(default_factory=list)
    killed: int = -1
    """Number of the peer that was killed."""
    returned: trio.Event = field(default_factory=trio.Event)
    """Whoever comes after the kill has been started."""
    _triggers: list[_Trigger] = field(default_factory=list)
    _count: int = 0

    async def once(
        self,
        role: str,
        point: str,
        strike: Callable[[int], None],
        is_meant: Callable[[int], bool] = anybody,
    ) -> None:
        """Call `strike` with the number of the first peer of that role at that point that is meant;
        return then, or when nobody has come for long."""
        trigger = _Trigger(role, point, is_meant, strike)
        self._triggers.append(trigger)
        with trio.move_on_after(PATIENCE_SECONDS):
            await trigger.struck.wait()
        if trigger in self._triggers:
            self._triggers.remove(trigger)

    def reached(self, process: Process, point: str) -> None:
        """A daemon is at a point (World.on_point)."""
        for trigger in [each for each in self._triggers if each.point == point]:
            if trigger.role in roles_of(self.world, process.number) and trigger.is_meant(
                process.number
            ):
                self._triggers.remove(trigger)
                trigger.strike(process.number)
                trigger.struck.set()
        if process.dead or point not in self.points:
            return
        self._count += 1
        if self.victim is None:
            roles = roles_of(self.world, process.number)
            self.moments.append(Moment(self._count, process.name, point, roles))
        elif self._count == self.victim.number:
            self._kill(process, point, self.victim)

    def _kill(self, process: Process, point: str, victim: Moment) -> None:
        if (process.name, point) != (victim.process, victim.point):
            self.world.violate("replay", f"{process.name} {point} is not {victim}")
        self.world.note(f"{process.name} is {point}")
        self.killed = process.number
        self.replaced = self.replaced and self._can_do_without(process.number)
        self.world.kill(process.number)
        self.world.network.after(PAUSE_SECONDS, self._return)

    def _can_do_without(self, number: int) -> bool:
        """Return whether another peer knows a council that has a majority without this one: else
        all wait for it to come again, or for the recovery key."""
        councils = [
            peer.daemon.control.plan.header.council
            for peer in self.world.peers
            if peer.daemon is not None
            and peer.number != number
            and self.world.is_alive(peer.number)
        ]
        return any(len(council) >= 3 for council in councils)

    def _return(self) -> None:
        number = SUBSTITUTE if self.replaced else self.killed
        if not self.world.is_alive(number):
            self.world.start(number)
        self.returned.set()

    def start(self, *numbers: int) -> None:
        """Start those of some peers that do not run; who is replaced does not come again."""
        for number in numbers:
            if not self.world.is_alive(number) and not (self.replaced and number == self.killed):
                self.world.start(number)


# --- disturbances ---------------------------------------------------------------------------


async def lost_leader(world: World, watch: Watch) -> None:
    """The leader's host loses power in the second step, and another peer joins."""
    lost: list[int] = []

    def strike(number: int) -> None:
        lost.append(number)
        world.kill(number, silent=True)
        watch.start(JOINER)

    await _first_commit(watch)
    await watch.once("leader", "after send LeaderBeat", strike)
    await trio.sleep(9)
    watch.start(*lost)


async def lost_link(world: World, watch: Watch) -> None:
    """Two workers lose their link; another peer joins, and one leaves and comes again."""
    await _first_commit(watch)
    await watch.once("replica", "after send Backward", lambda number: _reset_all(world, number))
    await trio.sleep(0.5)
    watch.start(JOINER)
    await trio.sleep(3)
    world.stop(3)
    await trio.sleep(4)
    watch.start(3)


async def half_prepared(world: World, watch: Watch) -> None:
    """The step coordinator dies when a stage is prepared, which a standby has just come to."""
    lost: list[int] = []

    def strike(number: int) -> None:
        lost.append(stage_of(world, body_of(world, number), 0)[0])
        world.kill(lost[0])

    def has_standby(number: int) -> bool:
        body = body_of(world, number)
        stages = [standby.stage for standby in body.standby]
        return any(group_of(world, number) == stage_of(world, body, stage) for stage in stages)

    await _first_commit(watch)
    watch.start(JOINER)
    await watch.once("standby", "after load", _nothing)
    await watch.once("coordinator", "after send Prepared", strike, has_standby)
    await trio.sleep(4)
    watch.start(*lost)


async def lost_stage(world: World, watch: Watch) -> None:
    """All replicas of a stage die: what they have written is all that is left of it."""
    lost: list[int] = []

    def strike(number: int) -> None:
        lost.extend(group_of(world, number))
        for each in lost:
            world.kill(each)

    await watch.once("coordinator", "after send Durable", _nothing)
    await watch.once("coordinator", "before turn", strike)
    await trio.sleep(2)
    watch.start(*lost)


async def hung_leader(world: World, watch: Watch) -> None:
    """The leader's executor hangs until the swarm does without it, and another peer joins."""
    hung: list[int] = []

    def strike(number: int) -> None:
        executor = world.peers[number].executor
        assert executor is not None
        world.note(f"hang the executor of p{number}")
        hung.append(number)
        executor.hang()

    await _first_commit(watch)
    await watch.once("leader", "after send LeaderBeat", strike)
    watch.start(JOINER)
    await trio.sleep(HUNG_SECONDS)
    for number in hung:
        executor = world.peers[number].executor
        if executor is not None:
            executor.go_on()


Disturbance = Callable[[World, Watch], Awaitable[None]]
DISTURBANCES: dict[str, Disturbance] = {
    each.__name__: each for each in (lost_leader, lost_link, half_prepared, lost_stage, hung_leader)
}


async def _first_commit(watch: Watch) -> None:
    await watch.once("coordinator", "after commit", _nothing)


def _nothing(number: int) -> None:
    """Only wait for this moment."""


def body_of(world: World, number: int) -> PlanBody:
    """Return the plan by which a peer works."""
    daemon = world.peers[number].daemon
    assert daemon is not None
    return daemon.control.agreement.active.body


def group_of(world: World, number: int) -> list[int]:
    """Return the replicas of a peer's stage, in plan order; none if it hosts no stage."""
    body = body_of(world, number)
    groups = [stage_of(world, body, stage) for stage in range(len(body.stages))]
    return next((group for group in groups if number in group), [])


def stage_of(world: World, body: PlanBody, stage: int) -> list[int]:
    numbers = {peer.identity.peer: peer.number for peer in world.peers}
    return [numbers[member.peer] for member in body.stages[stage].replicas]


def _reset_all(world: World, number: int) -> None:
    for other in range(FIRST_PEERS):
        if other != number:
            world.reset(number, other, 0)
