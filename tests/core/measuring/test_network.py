"""The whole network from a few links: what was measured stays, the rest is near the truth."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.records import GUESS_SPREAD, LinkEstimate
from swarm.core.measuring.network import (
    DEFAULT_BANDWIDTH,
    DEFAULT_LATENCY_SECONDS,
    MOST_SECONDS,
    completed,
)
from tests.core.networks import WORLDS, cities, datacenter, estimates, hidden, homes, told

SEEDS = ("0", "1", "2")


def errors(name: str, seed: str, is_labelled: bool) -> tuple[float, float]:
    world = WORLDS[name]()
    given = told(world, seed)
    assert {len(own.links) for own in given.values()} == {8}
    places = dict(zip(world.names, world.places, strict=True)) if is_labelled else None
    network = completed(world.names, given, places)
    unknown = hidden(world, given)
    latency = np.abs(network.latency / world.latency - 1)[unknown]
    bandwidth = np.abs(network.bandwidth / world.bandwidth - 1)[unknown]
    return float(np.median(latency)), float(np.median(bandwidth))


@pytest.mark.parametrize("is_labelled", [False, True], ids=["without labels", "with labels"])
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", WORLDS)
def test_eight_probes_each_of_sixty_four_peers(name: str, seed: str, is_labelled: bool) -> None:
    latency, bandwidth = errors(name, seed, is_labelled)
    assert latency < 0.2
    assert bandwidth < 0.2


def test_labels_tell_apart_what_latencies_do_not() -> None:
    """Within a machine it is 32 times as fast, and just as far."""
    world = datacenter()
    given = told(world)
    places = dict(zip(world.names, world.places, strict=True))
    same = np.equal.outer(np.array(world.places), np.array(world.places))
    unknown = hidden(world, given) & same
    with_labels = completed(world.names, given, places).bandwidth[unknown]
    without = completed(world.names, given).bandwidth[unknown]
    assert np.median(with_labels) == pytest.approx(12.5e9, rel=0.05)
    assert np.median(without) < 1e9


def test_a_home_gives_less_than_it_takes() -> None:
    world = homes()
    network = completed(world.names, told(world))
    slow = world.bandwidth.max(1) < 2e6
    assert 10 < slow.sum() < 54
    assert np.median(network.bandwidth[slow][:, ~slow]) == pytest.approx(1.25e6, rel=0.1)
    assert np.median(network.bandwidth[~slow][:, slow]) == pytest.approx(12.5e6, rel=0.2)
    assert (network.uplink[slow] < 0.5 * network.downlink[slow]).all()


def test_the_spread_says_how_far_an_entry_is_off() -> None:
    world = cities(jitter=0.15)
    given = told(world)
    network = completed(world.names, given)
    unknown = hidden(world, given)
    off = np.abs(np.log(network.bandwidth / np.where(world.bandwidth > 0, world.bandwidth, 1.0)))
    assert np.mean(off[unknown] <= 2 * network.spread[unknown]) > 0.8
    assert np.median(network.spread[unknown]) < 0.4
    known = ~unknown & ~np.eye(len(off), dtype=bool)
    assert np.median(network.spread[known]) < np.median(network.spread[unknown])


def test_a_lie_moves_few_others() -> None:
    world = cities()
    given = told(world)
    liar = world.names[0]
    lies = [LinkEstimate(link.peer, 1e15, 1e9, 0.0) for link in given[liar].links]
    network = completed(world.names, {**given, liar: estimates(liar, *lies)})
    others = hidden(world, given)
    others[0, :] = others[:, 0] = False
    assert np.median(np.abs(network.bandwidth / world.bandwidth - 1)[others]) < 0.2
    assert np.median(np.abs(network.latency / world.latency - 1)[others]) < 0.2


def test_nothing_is_known() -> None:
    network = completed(["a", "b", "c"], {})
    off = ~np.eye(3, dtype=bool)
    assert (network.bandwidth[off] == DEFAULT_BANDWIDTH).all()
    assert (network.latency[off] == DEFAULT_LATENCY_SECONDS).all()
    assert (network.spread[off] == 1).all()
    assert (network.uplink == DEFAULT_BANDWIDTH).all()
    assert (network.downlink == DEFAULT_BANDWIDTH).all()
    assert (np.diag(network.latency) == 0).all() and (np.diag(network.spread) == 0).all()


def test_a_peer_alone() -> None:
    network = completed(["a"], {"a": estimates("a", LinkEstimate("b", 1.0, 1.0, 0.1))})
    assert network.bandwidth.shape == (1, 1)
    assert network.uplink.tolist() == [DEFAULT_BANDWIDTH]
    assert completed([], {}).bandwidth.shape == (0, 0)


def test_a_total_that_was_seen_counts() -> None:
    own = estimates("a", LinkEstimate("b", 1e6, 0.01, 0.1), uplink=5e6, downlink=4e6)
    network = completed(["a", "b"], {"a": own})
    assert network.uplink[0] == 5e6 and network.downlink[0] == 4e6
    assert network.uplink[1] >= network.bandwidth[1, 0]


def test_who_has_measured_nothing_is_like_the_others() -> None:
    world = cities()
    given = told(world)
    silent = world.names[5]
    del given[silent]
    network = completed(world.names, given)
    assert np.median(np.abs(network.bandwidth / world.bandwidth - 1)[5, 6:]) < 0.5
    unheard = completed([*world.names, "stranger"], given)
    row = np.delete(unheard.latency[-1], -1)
    assert np.isfinite(row).all()
    assert world.latency.min() < np.median(row) < world.latency.max()


def test_a_thousand_peers() -> None:
    world = cities(1000, jitter=0.1)
    given = told(world)
    began = time.process_time()
    network = completed(world.names, given)
    assert time.process_time() - began < 3.0  # 0.7 s on one core that has nothing else to do
    unknown = hidden(world, given)
    assert np.median(np.abs(network.latency / world.latency - 1)[unknown]) < 0.2
    assert np.median(np.abs(network.bandwidth / world.bandwidth - 1)[unknown]) < 0.2


LINKS = st.tuples(
    st.integers(0, 5),
    st.integers(0, 5),
    st.one_of(st.just(0.0), st.floats(1e-3, 1e15)),
    st.one_of(st.just(0.0), st.floats(1e-9, 1e9)),
    st.floats(0, 1e3),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(LINKS, max_size=20), st.lists(st.sampled_from(["", "x", "y"]), min_size=6))
def test_whatever_peers_tell_the_network_is_whole(
    links: list[tuple[int, int, float, float, float]], places: list[str]
) -> None:
    names = [f"p{number}" for number in range(6)]
    by_sender: dict[str, dict[str, LinkEstimate]] = {name: {} for name in names}
    for one, other, bandwidth, seconds, spread in links:
        link = LinkEstimate(names[other], bandwidth, seconds, spread)
        by_sender[names[one]][names[other]] = link
    given = {name: estimates(name, *found.values()) for name, found in by_sender.items()}
    network = completed(names, given, dict(zip(names, places, strict=False)))
    off = ~np.eye(6, dtype=bool)
    assert np.isfinite(network.bandwidth[off]).all() and (network.bandwidth[off] > 0).all()
    assert np.isfinite(network.latency).all() and (network.latency[off] > 0).all()
    assert ((network.spread >= 0) & (network.spread <= 1)).all()
    assert (network.uplink[:, None] >= network.bandwidth)[off].all()
    assert (network.downlink[None, :] >= network.bandwidth)[off].all()
    for i, sender in enumerate(names):
        for link in given[sender].links:
            j = names.index(link.peer)
            if i != j and link.bandwidth >= 1:
                is_bound = link.spread >= GUESS_SPREAD
                assert network.bandwidth[i, j] >= link.bandwidth
                assert is_bound or network.bandwidth[i, j] == link.bandwidth
            if i != j and link.latency_seconds >= 1e-6:
                assert network.latency[i, j] == link.latency_seconds


def test_what_is_at_least_so_quick_says_nothing_of_how_quick_it_is() -> None:
    """Everybody has sent something to everybody at the same time, as in a reduction."""
    world = datacenter()
    given = told(world)
    sharing = {
        peer: estimates(
            peer,
            *own.links,
            *(
                LinkEstimate(other, 1e6, 0.0, GUESS_SPREAD)
                for other in world.names
                if other != peer and other not in {link.peer for link in own.links}
            ),
        )
        for peer, own in given.items()
    }
    assert (
        completed(world.names, sharing).bandwidth == completed(world.names, given).bandwidth
    ).all()


def test_nothing_is_slower_than_it_is_at_least() -> None:
    names = ["a", "b", "c"]
    quick = LinkEstimate("c", 5e9, 0.0, GUESS_SPREAD)
    only = completed(names, {"a": estimates("a", quick)})
    assert only.bandwidth[0, 2] == 5e9
    measured = LinkEstimate("b", 1e8, 0.0, 0.1)
    both = completed(names, {"a": estimates("a", measured, quick)})
    assert both.bandwidth[0, 2] == 5e9 and both.bandwidth[0, 1] == 1e8


def test_the_order_of_what_is_told_does_not_matter() -> None:
    world = cities(20)
    given = told(world)
    one = completed(world.names, given)
    other = completed(world.names, dict(reversed(given.items())))
    assert (one.bandwidth == other.bandwidth).all() and (one.latency == other.latency).all()


def test_latencies_stay_in_bounds_whatever_one_peer_says() -> None:
    """Nobody has measured the way between the two others of three."""
    names = ["a", "b", "c"]
    links = [LinkEstimate(peer, 1e6, MOST_SECONDS, 0.1) for peer in ("b", "c")]
    said = {"a": estimates("a", *links)}
    found = completed(names, said)
    assert (found.latency <= MOST_SECONDS).all()
