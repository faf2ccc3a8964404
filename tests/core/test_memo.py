"""Answers that are remembered by who asks, not by what is equal."""

from swarm.core.memo import KEPT, by_identity, by_pair


def test_an_answer_is_computed_once_for_an_object_and_anew_for_an_equal_one() -> None:
    asked: list[tuple[int, ...]] = []

    @by_identity
    def length(value: tuple[int, ...]) -> int:
        asked.append(value)
        return len(value)

    one, equal = (1, 2), tuple(range(1, 3))
    assert [length(one), length(one), length(equal)] == [2, 2, 2]
    assert asked == [one, equal]


def test_only_the_last_objects_are_remembered() -> None:
    asked: list[list[int]] = []

    @by_identity
    def first(value: list[int]) -> int:
        asked.append(value)
        return value[0]

    values = [[number] for number in range(KEPT + 1)]
    assert [first(value) for value in values] == list(range(KEPT + 1))
    assert first(values[-1]) == KEPT
    assert first(values[0]) == 0
    assert len(asked) == KEPT + 2


def test_pairs_are_remembered_in_their_order() -> None:
    asked = 0

    @by_pair
    def less(one: list[int], two: list[int]) -> bool:
        nonlocal asked
        asked += 1
        return one < two

    a, b = [1], [2]
    assert [less(a, b), less(a, b), less(b, a)] == [True, True, False]
    assert asked == 2
