"""Errors of the daemon and the command line.

Every error that a person can meet has a message (what), evidence lines, a hint (next step) and
an exit code of its own (docs/cli.md).
"""

from protocol.signing import PeerId


class SwarmError(Exception):
    """Base of the errors that are reported to a person, without a traceback."""

    exit_code = 1

    def __init__(self, what: str, *, evidence: tuple[str, ...] = (), hint: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.evidence = evidence
        self.hint = hint

    def __str__(self) -> str:
        lines = [self.what, *(f"  {line}" for line in self.evidence)]
        if self.hint:
            lines.append(f"try: {self.hint}")
        return "\n".join(lines)


class ConfigError(SwarmError):
    """A manifest or a peer's settings are wrong."""

    exit_code = 3


class ModelError(SwarmError):
    """The model does not import, cannot be sliced, or is not a function of its input."""

    exit_code = 4


class DataError(SwarmError):
    """Data is missing, or not what the manifest says."""

    exit_code = 5


class HomeError(SwarmError):
    """The home folder is in use, incomplete, damaged, or of another run."""

    exit_code = 6


class AddressError(SwarmError):
    """The address to listen on cannot be used."""

    exit_code = 7


class JoinError(SwarmError):
    """The swarm could not be reached, or refused this peer."""

    exit_code = 8


class NoFeasiblePlan(SwarmError):
    """These peers cannot train this model."""

    exit_code = 9


class RunHalted(SwarmError):
    """Training stands still for good, and the message says why."""

    exit_code = 10


class DhtError(SwarmError):
    """The DHT node of this peer does not start or does not answer."""

    exit_code = 11


class NotRunning(SwarmError):
    """No daemon answers in this home."""

    exit_code = 12


class ExportError(SwarmError):
    """There is no certified complete version to export, or a layer cannot be had."""

    exit_code = 13


class RecoveryError(SwarmError):
    """A new generation of councils cannot be started here."""

    exit_code = 15


class SimulationError(SwarmError):
    """A simulated swarm broke one of its promises, or cannot be drawn."""

    exit_code = 16


class PeerError(Exception):
    """Something went wrong with one peer; its link or its request, not this daemon."""

    def __init__(self, peer: PeerId, reason: str) -> None:
        super().__init__(f"peer={peer} reason={reason!r}")
        self.peer = peer
        self.reason = reason


class PeerUnreachable(PeerError):
    """Indefinite: what was asked may or may not have happened."""


class NobodyListens(PeerUnreachable):
    """At the address where a peer was nobody takes connections: it is gone, or its host is."""


class PeerRefused(PeerError):
    """Definite: what was asked did not happen."""


class Overloaded(PeerRefused):
    """The peer has no room for more."""
