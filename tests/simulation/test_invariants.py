"""What the simulation notices from outside when the agreement is broken."""

from collections.abc import Callable

import pytest
import trio

from protocol.messages import LeaderBeat
from protocol.packing import canonical
from protocol.records import (
    BALLOT_PURPOSE,
    Ballot,
    Certificate,
    CertifiedPlan,
    Generation,
    Manifest,
    PlanBody,
    PlanHeader,
    council_hash,
    sha256,
)
from protocol.signing import Identity
from swarm.core.chain import HARD_STATE, HardState, genesis
from swarm.peer.keeping import PLACES
from swarm.simulation.invariants import MOST_BODIES, Invariants
from swarm.simulation.physics import integer_training
from tests.simulation.sim import process

KEYS = [Identity.from_seed(sha256(b"%d" % number)) for number in range(3)]
MANIFEST = Manifest(
    training=integer_training(), founder=KEYS[0].peer, recovery=KEYS[2].peer, nonce=bytes(32)
)
ROOT = genesis(MANIFEST)


def plan(
    before: PlanHeader, signers: tuple[Identity, ...] = (KEYS[0],), reason: str = ""
) -> tuple[CertifiedPlan, PlanHeader]:
    """Return a plan after `before` with the certificate of these signers."""
    body = canonical(_with_reason(reason))
    header = PlanHeader(
        run=MANIFEST.run,
        generation=before.generation,
        epoch=before.epoch + 1,
        predecessor=before.hash,
        council=(KEYS[0].peer,),
        body_hash=sha256(body),
        kind="planned",
        from_step=0,
        lineage=0,
    )
    ballot = canonical(
        Ballot(
            run=MANIFEST.run,
            generation=header.generation,
            epoch=header.epoch,
            term=header.epoch,
            header_hash=header.hash,
            council_hash=council_hash(before.council),
        )
    )
    signatures = tuple((key.peer, key.sign(BALLOT_PURPOSE, ballot)) for key in signers)
    return CertifiedPlan(canonical(header), body, Certificate(ballot, signatures)), header


def _with_reason(reason: str) -> PlanBody:
    values = {name: getattr(ROOT.body, name) for name in PlanBody.__struct_fields__}
    return PlanBody(**(values | {"reason": reason}))


def noticed(saves: list[tuple[int, HardState]]) -> list[str]:
    """Return the rules that are broken when these peers save these states one after the other."""
    broken: list[str] = []

    async def main() -> None:
        invariants = Invariants(MANIFEST, lambda rule, text: broken.append(rule))
        for number, state in saves:
            invariants.saved(process(number), HARD_STATE, canonical(state))

    trio.run(main)
    return broken


ONE, ONE_HEADER = plan(ROOT.header)
TWO, TWO_HEADER = plan(ONE_HEADER)


def test_an_ordinary_life_breaks_nothing() -> None:
    assert (
        noticed(
            [
                (0, HardState()),
                (0, HardState(term=1, voted_for=KEYS[0].peer)),
                (0, HardState(term=1, voted_for=KEYS[0].peer, newest=ONE, active=ONE)),
                (1, HardState(newest=ONE)),
                (0, HardState(term=2, voted_for=KEYS[1].peer, newest=TWO, active=ONE)),
                (1, HardState(newest=TWO, active=TWO)),
            ]
        )
        == []
    )


def test_bodies_that_are_nobodys_newest_are_forgotten_and_others_are_not() -> None:
    async def main() -> None:
        invariants = Invariants(MANIFEST, lambda rule, text: pytest.fail(f"{rule}: {text}"))
        for number in range(3 * MOST_BODIES):
            invariants.saved(process(0), PLACES[0], canonical(_with_reason(f"draft {number}")))
            if number == 0:
                invariants.saved(process(1), HARD_STATE, canonical(HardState(newest=ONE)))
        assert invariants.kept_bodies <= MOST_BODIES + 1
        kept = invariants.newest(1)
        assert kept is not None
        assert kept[1] is not None

    trio.run(main)


@pytest.mark.parametrize(
    ("rule", "saves"),
    [
        (
            "A1",
            [(0, HardState(newest=ONE)), (1, HardState(newest=plan(ROOT.header, reason="x")[0]))],
        ),
        ("A2", [(0, HardState(newest=ONE)), (0, HardState())]),
        ("A2", [(0, HardState(newest=ONE, active=ONE)), (0, HardState(newest=ONE))]),
        (
            "A2",
            [
                (0, HardState(newest=ONE)),
                (0, HardState(newest=TWO, active=TWO)),
                (0, HardState(newest=TWO, active=ONE)),
            ],
        ),
        ("A3", [(0, HardState(newest=TWO))]),
        ("A4", [(0, HardState(term=3)), (0, HardState(term=2))]),
        (
            "A4",
            [
                (0, HardState(term=3, voted_for=KEYS[0].peer)),
                (0, HardState(term=3, voted_for=KEYS[1].peer)),
            ],
        ),
        (
            "A4",
            [
                (0, HardState(term=3, voted_for=KEYS[0].peer)),
                (0, HardState(term=3)),
            ],
        ),
        ("A6", [(0, HardState(newest=plan(ROOT.header, (KEYS[1],))[0]))]),
        ("A6", [(0, HardState(newest=plan(ROOT.header, ())[0]))]),
    ],
)
def test_what_must_not_be_is_noticed(rule: str, saves: list[tuple[int, HardState]]) -> None:
    assert noticed(saves) == [rule]


def test_two_leaders_of_one_term_are_noticed() -> None:
    broken: list[str] = []
    violate: Callable[[str, str], None] = lambda rule, text: broken.append(rule)  # noqa: E731
    beat = LeaderBeat(
        generation=Generation(),
        epoch=1,
        term=4,
        waiting_for=0,
        version=0,
        loss=None,
        samples_per_second=0.0,
        trouble="",
    )

    async def main() -> None:
        invariants = Invariants(MANIFEST, violate)
        invariants.beat(process(0), beat)
        invariants.beat(process(0, 2), beat)
        assert broken == []
        invariants.beat(process(1), beat)

    trio.run(main)
    assert broken == ["A4"]
