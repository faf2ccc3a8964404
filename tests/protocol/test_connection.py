"""A connection: what may be said when, and what the worst that can arrive may cost."""

import tracemalloc
from collections.abc import Callable, Sequence
from typing import get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.codec import PREFIX, PREFIX_BYTES, encode
from protocol.connection import (
    MAX_FAULT_CHARS,
    MAX_OPEN_REQUESTS,
    PROTOCOL_VERSION,
    Connection,
    Received,
)
from protocol.errors import LocalProtocolError, RemoteProtocolError
from protocol.messages import (
    TABLE,
    Backward,
    Channel,
    Fence,
    GetManifest,
    Goodbye,
    Hello,
    JoinAnswer,
    ManifestAnswer,
    Message,
    Microbatch,
    Ping,
    Pong,
    Reply,
    Request,
    StateChunk,
)
from protocol.records import Generation, TensorSpec
from tests.protocol.strategies import RUN, any_of, frame, hello_on, messages_on
from tests.protocol.test_packing import BOMBS, KIB

LIMIT = 1 << 16


class Memory:
    """Hands out the memory for payloads and remembers how much."""

    def __init__(self) -> None:
        self.bytes = 0

    def __call__(self, message: Message) -> memoryview:
        size = sum(spec.nbytes for spec in getattr(message, "tensors", ()))
        self.bytes += size
        return memoryview(bytearray(size))


def connection(channel: Channel | None, memory: Callable[[Message], memoryview]) -> Connection:
    return Connection(run=RUN, boot=5, channel=channel, allocate=memory, max_payload_bytes=LIMIT)


def opened(channel: Channel = "bulk") -> Connection:
    """Return a connection on which both sides have said Hello."""
    ours = connection(channel, Memory())
    ours.hello()
    assert [each.message for each in ours.receive_data(encode(hello_on(channel)))]
    return ours


def chunks(data: bytes, sizes: Sequence[int]) -> list[bytes]:
    """Cut `data` into pieces of the given sizes, again and again."""
    pieces, start, turn = [], 0, 0
    while start < len(data):
        size = sizes[turn % len(sizes)] if sizes else len(data)
        pieces.append(data[start : start + size])
        start, turn = start + size, turn + 1
    return pieces


sizes = st.lists(st.integers(1, 40) | st.integers(41, 5000), max_size=8)
channels = st.sampled_from(get_args(Channel))


# --- what was said arrives ----------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(channels, sizes, st.data())
def test_messages_arrive_whole_in_order_for_any_chunking(
    channel: Channel, cuts: list[int], data: st.DataObject
) -> None:
    said = data.draw(st.lists(messages_on(channel), max_size=6))
    said = [
        msgspec.structs.replace(message, id=number)
        if isinstance(message, Request | Reply)
        else message
        for number, message in enumerate(said)
    ]
    goodbyes = [n for n, message in enumerate(said) if isinstance(message, Goodbye)]
    said = said[: goodbyes[0] + 1] if goodbyes else said
    ours = opened(channel)
    for message in said:
        if isinstance(message, Reply):
            ours.send(GetManifest(id=message.id))
    stream = b"".join(frame(message, fill) for fill, message in enumerate(said))
    heard: list[Received] = []
    for piece in chunks(stream, cuts):
        heard += ours.receive_data(piece)
    ours.receive_end()
    assert [encode(each.message) for each in heard] == [encode(message) for message in said]
    for fill, each in enumerate(heard):
        assert bytes(each.payload) == bytes([fill]) * len(each.payload)
        assert each.frame_bytes == len(frame(each.message))
    assert ours.said_goodbye == bool(goodbyes)


@settings(max_examples=30, deadline=None)
@given(st.lists(any_of(StateChunk), min_size=1, max_size=4))
def test_as_many_bytes_as_are_missing_are_never_too_many(said: list[StateChunk]) -> None:
    """Who reads no more than `missing_bytes` ends exactly where a message ends."""
    ours = opened()
    for number, _ in enumerate(said):
        ours.send(GetManifest(id=number))
    stream = b"".join(
        frame(msgspec.structs.replace(chunk, id=number)) for number, chunk in enumerate(said)
    )
    heard = 0
    while stream:
        size = ours.missing_bytes
        assert size > 0
        done = ours.receive_data(stream[:size])
        assert len(done) <= 1
        heard += len(done)
        assert bool(done) == (ours.mid_frame_bytes is None)
        stream = stream[size:]
    assert heard == len(said)


