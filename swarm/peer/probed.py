"""Being probed: how fast the chunks of others come is told to them, if this peer has the time.

The rule: one prober at a time, in turns, none while this peer is busy, and no more bytes within an
hour than the budget holds. What was not granted is not measured, and too much of it ends the link.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

import trio

from protocol.errors import RemoteProtocolError
from protocol.messages import Probe, ProbeAnswer
from protocol.signing import PeerId
from swarm.core.measuring.estimation import PROBE_BYTES
from swarm.peer.links import Links

MAX_CHUNK_BYTES = 64 * 1024
SERVE_SECONDS = 1.5
"""After its last train a prober is taken to be done."""
TRAIN_SECONDS = 20.0
"""So long a train that has begun keeps others waiting."""
PATIENCE_SECONDS = 10.0
"""So long somebody who was turned away has to ask again before who probed last may."""
HOUR_SECONDS = 3600.0
HOURLY_BYTES = 64_000_000
"""Sent in probes within an hour; and as much taken in, from all peers together."""


@dataclass
class Budget:
    """Bytes within an hour."""

    _began: float = -inf
    _spent: int = 0

    def take(self, size: int, now: float) -> bool:
        """Spend bytes; return whether there were enough."""
        if now >= self._began + HOUR_SECONDS:
            self._began, self._spent = now, 0
        self._spent += size
        return self._spent < HOURLY_BYTES


@dataclass
class _Served:
    """The peer whose chunks this one takes in now."""

    peer: PeerId
    until: float
    number: int = 0
    """Of its train."""
    began: float = 0.0
    arrivals: list[float] = field(default_factory=list)


class Probed:
    """One peer's answers to probes."""

    def __init__(self, links: Links, is_busy: Callable[[], bool]) -> None:
        self._links = links
        self._is_busy = is_busy
        self._served: _Served | None = None
        self._budget = Budget()
        self._last: PeerId = ""
        """Who was granted a probe last: not again before another who has asked since,"""
        self._turned_away_at = -inf
        """at this time."""
        self._unwanted: dict[PeerId, int] = {}
        """Bytes that each peer has sent since its last grant, without one."""

    @property
    def is_serving(self) -> bool:
        """Return whether somebody probes this peer."""
        return self._served is not None and trio.current_time() < self._served.until

    def check_payload(self, message: Probe) -> None:
        """Raise RemoteProtocolError if a chunk is none of ours."""
        spec = message.tensors[0] if message.tensors else None
        if (
            spec is None
            or spec.dtype != "uint8"
            or len(spec.shape) != 1
            or not 1 <= spec.nbytes <= MAX_CHUNK_BYTES
            or message.chunk >= message.chunks
        ):
            raise RemoteProtocolError(
                f"chunk {message.chunk} of {message.chunks} carries {spec} in a probe"
            )

    def take(self, peer: PeerId, message: Probe) -> None:
        """Take in a question or a chunk. Raises RemoteProtocolError if it may not be sent."""
        if message.chunks == 0 and not message.tensors:
            self._take_question(peer, message)
        else:
            self.check_payload(message)
            self._take_chunk(peer, message)

    def _take_question(self, peer: PeerId, message: Probe) -> None:
        now = trio.current_time()
        is_other = self.is_serving and self._served is not None and self._served.peer != peer
        is_greedy = peer == self._last and now < self._turned_away_at + PATIENCE_SECONDS
        busy = self._is_busy() or is_other or is_greedy
        if busy and peer != self._last:
            self._turned_away_at = now
        if not busy and self._budget.take(MAX_CHUNK_BYTES, now):
            self._served, self._last = _Served(peer, now + SERVE_SECONDS), peer
            self._turned_away_at = -inf
            self._unwanted.pop(peer, None)
        else:
            busy = True
        self._links.post(peer, ProbeAnswer(number=message.number, busy=busy))

    def _take_chunk(self, peer: PeerId, message: Probe) -> None:
        now, size = trio.current_time(), message.tensors[0].nbytes
        is_last = message.chunk == message.chunks - 1
        served = self._granted(peer, message, now)
        if not self._budget.take(size, now):
            served = self._served = None
        if served is None:
            self._drop(peer, size)
            if is_last:
                self._links.post(peer, ProbeAnswer(number=message.number, busy=True))
            return
        served.arrivals.append(now - served.began)
        served.until = now + (SERVE_SECONDS if is_last else TRAIN_SECONDS)
        if is_last:
            answer = ProbeAnswer(number=message.number, arrivals=tuple(served.arrivals))
            self._links.post(peer, answer)

    def _granted(self, peer: PeerId, message: Probe, now: float) -> _Served | None:
        """Return the train to which a chunk belongs, if it has a grant and is the next one."""
        served = self._served
        if served is None or served.peer != peer:
            return None
        if message.chunk == 0 and message.number != served.number:
            served.number, served.began, served.arrivals = message.number, now, []
        is_next = (message.number, message.chunk) == (served.number, len(served.arrivals))
        if not is_next or now >= served.until or self._is_busy():
            self._served = None  # the rest of the train means nothing
        return self._served

    def _drop(self, peer: PeerId, size: int) -> None:
        dropped = self._unwanted[peer] = self._unwanted.get(peer, 0) + size
        if dropped > 2 * PROBE_BYTES:
            raise RemoteProtocolError(f"{dropped} bytes of probes that were not granted")
