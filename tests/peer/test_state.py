"""State and gradients from peer to peer: several donors, and donors that die, lie or disagree."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import trio
from msgspec.structs import replace

from protocol.messages import GetListing, StateKind
from protocol.signing import Identity
from swarm.core.holding import Holding
from swarm.peer.state import Fetched, NobodyHas, fetch, fetch_into
from swarm.ports import Buffer
from swarm.simulation.physics import Physics, integer_training
from swarm.simulation.reference import Reference
from tests.peer.ends import HASH, RANGES, STAGE, Giver, gradient_of, totals_of, with_givers

PHYSICS = Physics(integer_training(steps=6, microbatches=2), layers=3)
OTHER_PHYSICS = Physics(PHYSICS.training, layers=3, elements=4)
FIRST, LAST = RANGES[STAGE]
CHUNK = 16
LARGEST = {
    "state": dict.fromkeys(range(FIRST, LAST), 1000),
    "gradient": {bucket: len(data) for bucket, data in gradient_of(PHYSICS, 0).items()},
}
OTHER_HASH = b"o" * 32


def listing(
    kind: StateKind = "state",
    version: int = 0,
    *,
    lineage: int = 0,
    layers: tuple[int, int] = (FIRST, LAST),
) -> GetListing:
    first, last = layers
    return GetListing(kind=kind, lineage=lineage, version=version, first=first, last=last)


def states(version: int, physics: Physics = PHYSICS) -> dict[int, bytes]:
    """Return the states of the stage's layers, as the plain loop has them."""
    tensors = Reference(physics).at(version)
    return {layer: physics.state(layer, version, tensors) for layer in range(FIRST, LAST)}


def plain(fetched: Fetched) -> dict[int, bytes]:
    return {number: bytes(data) for number, data in fetched.pieces.items()}


