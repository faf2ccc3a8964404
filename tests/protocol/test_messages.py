"""Messages: what a field may hold, and that the fullest honest message fits its cap."""

import math
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from protocol.codec import PREFIX_BYTES, encode
from protocol.errors import RemoteProtocolError
from protocol.messages import (
    MAX_CHUNKS,
    MAX_FLAGS,
    MAX_KINDS,
    TABLE,
    Accepted,
    Account,
    Commit,
    Consented,
    Fence,
    Flag,
    Forwarded,
    GetChain,
    GetListing,
    GetManifest,
    GetState,
    Heartbeat,
    Held,
    LeaderBeat,
    Leave,
    LedgerReport,
    Listing,
    LostWork,
    Measured,
    MemberView,
    Message,
    Microbatch,
    Piece,
    Ping,
    PingFor,
    PingResult,
    Pong,
    Prepared,
    PreVote,
    PreVoteAnswer,
    Probe,
    ProbeAnswer,
    Report,
    RequestVote,
    Resume,
    Settlement,
    Stand,
    StartReduction,
    StateChunk,
    Suspect,
    SwarmAnswer,
    Totals,
    Traffic,
    VerdictAnswer,
)
from protocol.packing import canonical, unpack
from protocol.records import (
    MAX_LETTER_BYTES,
    MAX_LINKS,
    Ballot,
    Consent,
    Estimates,
    Generation,
    Letter,
    LinkEstimate,
    Member,
    Observation,
    Signed,
    TensorSpec,
    Verdict,
)

