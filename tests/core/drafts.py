"""Plans that follow one another, as a leader drafts them and a reviewer knows them."""

from collections.abc import Sequence
from dataclasses import dataclass

from protocol.messages import Heartbeat
from protocol.records import Manifest, Member, PlanBody, PlanHeader, decode_record
from protocol.signing import PeerId
from swarm.core.ballots import Draft, drafted
from swarm.core.chain import genesis
from swarm.core.drafting import Situation, next_draft
from swarm.core.scheduling.planning import Candidate, first_plan
from tests.core.plans import PEOPLE, candidate, candidates, heartbeat, manifest, request, training

FOUR_LAYERS = [1.0] * 4


@dataclass(frozen=True)
class Known:
    """A plan as a reviewer knows it."""

    header: PlanHeader
    body: PlanBody


def adopted(draft: Draft, before: PlanHeader) -> Known:
    plan = drafted(draft, before, before.generation)
    return Known(decode_record(plan.header, PlanHeader), decode_record(plan.body, PlanBody))


def begun(run: Manifest, members: Sequence[Candidate], stages: int) -> Known:
    body = first_plan(run.training, members, stages)
    before = genesis(run).header
    return adopted(Draft(body, "planned", 0, 0, before.council), before)


def situation(run: Manifest, plan: Known, **more: object) -> Situation:
    return Situation(run, plan.header, plan.body, **more)  # type: ignore[arg-type]


def draft_in(now: Situation) -> Draft:
    draft = next_draft(now)
    assert isinstance(draft, Draft), draft
    return draft


def groups(body: PlanBody) -> list[list[PeerId]]:
    return [[member.peer for member in stage.replicas] for stage in body.stages]


def waiting(body: PlanBody) -> list[tuple[PeerId, int]]:
    return [(each.member.peer, each.stage) for each in body.standby]


def peers(*numbers: int) -> list[PeerId]:
    return [PEOPLE[n].peer for n in numbers]


def member(number: int, boot: int = 1) -> Member:
    return Member(PEOPLE[number].peer, boot)


def ready(number: int, stage: int, **more: object) -> dict[PeerId, Heartbeat]:
    return {PEOPLE[number].peer: heartbeat(state="ready", stage=stage, **more)}  # type: ignore[arg-type]


def newcomer(
    number: int, run: Manifest, *, boot: int = 1, epoch: int = 1, **more: object
) -> Candidate:
    who = PEOPLE[number]
    return candidate(
        who,
        run,
        request(who, run.run, seconds=FOUR_LAYERS, boot=boot, epoch=epoch, **more),  # type: ignore[arg-type]
    )


RUN = manifest(run=training(steps=100))
ONE = manifest(run=training(steps=100, max_replicas=1))
FOUR = begun(RUN, candidates(4, RUN, FOUR_LAYERS), 2)
"""Two stages of two replicas: 0 and 1, 2 and 3."""
SPARE = begun(ONE, candidates(4, ONE, FOUR_LAYERS), 2)
"""Two stages: 0 works and 1 stands by, 2 works and 3 stands by."""
