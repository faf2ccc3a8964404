"""How a peer becomes a member, and stays one: it asks whenever no plan names this start of it.

The rule: who has been part of the swarm never gives up; who comes for the first time fails with
what everybody answered.
"""

import logging
from collections.abc import Callable

import trio

from protocol.records import (
    JOIN_REQUEST_PURPOSE,
    PEER_RECORD_PURPOSE,
    JoinRequest,
    Signed,
    sign_record,
)
from protocol.signing import Identity, PeerId
from swarm.core.model import Profile
from swarm.core.scheduling.planning import Candidate
from swarm.errors import JoinError, PeerError
from swarm.peer.control import Control
from swarm.peer.discovery import Discovery
from swarm.peer.joining import JOIN_SECONDS, RETRY_SECONDS, find_swarm, join
from swarm.peer.links import Links
from swarm.peer.prober import Prober

log = logging.getLogger(__name__)

REJOIN_SECONDS, REJOIN_MOST_SECONDS = 5.0, 60.0


class Applicant:
    """One peer on its way into the plan."""

    def __init__(
        self,
        *,
        identity: Identity,
        control: Control,
        links: Links,
        discovery: Discovery,
        addresses: tuple[str, ...],
        device: str,
        draw: Callable[[], float],
        prober: Prober,
    ) -> None:
        """Ask at `addresses` first; `draw` returns a random number in [0, 1)."""
        self.phase = "starting"
        """What this peer does while it has no work, for people."""
        self._identity = identity
        self._control = control
        self._links = links
        self._discovery = discovery
        self._addresses = addresses
        self._device = device
        self._draw = draw
        self._prober = prober
        self._asked: frozenset[PeerId] = frozenset()
        """Whom this peer has asked, last, to become a member."""

    async def stay_member(
        self, profile: Profile, digest: bytes, task_seconds: Callable[[], float]
    ) -> None:
        """Ask to become a member whenever the newest plan does not name this start of this peer.

        Who has asked waits for a plan, and asks again after a while: a leader that is lost has
        forgotten it. While the executor hangs (`task_seconds` says for how long its task has
        run) this peer does not ask. Raises JoinError if nobody takes it in, or the swarm refuses.
        """
        control = self._control
        control.measured.set()
        pause = REJOIN_SECONDS
        while True:
            if control.is_member or control.plan.body.ended:
                self.phase = "standby"
                pause = REJOIN_SECONDS
                await control.next_plan()
            elif control.is_stuck(task_seconds()):
                self.phase = "stalled"
                await _wait_a_moment()
            else:
                self.phase = "joining"
                await self._join(profile, digest)
                self.phase = "waiting for peers"
                with trio.move_on_after(pause * (1 + self._draw())):
                    while self._is_asking():
                        await _wait_a_moment()
                pause = min(2 * pause, REJOIN_MOST_SECONDS)

    def _is_asking(self) -> bool:
        """Return whether this peer still waits for the leader that it has asked."""
        control = self._control
        if control.is_member or control.plan.body.ended:
            return False
        # Before the first plan a leader forgets whose link has ended.
        asked = self._has_plan or control.is_leader or self._asked <= self._links.connected()
        return asked and (
            control.leader is None or control.is_leader or control.leader in self._asked
        )

    async def _join(self, profile: Profile, digest: bytes) -> None:
        if self._control.is_leader:
            self._control.join_myself(Candidate(*self._request(profile, digest)))
        else:
            await self._join_others(profile, digest)

    async def _join_others(self, profile: Profile, digest: bytes) -> None:
        control = self._control
        fault: PeerError | None = None
        deadline = trio.current_time() + JOIN_SECONDS
        first: PeerId | None = None
        while trio.current_time() < deadline or self._has_plan:
            try:
                if first is None or first not in self._links.connected():
                    known = await self._known_peers()
                    addresses = () if self._has_plan and known else self._addresses
                    first = await find_swarm(self._links, addresses, known)
                self._prober.tell([first])
                await control.fetch_chain(first)  # a request is good for a few epochs only
                record, _, request = self._request(profile, digest)
                self._asked = await join(self._links, first, record, request)
                self._prober.tell(self._asked)
                return
            except PeerError as error:
                log.info("nobody takes this peer in yet reason=%r", error.reason)
                fault, first = error, None
            if control.is_member or control.is_leader:
                return
            await trio.sleep(RETRY_SECONDS)
        raise JoinError(
            f"cannot join run {control.manifest.run.hex()[:16]}…: nobody took us in "
            f"within {JOIN_SECONDS:g} s",
            evidence=(fault.reason,) if fault is not None else (),
            hint="ask a running peer for a fresh invitation with `swarm invite`",
        )

    def _request(self, profile: Profile, digest: bytes) -> tuple[Signed, JoinRequest, Signed]:
        """Return the signed peer record, the join request, and that signed."""
        control = self._control
        request = JoinRequest(
            run=control.manifest.run,
            peer=control.me.peer,
            boot=control.me.boot,
            epoch=control.plan.header.epoch,
            device=self._device,
            layers=profile.layers,
            memory_bytes=profile.memory_bytes,
            numerics=profile.numerics,
            data_digest=digest,
        )
        record = sign_record(self._identity, PEER_RECORD_PURPOSE, self._discovery.record())
        return record, request, sign_record(self._identity, JOIN_REQUEST_PURPOSE, request)

    @property
    def _has_plan(self) -> bool:
        """Return whether this peer has been part of the swarm: then it does not give up."""
        return bool(self._control.plan.body.stages)

    async def _known_peers(self) -> list[PeerId]:
        """Return whom to ask: the leader and those with a link first, then who was a member, and
        whom the DHT names."""
        control = self._control
        leader = [control.leader] if control.leader is not None else []
        members = [signed.signer for signed in control.plan.body.members]
        found = [each.peer for each in await self._discovery.look_up()]
        connected = sorted(self._links.connected())
        if not leader and connected and not self._has_plan:
            return connected
        council = control.plan.header.council
        ordered = dict.fromkeys([*leader, *connected, *council, *members, *found])
        return [peer for peer in ordered if peer != control.me.peer]


async def _wait_a_moment() -> None:
    """Let others act: whether this peer is a member, or is waited for, is theirs to change."""
    await trio.sleep(RETRY_SECONDS)
