"""Who votes: how the council follows the members, one legal step per plan.

The rule: whoever votes is a member that has consented, or has voted before; every change is one
that `chain.legal_council_change` allows.
"""

from collections.abc import Callable, Sequence, Set

from protocol.records import PeerRecord, PlanBody, decode_record
from protocol.signing import PeerId
from swarm.core.chain import majority


def next_council(
    council: Sequence[PeerId], body: PlanBody, consents: Set[PeerId]
) -> tuple[PeerId, ...]:
    """Return the council that a plan with this body names, after `council`.

    Voters that are no members any more are replaced by members that consent, as many as one plan
    may replace, or leave in pairs; without such voters two members that consent come in. Voters
    keep their order, newcomers follow by peer id, at most one per host label.
    """
    labels = {record.peer: record.host_label for record in _records(body)}
    absent = [peer for peer in council if peer not in labels]
    present = [peer for peer in council if peer in labels]
    newcomers = _newcomers(present, labels, consents)
    if len(council) == 1:
        replaceable = 1
    else:
        replaceable = (len(council) - 1) // 2
    leaving = absent[: min(len(newcomers), replaceable)]
    if leaving:
        staying = [peer for peer in council if peer not in leaving]
        return (*staying, *newcomers[: len(leaving)])
    if len(absent) >= 2 and len(council) >= 3:
        return tuple(peer for peer in council if peer not in absent[:2])
    if len(newcomers) >= 2 and len(council) + 2 <= LARGEST_COUNCIL:
        return (*council, *newcomers[:2])
    return tuple(council)


LARGEST_COUNCIL = 7


def majority_rtt_seconds(
    council: Sequence[PeerId], me: PeerId, rtt_seconds: Callable[[PeerId], float]
) -> float:
    """Return within how long a question of `me` is answered by enough of the council to decide.

    One voter that is far away, or that answers late on purpose, changes nothing."""
    trips = sorted(rtt_seconds(peer) for peer in council if peer != me)
    others = majority(council) - (me in council)
    return trips[others - 1] if others else 0.0


def _records(body: PlanBody) -> list[PeerRecord]:
    return [decode_record(signed.payload, PeerRecord) for signed in body.members]


def _newcomers(
    present: Sequence[PeerId], labels: dict[PeerId, str], consents: Set[PeerId]
) -> list[PeerId]:
    """Return members that may come in, each on a host that has no voter yet."""
    taken = {labels[peer] for peer in present}
    chosen = []
    for peer, label in sorted(labels.items()):
        if peer in consents and peer not in present and (not label or label not in taken):
            taken.add(label)
            chosen.append(peer)
    return chosen