LARGEST = 2**53
MICROBATCHES = 65536
GENERATION = Generation(LARGEST, b"n" * 32)
FENCE = Fence(GENERATION, LARGEST, LARGEST)
FLAGS = tuple(Flag(65535 - n, "\N{SNOWMAN}" * 200) for n in range(MAX_FLAGS))
EVERYTHING = b"\xff" * (MICROBATCHES // 8)
PEER = "12D3KooW" + "x" * 44
TRAFFIC = tuple(Traffic(kind.__name__, LARGEST, LARGEST) for kind in TABLE)
TOTALS = Totals(LARGEST, math.inf, FLAGS, "halt", None)

MEMBER = Member(PEER, LARGEST)
AGREEING: dict[str, Any] = {"generation": GENERATION, "epoch": LARGEST, "term": LARGEST}
ACCOUNT = Account(LARGEST, FLAGS, 1.5)
TEXT = "\N{SNOWMAN}" * 4096
HELD = Held(0, LARGEST - 1, LARGEST, LARGEST, b"h" * 32, EVERYTHING, ACCOUNT, TOTALS)
SETTLEMENT = Settlement(
    b"h" * 32, EVERYTHING, (PEER,) * 8, (PEER,) * 8, Account(LARGEST, (), 1.5), (PEER,) * 8
)
"""Of a stage of eight replicas."""
ESTIMATES = Estimates(
    run=b"r" * 32,
    peer=PEER,
    boot=LARGEST,
    sequence=LARGEST,
    slowdown=1.5,
    slowdown_spread=0.5,
    uplink=1e15,
    uplink_spread=0.5,
    downlink=1e15,
    downlink_spread=0.5,
    links=(LinkEstimate(PEER, 1e15, 1e9, 1e3),) * MAX_LINKS,
)


def signed(record: msgspec.Struct) -> Signed:
    """Return a record with a signature of the right size."""
    return Signed(canonical(record), PEER, b"s" * 64)


HEARTBEAT = Heartbeat(
    generation=Generation(),
    epoch=1,
    active_epoch=1,
    term=1,
    boot=1,
    state="filling",
    stage=-1,
    lineage=0,
    version=0,
    loss=2.5,
    ledger_size=0,
    queue_length=0,
    samples=0,
    compute_seconds=0.5,
    rtt_seconds=0.01,
    traffic=(),
)
VIEW = MemberView(
    peer=PEER,
    boot=LARGEST,
    address="[2001:db8::1]:31337",
    state="committing",
    stage=65536,
    version=LARGEST,
    ledger_size=65536,
    queue_length=65536,
    silent_seconds=1e9,
    rtt_seconds=1e9,
    compute_seconds=1e9,
    traffic=TRAFFIC,
)


@dataclass(frozen=True)
class Full:
    """A message with as much in it as an honest peer ever says."""

    message: Message
    why: str = field(default="")


FULLEST = [
    Full(Ping(number=LARGEST)),
    Full(Pong(number=LARGEST)),
    Full(GetManifest(id=LARGEST)),
    Full(GetChain(id=LARGEST, generation=GENERATION, epoch=LARGEST)),
    Full(PreVote(**AGREEING)),
    Full(PreVoteAnswer(**AGREEING, granted=True)),
    Full(RequestVote(**AGREEING)),
    Full(Stand(**AGREEING)),
    Full(
        VerdictAnswer(
            **AGREEING,
            verdict=signed(Verdict(b"r" * 32, GENERATION, LARGEST, b"h" * 32, TEXT)),
        ),
        "a refusal as long as a text may be",
    ),
    Full(
        Accepted(
            **AGREEING,
            ballot=canonical(Ballot(b"r" * 32, GENERATION, LARGEST, LARGEST, b"h" * 32, b"c" * 32)),
            signature=b"s" * 64,
        )
    ),
    Full(Consented(consent=signed(Consent(b"r" * 32, GENERATION, LARGEST)))),
    Full(PingFor(target=MEMBER)),
    Full(
        PingResult(
            target=MEMBER,
            observation=signed(Observation(b"r" * 32, GENERATION, LARGEST, MEMBER, TEXT)),
        )
    ),
    Full(Suspect(observation=signed(Observation(b"r" * 32, GENERATION, LARGEST, MEMBER, TEXT)))),
    Full(LostWork(generation=GENERATION, epoch=LARGEST, peer=PEER)),
    Full(Leave(boot=LARGEST)),
    Full(Measured(estimates=signed(ESTIMATES)), "a link to as many peers as are named"),
    Full(
        Probe(
            number=LARGEST,
            chunk=MAX_CHUNKS - 1,
            chunks=MAX_CHUNKS,
            tensors=(TensorSpec("uint8", (64 * 1024,)),),
        )
    ),
    Full(ProbeAnswer(number=LARGEST, arrivals=(1e9 / 3,) * MAX_CHUNKS)),
    Full(
        Forwarded(
            target=PEER,
            letter=signed(Letter(b"r" * 32, LARGEST, PEER, LARGEST, b"f" * MAX_LETTER_BYTES)),
        ),
        "a frame as long as is passed on",
    ),
    Full(
        GetListing(
            id=LARGEST, kind="gradient", lineage=LARGEST, version=LARGEST, first=0, last=LARGEST
        )
    ),
    Full(
        Listing(
            id=LARGEST,
            version=LARGEST,
            state_hash=b"h" * 32,
            totals=TOTALS,
            pieces=(Piece(LARGEST, LARGEST, b"h" * 32),) * 10_000,
        ),
        "ten thousand layers",
    ),
    Full(
        GetState(
            id=LARGEST,
            kind="gradient",
            lineage=LARGEST,
            version=LARGEST,
            number=LARGEST,
            offset=LARGEST,
            length=LARGEST,
        ),
    ),
    Full(StateChunk(id=LARGEST, total=LARGEST, tensors=(TensorSpec("uint8", (4 * 1024 * 1024,)),))),
    Full(Report(fence=FENCE, held=(HELD,)), "prepared, with all that can be odd"),
    Full(
        LedgerReport(
            fence=FENCE,
            step=LARGEST,
            stage=LARGEST,
            bitmap=EVERYTHING,
            weight=LARGEST,
            flags=FLAGS,
            loss_sum=1.5,
        ),
        "every index, and as many flags as are named",
    ),
    Full(
        StartReduction(
            fence=FENCE, step=LARGEST, stage=LARGEST, weight=LARGEST, flags=FLAGS, loss_sum=1.5
        )
    ),
    Full(
        Prepared(
            fence=FENCE,
            step=LARGEST,
            stage=LARGEST,
            square_norms=(1.5,) * 100_000,
            weight=LARGEST,
            flags=FLAGS,
            loss_sum=1.5,
        ),
        "a stage of a hundred thousand tensors",
    ),
    Full(Commit(fence=FENCE, step=LARGEST, totals=TOTALS)),
    Full(
        Resume(
            fence=FENCE,
            step=LARGEST,
            totals=TOTALS,
            stages=(SETTLEMENT,) * 100,
        ),
        "a hundred prepared stages of eight replicas at the largest number of microbatches",
    ),
    Full(
        LeaderBeat(
            generation=GENERATION,
            epoch=LARGEST,
            term=LARGEST,
            waiting_for=0,
            version=LARGEST,
            loss=1.5,
            samples_per_second=1.5,
            trouble="x" * 4096,
        )
    ),
    Full(SwarmAnswer(id=LARGEST, members=(VIEW,) * 300), "three hundred members"),
]


@pytest.mark.parametrize("full", FULLEST, ids=lambda full: type(full.message).__name__)
def test_the_fullest_message_fits_and_is_read_back(full: Full) -> None:
    header = encode(full.message)[PREFIX_BYTES:]
    assert unpack(header, type(full.message)) == full.message


def test_there_is_room_for_the_traffic_of_every_type() -> None:
    assert len(TABLE) <= MAX_KINDS
    beat = msgspec.structs.replace(HEARTBEAT, traffic=TRAFFIC)
    assert unpack(encode(beat)[PREFIX_BYTES:], Heartbeat) == beat


# --- what makes other peers fail --------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("loss", math.nan),
        ("loss", math.inf),
        ("compute_seconds", math.nan),
        ("compute_seconds", math.inf),
        ("rtt_seconds", -1.0),
        ("rtt_seconds", math.inf),
        ("state", "x" * 33),
        ("stage", -2),
        ("stage", 2**40),
        ("boot", 0),
        ("trouble", "x" * 4097),
        ("traffic", (Traffic("Ping", 0, 0),) * (MAX_KINDS + 1)),
        ("traffic", (Traffic("x" * 33, 0, 0),)),
        ("suspects", ("x" * 65,)),
        ("awaits", ("x" * 65,)),
        ("awaits_seconds", math.inf),
        ("task_seconds", -1.0),
        ("rollback", -2),
        ("term", -1),
    ],
)
def test_a_heartbeat_holds_nothing_that_the_leader_could_not_pass_on(
    name: str, value: object
) -> None:
    """What members say of themselves goes into one SwarmAnswer to who asks."""
    assert unpack(canonical(HEARTBEAT), Heartbeat) == HEARTBEAT
    with pytest.raises(RemoteProtocolError, match=name):
        unpack(canonical(msgspec.structs.replace(HEARTBEAT, **{name: value})), Heartbeat)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("boot", 0),
        ("sequence", 0),
        ("slowdown", 0.0),
        ("slowdown", math.nan),
        ("slowdown", 1e7),
        ("slowdown_spread", -0.1),
        ("uplink", -1.0),
        ("uplink", math.inf),
        ("uplink_spread", math.nan),
        ("downlink", math.nan),
        ("downlink_spread", math.inf),
        ("links", (LinkEstimate(PEER, 1.0, 1.0, 1.0),) * (MAX_LINKS + 1)),
        ("links", (LinkEstimate("x" * 65, 1.0, 1.0, 1.0),)),
        ("links", (LinkEstimate(PEER, math.inf, 1.0, 1.0),)),
        ("links", (LinkEstimate(PEER, 1.0, -1.0, 1.0),)),
        ("links", (LinkEstimate(PEER, 1.0, math.nan, 1.0),)),
        ("links", (LinkEstimate(PEER, 1.0, 1.0, 1e4),)),
    ],
)
def test_estimates_are_numbers_that_a_plan_can_be_made_of(name: str, value: object) -> None:
    assert unpack(canonical(ESTIMATES), Estimates) == ESTIMATES
    with pytest.raises(RemoteProtocolError, match=name):
        unpack(canonical(msgspec.structs.replace(ESTIMATES, **{name: value})), Estimates)


