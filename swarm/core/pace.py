"""How often members say how they are: the larger the swarm, the rarer.

The rule: up to twelve members everybody hears everybody every second. Beyond that, what a peer says
and hears of control grows no more: members tell the leader and one other voter, at periods that
grow with the swarm; voters go on hearing each other every second.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import cached_property

from protocol.signing import PeerId

SMALL = 12
"""So many members are few."""
HEARTBEAT_SECONDS = 1.0
LEADER_BEAT_SECONDS = 0.5
LONGEST_HEARTBEAT_SECONDS = 10.0
"""Unless more members than can be listened to ask for longer ones."""
HEARTBEATS_PER_SECOND = 80
"""So many a listener hears at most."""
LISTENERS = 2
"""Who hears all members of a large swarm: nobody is given up on one word."""
CONSENTS = 16
"""How many members of a large swarm say at a time that they would vote."""


@dataclass(frozen=True)
class Pace:
    """The periods of a swarm of so many members, in seconds."""

    members: int

    @property
    def is_small(self) -> bool:
        """Whether everybody hears everybody."""
        return self.members <= SMALL

    @cached_property
    def heartbeat_seconds(self) -> float:
        """How often a member that does not vote says how it is."""
        growing = min(self.members / SMALL, LONGEST_HEARTBEAT_SECONDS)
        return max(HEARTBEAT_SECONDS, growing, self.members / HEARTBEATS_PER_SECOND)

    @property
    def leader_beat_seconds(self) -> float:
        """How often the leader speaks to who does not vote."""
        return LEADER_BEAT_SECONDS if self.is_small else self.heartbeat_seconds

    @property
    def attention_seconds(self) -> float:
        """How often a peer hears whom it waits for: all may wait for the same one."""
        return HEARTBEAT_SECONDS if self.is_small else min(max(1.0, self.members / 50), 10.0)

    @cached_property
    def moment_seconds(self) -> float:
        """How often a peer looks at what seldom changes."""
        return 1.0 if self.is_small else min(self.heartbeat_seconds, 5.0)

    @property
    def draft_pause_seconds(self) -> float:
        """How soon a leader thinks again: what a draft costs grows with the swarm."""
        return 0.0 if self.is_small else self.members / 1000

    @property
    def improvement_pause_seconds(self) -> float:
        """How soon a leader thinks again of a plan that loses nothing: it asks for all that is
        known of the links."""
        return 0.0 if self.is_small else self.members / 100


def listeners_of(
    leader: PeerId | None, council: Sequence[PeerId], pace: Pace, unheard: Container[PeerId] = ()
) -> tuple[PeerId, ...]:
    """Return to whom members that do not vote tell how they are: leader and council; of a large
    swarm the leader, and the first others of the council that are not `unheard`."""
    others = [peer for peer in council if peer != leader]
    first = [leader] if leader is not None else []
    if pace.is_small:
        return (*first, *others)
    heard = [peer for peer in others if peer not in unheard]
    return (*first, *heard[: LISTENERS - len(first)])


def consents_now(me: PeerId, members: Sequence[PeerId], turn: int) -> bool:
    """Return whether it is `me` who says that it would vote: some at a time do, in turns. `members`
    are sorted."""
    if len(members) <= CONSENTS or me not in members:
        return True
    rank, turns = members.index(me), -(-len(members) // CONSENTS)
    return rank // CONSENTS == turn % turns
