"""Measures this peer's links and how fast it computes, and tells leader and council.

Bandwidth comes from real transfers, which costs nothing, and, where there were none, from a short
probe of a few partners (core/partners.py). The rule: whoever trains is left alone: a probe is asked
for, one at a time on either side, within a budget of bytes, and a busy peer says no.
"""

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import trio

from protocol.messages import Measured, Probe, ProbeAnswer
from protocol.records import (
    ESTIMATES_PURPOSE,
    Estimates,
    LinkEstimate,
    Member,
    RunId,
    Signed,
    TensorSpec,
    sign_record,
)
from protocol.signing import Identity, PeerId
from swarm.core.measuring.estimation import WINDOW_SECONDS, Average, Probing, Slowdown
from swarm.core.measuring.measured import Telling, fitting
from swarm.core.measuring.partners import partners
from swarm.core.pace import Pace
from swarm.errors import PeerError
from swarm.peer.links import Links
from swarm.peer.probed import Budget

log = logging.getLogger(__name__)

ANSWER_SECONDS = 10.0
"""After so long without an answer a probe is given up."""
NEW_SECONDS = 60.0
"""For so long a peer looks round every second, or of many every moment, whom else there is."""
LONG_PERIODS = 2
"""Of heartbeats: in a large swarm a peer then looks round as seldom."""
CHOOSE_SECONDS = 300.0
AGAIN_SECONDS = 3600.0
"""So old a measurement of the bandwidth is repeated, unless real transfers have renewed it."""
RETRY_SECONDS, RETRY_MOST_SECONDS = 2.0, 600.0
"""How soon one that was busy, or could not be reached, is asked again."""
PAUSE_SECONDS = 0.25
"""Between two probes of one peer."""


class Work(NamedTuple):
    """What a peer has computed by one plan."""

    plan: object
    """The counts begin anew with each."""
    compute_seconds: float
    microbatches: int
    profiled_seconds: float
    """What one microbatch takes according to the profile of this peer's layers."""


@dataclass
class Way:
    """What is known of the way to one peer."""

    bandwidth: Average = field(default_factory=Average)
    latency: Average = field(default_factory=Average)
    measured_at: float = -math.inf
    """The bandwidth, by a probe or by a transfer that had the way to itself."""
    retry_at: float = -math.inf
    failures: int = 0


