"""Where this peer is, and who else is where: what it tells the DHT and what that answers.

The rule: what others say of themselves is a hint where to dial, and never more.
"""

import logging
from collections.abc import Sequence

import trio

from protocol.records import Manifest, Member, PeerRecord
from swarm.peer.links import Links
from swarm.ports import Dht

log = logging.getLogger(__name__)

FIRST_PUBLISH_SECONDS, PUBLISH_SECONDS = 1.0, 30.0
FEW_PEERS = 100
MAX_OTHER_WAYS_IN = 3
"""How many others' addresses an invitation names."""


def with_port(hosts: Sequence[str], listen: str) -> tuple[str, ...]:
    """Return HOST:PORT for every host, with the port of `listen`."""
    port = listen.rpartition(":")[2]
    return tuple(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts)


class Discovery:
    """One peer's own record, and the records of others that it has found."""

    def __init__(
        self,
        *,
        manifest: Manifest,
        me: Member,
        links: Links,
        advertised_hosts: tuple[str, ...],
        host_label: str,
    ) -> None:
        """Know nobody; `advertised_hosts` may be empty: then the one that it listens on."""
        self.listen = ""
        """HOST:PORT, once this peer listens."""
        self.dht: Dht | None = None
        """None until the node has started."""
        self.found: list[PeerRecord] = []
        """Who else the DHT named last."""
        self.is_published = False
        """Whether the DHT took this peer's record the last time."""
        self._manifest = manifest
        self._me = me
        self._links = links
        self._advertised_hosts = advertised_hosts
        self._host_label = host_label
        self._sequence = 0

    def addresses(self) -> tuple[str, ...]:
        """Return the HOST:PORTs under which others reach this peer."""
        return with_port(self._advertised_hosts, self.listen) or (self.listen,)

    def ways_in(self) -> tuple[str, ...]:
        """Return where a newcomer may ask: at this peer first, then at some others that have a link
        to it. Whoever invites may be gone by the time that a newcomer has come."""
        others = [self._links.address_of(peer) for peer in sorted(self._links.connected())]
        known = [address for address in others if address][:MAX_OTHER_WAYS_IN]
        return tuple(dict.fromkeys((*self.addresses(), *known)))

    def dht_addresses(self) -> tuple[str, ...]:
        """Return the multiaddresses of this peer's DHT node."""
        return self.dht.addresses if self.dht is not None else ()

    def record(self) -> PeerRecord:
        """Return this peer's record, newer than all before."""
        self._sequence += 1
        return PeerRecord(
            run=self._manifest.run,
            peer=self._me.peer,
            boot=self._me.boot,
            addresses=self.addresses(),
            dht_addresses=self.dht_addresses(),
            sequence=self._sequence,
            host_label=self._host_label,
        )

    async def run(self, dht: Dht) -> None:
        """Say where this peer is and see who else is there: often at first, then now and then."""
        pause, rounds = FIRST_PUBLISH_SECONDS, 0
        while True:
            self.is_published = await dht.publish(self.record())
            if not self.is_published:
                log.warning("dht publish failed")
            rounds += 1
            if rounds % self._look_up_rounds() == 0:
                await self.look_up()
            await trio.sleep(pause)
            pause = min(2 * pause, PUBLISH_SECONDS)

    def _look_up_rounds(self) -> int:
        """Return how often this peer says where it is before it asks again where all the others
        are: of many it knows enough."""
        return 1 + len(self.found) // FEW_PEERS

    async def look_up(self) -> list[PeerRecord]:
        """Ask the DHT who is where, and remember it."""
        if self.dht is None:
            return []
        found = await self.dht.lookup()
        self.found = [record for record in found if record.peer != self._me.peer]
        for record in self.found:
            self._links.know_record(record)
        return self.found
