"""Effects that more than one part of the core asks for."""

from dataclasses import dataclass

from protocol.messages import Message
from protocol.signing import PeerId


@dataclass(frozen=True, slots=True)
class Send:
    """Send `message` to `peer` (which may be this peer itself)."""

    peer: PeerId
    message: Message
