"""Simulated swarms in which somebody is doubted.

Who is slow or cut off for a moment stays a member; who lives and does not do its part is left out.
"""

import math

import pytest
import trio

from protocol.messages import GatherShard, LostWork, Message, Prepared, ReduceShard
from protocol.signing import PeerId
from swarm.core import voting
from swarm.errors import PeerUnreachable
from swarm.peer.control import Control
from swarm.peer.vigil import MAX_ASKED
from swarm.simulation.network import Weather
from swarm.simulation.physics import Physics, integer_training
from swarm.simulation.world import Options, Outcome, World

SETTLED_SECONDS = 25.0
"""After so long the council has grown, and nothing is planned any more."""


def settled(peers: int = 6, latency_seconds: float = 0.002) -> World:
    """Return a world that trains for longer than any test looks at it."""
    training = integer_training(steps=4000, microbatches=6)
    physics = Physics(training, layers=6)
    options = Options(
        physics, peers=peers, weather=Weather(latency_seconds, 0.0), speeds=(0.1,) * peers
    )
    return World(1, options)


def start_all(world: World) -> None:
    for peer in world.peers:
        world.start(peer.number)


def control(world: World, number: int) -> Control:
    daemon = world.peers[number].daemon
    assert daemon is not None
    return daemon.control


def followers(world: World) -> list[int]:
    """Return everybody but the leader."""
    return [peer.number for peer in world.peers if not control(world, peer.number).is_leader]


def test_two_short_cuts_one_after_the_other_leave_nobody_out() -> None:
    """What one of the two has seen is over when the other one sees it; the leader hears it all."""
    epochs: list[int] = []

    async def scenario(world: World) -> None:
        start_all(world)
        await trio.sleep(SETTLED_SECONDS)
        *others, victim = followers(world)
        epochs.append(world.newest_epoch())
        for other in others[-2:]:
            world.cut([other], [victim])
            await trio.sleep(4.6)
            assert control(world, other).members.suspects
            world.heal([other], [victim])
            await trio.sleep(4)
        epochs.append(world.newest_epoch())

    settled().run(scenario)
    assert epochs[0] == epochs[1]


@pytest.mark.parametrize("pause", [2.2, 2.9])
@pytest.mark.parametrize("together", [True, False])
def test_who_stands_still_for_less_than_three_seconds_is_not_left_out(
    pause: float, together: bool
) -> None:
    epochs: list[int] = []

    async def scenario(world: World) -> None:
        start_all(world)
        await trio.sleep(SETTLED_SECONDS)
        epochs.append(world.newest_epoch())
        two = followers(world)[-2:]
        for victims in [two] if together else [[each] for each in two]:
            for each in victims:
                world.freeze(each)
            await trio.sleep(pause)
            for each in victims:
                world.thaw(each)
            await trio.sleep(0.3)
        await trio.sleep(5)
        epochs.append(world.newest_epoch())

    settled().run(scenario)
    assert epochs[0] == epochs[1]


def test_who_stands_still_for_long_is_gone_within_six_seconds() -> None:
    async def scenario(world: World) -> None:
        start_all(world)
        await trio.sleep(SETTLED_SECONDS)
        epoch = world.newest_epoch()
        world.freeze(followers(world)[-1])
        await trio.sleep(6)
        assert world.newest_epoch() > epoch

    settled().run(scenario)


@pytest.mark.parametrize("one_way", [0.3, 0.6])
def test_round_trips_that_take_longer_than_from_ping_to_ping_are_measured(one_way: float) -> None:
    async def scenario(world: World) -> None:
        start_all(world)
        await trio.sleep(SETTLED_SECONDS)
        for number in (1, 2):
            founder = world.peers[0].identity.peer
            rtt = control(world, number).members.rtt_seconds(founder)
            assert rtt == pytest.approx(2 * one_way, rel=0.05)

    settled(peers=3, latency_seconds=one_way).run(scenario)


