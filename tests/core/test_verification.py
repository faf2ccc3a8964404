"""What keeps a peer out, and what keeps a plan from being voted for: each rule, alone."""

from typing import Literal

import msgspec
import pytest

from protocol.errors import RemoteProtocolError
from protocol.records import (
    BALLOT_PURPOSE,
    JOIN_REQUEST_PURPOSE,
    PEER_RECORD_PURPOSE,
    FeederPlan,
    Member,
    PlanBody,
    Signed,
    StagePlan,
    StandbyPlan,
    TensorSpec,
    sign_record,
)
from protocol.signing import PeerId
from swarm.core.scheduling.planning import Candidate, first_plan
from swarm.core.verification import JOIN_REQUEST_EPOCHS, check_join, check_plan, refusal_of
from tests.core.plans import (
    PEOPLE,
    candidate,
    candidates,
    manifest,
    record,
    request,
    signed_request,
    training,
)

MANIFEST = manifest()
RUN = MANIFEST.run
ALICE, BOB = PEOPLE[:2]

replace = msgspec.structs.replace


# --- joining --------------------------------------------------------------------------------------


def joined(where: Signed, asked: Signed, epoch: int = 0) -> Candidate:
    return check_join(where, asked, ALICE.peer, MANIFEST, epoch)


def test_a_peer_that_speaks_for_itself_is_a_candidate() -> None:
    where, asked = record(ALICE, RUN, boot=4), request(ALICE, RUN, boot=4)
    candidate = joined(where, signed_request(ALICE, asked))
    assert candidate == Candidate(where, asked, signed_request(ALICE, asked))
    assert candidate.member == Member(ALICE.peer, 4)


@pytest.mark.parametrize(
    ("where", "asked"),
    [
        (record(BOB, RUN), signed_request(BOB, request(BOB, RUN))),
        (record(ALICE, RUN), signed_request(BOB, request(BOB, RUN))),
        (record(BOB, RUN), signed_request(ALICE, request(ALICE, RUN))),
        # signed by oneself, about another
        (record(ALICE, RUN, peer=BOB.peer), signed_request(ALICE, request(ALICE, RUN))),
        (record(ALICE, RUN), signed_request(ALICE, request(BOB, RUN))),
        # about oneself, signed by another
        (record(BOB, RUN, peer=ALICE.peer), signed_request(ALICE, request(ALICE, RUN))),
        (record(ALICE, RUN), signed_request(BOB, request(ALICE, RUN))),
    ],
)
def test_nobody_joins_for_another(where: Signed, asked: Signed) -> None:
    with pytest.raises(RemoteProtocolError, match=f"{ALICE.peer} sends a join request of another"):
        joined(where, asked)


def test_signatures_are_checked_and_have_their_purpose() -> None:
    where, asked = record(ALICE, RUN), signed_request(ALICE, request(ALICE, RUN))
    wrong = sign_record(ALICE, BALLOT_PURPOSE, request(ALICE, RUN))
    with pytest.raises(RemoteProtocolError, match="bad join-request signature"):
        joined(where, wrong)
    with pytest.raises(RemoteProtocolError, match="bad peer-record signature"):
        joined(replace(where, signature=asked.signature), asked)


@pytest.mark.parametrize(
    ("where", "asked"),
    [
        (record(ALICE, b"x" * 32), request(ALICE, RUN)),
        (record(ALICE, RUN), request(ALICE, b"x" * 32)),
        (record(ALICE, RUN, boot=2), request(ALICE, RUN, boot=1)),
    ],
)
def test_record_and_request_are_of_this_run_and_one_boot(where: Signed, asked: object) -> None:
    with pytest.raises(RemoteProtocolError, match="not of this run and boot"):
        joined(where, signed_request(ALICE, asked))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("asked_at", "epoch", "good"),
    [
        (3, 3, True),
        (3, 3 + JOIN_REQUEST_EPOCHS, True),
        (3, 4 + JOIN_REQUEST_EPOCHS, False),
        (4, 3, False),
    ],
)
def test_a_request_is_good_for_a_few_epochs(asked_at: int, epoch: int, good: bool) -> None:
    where, asked = record(ALICE, RUN), signed_request(ALICE, request(ALICE, RUN, epoch=asked_at))
    if good:
        assert joined(where, asked, epoch).request.epoch == asked_at
    else:
        with pytest.raises(RemoteProtocolError, match=f"epoch {asked_at} at epoch {epoch}"):
            joined(where, asked, epoch)


