"""Agreements with one rule broken: the world's invariants notice each of them."""

import dataclasses

import pytest
from msgspec.structs import replace

import swarm.core.chain
from protocol.errors import RemoteProtocolError
from protocol.messages import Accepted
from protocol.records import Ballot, Certificate, PlanHeader, decode_record
from protocol.signing import PeerId
from swarm.core.agreement import Agreement
from swarm.core.chain import majority
from swarm.core.voting import Effect, Leader, Leading, Persist, Proposing
from tests.core.agreement_world import run_seed

SEEDS = range(60)


class SkipsTheFsync(Agreement):
    """Says things before they are saved."""

    def _saving(self, effects: list[Effect]) -> list[Effect]:
        return [effect for effect in super()._saving(effects) if not isinstance(effect, Persist)]


class ForgetsTheAcceptedPlan(Agreement):
    """Neither tells a candidate what it has accepted nor completes it."""

    def _answer_vote(self, sender: PeerId, now: float) -> list[Effect]:
        self._state = replace(self._state, accepted=None)
        return super()._answer_vote(sender, now)

    def _stand(self, now: float) -> list[Effect]:
        self._state = replace(self._state, accepted=None)
        return super()._stand(now)


class VotesTwice(Agreement):
    """Votes for whoever asks."""

    def _answer_vote(self, sender: PeerId, now: float) -> list[Effect]:
        self._state = replace(self._state, voted_for="")
        return super()._answer_vote(sender, now)


class CountsTheNewCouncil(Agreement):
    """Takes a majority of V(e+1) for the decision of plan e+1."""

    def _is_majority(self, peers: frozenset[PeerId]) -> bool:
        work = self._stance.work if isinstance(self._stance, Leader) else None
        if not isinstance(work, Proposing):
            return super()._is_majority(peers)
        council = work.header.council
        return len(peers & set(council)) >= majority(council)


class ProposesTwice(Agreement):
    """Proposes another plan in the same term."""

    @property
    def may_lead(self) -> bool:
        return isinstance(self._stance, Leader)

    def _accept(self, *what):  # type: ignore[no-untyped-def]
        self._state = replace(self._state, accepted=None)
        return super()._accept(*what)

    def _count_accepted(self, sender: PeerId, message: Accepted, now: float) -> list[Effect]:
        try:
            return super()._count_accepted(sender, message, now)
        except RemoteProtocolError:
            return []  # a ballot for the first of the two


class MixesTerms(Agreement):
    """Adds up signatures for one plan whatever their terms."""

    _seen: tuple[tuple[bytes, PeerId, bytes], ...] = ()

    def _count_accepted(self, sender: PeerId, message: Accepted, now: float) -> list[Effect]:
        ballot = decode_record(message.ballot, Ballot)
        self._seen = (*self._seen, (ballot.header_hash, sender, message.signature))
        return super()._count_accepted(sender, message, now)

    def _certify_if_accepted(self, now: float) -> list[Effect]:
        work = self._stance.work if isinstance(self._stance, Leader) else None
        if isinstance(work, Proposing):
            seen = {who: said for plan, who, said in self._seen if plan == work.header.hash}
            signatures = tuple(sorted({**seen, **dict(work.signatures)}.items()))
            self._stance = Leader(dataclasses.replace(work, signatures=signatures))
        return super()._certify_if_accepted(now)


class GoesOnLeading(Agreement):
    """Leads the next epoch too, without another election."""

    def _hand_over(self, now: float) -> list[Effect]:
        if not self.is_voter:
            return super()._hand_over(now)
        self._stance = Leader()
        self._answered = dict.fromkeys(self._others(), now)
        self._patience = self._drawn_seconds()
        return [Leading(self.term)]


def count_names(certificate: Certificate, council: tuple[PeerId, ...], header: PlanHeader) -> None:
    """Check a certificate as the two mutants do that make bad ones."""
    names = {peer for peer, _ in certificate.signatures}
    if not names:
        raise RemoteProtocolError("nobody has signed")


LOSSY = 0.6
"""Of five voters a leader has to be lost between two accepts, and to be elected again."""
MUTANTS: dict[str, tuple[type[Agreement], float | None, tuple[str, ...]]] = {
    "skip the fsync": (SkipsTheFsync, None, ("A1", "A2", "A4", "two plans")),
    "forget the accepted plan": (ForgetsTheAcceptedPlan, None, ("A1",)),
    "vote twice": (VotesTwice, None, ("A4",)),
    "count V(e+1)": (CountsTheNewCouncil, None, ("A6",)),
    "propose twice": (ProposesTwice, None, ("two plans",)),
    "mix terms": (MixesTerms, LOSSY, ("A6",)),
    "go on leading": (GoesOnLeading, None, ("A4",)),
}


def first_caught(mutant: type[Agreement], drop: float | None) -> str:
    """Return what the first invariant says that does not hold."""
    for seed in SEEDS:
        try:
            run_seed(seed, mutant, drop)
        except AssertionError as error:
            return str(error).partition("\n")[0]
    return "nobody has noticed"


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_rule_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant, drop, expected = MUTANTS[name]
    if mutant in (CountsTheNewCouncil, MixesTerms):
        monkeypatch.setattr(swarm.core.chain, "_check_majority", count_names)
    assert first_caught(mutant, drop).startswith(expected)


@pytest.mark.parametrize("drop", [None, LOSSY])
def test_no_rule_is_broken_in_the_same_seeds(drop: float | None) -> None:
    for seed in SEEDS:
        run_seed(seed, drop=drop)
