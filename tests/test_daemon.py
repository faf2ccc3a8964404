"""What a daemon refuses, said by a member of its own swarm: with the right error, and nothing else
disturbed. Work goes on afterwards on the same daemon."""

import contextlib
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import get_args

import numpy
import pytest
import trio
from msgspec.structs import replace

from protocol.codec import PREFIX, PREFIX_BYTES, decode_header, decode_prefix, encode
from protocol.connection import Connection
from protocol.errors import RemoteProtocolError
from protocol.messages import (
    TABLE,
    Backward,
    Certified,
    Commit,
    Durable,
    Fence,
    Forward,
    Forwarded,
    GatherShard,
    GetChain,
    Goodbye,
    LedgerReport,
    Message,
    Ping,
    Pong,
    Resume,
    Totals,
)
from protocol.packing import canonical
from protocol.records import (
    LETTER_PURPOSE,
    CertifiedPlan,
    Letter,
    Member,
    PlanBody,
    PlanHeader,
    TensorSpec,
    decode_record,
    sign_record,
)
from protocol.signing import Identity
from swarm.adapters.datasets import ThreadedSource, open_source
from swarm.core.reduction import buckets
from swarm.core.routing import credit_windows
from swarm.core.scheduling.planning import members_of
from swarm.node import Node
from swarm.peer.feeder import Feeder
from swarm.peer.forwarding import FORWARDED
from swarm.ports import ByteStream
from tests.core.plans import certify, header_after, heartbeat
from tests.processes.swarms import GPT, manifest
from tests.rogues import Rogue, with_rogue


@pytest.mark.parametrize("kind", get_args(FORWARDED), ids=lambda kind: kind.__name__)
def test_whatever_is_forwarded_fits_into_a_frame(kind: type[Message]) -> None:
    who = Identity.from_seed(bytes(32))
    inner = bytes(2 + TABLE[kind].header_cap_bytes)
    letter = Letter(bytes(32), 2**53, "t" * 64, 2**53, inner)
    frame = encode(Forwarded(target="t" * 64, letter=sign_record(who, LETTER_PURPOSE, letter)))
    prefix = decode_prefix(frame[:PREFIX_BYTES], "control", 0)
    assert encode(decode_header(prefix, frame[PREFIX_BYTES:])) == frame


def test_wrong_shape_dtype_or_count_of_tensors_ends_the_link(tmp_path: Path) -> None:
    async def scenario(node: Node, rogue: Rogue) -> None:
        victim = node.daemon.me.peer
        await rogue.take_role(victim)
        good = rogue.forward(0).tensors
        for wrong in (
            (TensorSpec("float32", (*good[0].shape, 2)), good[1]),
            (TensorSpec("int64", good[0].shape), good[1]),
            (good[0],),
            (good[1], good[0]),
        ):
            message = rogue.forward(0, wrong)
            rogue.links.post(victim, message, rogue.zeros(message))
            reason = await rogue.link_end()
            assert "Forward carries" in reason and "stage 1 takes" in reason
            assert str(list(good[0].shape)) in reason
            await rogue.go_on(victim)
        assert (await rogue.works_on(victim, 0)).nonfinite == ""
        assert node.daemon.control.trouble == ""

    with_rogue(tmp_path, scenario)


def test_nan_is_flagged_and_the_others_of_the_step_are_not(
    tmp_path: Path,
) -> None:
    async def scenario(node: Node, rogue: Rogue) -> None:
        victim = node.daemon.me.peer
        await rogue.take_role(victim)
        message = rogue.forward(0)
        hidden = numpy.full(message.tensors[0].shape, numpy.nan, numpy.float32)
        targets = memoryview(bytes(message.tensors[1].nbytes))
        rogue.links.post(victim, message, (hidden.data.cast("B"), targets))
        backward = (await rogue.hear(Backward)).message
        assert isinstance(backward, Backward)
        assert backward.tensors == () and backward.nonfinite
        # The others of the step are not disturbed.
        assert (await rogue.works_on(victim, 1)).nonfinite == ""
        ledger = node.daemon.ledger
        assert [flag.index for flag in ledger.flags] == [0] and len(ledger) == 2

    with_rogue(tmp_path, scenario)