# --- what members have in common ------------------------------------------------------------------


def pair(
    determinism: Literal["standard", "exact"] = "exact", /, **changed: object
) -> tuple[Candidate, Candidate, str]:
    """Return a candidate that differs from the founder in `changed`, the founder, the answer."""
    run = manifest(run=training(determinism=determinism))
    founder, other = candidates(2, run)
    theirs = Candidate(other.record, replace(other.request, **changed), other.signed_request)
    return theirs, founder, refusal_of(theirs, [founder], run)


def test_equal_peers_are_let_in_and_the_founder_always() -> None:
    theirs, _, refusal = pair()
    assert refusal == ""
    assert refusal_of(theirs, [], MANIFEST) == ""


@pytest.mark.parametrize(
    "changed",
    [
        {"device": "cuda:0"},
        {"memory_bytes": 1},
        {"boot": 9},
        {"data_digest": b""},
        {"layers": request(BOB, RUN, seconds=[9.0, 9.0]).layers},
    ],
)
def test_peers_may_differ_in_what_does_not_change_the_result(changed: dict[str, object]) -> None:
    assert pair(**changed)[2] == ""


def test_numerics_matter_in_exact_mode_only() -> None:
    refusal = pair(numerics="other cpu")[2]
    assert refusal == (
        "numerics fingerprint differs, so exact mode would not be exact: "
        "yours is [other cpu], the swarm's is [cpu]"
    )
    assert pair("standard", numerics="other cpu")[2] == ""


def test_the_model_is_the_same_to_the_byte() -> None:
    layers = request(BOB, RUN).layers
    larger = request(BOB, RUN, parameter_bytes=17).layers
    renamed = (layers[0], replace(layers[1], name="x"))
    reshaped = (layers[0], replace(layers[1], output=TensorSpec("float32", (4, 9))))
    assert pair(layers=larger)[2] == (
        "the model differs: yours has 2 layers and 34 parameter bytes, the swarm's 2 and 32"
    )
    for other in (layers[:1], (*layers, layers[0]), (), layers[::-1], renamed, reshaped):
        assert pair(layers=other)[2].startswith("the model differs")


def test_the_data_is_the_same_where_there_is_any() -> None:
    assert pair(data_digest=b"e" * 32)[2] == (
        f"the data differs: your digest is {'65' * 32}, the swarm's is {'64' * 32}"
    )


def test_whoever_has_the_data_agrees_with_the_first_that_has_it() -> None:
    """Also where the first member has none."""
    without, one, other = (
        candidate(who, MANIFEST, request(who, MANIFEST.run, digest=digest))
        for who, digest in zip(PEOPLE[:3], (b"", b"1" * 32, b"2" * 32), strict=True)
    )
    assert refusal_of(other, [without], MANIFEST) == ""
    assert refusal_of(other, [without, one], MANIFEST).startswith("the data differs")
    assert refusal_of(without, [one], MANIFEST) == ""


def test_a_refusal_fits_into_an_answer() -> None:
    assert len(pair(numerics="x" * 4096)[2]) < 4096


# --- plans ----------------------------------------------------------------------------------------

GOOD = first_plan(MANIFEST.training, candidates(4, MANIFEST, [1.0] * 4), stages=2)
FIRST, SECOND = GOOD.stages


