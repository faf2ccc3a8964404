"""The full solve: a good assignment, its wiring, and why some peers stand by.

The rule: the same problem, seed and budget give the same answer on one machine. Starts (starts.py)
of several numbers of stages are improved by the search on grids (placing.py, search.py); the best
of them go downhill by single steps (candidates.py). Nothing is claimed about the optimum; exact.py
knows it for small problems.
"""

from dataclasses import dataclass, replace

from swarm.core.scheduling.bounds import MOST_KEPT
from swarm.core.scheduling.candidates import (
    BETTER,
    FEW_PEERS,
    Budget,
    Search,
    budget_for,
    diverse,
)
from swarm.core.scheduling.cost import Prediction, predict
from swarm.core.scheduling.estimate import INFEASIBLE
from swarm.core.scheduling.problem import Assignment, Problem, Standby, check_assignment
from swarm.core.scheduling.regrouping import changed
from swarm.core.scheduling.starts import Start, fits, stage_counts
from swarm.core.scheduling.wiring import NO_FLOW, Flow
from swarm.errors import NoFeasiblePlan

KICKED = 3

__all__ = ["Budget", "Search", "Solution", "budget_for", "check_solvable", "feeding", "solve"]


@dataclass(frozen=True)
class Solution:
    """An assignment and what it costs."""

    assignment: Assignment
    prediction: Prediction
    bound_seconds: float
    """Lower bound of this assignment's seconds per step."""
    programs: int
    """Linear programs that were solved to find it."""


def solve(problem: Problem, *, seed: int = 0, budget: Budget | None = None) -> Solution:
    """Return the best assignment found.

    Raises NoFeasiblePlan, with the figures, if nobody has the data, or if no assignment was found
    that fits into memory, has replicas enough and lets microbatches through.
    """
    check_solvable(problem)
    search = Search(problem, budget or budget_for(problem), seed)
    best = _descended(search)
    if not best or not best[0][0] < INFEASIBLE:
        raise _nothing_fits(problem)
    _kick(search, best)
    start = min(best)[1]
    employed = start if len(problem.peers) <= FEW_PEERS else search.employed(start)
    return _solution(search, min(start, employed, key=search.price))


def _descended(search: Search) -> list[tuple[float, Start]]:
    """Return where descents from the best starts and the best of the search on grids end, the best
    first, KICKED of them, with their seconds per step."""
    most = search.budget.descents
    begin = search.begin()
    best_begun = sorted(begin, key=search.plain_seconds)[: most + 1]
    placed = sorted(search.placed(begin), key=search.plain_seconds)[: most + 1]
    begin = sorted(dict.fromkeys([*placed, *best_begun]), key=search.price)
    few = len(search.problem.peers) <= FEW_PEERS
    found = [search.descend(start) for start in diverse(begin, most * (1 + few))]
    return sorted(dict.fromkeys(found))[:KICKED]


def _kick(search: Search, best: list[tuple[float, Start]]) -> None:
    """Kick one after the other, and keep what a descent from there improves."""
    for number in range(search.budget.kicks):
        if search.programs >= search.budget.programs:
            break
        turn = number % len(best)
        value, start = search.descend(search.kicked(best[turn][1]))
        if value < best[turn][0] * BETTER:
            best[turn] = value, start


def check_solvable(problem: Problem) -> None:
    """Raise NoFeasiblePlan if no search is needed to see that nothing can be found."""
    if not problem.data_holders:
        raise NoFeasiblePlan(
            "no peer has the data", hint="start a peer where the manifest's data can be read"
        )
    if not stage_counts(problem):
        terms = problem.terms
        wanted = max(terms.stages, len(terms.cuts) + 1)
        raise NoFeasiblePlan(
            f"{len(problem.peers)} peers are too few for {wanted} stages of at least "
            f"{terms.min_replicas} replicas",
            hint="wait for more peers, or ask for fewer stages or replicas",
        )


# --- the answer ----------------------------------------------------------------------------------


def _solution(search: Search, start: Start) -> Solution:
    problem = search.problem
    assignment = search.assignment(start)
    prediction = predict(problem, assignment)
    standby = tuple(
        Standby(each.peer, _reason(search, start, each.peer, prediction.step_seconds))
        for each in assignment.standby
    )
    assignment, flow = feeding(replace(assignment, standby=standby), prediction.flow)
    check_assignment(problem, assignment)
    return Solution(
        assignment, predict(problem, assignment, flow), search.bound(start), search.programs
    )


def feeding(assignment: Assignment, flow: Flow) -> tuple[Assignment, Flow]:
    """Return both without the feeders that have no share."""
    kept = [i for i, share in enumerate(flow.feeder_shares) if share > NO_FLOW]
    shares = flow.feeder_shares[kept]
    return (
        replace(assignment, feeders=tuple(assignment.feeders[i] for i in kept)),
        Flow(shares / shares.sum(), (flow.wiring[0][kept], *flow.wiring[1:])),
    )


def _reason(search: Search, start: Start, peer: int, seconds: float) -> str:
    """Say why a peer stands by: memory, the limit of replicas, or what a step would take."""
    ranges, groups = start
    fitting = [stage for stage in range(len(ranges)) if fits(search.problem, peer, ranges, stage)]
    if not fitting:
        return "its memory is too small for any stage"
    open_to = [stage for stage in fitting if len(groups[stage]) < search.problem.replica_limit]
    if not open_to:
        return "every stage that it has the memory for has all its replicas"
    if len(search.problem.peers) > FEW_PEERS:
        stage, added = search.with_peer(start, peer)
        if len(search.problem.peers) > MOST_KEPT:
            return (
                f"with it in stage {stage} a step would take at least {search.bound(added):.4g} s, "
                f"without it {seconds:.4g} s"
            )
        return (
            f"with it in stage {stage} a step would take {search.plain_seconds(added):.4g} s, "
            f"without it {search.plain_seconds(start):.4g} s, both wired in proportion"
        )
    options = [(ranges, changed(groups, ((stage, None, peer),))) for stage in open_to]
    best = min(options, key=search.bound)
    stage = open_to[options.index(best)]
    return (
        f"with it in stage {stage} a step would take {search.price(best):.4g} s, "
        f"without it {seconds:.4g} s"
    )


def _nothing_fits(problem: Problem) -> NoFeasiblePlan:
    """Say what is missing, as far as figures show it."""
    terms = problem.terms
    largest = max(layer.parameter_bytes for layer in problem.layers) * terms.state_ratio
    everything = problem.parameter_bytes(0, len(problem.layers)) * terms.state_ratio
    memories = [peer.memory_bytes for peer in problem.peers]
    return NoFeasiblePlan(
        "no assignment was found that fits into memory and lets microbatches through",
        evidence=(
            f"the largest layer's state takes {largest:.0f} bytes, the model's {everything:.0f}",
            f"peers have {min(memories)} to {max(memories)} bytes of memory, "
            f"{sum(memories)} together",
            f"a stage needs {terms.min_replicas} replicas at least, cuts are "
            + (f"{list(terms.cuts)}" if terms.cuts else "free"),
            f"{int((problem.bandwidth == 0).sum())} of "
            f"{len(problem.peers) * (len(problem.peers) - 1)} directed links let nothing through",
        ),
        hint="wait for more or larger peers, or cut the model into more stages",
    )
