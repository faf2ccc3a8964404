"""The daemon, but for one thing: stages keep the peers of the first plan, whatever is measured.

The rule: it is the shipped daemon with another rule of placing; arguments are those of `swarm`.
"""

import sys
from functools import partial

from swarm import cli
from swarm.core.roles import Roles, let_stand_by
from swarm.node import Node


def keep(roles: Roles) -> None:
    """Nobody moves; newcomers stand by."""
    let_stand_by(roles, roles.idle())


def main(arguments: list[str]) -> int:
    """Run a swarm command whose daemon keeps its split."""
    vars(cli)["Node"] = partial(Node, place=keep)
    return cli.main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
