"""What passes between the peers of one plan: replays, frames that are lost, donors that lie."""

from collections.abc import Sequence
from typing import Any

import pytest
import trio
from msgspec.structs import replace

from protocol.messages import GetListing, Message, Resume
from protocol.signing import PeerId
from swarm.peer import donor
from swarm.peer.links import Links
from swarm.ports import Buffer
from swarm.simulation.network import Weather
from swarm.simulation.physics import Physics, integer_training
from swarm.simulation.process import running
from swarm.simulation.world import Options, World

PEERS = 4
EARLY = ("waiting", "recovering")


def world_of(seed: int = 1, *, steps: int, microbatches: int, **more: Any) -> World:
    """Return a world of two stages."""
    training = integer_training(steps=steps, microbatches=microbatches, **more)
    return World(seed, Options(Physics(training), peers=PEERS, whole_trace=True))


# --- replays --------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1])
def test_who_lacks_nothing_keeps_no_activations_of_a_replay(stage: int) -> None:
    """The executor complains of what is left of a pass at the commit: here a replica dies when its
    stage has most of the step, which is then computed again for the sake of this stage alone."""
    microbatches = 48
    world = world_of(steps=3, microbatches=microbatches)
    forwards = 0

    def count(_: object, point: str) -> None:
        nonlocal forwards
        forwards += point == "after forward"

    world.on_point = count

    async def killed(world: World) -> None:
        for number in range(PEERS):
            world.start(number)
        while not (group := _nearly_done(world, stage, microbatches)):  # noqa: ASYNC110
            await trio.sleep(0.01)
        world.kill(group[-1])
        await world.ended(60)

    world.run(killed)
    assert forwards > 3 * microbatches


def _nearly_done(world: World, stage: int, microbatches: int) -> list[int]:
    """Return the replicas of a stage once they have two thirds of a step between them."""
    hosts = world.hosts()
    if not hosts or len(hosts[stage]) < 2:
        return []
    executors = [world.peers[number].executor for number in hosts[stage]]
    done = sum(len(each.ledger) for each in executors if each is not None)
    return hosts[stage] if done > microbatches * 2 / 3 else []


def test_a_gradient_that_does_not_count_any_more_is_forgotten() -> None:
    """Two stages share a tensor: where one of them has to reduce again, the other has to, too, and
    must not be taken for prepared by what it reduced before."""
    physics = Physics(integer_training(steps=2, microbatches=12), tied=True)
    kept: list[bool] = []

    async def killed(world: World) -> None:
        for number in range(PEERS):
            world.start(number)
        while not (split := _split_by_reduction(world)):  # noqa: ASYNC110
            await trio.sleep(0.0005)
        prepared, other = split
        world.kill(other)
        daemon = world.peers[prepared].daemon
        assert daemon is not None
        before = daemon._epoch
        while (epoch := daemon._epoch) in (None, before) or epoch.state in EARLY:  # noqa: ASYNC110
            await trio.sleep(0.0005)
        if epoch.state == "filling":  # whoever is left of the other stage is not prepared either
            kept.append(_has_reduced(world, prepared))

    for seed in range(18, 58):
        if len(kept) < 2:
            World(seed, Options(physics, peers=PEERS, weather=Weather(0.05, 0.2))).run(killed)
    assert len(kept) > 0
    assert not any(kept)


def _has_reduced(world: World, number: int) -> bool:
    executor = world.peers[number].executor
    return executor is not None and len(executor.ledger) > 0 and executor._stage._is_whole()


def _split_by_reduction(world: World) -> tuple[int, int] | None:
    """Return a replica that has its whole reduced gradient, and one of another stage, where nobody
    has; None if there are no such two, or if the second would be missed."""
    hosts = world.hosts()
    whole = [{number for number in group if _has_reduced(world, number)} for group in hosts]
    for stage, group in enumerate(hosts):
        others = [each for each in range(len(hosts)) if each != stage and whole[each]]
        if others and not whole[stage] and len(group) > 1:
            return min(whole[others[0]]), group[-1]
    return None


# --- frames that are lost ----------------------------------------------------------------------


class LostResume:
    """Breaks the streams from the step coordinator to a peer just when its Resume of a plan with
    number `epoch` or a later one is on them, once."""

    def __init__(self, patch: pytest.MonkeyPatch, world: World, role: str, epoch: int) -> None:
        self.victim = -1
        self._world = world
        self._role = role
        self._epoch = epoch
        self._numbers = {peer.identity.peer: peer.number for peer in world.peers}
        real = Links.post

        def post(
            links: Links, peer: PeerId, message: Message, payloads: Sequence[Buffer] = ()
        ) -> None:
            if isinstance(message, Resume) and self._is_meant(links.me, peer, message):
                self.victim = self._numbers[peer]
                world.reset(self._numbers[links.me], self.victim, 0)
            else:
                real(links, peer, message, payloads)

        patch.setattr(Links, "post", post)

    def _is_meant(self, sender: PeerId, peer: PeerId, message: Resume) -> bool:
        if self.victim >= 0 or message.fence.epoch < self._epoch or peer == sender:
            return False
        daemon = self._world.peers[self._numbers[sender]].daemon
        assert daemon is not None
        body = daemon.control.agreement.active.body
        standby = peer in {each.member.peer for each in body.standby}
        return standby == (self._role == "standby")


