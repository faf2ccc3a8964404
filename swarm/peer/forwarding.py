"""Control messages that go by another peer, where two cannot reach each other: one hop, no further.

The rule: nobody speaks in another's name: what is passed on is signed by whoever says it, for this
run, this receiver and once.
"""

import logging
from collections import deque
from collections.abc import Callable, Collection

from protocol.codec import pack_forwarded, unpack_forwarded
from protocol.errors import RemoteProtocolError
from protocol.messages import (
    Commit,
    Durable,
    Forwarded,
    Heartbeat,
    Leave,
    LedgerReport,
    LostWork,
    Message,
    PingResult,
    Prepared,
    Report,
    Resume,
    StartReduction,
    Suspect,
)
from protocol.records import LETTER_PURPOSE, Letter, Member, RunId, open_signed, sign_record
from protocol.signing import Identity, PeerId
from swarm.peer.links import Links

log = logging.getLogger(__name__)

FORWARDED = (
    Report
    | Resume
    | LedgerReport
    | StartReduction
    | Prepared
    | Commit
    | Durable
    | Heartbeat
    | LostWork
    | PingResult
    | Suspect
    | Leave
)
"""What may go by another peer: small, and training waits for it."""
MAX_REMEMBERED = 256
"""So many letters of one peer may overtake each other."""


class Forwarding:
    """What one peer sends by others, passes on, and gets by others."""

    def __init__(
        self,
        *,
        run: RunId,
        me: Member,
        identity: Identity,
        links: Links,
        relay_to: Callable[[PeerId], PeerId | None],
    ) -> None:
        """`relay_to` names a peer that may pass on a message to another, if there is one."""
        self._run = run
        self._me = me
        self._identity = identity
        self._links = links
        self._relay_to = relay_to
        self._number = 0
        self._seen: dict[PeerId, tuple[int, deque[int]]] = {}

    def send(self, target: PeerId, message: Message) -> bool:
        """Let another peer pass on a control message that this one cannot deliver; return
        whether one does."""
        via = self._relay_to(target) if isinstance(message, FORWARDED) else None
        if via is None:
            return False
        self._number += 1
        letter = Letter(self._run, self._me.boot, target, self._number, pack_forwarded(message))
        signed = sign_record(self._identity, LETTER_PURPOSE, letter)
        self._links.post(via, Forwarded(target=target, letter=signed))
        return True

    def take(
        self, sender: PeerId, message: Forwarded, members: Collection[PeerId]
    ) -> tuple[Member, Message] | None:
        """Return who says what to this peer; None if it is for another, to whom it is passed on,
        or by nobody of `members`: who has been left out may not know, and its relay is no liar.

        Raises RemoteProtocolError if it is not signed for this peer, or is nothing that is
        forwarded."""
        if message.target != self._me.peer:
            if message.letter.signer == sender and message.target in self._links.connected():
                self._links.post(message.target, message)
            return None
        source = message.letter.signer
        if source not in members:
            log.info("letter of a stranger peer=%s via=%s", source, sender)
            return None
        letter = open_signed(message.letter, LETTER_PURPOSE, Letter)
        if (letter.run, letter.target) != (self._run, self._me.peer):
            raise RemoteProtocolError(f"a letter of {source} to {letter.target} is sent here")
        if not self._is_new(source, letter):
            log.info("letter repeated peer=%s number=%d", source, letter.number)
            return None
        inner = unpack_forwarded(letter.frame)
        if not isinstance(inner, FORWARDED):
            raise RemoteProtocolError(f"{type(inner).__name__} is not forwarded")
        return Member(source, letter.boot), inner

    def _is_new(self, source: PeerId, letter: Letter) -> bool:
        boot, numbers = self._seen.get(source, (0, deque[int]()))
        if letter.boot > boot:
            boot, numbers = letter.boot, deque(maxlen=MAX_REMEMBERED)
            self._seen[source] = boot, numbers
        forgotten = len(numbers) == MAX_REMEMBERED and letter.number < min(numbers)
        if letter.boot < boot or letter.number in numbers or forgotten:
            return False
        numbers.append(letter.number)
        return True