@pytest.mark.parametrize(
    ("message", "name"),
    [
        (Probe(number=0), "number"),
        (Probe(number=1, chunk=MAX_CHUNKS), "chunk"),
        (Probe(number=1, chunks=MAX_CHUNKS + 1), "chunks"),
        (Probe(number=1, tensors=(TensorSpec("uint8", (1,)),) * 2), "tensors"),
        (ProbeAnswer(number=1, arrivals=(0.0,) * (MAX_CHUNKS + 1)), "arrivals"),
        (ProbeAnswer(number=1, arrivals=(math.nan,)), "arrivals"),
        (ProbeAnswer(number=1, arrivals=(-1.0,)), "arrivals"),
    ],
)
def test_a_probe_is_small_and_its_answer_says_times(message: Message, name: str) -> None:
    with pytest.raises(RemoteProtocolError, match=name):
        unpack(canonical(message), type(message))


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_is_none(loss: float) -> None:
    totals = Totals(1, 1.0, (), "apply", loss)
    with pytest.raises(RemoteProtocolError, match="loss"):
        unpack(canonical(totals), Totals)


def test_norms_and_sums_of_a_step_may_be_infinite_or_nan() -> None:
    """They are what came out: the totals decide what follows from it."""
    message = Prepared(
        fence=FENCE,
        step=0,
        stage=0,
        square_norms=(math.inf, math.nan),
        weight=1,
        flags=(),
        loss_sum=-math.inf,
    )
    again = unpack(canonical(message), Prepared)
    assert again.square_norms[0] == math.inf
    assert math.isnan(again.square_norms[1])
    assert again.loss_sum == -math.inf
    assert unpack(canonical(TOTALS), Totals).square_norm == math.inf


def test_more_flags_than_are_named_are_refused() -> None:
    totals = msgspec.structs.replace(TOTALS, flags=(*FLAGS, Flag(0, "x")))
    with pytest.raises(RemoteProtocolError, match="length <= 64"):
        unpack(canonical(totals), Totals)


def test_microbatches_are_ordered_by_step_then_index() -> None:
    assert sorted([Microbatch(1, 0), Microbatch(0, 9)]) == [Microbatch(0, 9), Microbatch(1, 0)]
    assert str(Microbatch(3, 4)) == "3/4"