@pytest.mark.parametrize("epoch", [0, 2])
def test_a_standby_whose_resume_is_lost_follows_by_what_is_committed(
    monkeypatch: pytest.MonkeyPatch, epoch: int
) -> None:
    """Also where it works by the plan before, and waits for Resume to go on to the next one."""
    world = world_of(steps=400, microbatches=2, max_replicas=1, checkpoint_every=30)
    lost = LostResume(monkeypatch, world, "standby", epoch)
    found: list[tuple[int, bool]] = []

    async def listened(world: World) -> None:
        for number in range(PEERS):
            world.start(number)
        while lost.victim < 0:  # noqa: ASYNC110 - seconds are virtual
            await trio.sleep(0.1)
        await trio.sleep(8)
        daemon = world.peers[lost.victim].daemon
        assert daemon is not None and daemon._epoch is not None
        versions = [each.executor.version for each in world.peers if each.executor is not None]
        found.append((max(versions) - daemon._epoch.version, daemon._epoch.state == "ready"))

    outcome = World.run(world, listened)
    assert found[0][1] and found[0][0] <= 1
    refused = [line for line in outcome.trace if "wait for Resume" in line]
    assert refused == []


def test_where_a_replicas_resume_is_lost_a_repair_follows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = world_of(steps=20, microbatches=4)
    lost = LostResume(monkeypatch, world, "replica", 0)

    async def listened(world: World) -> None:
        for number in range(PEERS):
            world.start(number)
        await world.ended(60)

    world.run(listened)
    assert lost.victim >= 0
    kinds = [each.kind for each in world.invariants._headers.values()]
    assert "repair" in kinds


# --- donors that lie ---------------------------------------------------------------------------


@pytest.mark.parametrize("lie", ["bytes", "size"])
def test_what_a_donor_gives_ends_no_standby(monkeypatch: pytest.MonkeyPatch, lie: str) -> None:
    """All that it gives is wrong, and its stage has no other replica: who stands by for it waits,
    and the swarm goes on."""
    liar, lies = 0, 0
    real = donor._copy_of

    async def copy_of(pieces: dict[int, Buffer], *what: Any) -> donor._Copy:
        nonlocal lies
        process = running.get()
        if process is None or process.number != liar:
            return await real(pieces, *what)
        lies += 1
        if lie == "bytes":
            return await real(dict.fromkeys(pieces, memoryview(b"no state at all")), *what)
        copy = await real(pieces, *what)
        copy.listing = tuple(replace(piece, nbytes=1 << 37) for piece in copy.listing)
        return copy

    monkeypatch.setattr(donor, "_copy_of", copy_of)
    world = world_of(steps=60, microbatches=2, max_replicas=1)

    async def listened(world: World) -> None:
        for number in range(PEERS):
            world.start(number)
        await world.ended(60)

    world.run(listened)
    assert lies > 0
    assert [peer.process.boot for peer in world.peers if peer.process is not None] == [1] * PEERS


def test_where_donors_give_nothing_that_they_have_reported_a_repair_follows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Everybody dies, and one disk is empty: that peer has to fetch, and those who hold the version
    refuse until the leader has been told."""
    world = world_of(steps=40, microbatches=2, checkpoint_every=5)
    refusals = 0
    real = donor.Donor._copy

    async def copy(self: donor.Donor, message: GetListing) -> donor._Copy | str:
        nonlocal refusals
        header, body = world._newest() or (None, None)
        repaired = body is not None and "a link was lost" in body.reason
        if message.state_hash and header is not None and header.lineage == 1 and not repaired:
            refusals += 1
            return "is not held here"
        return await real(self, message)

    monkeypatch.setattr(donor.Donor, "_copy", copy)

    async def lost(world: World) -> None:
        for number in range(PEERS):
            world.start(number)
        while not _is_complete(world):  # noqa: ASYNC110 - seconds are virtual
            await trio.sleep(0.1)
        for number in range(PEERS):
            world.kill(number)
        world.peers[3].disk.versions.clear()
        for number in range(PEERS):
            world.start(number)
        await world.ended(300)

    world.run(lost)
    assert refusals > 0


def _is_complete(world: World) -> bool:
    """Return whether a plan names a version complete."""
    _, body = world._newest() or (None, None)
    return body is not None and body.completed is not None