def test_two_connections_understand_each_other() -> None:
    dialling = connection("bulk", Memory())
    accepting = connection(None, Memory())
    [hello] = accepting.receive_data(dialling.hello())
    assert hello.message == Hello(version=PROTOCOL_VERSION, run=RUN, channel="bulk", boot=5)
    assert accepting.channel == "bulk"
    dialling.receive_data(accepting.hello())
    [asked] = accepting.receive_data(dialling.send(GetManifest(id=8)))
    assert asked.message == GetManifest(id=8)
    [answer] = dialling.receive_data(accepting.send(ManifestAnswer(id=8, manifest=b"m")))
    assert answer.message == ManifestAnswer(id=8, manifest=b"m")
    [goodbye] = accepting.receive_data(dialling.send(Goodbye()))
    assert goodbye.message == Goodbye()
    assert accepting.said_goodbye and not dialling.said_goodbye


# --- Hello ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", [kind for kind in TABLE if kind not in (Hello, Goodbye)], ids=lambda kind: kind.__name__
)
def test_nothing_comes_before_hello(kind: type[Message]) -> None:
    """Refused from the prefix: not even the header is awaited."""
    for channel in (None, TABLE[kind].channel):
        ours = connection(channel, Memory())
        with pytest.raises(RemoteProtocolError, match=f"{kind.__name__} where Hello"):
            ours.receive_data(PREFIX.pack(TABLE[kind].number, 1, 0))


def test_hello_is_said_once() -> None:
    ours = opened("control")
    with pytest.raises(RemoteProtocolError, match="Hello where Hello has its only place"):
        ours.receive_data(encode(hello_on("control")))
    with pytest.raises(LocalProtocolError, match="said twice"):
        ours.hello()
    with pytest.raises(LocalProtocolError, match="Hello before Hello"):
        ours.send(hello_on("control"))


def test_we_say_nothing_before_our_hello_either() -> None:
    ours = connection("control", Memory())
    with pytest.raises(LocalProtocolError, match="Ping before Hello"):
        ours.send(Ping(number=1))
    with pytest.raises(LocalProtocolError, match="before the channel is known"):
        connection(None, Memory()).hello()


def test_another_version_is_refused_with_both_numbers() -> None:
    hello = msgspec.structs.replace(hello_on("bulk"), version=PROTOCOL_VERSION + 6)
    with pytest.raises(RemoteProtocolError, match=f"version 7, ours is {PROTOCOL_VERSION}"):
        connection("bulk", Memory()).receive_data(encode(hello))


def test_another_run_is_refused_with_both_ids() -> None:
    hello = msgspec.structs.replace(hello_on("bulk"), run=b"\xab" * 32)
    with pytest.raises(RemoteProtocolError) as caught:
        connection(None, Memory()).receive_data(encode(hello))
    assert str(caught.value) == (
        "another run: theirs is abababababababab, ours is 0001020304050607"
    )


def test_another_channel_than_the_one_that_was_opened_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="bulk connection, we opened control"):
        connection("control", Memory()).receive_data(encode(hello_on("bulk")))


@pytest.mark.parametrize(
    ("channel", "message"),
    [("control", GetManifest(id=1)), ("bulk", Ping(number=1))],
)
def test_a_message_on_the_wrong_connection_is_refused(channel: Channel, message: Message) -> None:
    with pytest.raises(RemoteProtocolError, match=f"on the {channel} connection"):
        opened(channel).receive_data(encode(message))


# --- Goodbye --------------------------------------------------------------------------------------


