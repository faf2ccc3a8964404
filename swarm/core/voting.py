"""What a peer can be in an epoch, and what it can ask its driver to do.

The rule: a stance is a value. What changes makes a new one, so that a copy of an agreement is
cheap and two of them can be compared.
"""

from dataclasses import dataclass

from protocol.messages import (
    Accepted,
    PreVote,
    PreVoteAnswer,
    Propose,
    RequestVote,
    Review,
    Stand,
    VerdictAnswer,
    Vote,
)
from protocol.records import AcceptedPlan, CertifiedPlan, PlanHeader, Signed
from protocol.signing import PeerId
from swarm.core.chain import HardState, Plan
from swarm.core.effects import Send

Question = PreVote | RequestVote | Stand | Review | Propose
Reply = PreVoteAnswer | Vote | VerdictAnswer | Accepted
Voting = Question | Reply
"""What Agreement.handle takes."""

# --- effects -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Persist:
    """Save the hard state durably before performing the effects that follow."""

    state: HardState


@dataclass(frozen=True, slots=True)
class Adopted:
    """A newer plan is certified."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class Announce:
    """Send the certificate to every member of this plan and of the one before, and to both
    councils."""

    proof: CertifiedPlan


@dataclass(frozen=True, slots=True)
class FetchChain:
    """Ask `peer`, who knows a newer plan, for the chain; asked again as long as it is unknown."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class Leading:
    """This peer leads in `term`, until Deposed or Adopted."""

    term: int


@dataclass(frozen=True, slots=True)
class Deposed:
    """This peer leads no longer, though its epoch goes on."""

    reason: str


@dataclass(frozen=True, slots=True)
class Refused:
    """A voter finds the draft under review not good."""

    voter: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class ReviewFailed:
    """The draft was not found good by a majority in time: another one is welcome."""

    refusals: tuple[tuple[PeerId, str], ...]
    """Who refused it and why; who is not here has not answered."""


Effect = (
    Persist | Send | Announce | Adopted | FetchChain | Leading | Deposed | Refused | ReviewFailed
)

# --- stances --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Follower:
    """Waits for a leader, or is no voter."""


@dataclass(frozen=True, slots=True)
class Asking:
    """Asks whether an election would succeed."""

    granted: frozenset[PeerId]


@dataclass(frozen=True, slots=True)
class Standing:
    """Stands for the leadership of its term."""

    votes: frozenset[PeerId]
    best: AcceptedPlan | None
    """The accepted plan with the highest term among the votes."""


@dataclass(frozen=True, slots=True)
class Reviewing:
    """A draft of the leader before the council."""

    plan: CertifiedPlan
    header: PlanHeader
    evidence: tuple[Signed, ...]
    verdicts: tuple[Signed, ...]
    """Those that find it good."""
    refusals: tuple[tuple[PeerId, str], ...] = ()

    @property
    def answered(self) -> frozenset[PeerId]:
        """Return the voters that have given a verdict."""
        good = (signed.signer for signed in self.verdicts)
        return frozenset((*good, *(voter for voter, _ in self.refusals)))


@dataclass(frozen=True, slots=True)
class Proposing:
    """The one plan that the leader proposes in its term."""

    plan: CertifiedPlan
    header: PlanHeader
    verdicts: tuple[Signed, ...]
    ballot: bytes
    signatures: tuple[tuple[PeerId, bytes], ...]

    @property
    def answered(self) -> frozenset[PeerId]:
        """Return the voters that have accepted it."""
        return frozenset(voter for voter, _ in self.signatures)


@dataclass(frozen=True, slots=True)
class Leader:
    """Leads its term."""

    work: Reviewing | Proposing | None = None


Stance = Follower | Asking | Standing | Leader