def test_a_repeated_forward_ends_the_link(tmp_path: Path) -> None:
    async def scenario(node: Node, rogue: Rogue) -> None:
        victim = node.daemon.me.peer
        await rogue.take_role(victim)
        # Of the next step, so that it waits and is still there when the second one comes.
        message = rogue.forward(0, step=1)
        for _ in range(2):
            rogue.links.post(victim, message, rogue.zeros(message))
        assert "mb=1/0 was sent twice" in await rogue.link_end()
        await rogue.go_on(victim)
        await rogue.works_on(victim, 0)
        message = rogue.forward(0)
        rogue.links.post(victim, message, rogue.zeros(message))
        assert "mb=0/0 is in the ledger already" in await rogue.link_end()
        assert len(node.daemon.ledger) == 1
        await rogue.go_on(victim)
        assert [index in node.daemon.ledger for index in range(2)] == [True, False]
        await rogue.works_on(victim, 1)
        assert len(node.daemon.ledger) == 2

    with_rogue(tmp_path, scenario)


def test_more_forwards_than_credit_end_the_link(tmp_path: Path) -> None:
    """Two stages, one source: as many of each step parity may be here as the plan says."""

    async def scenario(node: Node, rogue: Rogue) -> None:
        victim = node.daemon.me.peer
        await rogue.take_role(victim)
        assert rogue.body is not None
        ((window,),) = credit_windows(rogue.body, 1)
        for index in range(window + 1):
            message = rogue.forward(index, step=1)
            rogue.links.post(victim, message, rogue.zeros(message))
        assert f"mb=1/{window} has no credit" in await rogue.link_end()
        await rogue.go_on(victim)
        # The step in hand has credit of its own.
        assert (await rogue.works_on(victim, 0)).nonfinite == ""

    with_rogue(tmp_path, scenario, manifest(GPT, microbatches=64))


def test_a_stale_epoch_is_answered_with_the_newest_certificate_and_changes_nothing(
    tmp_path: Path,
) -> None:
    async def scenario(node: Node, rogue: Rogue) -> None:
        victim = node.daemon.me.peer
        await rogue.take_role(victim)
        assert rogue.fence is not None
        old = Fence(rogue.fence.generation, 0, rogue.fence.boot)
        totals = Totals(1, 1.0, (), "apply", 1.0)
        rogue.links.post(victim, Commit(fence=old, step=0, totals=totals))
        answer = (await rogue.hear(Certified)).message
        assert isinstance(answer, Certified)
        assert decode_record(answer.plan.header, PlanHeader).epoch == 1
        message = rogue.forward(0)
        stale = Forward(
            fence=old,
            microbatch=message.microbatch,
            weight=message.weight,
            path=message.path,
            tensors=message.tensors,
        )
        rogue.links.post(victim, stale, rogue.zeros(stale))
        assert len(node.daemon.ledger) == 0
        assert (await rogue.works_on(victim, 0)).nonfinite == ""
        assert len(node.daemon.ledger) == 1

    with_rogue(tmp_path, scenario)


def test_a_newer_epoch_is_asked_for_and_not_believed(tmp_path: Path) -> None:
    async def scenario(node: Node, rogue: Rogue) -> None:
        victim = node.daemon.me.peer
        await rogue.take_role(victim)
        assert rogue.fence is not None
        newer = Fence(rogue.fence.generation, 9, rogue.fence.boot)
        rogue.links.post(victim, Resume(fence=newer, step=0, totals=None, stages=()))
        assert isinstance((await rogue.hear(GetChain)).message, GetChain)
        assert node.daemon.control.plan.header.epoch == 1
        assert (await rogue.works_on(victim, 0)).nonfinite == ""

    with_rogue(tmp_path, scenario)


def test_another_boot_in_the_fence_ends_the_link(tmp_path: Path) -> None:
    async def scenario(node: Node, rogue: Rogue) -> None:
        victim = node.daemon.me.peer
        await rogue.take_role(victim)
        assert rogue.fence is not None
        other = Fence(rogue.fence.generation, rogue.fence.epoch, rogue.fence.boot + 1)
        report = LedgerReport(
            fence=other, step=0, stage=1, bitmap=b"\xff", weight=1, flags=(), loss_sum=0.0
        )
        rogue.links.post(victim, report)
        assert "fence of boot 2 on a link of boot 1" in await rogue.link_end()
        await rogue.go_on(victim)
        assert (await rogue.works_on(victim, 0)).nonfinite == ""

    with_rogue(tmp_path, scenario)


