"""Lost work: when it counts, how long it lasts, and who is kept apart."""

from protocol.records import Generation
from swarm.core.losses import APART_LOSSES, APART_SECONDS, Key, Losses

FIRST = Generation()


def key(epoch: int) -> Key:
    return FIRST, epoch


def lost_once(at: float = 1.0, epoch: int = 4) -> Losses:
    losses = Losses()
    losses.adopted(key(epoch), at_once=True)
    losses.lost("b", "a", key(epoch), at)
    return losses


def both_heard(losses: Losses, at: float) -> None:
    losses.heard("a", at)
    losses.heard("b", at)


def test_work_is_lost_once_both_have_been_heard_again() -> None:
    losses = lost_once()
    losses.heard("a", 0.5)
    assert losses.reason == ""
    losses.heard("a", 2.0)
    assert losses.reason == ""
    losses.heard("b", 2.0)
    assert losses.reason == "a link was lost between a and b"


def test_who_repeats_a_loss_does_not_begin_anew() -> None:
    losses = lost_once()
    both_heard(losses, 2.0)
    losses.lost("a", "b", key(4), 3.0)
    assert losses.reason != ""


def test_a_plan_that_waits_for_a_step_leaves_the_loss_as_it_is() -> None:
    losses = lost_once()
    losses.adopted(key(5), at_once=False)
    both_heard(losses, 2.0)
    assert losses.reason != ""


def test_a_loss_that_is_told_after_such_a_plan_counts_too() -> None:
    losses = Losses()
    losses.adopted(key(4), at_once=True)
    losses.adopted(key(5), at_once=False)
    losses.lost("a", "b", key(4), 1.0)
    both_heard(losses, 2.0)
    assert losses.reason != ""


def test_once_everybody_works_by_the_newer_plan_the_loss_is_over() -> None:
    losses = lost_once()
    losses.adopted(key(5), at_once=False)
    losses.settled(key(5))
    both_heard(losses, 2.0)
    assert losses.reason == ""


def test_a_repair_ends_the_loss_and_late_words_of_it() -> None:
    losses = lost_once()
    losses.adopted(key(5), at_once=True)
    losses.lost("a", "b", key(4), 1.5)
    both_heard(losses, 2.0)
    assert losses.reason == ""


def test_who_loses_work_again_and_again_is_kept_apart_for_a_while() -> None:
    losses = Losses()
    for number in range(APART_LOSSES):
        assert losses.apart(10.0 * number) == ()
        losses.adopted(key(number), at_once=True)
        losses.lost("b", "a", key(number), 10.0 * number)
        losses.lost("a", "b", key(number), 10.0 * number + 1)
    last = 10.0 * (APART_LOSSES - 1)
    assert losses.apart(last) == (("a", "b"),)
    assert losses.apart(last + APART_SECONDS - 1) == (("a", "b"),)
    assert losses.apart(last + APART_SECONDS) == ()


def test_rare_losses_keep_nobody_apart() -> None:
    losses = Losses()
    for number in range(2 * APART_LOSSES):
        at = APART_SECONDS * number
        losses.adopted(key(number), at_once=True)
        losses.lost("a", "b", key(number), at)
        assert losses.apart(at) == ()
