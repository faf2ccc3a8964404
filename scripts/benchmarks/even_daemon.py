"""The daemon, but for two things: the first plan divides peers evenly among stages, in the order of
their host labels, and that is how they stay, whatever is measured.

The rule: it is the shipped daemon with another rule of placing; arguments are those of `swarm`.
"""

import sys
from collections.abc import Sequence
from functools import partial

from protocol.records import PeerRecord, decode_record
from swarm import cli
from swarm.core.roles import Roles, let_stand_by
from swarm.core.scheduling import planning
from swarm.core.scheduling.planning import Candidate
from swarm.node import Node


def keep(roles: Roles) -> None:
    """Nobody moves; newcomers stand by."""
    let_stand_by(roles, roles.idle())


def in_order(
    candidates: Sequence[Candidate], replicas: Sequence[int], _speeds: Sequence[float]
) -> list[list[Candidate]]:
    """Deal peers to stages by their labels."""
    ordered = iter(sorted(candidates, key=_label))
    return [[next(ordered) for _ in range(number)] for number in replicas]


def _label(candidate: Candidate) -> str:
    return decode_record(candidate.record.payload, PeerRecord).host_label


def main(arguments: list[str]) -> int:
    """Run a swarm command whose daemon keeps its split."""
    vars(planning)["_groups"] = in_order
    vars(cli)["Node"] = partial(Node, place=keep)
    return cli.main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
