"""Plans that anybody may send to a leader: whole daemons, on the modelled network."""

from collections.abc import Callable

import msgspec
import pytest
import trio

from protocol.messages import CandidatePlan
from protocol.packing import canonical
from protocol.records import PlanBody
from swarm.core.scheduling.planning import candidates_of, first_plan
from swarm.simulation.world import World
from tests.core.plans import PEOPLE, candidate, request
from tests.peer.test_prober import after, daemon, idle, names, working


def of_strangers(world: World) -> PlanBody:
    """Return a plan whose members nobody knows; they have signed it all themselves."""
    control = daemon(world, 0).control
    now, manifest = control.plan.body, control.manifest
    known = next(iter(candidates_of(now).values()), None)
    layers = known.request.layers if known else request(PEOPLE[6], manifest.run).layers
    made = [
        candidate(who, manifest, msgspec.structs.replace(request(who, manifest.run), layers=layers))
        for who in PEOPLE[6:10]
    ]
    body = first_plan(manifest.training, made, len(now.stages) or 2)
    stages = tuple(
        msgspec.structs.replace(stage, first=as_now.first, last=as_now.last)
        for stage, as_now in zip(body.stages, now.stages or body.stages, strict=True)
    )
    return msgspec.structs.replace(body, stages=stages)


@pytest.mark.parametrize("make", [idle, working], ids=["before the first plan", "at work"])
def test_a_plan_of_strangers_changes_nothing(make: Callable[[int], World]) -> None:
    async def look(world: World) -> None:
        leader = next(n for n in range(3) if daemon(world, n).control.is_leader)
        control = daemon(world, leader).control
        generation, epoch = control.plan.key
        message = CandidatePlan(
            generation=generation, epoch=epoch, body=canonical(of_strangers(world))
        )
        daemon(world, (leader + 1) % 3)._links.post(names(world)[leader], message)
        await trio.sleep(5)
        assert control.plan.key == (generation, epoch)
        assert daemon(world, leader).control.is_leader

    after(make(3), 30, look)