class Prober:
    """One peer's measurements."""

    def __init__(
        self,
        *,
        run: RunId,
        me: Member,
        identity: Identity,
        links: Links,
        peers: Callable[[], Iterable[PeerId]],
        listeners: Callable[[], Iterable[PeerId]],
        rtt_seconds: Callable[[PeerId], float],
        pace: Callable[[], Pace],
        is_busy: Callable[[], bool],
        work: Callable[[], Work | None],
        on_estimates: Callable[[Estimates, Signed], None],
        draw: Callable[[], float],
    ) -> None:
        """`peers` are those whose links matter, `listeners` those who are told; `on_estimates` is
        given what this peer tells of itself; `draw` returns a random number in [0, 1)."""
        self._run = run
        self._me = me
        self._identity = identity
        self._links = links
        self._peers = peers
        self._listeners = listeners
        self._rtt_seconds = rtt_seconds
        self._pace = pace
        self._is_busy = is_busy
        self._work = work
        self._on_estimates = on_estimates
        self._draw = draw
        self._ways: dict[PeerId, Way] = {}
        self._slowdown = Slowdown()
        self._worked: Work | None = None
        self._uplink, self._downlink = Average(), Average()
        self._window: tuple[float, float, float] | None = None
        """When it began, and what had been sent and received by then."""
        self._telling = Telling()
        self._signed: Signed | None = None
        self._asked: frozenset[PeerId] = frozenset()
        self._probed: PeerId | None = None
        self._number = 0
        self._answer: ProbeAnswer | None = None
        self._answered = trio.Event()
        self._sent = Budget()
        self._partners: tuple[frozenset[PeerId], float, tuple[PeerId, ...]] = (frozenset(), 0.0, ())
        """Of whom they were chosen, when, and who they are."""

    # --- life ------------------------------------------------------------------------------

    async def run(self) -> None:
        """Measure and tell, until cancelled."""
        began = trio.current_time()
        while True:
            self._look()
            self._tell()
            target = self._next_partner()
            if target is not None:
                await self._probe(target)
                await trio.sleep(PAUSE_SECONDS * (1 + self._draw()))
            else:
                is_new = trio.current_time() < began + NEW_SECONDS
                pace = self._pace()
                later = max(WINDOW_SECONDS, LONG_PERIODS * pace.heartbeat_seconds)
                await trio.sleep(pace.moment_seconds if is_new else later)

    def tell(self, peers: Iterable[PeerId]) -> None:
        """Let these peers, who are asked to take this one in, know what is known."""
        self._asked = frozenset(peers)
        self._look()
        for peer in self._asked:
            self._telling.forget(peer)
        self._tell()

    def retimed(self, slowdown: float) -> None:
        """A peer without work has timed its layers again: they take so many times as long as when
        it joined."""
        self._slowdown.average.replace(slowdown, spread=0.1)

    def opened(self, peer: PeerId) -> None:
        """There is a new link to a peer, which may not know yet what the others have been told."""
        self._telling.forget(peer)

    # --- what is known ---------------------------------------------------------------------

    @property
    def ways(self) -> dict[PeerId, Way]:
        """Return what is known of the way to each peer, in order of peer."""
        return dict(sorted(self._ways.items()))

    @property
    def is_probing(self) -> bool:
        """Return whether a probe of another peer is under way."""
        return self._probed is not None

    @property
    def slowdown(self) -> Average:
        """Return how much longer microbatches take than the profile says; 0 before any."""
        return self._slowdown.average

    def estimates(self) -> Estimates:
        """Return what this peer would tell now; its sequence means nothing."""
        wanted = frozenset(self._peers())
        links = [
            LinkEstimate(
                peer=peer,
                bandwidth=min(way.bandwidth.value, 1e15),
                latency_seconds=min(way.latency.value, 1e9),
                spread=min((way.bandwidth if way.bandwidth.value else way.latency).spread, 1e3),
            )
            for peer, way in self._ways.items()
            if peer in wanted and (way.bandwidth.value or way.latency.value)
        ]
        best = max((link.bandwidth for link in links), default=0.0)
        slowdown = self._slowdown.average
        # What all transfers get together says something only if it is more than one gets alone.
        up, down = (
            each if each.value > best else Average() for each in (self._uplink, self._downlink)
        )
        return Estimates(
            run=self._run,
            peer=self._me.peer,
            boot=self._me.boot,
            sequence=1,
            slowdown=min(max(slowdown.value or 1.0, 1e-6), 1e6),
            slowdown_spread=min(slowdown.spread, 1e3),
            uplink=min(up.value, 1e15),
            uplink_spread=up.spread,
            downlink=min(down.value, 1e15),
            downlink_spread=down.spread,
            links=fitting(links),
        )

    def _way(self, peer: PeerId) -> Way:
        return self._ways.setdefault(peer, Way())

    def _look(self) -> None:
        """Take in what others have measured by the way."""
        now = trio.current_time()
        connected = self._links.connected()
        for peer in sorted(connected - {self._me.peer}):
            rtt = self._rtt_seconds(peer)
            if rtt > 0:
                self._way(peer).latency.take(rtt / 2)
        writers = self._links.writers
        while writers.seen:
            transfer = writers.seen.popleft()
            way = self._way(transfer.peer)
            if transfer.is_alone:
                way.bandwidth.take(transfer.bytes_per_second)
                way.measured_at = now
            else:
                way.bandwidth.bound(transfer.bytes_per_second)
        self._look_at_totals(now)
        self._look_at_work()
        if len(self._ways) > len(connected):
            kept = connected.union(self._peers())
            self._ways = {peer: way for peer, way in self._ways.items() if peer in kept}

    def _look_at_totals(self, now: float) -> None:
        writers = self._links.writers
        sent, received = writers.sent_bytes, writers.received_bytes
        if self._window is not None:
            began, sent_before, received_before = self._window
            if now < began + WINDOW_SECONDS:
                return
            self._uplink.bound((sent - sent_before) / (now - began))
            self._downlink.bound((received - received_before) / (now - began))
        self._window = now, sent, received

    def _look_at_work(self) -> None:
        work, before = self._work(), self._worked
        self._worked = work
        if work is None:
            return
        seconds, count = work.compute_seconds, work.microbatches
        if before is not None and before.plan == work.plan:
            seconds, count = seconds - before.compute_seconds, count - before.microbatches
        if count > 0:
            self._slowdown.take(seconds, count, work.profiled_seconds)

    def _tell(self) -> None:
        made = self._telling.news(self.estimates(), trio.current_time())
        if made is not None:
            self._signed = sign_record(self._identity, ESTIMATES_PURPOSE, made)
            self._on_estimates(made, self._signed)
        if self._signed is None:
            return
        listeners = {*self._listeners(), *self._asked} - {self._me.peer}
        for peer in self._telling.untold(sorted(listeners)):
            self._links.post(peer, Measured(estimates=self._signed))

    # --- probing others ----------------------------------------------------------------------

    def _next_partner(self) -> PeerId | None:
        """Return whom to probe now; None while nobody is due, or this peer is busy."""
        now = trio.current_time()
        if self._probed is not None or self._is_busy() or not self._sent.take(0, now):
            return None
        chosen = self._chosen(frozenset(self._peers()), now)
        return next((peer for peer in chosen if self._is_due(self._way(peer), now)), None)

    def _chosen(self, peers: frozenset[PeerId], now: float) -> tuple[PeerId, ...]:
        """Return the partners among these peers; chosen anew if they are others, or once in a
        while, since more is known of what is near."""
        before, at, chosen = self._partners
        if peers != before or now >= at + CHOOSE_SECONDS:
            known = {p: way.latency.value for p, way in self._ways.items() if way.latency.value}
            chosen = partners(self._me.peer, sorted(peers), self._run.hex(), known)
            self._partners = peers, now, chosen
        return chosen

    @staticmethod
    def _is_due(way: Way, now: float) -> bool:
        return now >= max(way.measured_at + AGAIN_SECONDS, way.retry_at)

    async def _probe(self, peer: PeerId) -> None:
        """Measure the way to a peer, if it lets us."""
        self._probed = peer
        way = self._way(peer)
        probing = Probing()
        try:
            await self._links.reach(peer)
            await self._send_trains(peer, probing)
        except PeerError as fault:
            log.info("not probed peer=%s reason=%r", peer, fault.reason)
        finally:
            self._probed = None
        now = trio.current_time()
        if probing.rate is None:
            way.failures += 1
            wait = min(RETRY_SECONDS * 2 ** min(way.failures - 1, 10), RETRY_MOST_SECONDS)
            way.retry_at = now + wait * (0.5 + self._draw())
            return
        rate = probing.rate
        log.info(
            "probed peer=%s bytes_per_second=%.4g spread=%.2g",
            peer,
            rate.bytes_per_second,
            rate.spread,
        )
        way.bandwidth.replace(rate.bytes_per_second, rate.spread)
        way.measured_at, way.failures = now, 0

    async def _send_trains(self, peer: PeerId, probing: Probing) -> None:
        began = trio.current_time()
        if await self._ask(peer, [Probe(number=self._next_number())], b"") is None:
            return
        way = self._way(peer)
        if way.latency.value <= 0:
            way.latency.take((trio.current_time() - began) / 2, 0.3)
        while (train := probing.next_train()) is not None and not self._is_busy():
            chunks, size = train
            if not self._sent.take(chunks * size, trio.current_time()):
                return
            number, tensors = self._next_number(), (TensorSpec("uint8", (size,)),)
            messages = [
                Probe(number=number, chunk=chunk, chunks=chunks, tensors=tensors)
                for chunk in range(chunks)
            ]
            began = trio.current_time()
            answer = await self._ask(peer, messages, bytes(size))
            if answer is None:
                return
            elapsed = trio.current_time() - began
            if answer.arrivals and answer.arrivals[-1] > elapsed:
                log.warning("probe answered with times that were not peer=%s", peer)
                return
            probing.arrived(answer.arrivals, max(elapsed - 2 * way.latency.value, 0.0))

    def take_answer(self, peer: PeerId, message: ProbeAnswer) -> None:
        """Take in what a peer answers; nothing, if this was not asked."""
        if peer == self._probed and message.number == self._number:
            self._answer = message
            self._answered.set()

    def _next_number(self) -> int:
        self._number += 1
        return self._number

    async def _ask(
        self, peer: PeerId, messages: Sequence[Probe], payload: bytes
    ) -> ProbeAnswer | None:
        """Send a question or a train; return its answer, None if there is none or a no."""
        self._answer, self._answered = None, trio.Event()
        payloads = (memoryview(payload),) if payload else ()
        for message in messages:
            self._links.post(peer, message, payloads)
        with trio.move_on_after(ANSWER_SECONDS):
            await self._answered.wait()
        answer: ProbeAnswer | None = self._answer
        return answer if answer is not None and not answer.busy else None