def test_nothing_follows_goodbye() -> None:
    ours = opened("control")
    ours.receive_data(encode(Goodbye()))
    for message in (Goodbye(), Ping(number=1)):
        with pytest.raises(RemoteProtocolError, match=f"{type(message).__name__} after Goodbye"):
            ours.receive_data(encode(message))
        ours = opened("control")
        ours.receive_data(encode(Goodbye()))


def test_we_say_nothing_after_our_goodbye_but_still_listen() -> None:
    ours = opened("control")
    ours.send(Goodbye())
    for message in (Goodbye(), Ping(number=1)):
        with pytest.raises(LocalProtocolError, match="after Goodbye"):
            ours.send(message)
    assert ours.refuse("a fault of theirs meanwhile") == b""
    assert [each.message for each in ours.receive_data(encode(Pong(number=1)))]


def test_a_fault_is_told_even_before_hello() -> None:
    ours, theirs = connection(None, Memory()), connection("bulk", Memory())
    [heard] = theirs.receive_data(ours.refuse("another run"))
    assert heard.message == Goodbye(fault="another run")
    assert theirs.remote_hello is None
    with pytest.raises(RemoteProtocolError, match="Hello after Goodbye"):
        theirs.receive_data(encode(hello_on("bulk")))


@settings(max_examples=30, deadline=None)
@given(st.text(max_size=20), st.integers(0, 6000))
def test_any_fault_can_be_told(text: str, times: int) -> None:
    """What a peer did wrong may contain what it sent: long, and four bytes a character."""
    fault = (text + "\N{EARTH GLOBE EUROPE-AFRICA}") * times
    [heard] = opened().receive_data(opened().refuse(fault))
    assert heard.message == Goodbye(fault=fault[:MAX_FAULT_CHARS])


# --- requests -------------------------------------------------------------------------------------


def test_a_reply_answers_one_open_request() -> None:
    ours = opened()
    with pytest.raises(RemoteProtocolError, match="reply to request 4, which is not open"):
        ours.receive_data(encode(ManifestAnswer(id=4, manifest=b"")))
    ours = opened()
    ours.send(GetManifest(id=4))
    ours.receive_data(encode(ManifestAnswer(id=4, manifest=b"")))
    with pytest.raises(RemoteProtocolError, match="reply to request 4, which is not open"):
        ours.receive_data(encode(ManifestAnswer(id=4, manifest=b"")))


def test_we_answer_what_was_asked_and_once() -> None:
    ours = opened()
    answer = JoinAnswer(id=2, refusal="", leader="a", leader_address="")
    with pytest.raises(LocalProtocolError, match="request 2, which is not open"):
        ours.send(answer)
    ours.receive_data(encode(GetManifest(id=2)))
    ours.send(answer)
    with pytest.raises(LocalProtocolError, match="request 2, which is not open"):
        ours.send(answer)


def test_an_id_is_open_once_in_each_direction() -> None:
    ours = opened()
    ours.send(GetManifest(id=1))
    ours.receive_data(encode(GetManifest(id=1)))  # theirs: another direction, another request
    with pytest.raises(LocalProtocolError, match="request id 1 is open already"):
        ours.send(GetManifest(id=1))
    with pytest.raises(RemoteProtocolError, match="request id 1 is open already"):
        ours.receive_data(encode(GetManifest(id=1)))


def test_requests_that_wait_for_our_answer_are_bounded() -> None:
    ours = opened()
    for number in range(MAX_OPEN_REQUESTS):
        ours.receive_data(encode(GetManifest(id=number)))
    with pytest.raises(RemoteProtocolError, match=f"more than {MAX_OPEN_REQUESTS} open requests"):
        ours.receive_data(encode(GetManifest(id=1000)))
    ours = opened()
    for number in range(3 * MAX_OPEN_REQUESTS):
        ours.receive_data(encode(GetManifest(id=number)))
        ours.send(ManifestAnswer(id=number, manifest=b""))


# --- payloads -------------------------------------------------------------------------------------


def backward(*tensors: TensorSpec) -> Backward:
    fence = Fence(Generation(), 1, 1)
    return Backward(fence=fence, microbatch=Microbatch(0, 0), path=(), tensors=tensors)