async def fetched_from(
    asker: Giver, givers: Sequence[Giver], wanted: GetListing, state_hash: bytes = b""
) -> Fetched:
    donors = [each.me for each in givers]
    wanted = replace(wanted, state_hash=state_hash)
    return await fetch(asker.links, donors, wanted, LARGEST[wanted.kind])


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a layer of some dozen bytes come in several pieces."""
    monkeypatch.setattr("swarm.peer.state.CHUNK_BYTES", CHUNK)


@pytest.mark.usefixtures("small_chunks")
def test_several_donors_share_the_work(tmp_path: Path) -> None:
    async def scenario(asker: Giver, givers: list[Giver]) -> None:
        found = await fetched_from(asker, givers, listing())
        assert plain(found) == states(0)
        assert found.donors == tuple(each.me for each in givers)
        assert (found.listing.version, found.listing.state_hash) == (0, HASH)
        assert found.listing.totals is None
        # One layer from each, and every byte once.
        assert {number for number, _ in givers[0].asked} | {
            number for number, _ in givers[1].asked
        } == {0, 1}
        assert all(each.asked for each in givers)
        offsets = range(0, len(states(0)[0]), CHUNK)
        every = [(layer, offset) for layer in (0, 1) for offset in offsets]
        assert sorted(givers[0].asked + givers[1].asked) == every
        await asker.executor.load(RANGES, STAGE, 0, found.pieces)

    with_givers(tmp_path, scenario, 2, PHYSICS)


@pytest.mark.usefixtures("small_chunks")
def test_where_a_donor_dies_another_goes_on_at_the_offset(tmp_path: Path) -> None:
    async def scenario(asker: Giver, givers: list[Giver]) -> None:
        mortal, other = givers
        mortal.pieces_to_give = 2
        found = await fetched_from(asker, givers, listing())
        assert plain(found) == states(0)
        assert len(mortal.asked) == 2
        offsets = range(0, len(states(0)[0]), CHUNK)
        every = [(layer, offset) for layer in (0, 1) for offset in offsets]
        # What has come before is not asked for again.
        assert sorted(mortal.asked + other.asked) == every

    with_givers(tmp_path, scenario, 2, PHYSICS)


@pytest.mark.usefixtures("small_chunks")
def test_where_all_donors_die_nobody_has_it(tmp_path: Path) -> None:
    async def scenario(asker: Giver, givers: list[Giver]) -> None:
        with pytest.raises(NobodyHas) as caught:
            await fetched_from(asker, givers, listing())
        for each in givers:
            assert each.me in str(caught.value)
            assert len(each.asked) == 1

    with_givers(tmp_path, scenario, 2, PHYSICS, pieces_to_give=1)


def test_a_donor_that_sends_other_bytes_is_left(tmp_path: Path) -> None:
    async def scenario(asker: Giver, givers: list[Giver]) -> None:
        liar, honest = givers
        liar.corrupt = True
        found = await fetched_from(asker, givers, listing())
        assert plain(found) == states(0)
        assert len(liar.asked) == 1
        assert sorted(number for number, _ in honest.asked) == [0, 1]
        with pytest.raises(NobodyHas, match=f"{liar.me}  sent a piece . with another hash"):
            await fetched_from(asker, [liar], listing())

    with_givers(tmp_path, scenario, 2, PHYSICS)


def test_a_donor_that_claims_more_bytes_than_a_layer_has_is_not_asked_for_them(
    tmp_path: Path,
) -> None:
    async def scenario(asker: Giver, givers: list[Giver]) -> None:
        liars, honest = givers[:2], givers[2]
        for each in liars:
            each.claims_bytes = 1 << 37  # nobody has the memory for it
        found = await fetched_from(asker, givers, listing())
        assert (plain(found), found.donors) == (states(0), (honest.me,))
        with pytest.raises(NobodyHas, match=f"claims that piece 0 has {1 << 37} bytes"):
            await fetched_from(asker, liars, listing())
        for number in (FIRST - 1, LAST):
            largest = {**LARGEST["state"], number: 1000}
            with pytest.raises(NobodyHas, match=r"lists pieces \[0, 1\] instead of"):
                await fetch(asker.links, [honest.me], listing(), largest)

    with_givers(tmp_path, scenario, 3, PHYSICS)


def test_who_gives_what_does_not_fit_is_left_and_others_are_asked(tmp_path: Path) -> None:
    async def scenario(asker: Giver, givers: list[Giver]) -> None:
        odd, honest = givers[:2], givers[2]
        for each in odd:
            each.use(OTHER_PHYSICS)
            await each.hold()
        donors, largest = [each.me for each in givers], LARGEST["state"]

        async def load(pieces: Mapping[int, Buffer]) -> None:
            await asker.executor.load(RANGES, STAGE, 0, pieces)

        found = await fetch_into(load, asker.links, donors, listing(), largest)
        assert found.donors == (honest.me,)
        assert plain(found) == states(0)
        assert await asker.executor.snapshot(0) == found.pieces
        with pytest.raises(NobodyHas) as caught:
            await fetch_into(load, asker.links, donors[:2], listing(), largest)
        for each in odd:
            assert f"{each.me}  gave what does not fit" in str(caught.value)

    with_givers(tmp_path, scenario, 3, PHYSICS)


def test_of_donors_that_disagree_the_largest_group_gives(tmp_path: Path) -> None:
    async def scenario(asker: Giver, givers: list[Giver]) -> None:
        for odd in (0, 2):
            others = [each for each in givers if each is not givers[odd]]
            for each in givers:
                each.use(OTHER_PHYSICS if each is givers[odd] else PHYSICS)
                await each.hold()
                each.asked.clear()
            found = await fetched_from(asker, givers, listing())
            assert found.donors == tuple(each.me for each in others)
            assert plain(found) == states(0)
            assert givers[odd].asked == []

    with_givers(tmp_path, scenario, 3, PHYSICS)


def test_only_donors_of_the_wanted_state_give(tmp_path: Path) -> None:
    async def scenario(asker: Giver, givers: list[Giver]) -> None:
        for each in givers[1:]:
            await each.hold(OTHER_HASH)
        found = await fetched_from(asker, givers, listing(), HASH)
        assert found.donors == (givers[0].me,)
        assert found.listing.state_hash == HASH
        with pytest.raises(NobodyHas) as caught:
            await fetched_from(asker, givers[1:], listing(), HASH)
        assert str(caught.value).count("state of version 0 is not held here") == 2
        # Who gives it all the same is not believed.
        for each in givers[1:]:
            each.gives_any_state = True
        with pytest.raises(NobodyHas) as caught:
            await fetched_from(asker, givers[1:], listing(), HASH)
        for each in givers[1:]:
            assert f"{each.me}  holds another state" in str(caught.value)

    with_givers(tmp_path, scenario, 3, PHYSICS)


def test_what_nobody_holds_is_told_with_what_each_has_answered(tmp_path: Path) -> None:
    async def scenario(asker: Giver, givers: list[Giver]) -> None:
        with pytest.raises(NobodyHas, match="there is no donor"):
            await fetched_from(asker, [], listing())
        with pytest.raises(NobodyHas, match="there is no donor"):
            await fetched_from(asker, [asker], listing())
        for wanted, words in (
            (listing(version=1), "state of version 1 is not held here"),
            (listing(lineage=1), "state of version 0 is not held here"),
            (listing(layers=(2, 3)), "state of version 0 is not held here"),
            (listing("gradient"), "gradient of version 0 is not held here"),
        ):
            with pytest.raises(NobodyHas) as caught:
                await fetched_from(asker, givers, wanted)
            assert str(caught.value).count(words) == 2
        stranger = Identity.from_seed(b"s" * 32).peer
        with pytest.raises(NobodyHas, match=f"{stranger}  no address is known"):
            await fetch(asker.links, [stranger], listing(), LARGEST["state"])
        # Who is not there spoils nothing.
        everybody = [stranger, *(each.me for each in givers)]
        found = await fetch(asker.links, everybody, listing(), LARGEST["state"])
        assert plain(found) == states(0)

    with_givers(tmp_path, scenario, 2, PHYSICS)


@pytest.mark.usefixtures("small_chunks")
def test_donors_go_on_training_while_a_version_is_fetched(tmp_path: Path) -> None:
    """It is served from a copy: of the version that was listed, not of the one that is held."""

    async def scenario(asker: Giver, givers: list[Giver]) -> None:
        (giver,) = givers
        giver.pause_at, totals = 2, totals_of(PHYSICS, 0)
        async with trio.open_nursery() as nursery:
            found: list[Fetched] = []

            async def ask() -> None:
                found.append(await fetched_from(asker, givers, listing()))

            nursery.start_soon(ask)
            await giver.paused.wait()
            await giver.commit(totals)
            giver.go_on.set()
        assert plain(found[0]) == states(0)
        now = await fetched_from(asker, givers, listing(version=1))
        assert plain(now) == states(1) != states(0)
        assert giver.holding is not None
        assert now.listing.state_hash == giver.holding.state_hash
        assert now.listing.totals == totals

    with_givers(tmp_path, scenario, 1, PHYSICS)


def test_a_version_that_has_moved_on_is_not_given(tmp_path: Path) -> None:
    async def scenario(asker: Giver, givers: list[Giver]) -> None:
        for each in givers:
            await each.commit(totals_of(PHYSICS, 0))
        with pytest.raises(NobodyHas, match="state of version 0 is not held here"):
            await fetched_from(asker, givers, listing())

    with_givers(tmp_path, scenario, 2, PHYSICS)


def test_a_version_that_has_moved_on_is_given_from_the_disk(tmp_path: Path) -> None:
    async def scenario(asker: Giver, givers: list[Giver]) -> None:
        writer = givers[0]
        snapshot = await writer.executor.snapshot(0)
        assert snapshot is not None
        weights = {layer: memoryview(b"w") for layer in snapshot}
        await writer.checkpoints.write(0, 0, weights, snapshot, HASH)
        for each in givers:
            await each.commit(totals_of(PHYSICS, 0))
        found = await fetched_from(asker, givers, listing(), HASH)
        assert (plain(found), found.donors) == (states(0), (writer.me,))

    with_givers(tmp_path, scenario, 2, PHYSICS)


def test_a_void_version_of_an_older_lineage_is_not_given(tmp_path: Path) -> None:
    """Lineage 1 begins at version 0: version 1 of lineage 0 is another history, with another hash;
    and who knows no hash gets no checkpoint at all."""

    async def scenario(asker: Giver, givers: list[Giver]) -> None:
        (giver,) = givers
        await giver.commit(totals_of(PHYSICS, 0))
        snapshot = await giver.executor.snapshot(1)
        assert snapshot is not None
        weights = {layer: memoryview(b"w") for layer in snapshot}
        await giver.checkpoints.write(0, 1, weights, snapshot, HASH)
        await giver.hold()
        giver.holding = Holding(1, FIRST, LAST, 0, HASH)
        for wanted in (b"", bytes([7]) * 32):
            with pytest.raises(NobodyHas):
                await fetched_from(asker, givers, listing(version=1, lineage=1), wanted)

    with_givers(tmp_path, scenario, 1, PHYSICS)


def test_the_gradient_of_the_last_step_is_kept_after_its_commit(tmp_path: Path) -> None:
    async def scenario(asker: Giver, givers: list[Giver]) -> None:
        (giver,) = givers
        await giver.executor.load_gradient(0, gradient_of(PHYSICS, 0))
        for _ in ("prepared", "committed"):
            found = await fetched_from(asker, givers, listing("gradient"))
            assert plain(found) == {
                number: bytes(data) for number, data in gradient_of(PHYSICS, 0).items()
            }
            if giver.executor.version == 0:
                await giver.commit(totals_of(PHYSICS, 0))

    with_givers(tmp_path, scenario, 1, PHYSICS)
