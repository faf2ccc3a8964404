"""A small world for tests of the simulation's parts: no daemons, two or three hosts."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import trio

from protocol.records import sha256
from protocol.signing import Identity, PeerId
from swarm.ports import ByteStream
from swarm.simulation.clock import virtual_clock
from swarm.simulation.network import SimNetwork, SimTransport, Weather
from swarm.simulation.process import Process, running, seeded_scheduler

LATENCY = 0.5
STEADY = Weather(latency_seconds=LATENCY, jitter_seconds=0.0, bytes_per_second=1e9)


def process(number: int, boot: int = 1) -> Process:
    return Process(number, Identity.from_seed(sha256(b"%d" % number)).peer, boot)


def address(number: int) -> str:
    return f"sim-{number}:1"


@dataclass
class Frames:
    """Every frame that a stream has noticed."""

    seen: list[tuple[bool, str, int, bytes]] = field(default_factory=list)

    def frame(
        self, sending: bool, process: Process, other: PeerId, number: int, header: bytes
    ) -> None:
        self.seen.append((sending, process.name, number, header))


@dataclass
class Hosts:
    """Host 0 and host 1, both listening; what host 1 takes in waits in `accepted`."""

    network: SimNetwork
    frames: Frames
    processes: list[Process]
    nursery: trio.Nursery
    accepted: trio.MemoryReceiveChannel[ByteStream]

    async def connect(self) -> tuple[ByteStream, ByteStream]:
        """Return both sides of a stream from host 0 to host 1."""
        transport = SimTransport(self.network, self.processes[0], address(0))
        mine = await transport.dial(address(1), self.processes[1].peer)
        return mine, await self.accepted.receive()


def run(scenario: Callable[[], Awaitable[None]], seed: str = "test") -> None:
    """Run on a virtual clock."""
    with seeded_scheduler(seed):
        trio.run(scenario, clock=virtual_clock())


def with_hosts(
    scenario: Callable[[Hosts], Awaitable[None]], weather: Weather = STEADY, seed: str = "test"
) -> None:
    async def main() -> None:
        frames = Frames()
        network = SimNetwork(seed, frames, weather)
        processes = [process(0), process(1)]
        send, receive = trio.open_memory_channel[ByteStream](10)

        async def handler(stream: ByteStream) -> None:
            send.send_nowait(stream)
            await trio.sleep_forever()

        async def listen(
            each: Process, task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED
        ) -> None:
            running.set(each)
            with each.scope:
                transport = SimTransport(network, each, address(each.number))
                await transport.serve(handler, started=task_status.started)

        async with trio.open_nursery() as nursery:
            for each in processes:
                await nursery.start(listen, each)
            await scenario(Hosts(network, frames, processes, nursery, receive))
            nursery.cancel_scope.cancel()

    run(main, seed)
