"""One end of a link whose bandwidth is measured, as a process of its own.

Run as `python -m benchmarks.probing NUMBER LISTEN OTHER`: it listens at LISTEN and says so; when a
line comes on its standard input it probes the other end, which listens at OTHER, and prints what it
found as JSON; it serves until its standard input ends.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import trio

from protocol.connection import Received
from protocol.messages import Message, Ping, Pong, Probe, ProbeAnswer
from protocol.records import Member
from protocol.signing import Identity, PeerId
from swarm.adapters.tls import TlsTransport
from swarm.core.membership import Membership
from swarm.errors import PeerError
from swarm.peer.link import Answer
from swarm.peer.links import Links
from swarm.peer.probed import Probed
from swarm.peer.prober import Prober
from swarm.peer.roster import Roster

RUN, KEY = b"r" * 32, b"k" * 32
PING_SECONDS, LOOK_SECONDS = 0.2, 0.05


class End:
    """Measures as a daemon does (links.Receiver), and does nothing else."""

    def __init__(self, number: int, listen: str, other: str, folder: Path) -> None:
        identity = identity_of(number)
        self.other = identity_of(1 - number).peer
        self.links = Links(
            transport=TlsTransport(identity, KEY, folder, listen=listen),
            me=identity.peer,
            run=RUN,
            boot=1,
            receiver=self,
        )
        self.links.know(self.other, (other,))
        self.members = Membership(Member(identity.peer, 1))
        self.roster = Roster(self.links)
        self.prober = Prober(
            run=RUN,
            me=Member(identity.peer, 1),
            identity=identity,
            links=self.links,
            peers=lambda: [self.other],
            listeners=tuple,
            rtt_seconds=self.members.rtt_seconds,
            is_busy=lambda: self.probed.is_serving,
            work=lambda: None,
            pace=lambda: self.roster.pace,
            on_estimates=lambda made, signed: None,
            draw=lambda: 0.5,
        )
        self.probed = Probed(self.links, is_busy=lambda: self.prober.is_probing)

    async def run(self) -> None:
        """Serve; measure when told to."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self._listen)
            print("listening", flush=True)
            while await trio.to_thread.run_sync(sys.stdin.readline):
                nursery.start_soon(self.prober.run)
                nursery.start_soon(self._ping)
                nursery.start_soon(self._tell)
            nursery.cancel_scope.cancel()

    async def _listen(self, task_status: trio.TaskStatus[str]) -> None:
        await self.links.run(started=task_status.started)

    async def _ping(self) -> None:
        while True:
            self.roster.ping(self.other)
            await trio.sleep(PING_SECONDS)

    async def _tell(self) -> None:
        """Print what the probe has found, once it has."""
        while not (links := self.prober.estimates().links) or not links[0].bandwidth:  # noqa: ASYNC110
            await trio.sleep(LOOK_SECONDS)
        found = {
            "bytes_per_second": links[0].bandwidth,
            "latency_seconds": links[0].latency_seconds,
            "spread": links[0].spread,
            "probe_bytes": sum(
                each.sent_bytes
                for each in self.links.traffic.snapshot()
                if each.kind == Probe.__name__
            ),
        }
        print(json.dumps(found), flush=True)

    # --- links.Receiver --------------------------------------------------------------------

    def check_payload(self, peer: PeerId, message: Message) -> None:
        """Take chunks."""
        if isinstance(message, Probe):
            self.probed.check_payload(message)

    async def handle(self, peer: PeerId, boot: int, received: Received, answer: Answer) -> None:
        """Take in a message."""
        match received.message:
            case Ping(number=number):
                self.links.post(peer, Pong(number=number))
            case Pong() as message:
                rtt = self.roster.round_trip(peer, message)
                self.members.heard(Member(peer, boot), trio.current_time(), rtt)
            case Probe() as message:
                self.probed.take(peer, message)
            case ProbeAnswer() as message:
                self.prober.take_answer(peer, message)

    def opened(self, peer: PeerId, boot: int) -> None:
        """Nothing waits for it."""

    def lost(self, peer: PeerId, reason: str) -> None:
        """The other end has been told to end."""

    def unreachable(self, fault: PeerError, waiting: Sequence[Message]) -> None:
        """The other end is not there yet: it is asked again."""


def identity_of(number: int) -> Identity:
    """Return who an end is."""
    return Identity.from_seed(bytes([number + 1]) * 32)


def main() -> None:
    """Be one end."""
    number, listen, other = sys.argv[1:]
    with TemporaryDirectory() as folder:
        trio.run(End(int(number), listen, other, Path(folder)).run)


if __name__ == "__main__":
    main()