def test_a_tampered_certificate_ends_the_link_and_is_not_adopted(tmp_path: Path) -> None:
    async def scenario(node: Node, rogue: Rogue) -> None:
        victim = node.daemon.me.peer
        await rogue.take_role(victim)
        genuine = node.daemon.control.plan
        header = PlanHeader(
            run=genuine.header.run,
            generation=genuine.header.generation,
            epoch=2,
            predecessor=genuine.header.hash,
            council=(rogue.identity.peer,),
            body_hash=genuine.header.body_hash,
            kind="planned",
            from_step=0,
            lineage=0,
        )
        forged = CertifiedPlan(canonical(header), genuine.proof.body, genuine.proof.certificate)
        rogue.links.post(victim, Certified(plan=forged))
        assert "certificate of epoch 2: not so: the ballot is of this epoch" in (
            await rogue.link_end()
        )
        assert node.daemon.control.plan is genuine
        await rogue.go_on(victim)
        assert (await rogue.works_on(victim, 0)).nonfinite == ""

    with_rogue(tmp_path, scenario)


def test_joining_is_refused_with_both_values_of_what_differs(tmp_path: Path) -> None:
    async def scenario(node: Node, rogue: Rogue) -> None:
        victim = node.daemon.me.peer
        answer = await rogue.join(victim, numerics="torch=0.0 threads=2")
        assert "torch=0.0 threads=2" in answer.refusal
        assert rogue.profile.numerics in answer.refusal
        answer = await rogue.join(victim, data_digest=bytes(32))
        assert bytes(32).hex() in answer.refusal and "the data differs" in answer.refusal
        answer = await rogue.join(victim, layers=rogue.profile.layers[:-1])
        assert "the model differs" in answer.refusal
        assert node.daemon.control.plan.header.epoch == 0
        assert (await rogue.join(victim)).refusal == ""

    with_rogue(tmp_path, scenario)


def test_numerics_may_differ_in_standard_mode(tmp_path: Path) -> None:
    async def scenario(node: Node, rogue: Rogue) -> None:
        answer = await rogue.join(node.daemon.me.peer, numerics="another machine")
        assert answer.refusal == ""

    with_rogue(tmp_path, scenario, manifest(GPT, microbatches=4, determinism="standard"))


@contextlib.asynccontextmanager
async def raw_connection(
    rogue: Rogue, node: Node, run: bytes
) -> AsyncIterator[tuple[Connection, ByteStream]]:
    """Open a connection whose bytes the test writes itself; Hello is said."""
    stream = await rogue.transport.dial(node.daemon.discovery.listen, None)
    try:
        connection = Connection(run=run, boot=1, channel="control", allocate=_no_payload)
        await stream.send_all(connection.hello())
        yield connection, stream
    finally:
        await stream.aclose()


def _no_answer(*_: object) -> None:
    raise AssertionError("this is no request")


def _no_payload(message: object) -> memoryview:
    raise RemoteProtocolError("no payload is expected here")


async def _goodbye(connection: Connection, stream: ByteStream) -> str:
    """Read until the other side says Goodbye; return the fault that it names."""
    while True:
        data = await stream.receive_some(65536)
        assert data, "closed without Goodbye"
        for received in connection.receive_data(data):
            if isinstance(received.message, Goodbye):
                return received.message.fault


def test_another_run_is_refused_with_both_ids(tmp_path: Path) -> None:
    async def scenario(node: Node, rogue: Rogue) -> None:
        async with raw_connection(rogue, node, b"\x07" * 32) as (connection, stream):
            fault = await _goodbye(connection, stream)
        assert "another run" in fault
        assert "07" * 8 in fault and rogue.run_id.hex()[:16] in fault
        assert (await rogue.join(node.daemon.me.peer)).refusal == ""

    with_rogue(tmp_path, scenario)


@pytest.mark.parametrize(
    ("frame", "fault"),
    [
        (PREFIX.pack(TABLE[Ping].number, 2**31, 0), "Ping header of 2147483648 bytes exceeds 64"),
        (PREFIX.pack(TABLE[Ping].number, 1, 2**40), "Ping payload of 1099511627776 bytes"),
        (PREFIX.pack(TABLE[Forward].number, 10, 0), "Forward on the control connection"),
        (PREFIX.pack(250, 1, 0), "unknown message type 250"),
        (struct.pack("!16s", b"GET / HTTP/1.1\r\n"), "unknown message type 71"),
    ],
    ids=["header", "payload", "channel", "type", "http"],
)
def test_an_oversized_or_unknown_frame_is_refused_from_its_prefix(
    frame: bytes, fault: str, tmp_path: Path
) -> None:
    async def scenario(node: Node, rogue: Rogue) -> None:
        async with raw_connection(rogue, node, rogue.run_id) as (connection, stream):
            await stream.send_all(frame)
            assert fault in await _goodbye(connection, stream)
        rogue.links.post(node.daemon.me.peer, Ping(number=1))
        assert (await rogue.hear(Pong)).message == Pong(number=1)

    with_rogue(tmp_path, scenario)