def with_stages(*stages: StagePlan) -> dict[str, object]:
    return {"stages": stages}


def members(*signed: Signed) -> dict[str, object]:
    return {"members": (*GOOD.members[:-1], *signed)}


def last_request(*signed: Signed) -> dict[str, object]:
    return {"requests": (*GOOD.requests[:-1], *signed)}


def standby(peer: PeerId, stage: int = 0) -> dict[str, object]:
    return {"standby": (StandbyPlan(Member(peer, 1), stage),)}


LAST = PEOPLE[3]
ONE_ROW = ((1.0,),)

BAD_PLANS: list[tuple[dict[str, object], str]] = [
    ({"stages": (), "wiring": ()}, "the plan has no stages"),
    (with_stages(replace(FIRST, first=1), SECOND), r"stage 0 covers layers \[1, 2\), .* ends at 0"),
    (with_stages(FIRST, replace(SECOND, first=1)), r"stage 1 covers layers \[1, 4\), .* ends at 2"),
    (with_stages(replace(FIRST, last=1), SECOND), r"stage 1 covers layers \[2, 4\), .* ends at 1"),
    (with_stages(FIRST, replace(SECOND, last=2)), r"stage 1 covers layers \[2, 2\)"),
    (with_stages(FIRST, replace(SECOND, replicas=())), "stage 1 has 0 replicas and 2 shares"),
    (with_stages(FIRST, replace(SECOND, shares=(1,))), "stage 1 has 2 replicas and 1 shares"),
    (
        with_stages(FIRST, replace(SECOND, replicas=FIRST.replicas)),
        "a peer hosts two stages or two replicas",
    ),
    (
        with_stages(FIRST, replace(SECOND, replicas=(SECOND.replicas[0],) * 2)),
        "a peer hosts two stages or two replicas",
    ),
    (
        with_stages(FIRST, replace(SECOND, replicas=(SECOND.replicas[0], Member(LAST.peer, 2)))),
        f"{LAST.peer} has a role and is no member",  # another boot is another member
    ),
    (
        {"members": GOOD.members[:-1], "requests": GOOD.requests[:-1]},
        f"{LAST.peer} has a role and is no member",
    ),
    ({"members": GOOD.members[:-1]}, "3 members and 4 join requests"),
    (
        {"members": GOOD.members[::-1], "requests": GOOD.requests[::-1]},
        "not in order of peer, each once",
    ),
    (
        {"members": GOOD.members[:1] * 2, "requests": GOOD.requests[:1] * 2},
        "not in order of peer, each once",
    ),
    (last_request(GOOD.requests[0]), f"the join request beside {LAST.peer}, boot 1, is of"),
    (last_request(signed_request(LAST, request(LAST, RUN, boot=2))), "boot 2, signed by"),
    (last_request(signed_request(LAST, request(LAST, b"x" * 32))), "the join request beside"),
    (last_request(signed_request(PEOPLE[5], request(LAST, RUN))), f"signed by {PEOPLE[5].peer}"),
    (last_request(GOOD.members[-1]), f"bad {JOIN_REQUEST_PURPOSE} signature"),
    (standby("stranger"), "stranger has a role and is no member"),
    ({"leavers": (Member("stranger", 1),)}, "stranger has a role and is no member"),
    (standby(LAST.peer), f"{LAST.peer} stands by and has work"),
    ({"leavers": (Member(LAST.peer, 1),)}, f"{LAST.peer} leaves and hosts a stage"),
    ({"feeders": (FeederPlan(Member("stranger", 1), 1),)}, "stranger has a role and is no member"),
    ({"feeders": (GOOD.feeders[0], GOOD.feeders[0])}, "named twice among the feeders"),
    ({"feeders": ()}, "nobody feeds, and the plan does not halt the run"),
    (members(record(LAST, b"x" * 32)), "for run 78787878"),
    (
        {
            "members": tuple(
                sorted(
                    (*GOOD.members[:-1], record(PEOPLE[5], RUN, peer=LAST.peer)),
                    key=lambda each: each.signer,
                )
            )
        },
        "signed by",
    ),
    (
        members(sign_record(LAST, BALLOT_PURPOSE, request(LAST, RUN))),
        f"bad {PEER_RECORD_PURPOSE} signature",
    ),
    ({"wiring": GOOD.wiring[:1]}, "wiring of 1 stages for 2"),
    ({"wiring": (GOOD.wiring[0], GOOD.wiring[1][:1])}, "wiring into stage 1 is not 2 x 2"),
    ({"wiring": (ONE_ROW * 2, GOOD.wiring[1])}, "wiring into stage 0 is not 2 x 2"),
    ({"wiring": (GOOD.wiring[0], ((0.5, 0.5), (0.5, 0.4)))}, r"of stage 1 sums to 0\.9"),
    ({"wiring": (((0.0, 0.0), (1.0, 0.0)), GOOD.wiring[1])}, "of stage 0 sums to 0"),
    ({"wiring": (GOOD.wiring[0], ((0.5, 0.5), (float("nan"), 0.5)))}, "of stage 1 sums to nan"),
]


