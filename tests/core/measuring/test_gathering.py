"""When enough has been measured for a first plan."""

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from protocol.records import Estimates, LinkEstimate
from swarm.core.measuring.gathering import LINKS, LONGEST_SECONDS, Gathering
from tests.core.measuring.test_measured import MADE, replace

MANY = [f"p{n:02}" for n in range(12)]


def told(known: Mapping[str, int], bandwidth: float = 1e6) -> dict[str, Estimates]:
    """Each peer knows the bandwidth to so many of the others."""
    return {
        peer: replace(
            MADE,
            peer=peer,
            links=tuple(
                LinkEstimate(other, bandwidth, 0.01, 0.1)
                for other in [each for each in MANY if each != peer][:count]
            ),
        )
        for peer, count in known.items()
    }


def test_it_waits_for_the_last_who_has_measured_little() -> None:
    gathering = Gathering()
    all_but_one = dict.fromkeys(MANY, LINKS) | {MANY[3]: LINKS - 1}
    assert not gathering.is_enough(MANY, told(all_but_one), 0.0)
    assert gathering.is_enough(MANY, told(dict.fromkeys(MANY, LINKS)), 1.0)


def test_of_few_peers_half_of_the_others_is_enough_and_one_alone_waits_for_nothing() -> None:
    four = MANY[:4]
    assert not Gathering().is_enough(four, told(dict.fromkeys(four, 1)), 0.0)
    assert Gathering().is_enough(four, told(dict.fromkeys(four, 2)), 0.0)
    assert Gathering().is_enough(MANY[:1], told({MANY[0]: 0}), 0.0)


def test_latencies_alone_and_links_to_strangers_are_not_enough() -> None:
    assert not Gathering().is_enough(MANY, told(dict.fromkeys(MANY, 11), bandwidth=0.0), 0.0)
    last = MANY[-4:]
    assert not Gathering().is_enough(last, told(dict.fromkeys(last, 4)), 0.0)


@given(st.lists(st.floats(0.0, 30.0), min_size=1, max_size=20))
def test_it_waits_no_longer_than_its_time_from_the_last_newcomer_on(pauses: list[float]) -> None:
    gathering, now = Gathering(), 0.0
    assert not gathering.is_enough(MANY[:3], {}, now)
    assert not gathering.is_enough(MANY, {}, now)
    for pause in pauses:
        now += pause
        assert gathering.is_enough(MANY, {}, now) == (now >= LONGEST_SECONDS)
