"""How a peer finds its swarm: the manifest first, then the leader's yes.

The rule: what the others answer is believed only as far as it can be checked: a manifest by the
run id, a plan by its certificate.
"""

import logging
from collections.abc import Sequence

import trio

from protocol.connection import Connection, Received
from protocol.errors import RemoteProtocolError
from protocol.messages import GetManifest, Join, JoinAnswer, ManifestAnswer, Message
from protocol.records import Manifest, RunId, Signed, decode_record, sha256
from protocol.signing import PeerId
from swarm.errors import JoinError, PeerError, PeerRefused, PeerUnreachable
from swarm.peer.link import Answer, Link, TrafficCount
from swarm.peer.links import Links
from swarm.ports import Transport

log = logging.getLogger(__name__)

FETCH_SECONDS = 10.0
JOIN_SECONDS = 300.0
RETRY_SECONDS = 1.0
MAX_NOT_YET = 10
"""So often one peer is asked before others are."""


class _Stranger:
    """Takes in nothing: a peer without a manifest answers no questions."""

    def check_payload(self, peer: PeerId, message: Message) -> None:
        raise RemoteProtocolError(f"{type(message).__name__} for a peer without a manifest")

    async def handle(self, peer: PeerId, boot: int, received: Received, answer: Answer) -> None:
        """Ignore it: whoever answered may also have something to say to members."""

    def opened(self, peer: PeerId, boot: int) -> None:
        """The question goes out on it."""

    def lost(self, peer: PeerId, reason: str) -> None:
        """Nothing depends on this link but the question that is asked on it."""

    def unreachable(self, fault: PeerError, waiting: Sequence[Message]) -> None:
        """Whoever asks is told by the exception."""


async def fetch_manifest(transport: Transport, run: RunId, addresses: Sequence[str]) -> Manifest:
    """Return the manifest whose hash is `run` from the first peer that has it.

    Peers that are not there yet are asked again for a while. Raises JoinError with what each
    address answered.
    """
    evidence = ["the invitation names no address"]
    deadline = trio.current_time() + FETCH_SECONDS
    while addresses:
        evidence, refused = [], False
        for address in addresses:
            try:
                return await _ask_for_manifest(transport, run, address)
            except PeerUnreachable as fault:
                evidence.append(f"{address}  {fault.reason}")
            except (PeerError, RemoteProtocolError) as fault:
                refused = True
                reason = fault.reason if isinstance(fault, PeerError) else str(fault)
                evidence.append(f"{address}  {reason}")
        if refused or trio.current_time() > deadline:
            break
        log.info("nobody answers yet evidence=%r", evidence)
        await trio.sleep(RETRY_SECONDS)
    raise JoinError(
        f"cannot join run {run.hex()[:16]}…: none of {len(addresses)} peers let us in",
        evidence=tuple(evidence),
        hint="is the founder running? Or ask a running peer for a fresh invitation with "
        "`swarm invite`",
    )


async def _ask_for_manifest(transport: Transport, run: RunId, address: str) -> Manifest:
    stream = await transport.dial(address, None)
    connection = Connection(run=run, boot=1, channel="bulk", allocate=_no_payload)
    link = Link(stream, connection, _Stranger(), TrafficCount())
    await link.open()
    answer: Message | PeerError = PeerUnreachable(link.peer, "ended")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_serve_quietly, link)
        try:
            answer = (await link.request(GetManifest(id=1))).message
        except PeerError as fault:
            answer = fault
        nursery.cancel_scope.cancel()
    if isinstance(answer, PeerError):
        raise answer
    if not isinstance(answer, ManifestAnswer) or sha256(answer.manifest) != run:
        raise RemoteProtocolError("answered with the manifest of another run")
    return decode_record(answer.manifest, Manifest)


async def _serve_quietly(link: Link) -> None:
    try:
        await link.serve()
    except PeerError as fault:
        log.info("link ended peer=%s reason=%r", link.peer, fault.reason)


def _no_payload(message: Message) -> memoryview:
    raise RemoteProtocolError(f"{type(message).__name__} with tensors for a peer without a plan")


async def find_swarm(links: Links, addresses: Sequence[str], known: Sequence[PeerId]) -> PeerId:
    """Return a peer of the swarm that answers: at one of the addresses, or one that is known.

    Raises PeerUnreachable with what each of them answered."""
    faults = []
    for address in addresses:
        try:
            return await links.meet(address)
        except PeerError as fault:
            faults.append(f"{address}  {fault.reason}")
    for peer in known:
        try:
            return await links.reach(peer)
        except PeerError as fault:
            faults.append(f"{peer}  {fault.reason}")
    raise PeerUnreachable("anybody", "; ".join(faults) or "no address is known")


async def join(links: Links, first: PeerId, record: Signed, request: Signed) -> frozenset[PeerId]:
    """Ask `first`, and whoever leads according to it, to become a member; return who took it in.

    Raises JoinError if the leader refuses; PeerUnreachable if it cannot be reached, or none leads.
    """
    asked, refusals = first, 0
    while True:
        received = await links.request(
            asked, lambda number: Join(id=number, record=record, request=request)
        )
        answer = received.message
        if not isinstance(answer, JoinAnswer):
            raise PeerRefused(asked, f"answered Join with {type(answer).__name__}")
        if answer.refusal.startswith(NOT_YET):
            refusals += 1
            if refusals == MAX_NOT_YET:
                raise PeerUnreachable(asked, answer.refusal)
            await trio.sleep(RETRY_SECONDS)
            asked = first
        elif answer.refusal:
            raise JoinError(
                "the swarm refused this peer",
                evidence=(answer.refusal,),
                hint="make this peer like the others in what the refusal names, and join again",
            )
        elif answer.leader == asked:
            return frozenset({asked})
        elif asked != first:
            raise PeerUnreachable(asked, f"says that {answer.leader} leads, {first} says it does")
        else:
            if answer.leader_address:
                links.know(answer.leader, (answer.leader_address,))
            asked = answer.leader


NOT_YET = "not yet: "
"""Refusals that begin so will pass: ask again."""
