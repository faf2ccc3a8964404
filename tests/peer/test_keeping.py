"""The hard state on a disk: what is read back is what was saved, whenever the process dies."""

import pytest

from protocol.errors import RemoteProtocolError
from protocol.packing import canonical
from protocol.records import CertifiedPlan, PlanHeader, sha256
from swarm.core.chain import HARD_STATE, HardState, genesis
from swarm.peer.keeping import PLACES, Keeper, load_state
from tests.core.plans import manifest

ROOT = genesis(manifest())


class Died(Exception):
    """The process ends here."""


class Disk:
    """Storage that can die at a save, before it counts."""

    def __init__(self) -> None:
        self.names: dict[str, bytes] = {}
        self.saves_left = 1000
        self.saved: list[str] = []

    def save(self, name: str, data: bytes) -> None:
        if not self.saves_left:
            raise Died
        self.saves_left -= 1
        self.saved.append(name)
        self.names[name] = data

    def load(self, name: str) -> bytes | None:
        return self.names.get(name)


def plan(number: int) -> CertifiedPlan:
    """Return a plan whose body is of its own."""
    body = b"body %d" % number
    header = PlanHeader(
        run=ROOT.header.run,
        generation=ROOT.header.generation,
        epoch=number,
        predecessor=b"p" * 32,
        council=("a",),
        body_hash=sha256(body),
        kind="planned",
        from_step=0,
        lineage=0,
    )
    return CertifiedPlan(canonical(header), body, None)


def state(newest: int, active: int) -> HardState:
    return HardState(term=newest, newest=plan(newest), active=plan(active))


def test_nothing_is_read_where_nothing_was_saved() -> None:
    assert load_state(Disk()) is None


def test_bodies_are_saved_once_and_the_state_stays_small() -> None:
    disk = Disk()
    keeper = Keeper(disk)
    for each in (state(1, 1), state(2, 1), state(2, 2), HardState(term=9, newest=plan(2))):
        keeper.save(each)
        assert load_state(disk) == each
    assert [name for name in disk.saved if name != HARD_STATE] == list(PLACES[:2])
    assert b"body 2" not in disk.names[HARD_STATE]


def test_places_are_used_again_and_never_one_that_is_needed() -> None:
    disk = Disk()
    keeper = Keeper(disk)
    for number in range(2, 40):
        if number % 7 == 0:
            keeper = Keeper(disk)  # it has started again
        keeper.save(state(number, number - 1))
        assert load_state(disk) == state(number, number - 1)
    assert {name for name in disk.names if name != HARD_STATE} <= set(PLACES)


@pytest.mark.parametrize("saves", [0, 1, 2])
@pytest.mark.parametrize("before", range(2, 12))
def test_whoever_dies_in_between_has_the_state_before(before: int, saves: int) -> None:
    disk = Disk()
    keeper = Keeper(disk)
    for number in range(1, before + 1):
        keeper.save(state(number, max(1, number - 1)))
    old = load_state(disk)
    disk.saves_left = saves
    new = HardState(term=99, newest=plan(50), active=plan(51))
    with pytest.raises(Died):
        keeper.save(new)
    assert load_state(disk) == old
    disk.saves_left = 1000
    Keeper(disk).save(new)
    assert load_state(disk) == new


def test_a_body_that_is_not_there_is_noticed() -> None:
    disk = Disk()
    Keeper(disk).save(state(2, 1))
    disk.names[PLACES[0]] = b"other bytes"
    with pytest.raises(RemoteProtocolError, match="body of a plan is missing"):
        load_state(disk)
