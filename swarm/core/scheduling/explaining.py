"""An assignment and its prediction in words and figures, for people and programs.

The rule: the same text for the plan at work and for what would be if the problem were another.
Fields are documented in docs/cli.md.
"""

from swarm.core.scheduling.cost import Prediction, predict
from swarm.core.scheduling.problem import Assignment, Problem
from swarm.core.scheduling.wiring import Flow, loads_of


def explained(
    problem: Problem, assignment: Assignment, flow: Flow | None = None
) -> dict[str, object]:
    """Return who does what, what a step takes by parts, and what each peer is limited by.

    Without a flow the best wiring is taken. Raises NoFeasiblePlan if there is none."""
    prediction = predict(problem, assignment, flow)
    return {
        "step_seconds": step_parts(prediction),
        "microbatches_per_second": prediction.microbatches_per_second,
        "stages": [
            _stage(problem, assignment, prediction, stage)
            for stage in range(len(assignment.groups))
        ],
        "feeders": [
            {"peer": problem.peers[peer].id, "share": float(share)}
            for peer, share in zip(
                assignment.feeders, prediction.flow.feeder_shares.tolist(), strict=True
            )
        ],
        "standby": [
            {"peer": problem.peers[each.peer].id, "reason": each.reason}
            for each in assignment.standby
            if each.peer not in assignment.feeders
        ],
    }


def step_parts(prediction: Prediction) -> dict[str, float]:
    """Return the predicted seconds of a step, and its parts."""
    return {
        "predicted": prediction.kept_seconds,
        "fill": prediction.fill_seconds,
        "steady": prediction.steady_seconds,
        "reduction": prediction.reduction_seconds,
        "change": prediction.change_seconds,
    }


def _stage(
    problem: Problem, assignment: Assignment, prediction: Prediction, stage: int
) -> dict[str, object]:
    first, last = assignment.ranges[stage]
    loads = loads_of(problem, assignment, prediction.flow)
    flow = prediction.flow.unit[stage].sum(axis=0).tolist()
    return {
        "stage": stage,
        "first_layer": first,
        "last_layer": last - 1,
        "seconds_at_speed_1": problem.seconds(first, last),
        "parameter_bytes": problem.parameter_bytes(first, last),
        "reduction_seconds": prediction.group_reduction_seconds[stage],
        "replicas": [
            {
                "peer": problem.peers[peer].id,
                "speed": problem.peers[peer].speed,
                "share_of_microbatches": flow[place],
                "share_of_reduction": prediction.shard_shares[stage][place],
                "limited_by": prediction.limits[peer],
                "busy": float(loads.compute[peer]) * prediction.microbatches_per_second,
            }
            for place, peer in enumerate(assignment.groups[stage])
        ],
    }
