"""The council follows the members: by seniority, one legal step at a time."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.records import PlanBody
from swarm.core.chain import legal_council_change
from swarm.core.council import majority_rtt_seconds, next_council
from swarm.core.scheduling.planning import first_plan
from tests.core.plans import PEOPLE, candidate, manifest, request

RUN = manifest()


def body(*members: int, labels: dict[int, str] | None = None) -> PlanBody:
    return first_plan(
        RUN.training,
        [
            candidate(PEOPLE[n], RUN, request(PEOPLE[n], RUN.run), label=(labels or {}).get(n, ""))
            for n in members
        ],
    )


def following(council: str, members: PlanBody, consents: str) -> str:
    """Peers are named by their numbers in PEOPLE."""
    numbers = {who.peer: str(n) for n, who in enumerate(PEOPLE)}
    willing = frozenset(PEOPLE[int(n)].peer for n in consents)
    after = next_council([PEOPLE[int(n)].peer for n in council], members, willing)
    return "".join(numbers[peer] for peer in after)


@pytest.mark.parametrize(
    ("council", "members", "consents", "after"),
    [
        # growth: two at a time, by peer id, voters before newcomers
        ("0", "01", "1", "0"),
        ("0", "012", "12", "012"),
        ("3", "0123", "012", "301"),
        ("012", "01234", "34", "01234"),
        ("012", "01234", "3", "012"),
        ("01234", "012345678", "5678", "0123456"),
        ("0123456", "0123456789", "789", "0123456"),
        # consent is needed
        ("0", "012", "", "0"),
        ("0", "012", "1", "0"),
        # the gone are replaced, at most (n - 1) / 2 of them
        ("012", "013", "3", "013"),
        ("012", "034", "34", "023"),
        ("01234", "01256", "56", "01256"),
        ("01234", "0156789", "56789", "01456"),
        # or removed in pairs
        ("012", "01", "", "012"),
        ("012", "0", "", "0"),
        ("01234", "0123", "", "01234"),
        ("01234", "012", "", "012"),
        ("0123456", "01234", "", "01234"),
        # one by one: replacement first
        ("01234", "0125", "5", "01245"),
        # a council of one hands over
        ("0", "12", "1", "1"),
        ("0", "12", "", "0"),
    ],
)
def test_one_step(council: str, members: str, consents: str, after: str) -> None:
    assert following(council, body(*map(int, members)), consents) == after


def test_one_voter_per_host_label() -> None:
    labels = {0: "a", 1: "a", 2: "b", 3: "b", 4: "c"}
    assert following("0", body(0, 1, 2, 3, labels=labels), "123") == "0"
    assert following("0", body(0, 1, 2, 3, 4, labels=labels), "1234") == "024"
    # the gone voter's host is free again, those of other voters are not
    assert following("024", body(1, 2, 3, 4, labels=labels), "13") == "241"


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([1, 3, 5, 7]).flatmap(
        lambda size: st.permutations(range(10)).map(lambda order: order[:size])
    ),
    st.sets(st.integers(0, 9), min_size=1),
    st.sets(st.integers(0, 9)),
)
def test_every_step_is_legal_and_only_the_willing_come(
    council: list[int], members: set[int], consents: set[int]
) -> None:
    after = following(
        "".join(map(str, council)), body(*sorted(members)), "".join(map(str, consents))
    )
    before = "".join(map(str, council))
    assert legal_council_change(before, after) == ""
    new = {int(n) for n in after} - set(council)
    assert new <= members & consents
    staying = [n for n in before if n in after]
    assert list(after[: len(staying)]) == staying
    if set(council) <= members:
        assert set(council) <= {int(n) for n in after}  # nobody who is there is put out


def test_councils_reach_the_size_that_the_members_allow_and_stay() -> None:
    members = body(*range(8))
    council = "0"
    sizes = []
    for _ in range(5):
        council = following(council, members, "1234567")
        sizes.append(len(council))
    assert sizes == [3, 5, 7, 7, 7]


@pytest.mark.parametrize(
    ("council", "me", "seconds"),
    [
        ("a", "a", 0.0),
        ("abc", "a", 0.1),  # b answers, c is far away or says so
        ("abcde", "a", 0.2),
        ("abc", "z", 0.1),  # who asks is no voter: a and b
        ("c", "z", 9.0),
    ],
)
def test_a_majority_answers_within_a_round_trip(council: str, me: str, seconds: float) -> None:
    trips = {"a": 0.1, "b": 0.1, "c": 9.0, "d": 0.2, "e": 9.0}
    assert majority_rtt_seconds(tuple(council), me, trips.__getitem__) == seconds
