"""Every order of events for three voters and small bounds, breadth first.

The network is the set of all that was ever sent: each message may arrive at any time, again and
again, or never. Any voter may stand, lead with one of several drafts, or crash and come back from
its hard state at any time. What a peer does is a function of what it is and what arrives, so each
such step is computed once.

Left out, to make it small: reviews (a verdict binds nobody, so a draft is found good at once),
pre-votes, answers that only tell of a higher term (they may be lost), what follows the last
epoch, and which voters' signatures a certificate holds. Voters are alike: who
stands first is A, who stands next is A or B.

    python -m tests.core.explore_agreement --terms 3 --epochs 2 --crashes 1 --states 2000000
"""

import argparse
import copy
import functools
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from protocol.errors import RemoteProtocolError
from protocol.messages import (
    Accepted,
    Certified,
    PreVoteAnswer,
    Propose,
    RequestVote,
    Review,
    Stand,
    VerdictAnswer,
    Vote,
)
from protocol.records import Ballot, CertifiedPlan, PlanHeader, decode_record
from swarm.core.agreement import Agreement
from swarm.core.ballots import sign_verdict
from swarm.core.chain import key_of
from swarm.core.effects import Send
from swarm.core.voting import Announce, Effect, FetchChain, Leader, Persist, Reviewing
from tests.core.agreement_world import (
    IDENTITIES,
    MANIFEST,
    NAME_OF,
    Violation,
    draft,
    founded,
    names_of,
    remembered_signatures,
    state_of,
)

VOTERS = "ABC"


@dataclass(frozen=True)
class Bounds:
    terms: int = 2
    """The highest term in which anybody stands of itself."""
    epochs: int = 1
    """How many plans may follow."""
    crashes: int = 1
    drafts: str = "same,leader"
    """What a leader may want: the same council, itself alone, or `next`, another one alone."""
    states: int = 10**9
    """After so many states the search stops."""


@dataclass
class Result:
    states: int
    steps: int
    peers: int
    messages: int
    decided: int
    """How many different plans were decided in some order or other."""
    complete: bool


Sent = tuple[str, str, Any]
State = tuple[tuple[int, ...], frozenset[int], int]
"""Number of what each voter is, numbers of all that was sent, crashes."""


