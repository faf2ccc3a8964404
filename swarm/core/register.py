"""What one peer knows of the chain of plans: the newest, the active one, and its hard state.

The rule: certified and active epochs never decrease, and whatever changes the hard state is saved
before anything is said that relies on it (`_saving`).
"""

import msgspec

from protocol.messages import Certified
from protocol.records import (
    CertifiedPlan,
    Generation,
    Manifest,
    PlanHeader,
    council_hash,
    decode_record,
)
from protocol.signing import Identity, PeerId
from swarm.core.ballots import Draft, recovery_plan
from swarm.core.chain import (
    HardState,
    Plan,
    check_certificate,
    check_state,
    checked_chain,
    decider_of,
    is_recovery,
    key_of,
    links_to,
    majority,
    open_plan,
)
from swarm.core.effects import Send
from swarm.core.voting import Effect, FetchChain, Persist

replace = msgspec.structs.replace


class Register:
    """The part of an agreement that remembers."""

    def __init__(self, manifest: Manifest, identity: Identity, state: HardState) -> None:
        """Start from the hard state. Raises RemoteProtocolError if it does not verify."""
        self._manifest = manifest
        self._identity = identity
        self._newest, self._active = check_state(state, manifest)
        self._state = self._saved = state

    @property
    def newest(self) -> Plan:
        """Return the newest certified plan that this peer knows."""
        return self._newest

    @property
    def active(self) -> Plan:
        """Return the plan that this peer works by."""
        return self._active

    @property
    def hard_state(self) -> HardState:
        """Return what must be on disk before this peer says anything."""
        return self._state

    @property
    def term(self) -> int:
        """Return the highest term that this peer knows of."""
        return self._state.term

    def chain_for(self, generation: Generation, epoch: int) -> tuple[CertifiedPlan, ...]:
        """Return what a peer whose newest plan is named here needs: the links and the newest
        plan, or nothing if it knows as much. Which links it has already, nobody else can say."""
        if self._state.newest is None or self._newest.key <= (generation, epoch):
            return ()
        return (*self._state.links, self._state.newest)

    def activate(self, plan: Plan) -> list[Effect]:
        """Work by `plan` from now on. Raises ValueError if it is older than the one before, or
        newer than what is certified."""
        if not self._active.key <= plan.key <= self._newest.key:
            raise ValueError(f"cannot work by epoch {plan.header.epoch} now")
        if plan.key == self._active.key:
            return []
        self._active = plan
        self._state = replace(self._state, active=plan.proof)
        return self._saving([])

    def recovery_plan(self, recovery: Identity, nonce: bytes, draft: Draft) -> CertifiedPlan:
        """Return the plan that starts a new generation after the newest plan known here.

        It is decided by the recovery key alone: hand it to `handle_certified`. Raises ValueError
        if the key is another one."""
        if recovery.peer != self._manifest.recovery:
            raise ValueError("this is not the recovery key of the run")
        return recovery_plan(recovery, nonce, draft, self._newest, self.term + 1)

    # --- for what decides ------------------------------------------------------------------

    def _checked(self, proof: CertifiedPlan) -> tuple[tuple[CertifiedPlan, ...], Plan] | None:
        """Return the links and the plan that a certificate of a newer epoch proves; None if links
        are missing that others must have. Raises RemoteProtocolError if it is not certified."""
        key, known = key_of_proof(proof), self._newest.header
        if key[0] > known.generation:
            return checked_chain((proof,), self._manifest) if self._is_recovery(proof) else None
        is_next = key[1] == known.epoch + 1
        # the council of the newest plan alone can be right about the next one
        decider = council_hash(known.council) if is_next else decider_of(proof)
        found = links_to(decider, self._state.links, self._newest, self._manifest)
        if found is None:
            return None
        links, before = found[0], known if is_next else found[1]
        return links, open_plan(proof, check_certificate(proof, before, self._manifest))

    def _is_recovery(self, proof: CertifiedPlan) -> bool:
        return is_recovery(proof, self._manifest)

    def _other_epoch(self, sender: PeerId, key: tuple[Generation, int]) -> list[Effect]:
        if key > self._newest.key:
            return [FetchChain(sender)]
        return [Send(sender, Certified(plan=self._newest.proof))]

    def _saving(self, effects: list[Effect]) -> list[Effect]:
        if self._state is self._saved:
            return effects
        self._saved = self._state
        return [Persist(self._state), *effects]

    @property
    def _me(self) -> PeerId:
        return self._identity.peer

    @property
    def _council(self) -> tuple[PeerId, ...]:
        return self._newest.header.council

    def _is_majority(self, peers: frozenset[PeerId]) -> bool:
        return len(peers) >= majority(self._council)


def key_of_proof(plan: CertifiedPlan) -> tuple[Generation, int]:
    """Return generation and epoch of a plan that is not decoded yet."""
    return key_of(decode_record(plan.header, PlanHeader))
