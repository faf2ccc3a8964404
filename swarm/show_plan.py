"""What a person sees of a plan: the one at work, or the one that a problem file would lead to."""

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from swarm.core.scheduling.explaining import explained
from swarm.core.scheduling.problem import Problem, problem_from_json
from swarm.core.scheduling.rebalance import HYSTERESIS
from swarm.core.scheduling.solver import solve
from swarm.errors import ConfigError
from swarm.show import plain, short


def print_plan(plan: dict[str, Any]) -> None:
    """Print `swarm plan` for a person."""
    console = Console(soft_wrap=True, highlight=False)
    if "epoch" in plan:
        console.print(plain(f"epoch {plan['epoch']} ({plan['kind']}): {plan['reason']}"))
    if "stages" not in plan:
        console.print("there is no plan with stages yet")
        return
    parts = plan["step_seconds"]
    shown = ", ".join(
        f"{name} {parts[name]:.3g} s" for name in ("fill", "steady", "reduction") if parts[name]
    )
    console.print(f"a step takes {parts['predicted']:.4g} s as predicted: {shown}")
    measured = plan.get("measured_step_seconds")
    if measured is not None and parts["predicted"] > 0:
        ratio = measured / parts["predicted"]
        console.print(f"measured {measured:.4g} s, {ratio:.2f} times that")
    if "estimates" in plan:
        known = plan["estimates"]
        console.print(
            f"by the measurements of {known['known']} of {known['members']} members, as far as "
            "this peer has heard of them"
        )
    console.print(_table(plan))
    for each in plan["standby"]:
        follows = f" for stage {each['stage']}" if each.get("stage") is not None else ""
        why = each["reason"] or "it gets work once it is ready and there is room"
        console.print(plain(f"{each['peer']} stands by{follows}: {why}"))


def print_what_if(answer: dict[str, Any]) -> None:
    """Print what a full solve makes of a problem (`what_if`) for a person."""
    console = Console(soft_wrap=True, highlight=False)
    current = answer.get("current")
    if current is not None:
        parts = answer["step_seconds"]
        verdict = "worth it" if answer["is_worth_it"] else "not worth it"
        console.print(
            f"a step takes {current['step_seconds']['predicted']:.4g} s now, "
            f"{parts['predicted']:.4g} s then; moving costs {parts['change']:.3g} s per step "
            f"until the next change: {verdict}"
        )
    print_plan(answer)


def _table(plan: dict[str, Any]) -> Table:
    table = Table("stage", "layers", "peer", "speed", "share", "shard", "busy", "limited by")
    for stage in plan["stages"]:
        for replica in stage["replicas"]:
            table.add_row(
                str(stage["stage"]),
                f"{stage['first_layer']}-{stage['last_layer']}",
                plain(short(replica["peer"])),
                f"{replica['speed']:.2f}",
                f"{replica['share_of_microbatches']:.1%}",
                f"{replica['share_of_reduction']:.1%}",
                f"{replica['busy']:.0%}",
                replica["limited_by"],
            )
    return table


def what_if(path: Path) -> dict[str, Any]:
    """Return the plan that a full solve finds for the problem in a file, beside the current one if
    the file has one. Raises ConfigError if the file holds no problem, NoFeasiblePlan."""
    problem = read_problem(path)
    solution = solve(problem)
    answer: dict[str, Any] = explained(problem, solution.assignment, solution.prediction.flow)
    answer["bound_seconds"] = solution.bound_seconds
    if problem.current is not None:
        current = explained(problem, problem.current)
        before = current["step_seconds"]["predicted"]  # type: ignore[index]
        after = answer["step_seconds"]["predicted"] + answer["step_seconds"]["change"]
        answer["current"] = current
        answer["is_worth_it"] = after < before * (1 - HYSTERESIS)
    return answer


def read_problem(path: Path) -> Problem:
    """Return the problem in a file, as `swarm plan --problem` writes it. Raises ConfigError."""
    hint = "`swarm plan --problem FILE` writes one; docs/cli.md describes it"
    try:
        return problem_from_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {path}", evidence=(str(error),), hint=hint) from error
    except ValueError as error:
        raise ConfigError(f"{path} holds no problem", evidence=(str(error),), hint=hint) from error


def write_problem(path: Path, plan: dict[str, Any]) -> None:
    """Write the problem of the plan at work. Raises ConfigError."""
    if "problem" not in plan:
        raise ConfigError("there is no problem yet", hint="wait for the first plan")
    try:
        path.write_text(json.dumps(plan["problem"], indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}", evidence=(str(error),)) from error