class Explorer:
    """Numbers what peers can be and what can be said, and remembers each step."""

    def __init__(self, bounds: Bounds, make: Callable[..., Agreement] = Agreement) -> None:
        self.bounds = bounds
        self.make = make
        self.peers: list[Agreement] = []
        self.sent: list[Sent] = []
        self.facts: list[tuple[tuple[Any, Any], ...]] = []
        self._peer_numbers: dict[tuple[object, ...], int] = {}
        self._sent_numbers: dict[object, int] = {}
        self.decided: set[bytes] = set()
        self.deliver = functools.cache(self._deliver)
        self.stand = functools.cache(self._stand)
        self.lead = functools.cache(self._lead)
        self.crash = functools.cache(self._crash)
        plans = founded(VOTERS)
        self.first = decode_record(plans[-1].header, PlanHeader)
        state = state_of(plans)
        self.start: State = (
            tuple(self._peer(self._restarted(name, state)) for name in VOTERS),
            frozenset(),
            0,
        )

    def explore(self) -> Result:
        """Look at every state that can be reached. Raises Violation with how to get there."""
        came: dict[State, tuple[State, str] | None] = {self.start: None}
        queue, steps = deque([self.start]), 0
        while queue and len(came) < self.bounds.states:
            state = queue.popleft()
            for what, following in self._successors(state):
                steps += 1
                if following in came:
                    continue
                came[following] = (state, what)
                try:
                    self._check(following)
                except Violation as error:
                    raise Violation(f"{error}\n{_path(came, following)}") from error
                queue.append(following)
        numbers = (len(came), steps, len(self.peers), len(self.sent), len(self.decided))
        return Result(*numbers, complete=not queue)

    def _successors(self, state: State) -> Iterator[tuple[str, State]]:
        peers, network, _ = state
        for message in sorted(network):
            place = VOTERS.index(self.sent[message][1])
            new, said = self.deliver(peers[place], message)
            if new != peers[place] or not said <= network:
                yield f"deliver {message}", self._after(state, place, new, said)
        for place in range(len(VOTERS)):
            for what, step in self._own_steps(state, place):
                if step is not None:
                    yield what, self._after(state, place, *step, crash=what.startswith("crash"))

    def _own_steps(
        self, state: State, place: int
    ) -> Iterator[tuple[str, tuple[int, frozenset[int]] | None]]:
        peers, network, crashes = state
        name, peer = VOTERS[place], peers[place]
        asked = [number for number in network if isinstance(self.sent[number][2], RequestVote)]
        if place == 0 or any(self.sent[number][0] == VOTERS[place - 1] for number in asked):
            yield f"stand {name}", self.stand(peer)
        for wanted in self.bounds.drafts.split(","):
            yield f"lead {name} {wanted}", self.lead(peer, wanted)
        if crashes < self.bounds.crashes:
            yield f"crash {name}", self.crash(peer)

    def _after(
        self, state: State, place: int, new: int, said: frozenset[int], crash: bool = False
    ) -> State:
        peers, network, crashes = state
        changed = (*peers[:place], new, *peers[place + 1 :])
        return (changed, network | said, crashes + crash)

    # --- steps, each computed once ---

    def _deliver(self, peer: int, message: int) -> tuple[int, frozenset[int]]:
        source, _, what = self.sent[message]
        sender, agreement = IDENTITIES[source].peer, copy.copy(self.peers[peer])
        try:
            match what:
                case Certified(plan=plan):
                    effects = agreement.handle_certified(plan, sender, 0.0, _any_body)
                case _:
                    effects = agreement.handle(sender, what, 0.0, _any_plan)
        except RemoteProtocolError as error:
            raise Violation(f"{source} says what is taken for a lie: {error}") from error
        return self._performed(agreement, effects)

    def _stand(self, peer: int) -> tuple[int, frozenset[int]] | None:
        agreement = copy.copy(self.peers[peer])
        tired = agreement.term >= self.bounds.terms
        if tired or agreement.is_leader or not agreement.is_voter or self._is_late(agreement):
            return None
        return self._performed(agreement, agreement.stand(0.0))

    def _lead(self, peer: int, wanted: str) -> tuple[int, frozenset[int]] | None:
        agreement = copy.copy(self.peers[peer])
        if not agreement.may_lead or self._is_late(agreement):
            return None
        council = agreement.newest.header.council
        me = council.index(agreement._me)
        after = {"same": council, "leader": council[me : me + 1], "next": council[me - 1 :][:1]}
        plan = draft(names_of(after[wanted]), 1 if wanted == "same" else 2)
        effects = agreement.lead(plan, 0.0, _any_plan)
        for voter in council:
            if voter != agreement._me and agreement.may_lead:
                effects += agreement.handle(voter, self._good(voter, agreement), 0.0, _any_plan)
        return self._performed(agreement, effects)

    def _good(self, voter: str, agreement: Agreement) -> VerdictAnswer:
        generation, epoch = agreement.newest.key
        work = agreement._stance.work if isinstance(agreement._stance, Leader) else None
        assert isinstance(work, Reviewing)
        verdict = sign_verdict(IDENTITIES[NAME_OF[voter]], work.header, "")
        return VerdictAnswer(
            generation=generation, epoch=epoch, term=agreement.term, verdict=verdict
        )

    def _crash(self, peer: int) -> tuple[int, frozenset[int]]:
        agreement = self.peers[peer]
        saved = getattr(agreement, "disk", agreement.hard_state)
        again = self._restarted(NAME_OF[agreement._me], saved)
        return self._performed(again, [])

    def _is_late(self, agreement: Agreement) -> bool:
        return agreement.newest.header.epoch >= self.first.epoch + self.bounds.epochs

    def _restarted(self, name: str, state: Any) -> Agreement:
        agreement = self.make(MANIFEST, IDENTITIES[name], state, draw=_no_chance)
        agreement.disk = state  # type: ignore[attr-defined]
        return agreement

    def _performed(self, agreement: Agreement, effects: list[Effect]) -> tuple[int, frozenset[int]]:
        said: list[Sent] = []
        me = NAME_OF[agreement._me]
        for effect in effects:
            match effect:
                case Persist(state):
                    agreement.disk = state  # type: ignore[attr-defined]
                case Send(_, Review() | PreVoteAnswer()):
                    continue
                case Send(_, RequestVote() | Stand()) if self._is_late(agreement):
                    continue
                case Send(peer, message):
                    said.append((me, NAME_OF[peer], message))
                case Announce(proof):
                    said += [(me, name, Certified(plan=proof)) for name in VOTERS if name != me]
                case FetchChain():
                    continue  # what it lacks is in the network already
        return self._peer(agreement), frozenset(map(self._number, said))

    # --- numbers and facts ---

    def _peer(self, agreement: Agreement) -> int:
        disk = agreement.disk  # type: ignore[attr-defined]
        saved = disk == agreement.hard_state
        state, *volatile = agreement.fingerprint()
        key = (agreement._me, _bare(state), *volatile, None if saved else _bare(disk))
        if key not in self._peer_numbers:
            self._peer_numbers[key] = len(self.peers)
            self.peers.append(agreement)
        return self._peer_numbers[key]

    def _number(self, sent: Sent) -> int:
        key: object = sent
        if isinstance(sent[2], Certified):
            key = (sent[1], sent[2].plan.header)
        if key not in self._sent_numbers:
            self._sent_numbers[key] = len(self.sent)
            self.sent.append(sent)
            self.facts.append(tuple(_facts(*sent)))
        return self._sent_numbers[key]

    def _check(self, state: State) -> None:
        peers, network, _ = state
        known: dict[Any, Any] = {}
        accepted: dict[tuple[Any, Any], set[str]] = {}
        for message in network:
            for fact, value in self.facts[message]:
                if known.setdefault(fact, value) != value:
                    raise Violation(f"not one thing: {fact}")
                if fact[0] == "accepts":
                    _, voter, key, term = fact
                    accepted.setdefault((key, (term, value)), set()).add(voter)
        self._check_decided(accepted, known)
        leaders: dict[Any, int] = {}
        for number in peers:
            peer = self.peers[number]
            if peer.is_leader:
                who = (peer.newest.key, peer.term)
                if leaders.setdefault(who, number) != number:
                    raise Violation(f"A4: two leaders {who}")

    def _check_decided(
        self, accepted: dict[tuple[Any, Any], set[str]], known: dict[Any, Any]
    ) -> None:
        decided: dict[Any, bytes] = {}
        for (key, (_, header_hash)), voters in accepted.items():
            council = known.get(("council", key[0], key[1] - 1), VOTERS)
            if key[1] - 1 == self.first.epoch:
                council = VOTERS
            if 2 * len(voters & set(council)) > len(council):
                self.decided.add(header_hash)
                if decided.setdefault(key, header_hash) != header_hash:
                    raise Violation(f"A1: two plans decided in epoch {key[1]}")


