"""What peers tell of their measurements: what is refused, and what is worth telling."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from protocol.errors import RemoteProtocolError
from protocol.records import (
    ESTIMATES_PURPOSE,
    MAX_LINKS,
    PEER_RECORD_PURPOSE,
    Estimates,
    LinkEstimate,
    Signed,
    sign_record,
)
from protocol.signing import Identity
from swarm.core.measuring.measured import (
    FIRST_SECONDS,
    FIRST_WORDS,
    NEWS_SECONDS,
    TELL_SECONDS,
    Telling,
    check_estimates,
    fitting,
    is_newer,
)
from tests.core.networks import estimates

FIRST = [FIRST_SECONDS] * (FIRST_WORDS - 1)
ALICE, BOB = (Identity.from_seed(bytes([number]) * 32) for number in (1, 2))
RUN = b"r" * 32
LINK = LinkEstimate("b", 1e6, 0.01, 0.1)
MADE = replace(estimates(ALICE.peer, LINK), run=RUN)


def signed(made: Estimates, who: Identity = ALICE, purpose: str = ESTIMATES_PURPOSE) -> Signed:
    return sign_record(who, purpose, made)


def test_what_a_peer_says_of_itself_is_taken() -> None:
    assert check_estimates(signed(MADE), ALICE.peer, RUN, 1) == MADE


@pytest.mark.parametrize(
    ("told", "fault"),
    [
        (signed(replace(MADE, peer=BOB.peer)), "not of this run and boot"),
        (signed(MADE, BOB), "sends estimates of"),
        (signed(MADE, purpose=PEER_RECORD_PURPOSE), "bad estimates signature"),
        (signed(replace(MADE, run=b"x" * 32)), "not of this run"),
        (signed(replace(MADE, boot=2)), "not of this run and boot"),
        (signed(replace(MADE, links=(LINK, LINK))), "each once"),
        (signed(replace(MADE, links=(replace(LINK, peer="c"), LINK))), "in order"),
        (signed(replace(MADE, links=(replace(LINK, peer=ALICE.peer),))), "in order"),
    ],
)
def test_what_it_may_not_say_is_refused(told: Signed, fault: str) -> None:
    with pytest.raises(RemoteProtocolError, match=fault):
        check_estimates(told, ALICE.peer, RUN, 1)


def test_the_newer_word_counts() -> None:
    assert is_newer(MADE, None)
    assert is_newer(replace(MADE, sequence=2), MADE) and not is_newer(MADE, MADE)
    assert is_newer(replace(MADE, boot=2), replace(MADE, sequence=9))


# --- when ----------------------------------------------------------------------------------------


def changed(factor: float) -> Estimates:
    return replace(MADE, links=(replace(LINK, bandwidth=LINK.bandwidth * factor),))


def test_the_first_word_is_told_at_once_and_the_same_is_not_told_again() -> None:
    telling = Telling()
    assert telling.news(MADE, 0.0) == replace(MADE, sequence=1)
    assert telling.news(MADE, 1000.0) is None


@pytest.mark.parametrize("factor", [1.2, 0.8])
def test_a_change_waits_for_its_time(factor: float) -> None:
    telling, now, seen = Telling(), 0.0, MADE
    telling.news(seen, now)
    for sequence, seconds in enumerate([*FIRST, TELL_SECONDS, TELL_SECONDS], 2):
        seen = replace(MADE, links=(replace(LINK, bandwidth=seen.links[0].bandwidth * factor),))
        assert telling.news(seen, now + seconds - 0.1) is None
        now += seconds
        assert telling.news(seen, now) == replace(seen, sequence=sequence)


def test_a_small_change_waits_longer_and_a_tiny_one_is_none() -> None:
    telling = Telling()
    telling.news(MADE, 0.0)
    assert telling.news(changed(1.06), NEWS_SECONDS - 1) is None
    assert telling.news(changed(1.06), NEWS_SECONDS) is not None
    telling = Telling()
    telling.news(MADE, 0.0)
    assert telling.news(changed(1.02), 10 * NEWS_SECONDS) is None


def test_a_new_link_and_a_lost_one_are_news() -> None:
    more = replace(MADE, links=(LINK, replace(LINK, peer="c")))
    telling = Telling()
    telling.news(MADE, 0.0)
    assert telling.news(more, 10.0) is not None
    assert telling.news(MADE, 20.0) is not None


def test_latencies_that_differ_by_microseconds_are_no_news() -> None:
    near = replace(MADE, links=(replace(LINK, latency_seconds=1e-4),))
    telling = Telling()
    telling.news(near, 0.0)
    assert telling.news(replace(MADE, links=(replace(LINK, latency_seconds=3e-4),)), 100.0) is None


@given(st.lists(st.tuples(st.floats(0, 30), st.floats(0.1, 10)), max_size=30))
def test_after_the_first_words_never_more_often_than_every_ten_seconds(
    steps: list[tuple[float, float]],
) -> None:
    telling, now, said = Telling(), 0.0, []
    for seconds, factor in steps:
        now += seconds
        made = telling.news(changed(factor), now)
        if made is not None:
            said.append((now, made.sequence))
    pauses = [late - early for (early, _), (late, _) in pairwise(said)]
    least = [*FIRST, *[TELL_SECONDS] * len(pauses)]
    assert all(pause >= each for pause, each in zip(pauses, least, strict=False))
    assert [sequence for _, sequence in said] == [*range(1, len(said) + 1)]


def test_each_listener_is_told_each_word_once() -> None:
    telling = Telling()
    assert telling.untold(["a"]) == []
    telling.news(MADE, 0.0)
    assert telling.untold(["a", "b"]) == ["a", "b"]
    assert telling.untold(["a", "b", "c"]) == ["c"]
    telling.forget("b")
    assert telling.untold(["a", "b", "c"]) == ["b"]
    telling.news(changed(2.0), 100.0)
    assert telling.untold(["a", "c"]) == ["a", "c"]


def test_of_too_many_links_the_measured_ones_are_told() -> None:
    links = [
        LinkEstimate(f"p{number:05}", 1.0 if number % 4 == 0 else 0.0, 0.1, 0.1)
        for number in range(2 * MAX_LINKS)
    ]
    kept = fitting(links[::-1])
    assert len(kept) == MAX_LINKS
    assert [link.peer for link in kept] == sorted(link.peer for link in kept)
    assert sum(link.bandwidth > 0 for link in kept) == MAX_LINKS // 2
