"""What this peer knows of the plan and why it is as it is: one JSON-ready dictionary.

Fields are documented in docs/cli.md.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import msgspec

from protocol.records import Signed, Training
from protocol.signing import PeerId
from swarm.core.chain import Plan
from swarm.core.scheduling.explaining import explained
from swarm.core.scheduling.planning import candidates_of, problem_for
from swarm.core.scheduling.problem import problem_to_json
from swarm.core.scheduling.snapshot import assignment_of, flow_of


def plan_of(
    plan: Plan,
    training: Training,
    estimates: Mapping[PeerId, Signed],
    commits: Sequence[tuple[int, float]],
) -> dict[str, object]:
    """Return the newest plan, explained by what this peer has heard of the members' measurements.

    `commits` are (step, time) of the steps that this peer has committed by the active plan."""
    body = plan.body
    told: dict[str, object] = {
        "epoch": plan.header.epoch,
        "kind": plan.header.kind,
        "reason": body.reason,
        "claimed_step_seconds": body.step_seconds,
        "measured_step_seconds": _median_step_seconds(commits),
    }
    if not body.stages or not body.feeders:
        return told
    problem = problem_for(training, list(candidates_of(body).values()), estimates, before=body)
    known = sum(each.signer in estimates for each in body.members)
    stages = {each.member.peer: each.stage for each in body.standby}
    found = explained(problem, assignment_of(body), flow_of(body))
    for each in found["standby"]:  # type: ignore[attr-defined]
        each["stage"] = stages.get(each["peer"])
    windows = [stage.window or len(body.stages) - k + 1 for k, stage in enumerate(body.stages)]
    return {
        **told,
        **found,
        "windows": windows,
        "estimates": {"members": len(body.members), "known": known},
        "problem": msgspec.json.decode(problem_to_json(problem)),
    }


def _median_step_seconds(commits: Sequence[tuple[int, float]]) -> float | None:
    """Return the median time between commits of successive steps; None before the second."""
    seconds = sorted(
        later - earlier
        for (step, earlier), (next_step, later) in pairwise(commits)
        if next_step == step + 1
    )
    return seconds[len(seconds) // 2] if seconds else None