def _facts(source: str, name: str, what: Any) -> Iterator[tuple[Any, Any]]:
    """Return what a message proves; each of it has one value only, for ever."""
    match what:
        case RequestVote(term=term):
            yield ("votes", source, term), source
        case Vote(term=term):
            yield ("votes", source, term), name
        case Propose(term=term, plan=plan):
            header = decode_record(plan.header, PlanHeader)
            yield ("proposes", key_of(header), term), header.hash
            yield ("accepts", source, key_of(header), term), header.hash
        case Accepted(ballot=ballot):
            vote = decode_record(ballot, Ballot)
            key = (vote.generation, vote.epoch)
            yield ("proposes", key, vote.term), vote.header_hash
            yield ("accepts", source, key, vote.term), vote.header_hash
        case Certified(plan=plan):
            yield from _certified_facts(plan)


def _certified_facts(plan: CertifiedPlan) -> Iterator[tuple[Any, Any]]:
    header = decode_record(plan.header, PlanHeader)
    yield ("certified", key_of(header)), header.hash
    yield ("council", *key_of(header)), names_of(header.council)


def _bare(state: Any) -> object:
    """Return a hard state without certificates: who signed does not matter any more."""
    newest = state.newest and state.newest.header
    links = tuple(link.header for link in state.links)
    return (state.term, state.voted_for, state.accepted, links, newest)


def _path(came: dict[State, tuple[State, str] | None], state: State) -> str:
    lines: list[str] = []
    before = came[state]
    while before is not None:
        state, what = before
        lines.append(what)
        before = came[state]
    return "\n".join(reversed(lines))


def _any_plan(header: object, content: object, evidence: object) -> str:
    return ""


def _any_body(content: object) -> None:
    return None


def _no_chance() -> float:
    return 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, value in vars(Bounds()).items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    bounds = Bounds(**vars(parser.parse_args()))
    started = time.perf_counter()
    with remembered_signatures():
        result = Explorer(bounds).explore()
    print(bounds, result, f"seconds={time.perf_counter() - started:.1f}", sep="\n")


if __name__ == "__main__":
    main()
