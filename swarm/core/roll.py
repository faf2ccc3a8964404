"""Who is in a plan, looked up: each table is made once for a body, whoever asks.

The rule: nothing here is known that is not in the body; nobody changes a table.
"""

from collections.abc import Mapping

from protocol.records import Member, PlanBody, Signed
from protocol.signing import PeerId
from swarm.core.memo import by_identity


@by_identity
def records_of(body: PlanBody) -> Mapping[PeerId, Signed]:
    """Return the signed peer record of every member."""
    return {signed.signer: signed for signed in body.members}


@by_identity
def stage_of(body: PlanBody) -> Mapping[Member, int]:
    """Return which stage each replica hosts."""
    return {member: number for number, stage in enumerate(body.stages) for member in stage.replicas}


@by_identity
def working_peers(body: PlanBody) -> frozenset[PeerId]:
    """Return all replicas and feeders."""
    replicas = (member.peer for stage in body.stages for member in stage.replicas)
    return frozenset((*replicas, *(feeder.member.peer for feeder in body.feeders)))


@by_identity
def working(body: PlanBody) -> frozenset[Member]:
    """Return all replicas and feeders, by their starts."""
    replicas = (member for stage in body.stages for member in stage.replicas)
    return frozenset((*replicas, *(each.member for each in body.feeders)))


@by_identity
def with_role(body: PlanBody) -> frozenset[Member]:
    """Return who may say something by a plan: replicas, feeders, and those that leave."""
    return working(body).union(body.leavers)
