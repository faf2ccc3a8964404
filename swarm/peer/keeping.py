"""The hard state on this peer's disk: small, with the bodies of its plans in places of their own.

The rule: a body is durable before the state that names it, and its place is taken by another one
only when no state that may be read back names it. Bodies are found by their hashes.
"""

from protocol.errors import RemoteProtocolError
from protocol.packing import canonical
from protocol.records import CertifiedPlan, PlanHeader, decode_record
from swarm.core.chain import HARD_STATE, HardState, hash_of_body
from swarm.ports import Storage

PLACES = tuple(f"plan-{number}" for number in range(6))
"""A state names three bodies at most (the newest, the active and an accepted one), and so does the
one that it replaces."""


class Keeper:
    """Saves the hard state, body by body."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._places: dict[bytes, str] | None = None
        self._named: frozenset[bytes] = frozenset()

    def save(self, state: HardState) -> None:
        """Replace the hard state durably."""
        if self._places is None:
            self._places = {hash_of_body(data): name for name, data in _bodies(self._storage)}
            data = self._storage.load(HARD_STATE)
            before = decode_record(data, HardState) if data is not None else HardState()
            self._named = frozenset(_hash_in(plan) for plan in _plans_of(before))
        bodies = {_hash_in(plan): plan.body for plan in _plans_of(state)}
        for digest in sorted(bodies):
            if digest not in self._places:
                name = self._free(frozenset(bodies))
                self._storage.save(name, bodies[digest])
                self._places[digest] = name
        self._storage.save(HARD_STATE, canonical(_without_bodies(state)))
        self._named = frozenset(bodies)

    def _free(self, wanted: frozenset[bytes]) -> str:
        """Return a place that no state needs."""
        assert self._places is not None
        taken = {name: digest for digest, name in self._places.items()}
        for name in PLACES:
            if name not in taken:
                return name
        for name in PLACES:
            if taken[name] not in wanted | self._named:
                del self._places[taken[name]]
                return name
        raise AssertionError("a state names more bodies than there are places")


def load_state(storage: Storage) -> HardState | None:
    """Return the hard state; None if there is none.

    Raises RemoteProtocolError if it, or a body that it names, is damaged or missing; and what
    `storage.load` raises."""
    data = storage.load(HARD_STATE)
    if data is None:
        return None
    state = decode_record(data, HardState)
    bodies: dict[bytes, bytes] = {}
    if any(not plan.body for plan in _plans_of(state)):
        bodies = {hash_of_body(body): body for _, body in _bodies(storage)}

    def whole(plan: CertifiedPlan) -> CertifiedPlan:
        if plan.body:
            return plan
        body = bodies.get(_hash_in(plan))
        if body is None:
            raise RemoteProtocolError("the body of a plan is missing")
        return CertifiedPlan(plan.header, body, plan.certificate)

    return state.with_plans(whole)


def _bodies(storage: Storage) -> list[tuple[str, bytes]]:
    loaded = [(name, storage.load(name)) for name in PLACES]
    return [(name, data) for name, data in loaded if data is not None]


def _plans_of(state: HardState) -> list[CertifiedPlan]:
    accepted = state.accepted.plan if state.accepted is not None else None
    return [plan for plan in (state.newest, state.active, accepted) if plan is not None]


def _without_bodies(state: HardState) -> HardState:
    return state.with_plans(lambda plan: CertifiedPlan(plan.header, b"", plan.certificate))


def _hash_in(plan: CertifiedPlan) -> bytes:
    return decode_record(plan.header, PlanHeader).body_hash