def test_each_attempt_to_pass_a_message_on_goes_another_way() -> None:
    async def scenario(world: World) -> None:
        start_all(world)
        await trio.sleep(SETTLED_SECONDS)
        vigil = control(world, 0).vigil
        target, *others = (peer.identity.peer for peer in world.peers[1:])
        ways = []
        for _ in range(2 * MAX_ASKED):
            vigil.unreachable(PeerUnreachable(target, "timed out"))
            ways.append(vigil.relay_to(target))
        assert sorted(ways[:MAX_ASKED], key=str) == sorted(others)
        assert ways[MAX_ASKED:] == ways[:MAX_ASKED]

    settled().run(scenario)


def test_a_loss_that_concerns_no_worker_hides_no_other() -> None:
    async def scenario(world: World) -> None:
        start_all(world)
        await trio.sleep(SETTLED_SECONDS)
        daemon = world.peers[followers(world)[0]].daemon
        assert daemon is not None
        plan = daemon.control.plan
        nobody = LostWork(generation=plan.header.generation, epoch=plan.header.epoch, peer="nobody")
        for guide in daemon.control.vigil.guides():
            daemon._links.post(guide, nobody)
        await trio.sleep(1)
        group = world.hosts()[0]
        world.reset(group[0], group[1], 0)
        await trio.sleep(3)
        assert world.newest_epoch() > plan.header.epoch

    settled().run(scenario)


def test_who_leads_again_does_not_act_on_what_was_due_before() -> None:
    async def scenario(world: World) -> None:
        start_all(world)
        await trio.sleep(SETTLED_SECONDS)
        (leader,) = {peer.number for peer in world.peers} - set(followers(world))
        leading = control(world, leader).leading
        leading._changes.note(trio.current_time())
        assert leading.deadline < math.inf
        control(world, leader)._perform([voting.Leading(control(world, leader).agreement.term)])
        assert leading.deadline == math.inf

    settled().run(scenario)


def test_a_member_says_again_that_it_would_vote(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first time is lost: the council grows all the same."""
    lost: list[PeerId] = []
    take = Control._take_consent

    def lose_first(self: Control, sender: PeerId, signed: object) -> None:
        if sender not in lost:
            lost.append(sender)
        else:
            take(self, sender, signed)  # type: ignore[arg-type]

    monkeypatch.setattr(Control, "_take_consent", lose_first)

    async def scenario(world: World) -> None:
        start_all(world)
        await trio.sleep(SETTLED_SECONDS)
        assert len(world.council()) == 5

    settled(peers=5).run(scenario)
    assert len(lost) == 4


def live_with_a_shirker(kind: type[Message], victim_of: int) -> Outcome:
    """Let a replica of a stage drop what it should send, of one kind, in the second step."""
    training = integer_training(steps=4, microbatches=6)
    world = World(
        1,
        Options(
            Physics(training, layers=6),
            peers=6,
            weather=Weather(0.002, 0.0),
            whole_trace=True,
        ),
    )
    dropped: list[Message] = []

    async def scenario(world: World) -> None:
        start_all(world)
        while not world.hosts():
            await world.changed.wait()
        shirker = world.hosts()[victim_of][-1]
        daemon = world.peers[shirker].daemon
        assert daemon is not None
        post = daemon._links.post

        def drop(peer: PeerId, message: Message, payloads: object = ()) -> None:
            if isinstance(message, kind) and message.step == 1:  # type: ignore[attr-defined]
                dropped.append(message)
            else:
                post(peer, message, payloads)  # type: ignore[arg-type]

        daemon._links.post = drop  # type: ignore[method-assign]
        await world.ended(120)

    outcome = world.run(scenario)
    assert dropped
    return outcome


@pytest.mark.parametrize("kind", [ReduceShard, GatherShard, Prepared])
@pytest.mark.parametrize("stage", [0, 1])
def test_who_does_not_send_what_it_should_in_a_step_is_left_out(
    kind: type[Message], stage: int
) -> None:
    """It lives, answers every ping, and says that it waits itself. The world checks the weights."""
    outcome = live_with_a_shirker(kind, stage)
    assert any("has waited for it for" in line for line in outcome.trace)
