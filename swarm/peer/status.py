"""What this peer knows, for people and for programs: one JSON-ready dictionary.

Fields are documented in docs/cli.md.
"""

from collections.abc import Sequence
from dataclasses import asdict

from protocol.messages import LeaderBeat, MemberView, Traffic
from protocol.records import PlanBody
from swarm.peer.control import Control
from swarm.peer.epoch import Course, Epoch


def status_of(
    control: Control,
    epoch: Epoch | None,
    *,
    own_traffic: tuple[Traffic, ...],
    phase: str,
    disk_trouble: str,
    listen: str,
    losses: Sequence[tuple[int, float]],
    courses: Sequence[Course],
    replayed: int,
    dht: dict[str, object],
) -> dict[str, object]:
    """Return the state of the swarm, with the members as the leader last told them, and of this
    peer."""
    plan, beat, training = control.plan, control.beat, control.manifest.training
    views = {view.peer: view for view in control.table}
    return {
        "run": control.manifest.run.hex(),
        "name": training.name,
        "determinism": training.execution.determinism,
        "generation": plan.header.generation.number,
        "epoch": plan.header.epoch,
        "term": control.agreement.term if control.is_leader or beat is None else beat.term,
        "leader": control.leader,
        "council": list(plan.header.council),
        "council_note": _council_note(plan.header.council),
        "phase": _phase(plan.body, phase, control),
        "trouble": control.trouble,
        "planning_trouble": control.planning_trouble,
        "disk_trouble": disk_trouble,
        "waiting_for_peers": beat.waiting_for if beat is not None else None,
        "steps": training.steps,
        **_newest_step(plan.body, beat, epoch, losses),
        "samples_per_second": beat.samples_per_second if beat is not None else 0.0,
        "plan_reason": plan.body.reason,
        "predicted_step_seconds": plan.body.step_seconds,
        "completed_version": plan.body.completed.version if plan.body.completed else None,
        "stages": _stages(plan.body, views),
        "standby": [
            {
                "peer": each.member.peer,
                "stage": each.stage,
                "state": views[each.member.peer].state if each.member.peer in views else "unknown",
            }
            for each in plan.body.standby
        ],
        "lineage": plan.header.lineage,
        "replayed": replayed,
        "plans": [asdict(each) for each in courses],
        "feeders": [feeder.member.peer for feeder in plan.body.feeders],
        "members": [_member(view, control.table_age_seconds) for view in views.values()],
        "bytes_by_kind": _traffic([t for view in views.values() for t in view.traffic]),
        "peer": {
            "id": control.me.peer,
            "boot": control.me.boot,
            "listen": listen,
            "state": epoch.state if epoch is not None else phase,
            "stage": epoch.stage if epoch is not None and epoch.stage >= 0 else None,
            "version": epoch.version if epoch is not None else 0,
            "losses": [list(pair) for pair in losses],
            "bytes_by_kind": _traffic(own_traffic),
            "dht": dht,
        },
    }


def _phase(body: PlanBody, phase: str, control: Control) -> str:
    if body.halted:
        return "halted"
    if body.ended:
        return "ended"
    if control.trouble:
        return "stalled"
    return "training" if body.stages else phase


def _newest_step(
    body: PlanBody,
    beat: LeaderBeat | None,
    epoch: Epoch | None,
    losses: Sequence[tuple[int, float]],
) -> dict[str, object]:
    """Return version and loss of the newest committed step: this peer's own, or the leader's word.

    What one has committed, all were prepared for."""
    version, loss = (beat.version, beat.loss) if beat is not None else (0, None)
    own = epoch.version if epoch is not None else losses[-1][0] + 1 if losses else 0
    if own >= version and losses:
        version, loss = own, losses[-1][1]
    if body.completed is not None:
        version = body.completed.version
    return {"version": version, "loss": loss}


def _council_note(council: tuple[str, ...]) -> str:
    if len(council) < 3:
        return f"a council of {len(council)}: losing {council[0]} halts planning"
    return ""


def _stages(body: PlanBody, views: dict[str, MemberView]) -> list[dict[str, object]]:
    return [
        {
            "stage": number,
            "first_layer": stage.first,
            "last_layer": stage.last - 1,
            "replicas": [
                {
                    "peer": member.peer,
                    "boot": member.boot,
                    "state": views[member.peer].state if member.peer in views else "unknown",
                    "version": views[member.peer].version if member.peer in views else None,
                }
                for member in stage.replicas
            ],
        }
        for number, stage in enumerate(body.stages)
    ]


def _member(view: MemberView, age_seconds: float) -> dict[str, object]:
    return {
        "peer": view.peer,
        "boot": view.boot,
        "address": view.address,
        "state": view.state,
        "stage": view.stage if view.stage >= 0 else None,
        "version": view.version,
        "ledger_size": view.ledger_size,
        "queue_length": view.queue_length,
        "silent_seconds": view.silent_seconds + age_seconds,
        "rtt_seconds": view.rtt_seconds,
        "compute_seconds": view.compute_seconds,
    }


def _traffic(counts: list[Traffic] | tuple[Traffic, ...]) -> dict[str, dict[str, int]]:
    total: dict[str, dict[str, int]] = {}
    for count in counts:
        kind = total.setdefault(count.kind, {"sent": 0, "received": 0})
        kind["sent"] += count.sent_bytes
        kind["received"] += count.received_bytes
    return dict(sorted(total.items()))