def test_a_payload_arrives_in_the_memory_that_was_allocated_for_it() -> None:
    given_out = memoryview(bytearray(8))
    ours = connection("bulk", lambda message: given_out)
    ours.receive_data(encode(hello_on("bulk")))
    data = encode(backward(TensorSpec("float32", (2,)))) + b"abcdefgh"
    assert ours.receive_data(data[:-3]) == []
    [received] = ours.receive_data(data[-3:])
    assert received.payload is given_out
    assert bytes(given_out) == b"abcdefgh"


@given(
    st.binary(min_size=1, max_size=300),
    st.integers(0, 299),
    st.lists(st.integers(1, 300), min_size=1),
)
def test_a_stream_may_fill_the_memory_of_a_payload_itself(
    payload: bytes, cut: int, sizes: list[int]
) -> None:
    ours = opened()
    assert len(ours.awaited_payload) == 0
    head = encode(backward(TensorSpec("uint8", (len(payload),))))
    received = ours.receive_data(head + payload[:cut])
    for size in [*sizes, len(payload)]:
        missing = ours.awaited_payload[:size]
        if len(missing):
            assert not received
            start = len(payload) - len(ours.awaited_payload)
            missing[:] = payload[start : start + len(missing)]
            received = ours.receive_filled(len(missing))
    assert [bytes(each.payload) for each in received] == [payload]
    assert len(ours.awaited_payload) == 0 and ours.mid_frame_bytes is None
    assert [each.message for each in ours.receive_data(encode(GetManifest(id=1)))]


def test_who_allocates_may_refuse_before_a_byte_of_the_payload_came() -> None:
    asked = []

    def refuse(message: Message) -> memoryview:
        asked.append(message)
        raise RemoteProtocolError("no such tensor")

    ours = connection("bulk", refuse)
    ours.receive_data(encode(hello_on("bulk")))
    message = backward(TensorSpec("uint8", (LIMIT,)))
    with pytest.raises(RemoteProtocolError, match="no such tensor"):
        ours.receive_data(encode(message))
    assert asked == [message]


def test_nothing_is_allocated_for_a_message_without_tensors() -> None:
    ours = connection("bulk", Memory())
    ours.receive_data(encode(hello_on("bulk")))
    for tensors in ((), (TensorSpec("float32", (0, 5)),)):
        [received] = ours.receive_data(encode(backward(*tensors)))
        assert len(received.payload) == 0


def test_memory_of_another_size_is_our_fault() -> None:
    ours = connection("bulk", lambda message: memoryview(bytearray(7)))
    ours.receive_data(encode(hello_on("bulk")))
    with pytest.raises(LocalProtocolError, match="allocated 7 bytes for 8"):
        ours.receive_data(encode(backward(TensorSpec("float64", (1,)))))


def test_the_cap_of_payloads_can_be_raised_between_frames() -> None:
    ours = opened()
    message = backward(TensorSpec("uint8", (LIMIT + 1,)))
    with pytest.raises(RemoteProtocolError, match="too large"):
        ours.receive_data(encode(message))
    ours = opened()
    ours.max_payload_bytes = LIMIT + 1
    [received] = ours.receive_data(frame(message))
    assert len(received.payload) == LIMIT + 1


@pytest.mark.parametrize("header, payload", [(0, 2**63), (2**32 - 1, 0), (64 * KIB, LIMIT + 1)])
def test_a_frame_that_is_too_large_is_refused_from_its_prefix(header: int, payload: int) -> None:
    memory = Memory()
    ours = connection("bulk", memory)
    ours.receive_data(encode(hello_on("bulk")))
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError, match="exceeds|too large"):
            ours.receive_data(PREFIX.pack(TABLE[Backward].number, header, payload))
        assert tracemalloc.get_traced_memory()[1] < 64 * KIB
    finally:
        tracemalloc.stop()
    assert memory.bytes == 0


