"""A good answer without a linear program: what reviewers compare a plan with.

The rule: no solver, so that it is quick and the same everywhere up to rounding; ties go to the
lower peer and to the lower stage.
"""

import math
from collections.abc import Iterator, Sequence

from swarm.core.scheduling.candidates import Search, budget_for
from swarm.core.scheduling.cost import Prediction, predict
from swarm.core.scheduling.problem import Assignment, Problem, Standby, is_assignment
from swarm.core.scheduling.rebalance import stage_seconds
from swarm.core.scheduling.regrouping import idle
from swarm.core.scheduling.solver import check_solvable
from swarm.core.scheduling.starts import Range, stage_counts
from swarm.core.scheduling.wiring import feeding_rates, proportional_flow
from swarm.errors import NoFeasiblePlan


def greedy_answer(problem: Problem) -> tuple[Assignment, Prediction]:
    """Return the best of what the search begins with (`Search.begin`): the best-bounded starts, of
    a small swarm with one peer after the other where it helps most, of a large one after greedy
    moves; and what the peers do now, rebalanced. All with the wiring in proportion to what replicas
    can take.

    Raises NoFeasiblePlan if none is feasible.
    """
    check_solvable(problem)
    best: tuple[Assignment, Prediction] | None = None
    for assignment in _candidates(problem):
        found = predict(problem, assignment, proportional_flow(problem, assignment))
        if found.step_seconds < (best[1].step_seconds if best else math.inf):
            best = assignment, found
    if best is None:
        raise NoFeasiblePlan(
            "no greedy assignment fits into memory and lets microbatches through",
            evidence=(f"{len(problem.peers)} peers, stages: {list(stage_counts(problem))}",),
            hint="let the full search look for one",
        )
    return best


def _candidates(problem: Problem) -> Iterator[Assignment]:
    """Yield the feasible ones; who feeds follows from stage 0."""
    for ranges, groups in Search(problem, budget_for(problem)).begin():
        standby = tuple(Standby(peer, "") for peer in idle(problem, groups))
        made = Assignment(ranges, groups, _feeders(problem, ranges[0], groups[0]), standby)
        if is_assignment(problem, made):
            yield made


def _feeders(problem: Problem, layers: Range, group: Sequence[int]) -> tuple[int, ...]:
    """Return the replicas of stage 0 that hold the data; else as many of those who hold it, the
    best connected first, as stage 0 needs."""
    own = tuple(peer for peer in group if problem.peers[peer].has_data)
    if own:
        return own
    rates = feeding_rates(problem, layers, group, problem.data_holders).tolist()
    wanted = 1.0 / stage_seconds(problem, layers, group)
    order = sorted(range(len(rates)), key=lambda i: (-rates[i], i))
    chosen: list[int] = []
    for i in order:
        if sum(rates[j] for j in chosen) < wanted:
            chosen.append(i)
    return tuple(sorted(problem.data_holders[i] for i in chosen))
