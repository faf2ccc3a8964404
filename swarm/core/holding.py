"""What a peer holds of the model's state: it outlives plans.

The rule: equal lineage, version and state hash are equal state. The hash is that of a history: it
begins with the bytes of the stage's initial weights and takes in the totals of every commit, which
are the same on every replica and name its gradient by its norm. It costs no pass over the state,
and in standard mode it is the same on unlike hardware, whose bytes differ by rounding.
"""

from dataclasses import dataclass

from protocol.messages import Account, Held, Totals
from protocol.packing import canonical
from protocol.records import sha256


@dataclass(frozen=True, slots=True)
class Holding:
    """The state of layers [first, last) at `version`, in this peer's executor."""

    lineage: int
    first: int
    last: int
    version: int
    state_hash: bytes
    totals: Totals | None = None
    """What it committed last; None where it has not committed, nor been told."""
    account: Account | None = None
    """The stage's account of step `version`, once its reduction has started."""

    @property
    def range(self) -> tuple[int, int]:
        """Return [first, last)."""
        return self.first, self.last

    def after(self, totals: Totals) -> "Holding":
        """Return what is held after the commit of step `version`."""
        return Holding(
            self.lineage,
            self.first,
            self.last,
            self.version + 1,
            state_hash_after(self.state_hash, self.version, totals),
            totals,
        )

    def reported(self, bitmap: bytes, *, prepared: bool) -> Held:
        """Return what a Report says; `prepared` if the whole reduced gradient is held."""
        return Held(
            lineage=self.lineage,
            first=self.first,
            last=self.last,
            version=self.version,
            state_hash=self.state_hash,
            bitmap=bitmap,
            prepared=self.account if prepared else None,
            totals=self.totals,
        )


def state_hash_after(state_hash: bytes, step: int, totals: Totals) -> bytes:
    """Return the state hash of version step + 1 (32 bytes)."""
    return sha256(b"%d/" % step + state_hash + canonical(totals))