def test_a_silent_connection_ends_by_itself_and_others_are_served_meanwhile(
    tmp_path: Path,
) -> None:
    async def scenario(node: Node, rogue: Rogue) -> None:
        silent = await rogue.transport.dial(node.daemon.discovery.listen, None)
        assert (await rogue.join(node.daemon.me.peer)).refusal == ""
        try:
            assert await silent.receive_some(1) == b""
        finally:
            await silent.aclose()

    with_rogue(tmp_path, scenario)


def test_who_leaves_before_the_first_plan_is_not_in_it(tmp_path: Path) -> None:
    async def scenario(node: Node, rogue: Rogue) -> None:
        victim = node.daemon.me.peer
        assert (await rogue.join(victim)).refusal == ""
        assert node.daemon.control.leading.candidates == {victim, rogue.identity.peer}
        await rogue.links.say_goodbye()
        while node.daemon.control.leading.candidates != {victim}:  # noqa: ASYNC110 - it tells nobody
            await trio.sleep(0.01)
        assert node.daemon.control.plan.header.epoch == 0
        assert (await rogue.join(victim)).refusal == ""
        assert node.daemon.control.leading.candidates == {victim, rogue.identity.peer}

    with_rogue(tmp_path, scenario, wait_for_peers=3)


def test_a_plan_names_only_what_its_council_decided(tmp_path: Path) -> None:
    """The body that a member gets is the one whose hash the council signed."""

    async def scenario(node: Node, rogue: Rogue) -> None:
        victim = node.daemon.me.peer
        await rogue.take_role(victim)
        proof = node.daemon.control.plan.proof
        body = decode_record(proof.body, PlanBody)
        assert body == rogue.body
        assert {each.peer for stage in body.stages for each in stage.replicas} == {
            victim,
            rogue.identity.peer,
        }
        await trio.lowlevel.checkpoint()

    with_rogue(tmp_path, scenario)


def test_a_token_that_is_none_halts_the_run_with_its_microbatch(tmp_path: Path) -> None:
    """Out of range is not a shape: only the executor sees it. It must not end the daemon."""

    async def scenario(node: Node, rogue: Rogue) -> None:
        victim = node.daemon.me.peer
        await rogue.take_role(victim)
        message = rogue.forward(0)
        hidden, targets = message.tensors
        wrong = numpy.full(targets.shape, 10**6, numpy.int64).data.cast("B")
        rogue.links.post(victim, message, (memoryview(bytes(hidden.nbytes)), wrong))
        while True:
            proof = (await rogue.hear(Certified)).message
            assert isinstance(proof, Certified)
            body = decode_record(proof.plan.body, PlanBody)
            if body.halted:
                break
        assert "mb=0/0" in body.halted and rogue.identity.peer in body.halted
        assert node.daemon.control.trouble == body.halted
        assert len(node.daemon.ledger) == 0

    with_rogue(tmp_path, scenario)


def test_little_of_an_unknown_epoch_is_kept(tmp_path: Path) -> None:
    """Sixteen messages of a peer, of the kinds that can be early; the next ends its link."""

    async def scenario(node: Node, rogue: Rogue) -> None:
        victim = node.daemon.me.peer
        await rogue.take_role(victim)
        assert rogue.fence is not None
        newer = Fence(rogue.fence.generation, 9, rogue.fence.boot)
        for _ in range(17):
            rogue.links.post(victim, Resume(fence=newer, step=0, totals=None, stages=()))
        assert "16 messages of this peer wait" in await rogue.link_end()
        await rogue.go_on(victim)
        report = LedgerReport(
            fence=newer, step=0, stage=1, bitmap=b"\xff", weight=1, flags=(), loss_sum=0.0
        )
        rogue.links.post(victim, report)
        assert "LedgerReport of epoch 9 at epoch 2" in await rogue.link_end()
        await rogue.go_on(victim)
        assert (await rogue.works_on(victim, 0)).nonfinite == ""

    with_rogue(tmp_path, scenario)