# --- the end --------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_stream_ends_between_frames_or_with_an_error(data: st.DataObject) -> None:
    ours = opened()
    whole = frame(backward(TensorSpec("uint8", (9,))))
    cut = data.draw(st.integers(0, len(whole)))
    ours.receive_data(whole[:cut])
    if cut in (0, len(whole)):
        assert ours.mid_frame_bytes is None
        ours.receive_end()
    else:
        assert ours.mid_frame_bytes == (PREFIX_BYTES if cut < PREFIX_BYTES else len(whole))
        with pytest.raises(RemoteProtocolError, match="ended inside a frame"):
            ours.receive_end()


# --- whatever comes -------------------------------------------------------------------------------


@st.composite
def mutated(draw: st.DrawFn, channel: Channel) -> bytes:
    """Draw a valid frame to which something happened."""
    data = bytearray(frame(draw(messages_on(channel))))
    match draw(st.sampled_from(["flip", "cut", "header length", "payload length", "insert"])):
        case "flip":
            for _ in range(draw(st.integers(1, 4))):
                data[draw(st.integers(0, len(data) - 1))] ^= 1 << draw(st.integers(0, 7))
        case "cut":
            del data[draw(st.integers(0, len(data) - 1)) :]
        case "header length":
            data[4:8] = draw(st.integers(0, 2**32 - 1) | st.integers(0, 999)).to_bytes(4, "big")
        case "payload length":
            data[8:16] = draw(st.integers(0, 2**64 - 1) | st.integers(0, 99)).to_bytes(8, "big")
        case "insert":
            place = draw(st.integers(0, len(data)))
            data[place:place] = draw(st.binary(min_size=1, max_size=5))
    return bytes(data)


def bombs(channel: Channel) -> st.SearchStrategy[bytes]:
    """Draw a frame whose header is a bomb, behind a prefix that is right."""
    numbers = [kind.number for kind in TABLE.values() if kind.channel in (None, channel)]
    return st.builds(
        lambda number, bomb: PREFIX.pack(number, len(bomb), 0) + bomb,
        st.sampled_from(numbers),
        st.sampled_from(sorted(BOMBS.values())),
    )


@st.composite
def streams(draw: st.DrawFn, channel: Channel) -> bytes:
    piece = (
        messages_on(channel).map(frame)
        | mutated(channel)
        | bombs(channel)
        | st.binary(max_size=60)
        | st.sampled_from([encode(hello_on(channel)), encode(Goodbye())])
    )
    return b"".join(draw(st.lists(piece, max_size=4)))


@settings(max_examples=400, deadline=None)
@given(channels, st.booleans(), st.booleans(), sizes, st.data())
def test_whatever_comes_is_heard_or_refused_and_costs_what_came(
    channel: Channel, dialled: bool, greeted: bool, cuts: list[int], data: st.DataObject
) -> None:
    memory = Memory()
    ours = connection(channel if dialled else None, memory)
    if greeted:
        ours.receive_data(encode(hello_on(channel)))
    pieces = chunks(data.draw(streams(channel)), cuts)
    arrived = 0
    tracemalloc.start()
    try:
        for piece in pieces:
            arrived += len(piece)
            ours.receive_data(piece)
        ours.receive_end()
    except RemoteProtocolError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    # 40: a byte that becomes a float and its place (test_packing.py)
    assert peak < 40 * arrived + memory.bytes + 256 * KIB


@pytest.mark.parametrize("kind", TABLE, ids=lambda kind: kind.__name__)
def test_the_largest_header_of_every_type_costs_a_few_times_its_size(kind: type[Message]) -> None:
    """Full of empty maps, each of which would take 72 times its byte."""
    how = TABLE[kind]
    cap = min(how.header_cap_bytes, 1 << 20)
    bomb = b"\xdd" + (cap - 5).to_bytes(4, "big") + b"\x80" * (cap - 5)
    ours = opened(how.channel or "bulk") if kind is not Hello else connection(None, Memory())
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError, match="does not decode"):
            for piece in chunks(PREFIX.pack(how.number, len(bomb), 0) + bomb, [64 * KIB]):
                ours.receive_data(piece)
        assert tracemalloc.get_traced_memory()[1] < 4 * cap + 256 * KIB
    finally:
        tracemalloc.stop()