@pytest.mark.parametrize(("changed", "reason"), BAD_PLANS)
def test_a_plan_that_is_not_well_formed_is_refused(changed: dict[str, object], reason: str) -> None:
    check_plan(GOOD, MANIFEST)
    with pytest.raises(RemoteProtocolError, match=reason):
        check_plan(replace(GOOD, **changed), MANIFEST)


def test_a_plan_without_feeders_may_halt_the_run() -> None:
    halted: PlanBody = replace(
        GOOD, feeders=(), wiring=((), GOOD.wiring[1]), halted="nobody has the data"
    )
    check_plan(halted, MANIFEST)


def test_the_manifest_decides_where_the_model_is_cut() -> None:
    other = manifest(run=training(cuts=(1,)))
    body = first_plan(other.training, candidates(4, other, [1.0] * 3))
    check_plan(body, other)
    moved = with_stages(replace(body.stages[0], last=2), replace(body.stages[1], first=2))
    with pytest.raises(RemoteProtocolError, match=r"the manifest cuts at \[1\], the plan does not"):
        check_plan(replace(body, **moved), other)


# --- those without work -----------------------------------------------------------------------

FEWER = manifest(run=training(max_replicas=1))
WAITING = first_plan(FEWER.training, candidates(4, FEWER, [1.0] * 4), stages=2)


def test_members_stand_by_and_a_leaver_may_at_once() -> None:
    """Where the manifest allows one replica, two of four stand by; one of them is a leaver."""
    check_plan(WAITING, FEWER)
    check_plan(replace(WAITING, leavers=(WAITING.standby[0].member,)), FEWER)
    check_plan(replace(WAITING, standby=()), FEWER)


def test_those_who_stand_by_do_so_once_for_a_stage_that_exists_without_work() -> None:
    first, second = WAITING.standby
    bad: dict[str, dict[str, object]] = {
        "stands by for stage 2 of 2": {"standby": (replace(first, stage=2), second)},
        "named twice among those who stand by": {"standby": (first, replace(first, stage=1))},
        "or leave": {"leavers": (first.member, first.member)},
        "stands by and has work": {"feeders": (FeederPlan(first.member, 1),)},
        "stage 1 has 2 replicas, the manifest allows 1": {
            "stages": (
                WAITING.stages[0],
                replace(
                    WAITING.stages[1],
                    replicas=(*WAITING.stages[1].replicas, first.member),
                    shares=(1, 1),
                ),
            ),
            "standby": (second,),
        },
    }
    for refusal, changed in bad.items():
        with pytest.raises(RemoteProtocolError, match=refusal):
            check_plan(replace(WAITING, **changed), FEWER)