def test_parts_that_come_twice_end_the_link(tmp_path: Path) -> None:
    async def scenario(node: Node, rogue: Rogue) -> None:
        victim = node.daemon.me.peer
        await rogue.take_role(victim)
        shape = rogue.profile.shape
        assert rogue.body is not None and rogue.fence is not None
        ranges = [(stage.first, stage.last) for stage in rogue.body.stages]
        tied = next(b for b in buckets(shape, ranges) if b.stages == (0, 1))
        spec = TensorSpec("int64", (tied.elements,))
        gather = GatherShard(fence=rogue.fence, step=0, bucket=tied.index, shard=0, tensors=(spec,))
        for _ in range(2):
            rogue.links.post(victim, gather, (memoryview(bytes(spec.nbytes)),))
        assert "twice" in await rogue.link_end()
        await rogue.go_on(victim)
        assert (await rogue.works_on(victim, 0)).nonfinite == ""

    with_rogue(tmp_path, scenario)


def test_a_resume_with_a_wrong_bitmap_ends_the_link(tmp_path: Path) -> None:
    """Said to a feeder, which would look for the indices."""

    async def scenario(node: Node, rogue: Rogue) -> None:
        await rogue.take_role(node.daemon.me.peer)
        assert rogue.body is not None and rogue.fence is not None
        feeder = Feeder(
            body=rogue.body,
            me=Member(rogue.identity.peer, 1),
            fence=rogue.fence,
            training=rogue.training,
            shape=rogue.profile.shape,
            source=ThreadedSource(open_source(rogue.training, Path())),
            links=rogue.links,
            on_trouble=lambda reason: None,
        )
        good = rogue.resume_message(node.daemon.me.peer)
        wrong = replace(good, stages=(good.stages[0], replace(good.stages[1], missing=b"x" * 99)))
        with pytest.raises(RemoteProtocolError, match="bitmap of 99 bytes"):
            feeder.resume(wrong)

    with_rogue(tmp_path, scenario)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"wiring": ()}, "wiring of 0 stages"),
        ({"stages": 1}, "the last stage ends at layer"),
    ],
)
def test_a_certified_plan_that_is_malformed_is_not_adopted(
    change: dict[str, object], fault: str, tmp_path: Path
) -> None:
    """A council that certifies nonsense does not end its members."""

    async def scenario(node: Node, rogue: Rogue) -> None:
        await rogue.take_role(node.daemon.me.peer)
        control, plan = node.daemon.control, node.daemon.control.plan
        body = plan.body
        if "wiring" in change:
            body = replace(body, wiring=())
        else:
            body = replace(body, stages=body.stages[:1], wiring=body.wiring[:1])
        council = [control._identity]
        proof = certify(header_after(plan.header, body, council), body, council, council)
        with pytest.raises(RemoteProtocolError, match=fault):
            control.handle(rogue.identity.peer, 1, Certified(plan=proof), _no_answer)
        assert control.plan is plan
        assert (await rogue.works_on(node.daemon.me.peer, 0)).nonfinite == ""

    with_rogue(tmp_path, scenario)


def test_the_trouble_of_a_standby_halts_nothing(tmp_path: Path) -> None:
    async def scenario(node: Node, rogue: Rogue) -> None:
        victim, control = node.daemon.me.peer, node.daemon.control
        while not control.plan.body.stages:  # noqa: ASYNC110 - it tells nobody
            await trio.sleep(0.01)
        assert (await rogue.join(victim)).refusal == ""
        me = Member(rogue.identity.peer, 1)
        while me not in members_of(control.plan.body):
            await rogue.hear(Certified)
        plan = control.plan
        assert me in [each.member for each in plan.body.standby]
        assert plan.header.council == (victim,)
        said = heartbeat(state="joining", epoch=plan.header.epoch)
        rogue.links.post(victim, replace(said, trouble="I do not like it here"))
        rogue.links.post(victim, Ping(number=7))  # behind it on the same link
        while (await rogue.hear(Pong)).message != Pong(number=7):
            pass
        assert control.plan is plan
        assert control.trouble == ""

    with_rogue(tmp_path, scenario, manifest(GPT, steps=100_000), wait_for_peers=1)


def test_durable_of_a_version_that_nobody_has_to_write_ends_the_link(tmp_path: Path) -> None:
    async def scenario(node: Node, rogue: Rogue) -> None:
        victim = node.daemon.me.peer
        await rogue.take_role(victim)
        assert rogue.fence is not None
        durable = Durable(fence=rogue.fence, stage=0, version=1, layer_hashes=())
        rogue.links.post(victim, durable)
        assert "wrote version 1, which is not due" in await rogue.link_end()
        await rogue.go_on(victim)
        assert (await rogue.works_on(victim, 0)).nonfinite == ""

    with_rogue(tmp_path, scenario)
