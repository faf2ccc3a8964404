"""A peer without work times its layers again; one with work shows how fast it is by it."""

from dataclasses import dataclass, field

import trio
from trio.testing import MockClock

from protocol.records import LayerProfile, TensorSpec
from swarm.core.model import ModelShape, Profile
from swarm.peer.retiming import AGAIN_SECONDS, FIRST_SECONDS, MOST_SECONDS, Retiming

SPEC = TensorSpec("float32", (1,))


def profile(seconds: float) -> Profile:
    layer = LayerProfile("layer", seconds, 2 * seconds, 4, SPEC, 4)
    return Profile(ModelShape((), SPEC, SPEC), (layer, layer), "numerics", 2**30)


@dataclass
class Peer:
    """A peer that takes so long for a profile; what it finds, and when."""

    takes_seconds: float = 1.0
    seconds: float = 0.1
    is_idle: bool = True
    found: list[tuple[float, float]] = field(default_factory=list)

    async def measure(self) -> Profile:
        await trio.sleep(self.takes_seconds)
        return profile(self.seconds)

    def retiming(self) -> Retiming:
        return Retiming(
            self.measure,
            lambda: self.is_idle,
            lambda slowdown: self.found.append((trio.current_time(), slowdown)),
        )


def live(
    peer: Peer, seconds: float, *, taken_seconds: float = 1.0, busy_until: float = 0.0
) -> None:
    """Let a peer live that joined with layers of 0.4 s; it has work until then."""

    async def main() -> None:
        with trio.move_on_after(seconds):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(peer.retiming().run, profile(0.4), taken_seconds)
                peer.is_idle = busy_until <= 0
                await trio.sleep(busy_until)
                peer.is_idle = True

    trio.run(main, clock=MockClock(autojump_threshold=0))


def test_who_has_no_work_looks_again_and_again() -> None:
    peer = Peer()
    live(peer, FIRST_SECONDS + 2 * AGAIN_SECONDS + 4)
    assert [slowdown for _, slowdown in peer.found] == [0.25] * 3
    first, second, third = (at for at, _ in peer.found)
    assert first == FIRST_SECONDS + 1
    assert (second - first, third - second) == (AGAIN_SECONDS + 1, AGAIN_SECONDS + 1)


def test_who_works_does_not() -> None:
    peer = Peer()
    live(peer, 2000.0, busy_until=1e9)
    assert peer.found == []
    live(peer, 1000.0 + 2 * FIRST_SECONDS, busy_until=1000.0)
    assert [slowdown for _, slowdown in peer.found] == [0.25]


def test_who_gets_work_meanwhile_says_nothing() -> None:
    peer = Peer(takes_seconds=2.0)

    async def measure() -> Profile:
        peer.is_idle = False
        return profile(0.1)

    peer.measure = measure  # type: ignore[method-assign]
    live(peer, FIRST_SECONDS + 5)
    assert peer.found == []


def test_a_model_that_takes_long_is_not_timed_again() -> None:
    peer = Peer()
    live(peer, 1000.0, taken_seconds=MOST_SECONDS + 1)
    assert peer.found == []
    peer = Peer(takes_seconds=MOST_SECONDS + 1)
    live(peer, 2000.0)
    assert len(peer.found) == 1
