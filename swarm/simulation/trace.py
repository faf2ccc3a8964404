"""What happened in a simulation, line by line: for people, and to compare two runs.

The rule: a trace changes nothing. Entries are kept as they are and become text only when somebody
reads them.
"""

import contextlib
import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import trio

from protocol.errors import RemoteProtocolError
from protocol.messages import BY_NUMBER, Training
from protocol.packing import unpack
from protocol.records import (
    AcceptedPlan,
    Certificate,
    CertifiedPlan,
    PlanHeader,
    Signed,
    decode_record,
)
from protocol.signing import PeerId
from swarm.simulation.process import Process, running

LAST_LINES = 400
MAX_KEPT_BYTES = 64 * 1024
MAX_TEXT_CHARS = 300


class SimulationFailure(AssertionError):
    """Something that must never be has been, or the run did not end in time."""

    def __init__(self, rule: str, what: str, replay: str, lines: list[str]) -> None:
        """`rule` is which invariant is broken; `what` says it in words."""
        self.rule = rule
        self.what = what
        self.lines = lines
        super().__init__("\n".join([what, *lines, what, f"replay: {replay}"]))


class Trace:
    """The events of one simulation; the last ones, or all."""

    def __init__(self, *, whole: bool = False) -> None:
        self._entries: deque[tuple[float, str, str | _Frame | _Logged]] = deque(
            maxlen=None if whole else LAST_LINES
        )
        self.names: dict[PeerId, str] = {}
        """How peers are called in it."""

    def add(self, who: str, what: str) -> None:
        """Note an event."""
        self._entries.append((trio.current_time(), who, what))

    def frame(
        self, sending: bool, process: Process, other: PeerId, number: int, header: bytes
    ) -> None:
        """Note a frame that was sent or received (streams.Tap); of a plan of many only its size."""
        if len(header) > MAX_KEPT_BYTES:
            kind = BY_NUMBER.get(number)
            name = kind.__name__ if kind is not None else f"type {number}"
            whom = self.names.get(other, other)
            self.add(process.name, f"{'->' if sending else '<-'} {whom} {name} of {len(header)} B")
            return
        self._entries.append((trio.current_time(), process.name, (sending, other, number, header)))

    def lines(self) -> list[str]:
        """Return the events as text."""
        return [f"{at:12.6f} {who:<6} {self._text(what)}" for at, who, what in self._entries]

    def _text(self, what: "str | _Frame | _Logged") -> str:
        match what:
            case str():
                return what
            case _Logged(text):
                return f"   {self._named(text)}"
            case _:
                return self._frame_text(what)

    def _named(self, text: str) -> str:
        """Return a text with peers called as they are called here."""
        for peer, name in self.names.items():
            text = text.replace(peer, name)
        return text

    def log(self, who: str, text: str) -> None:
        """Note what a daemon has logged."""
        self._entries.append((trio.current_time(), who, _Logged(text)))

    def _frame_text(self, frame: "_Frame") -> str:
        sending, other, number, header = frame
        whom = self.names.get(other, other)
        arrow = f"-> {whom}" if sending else f"<- {whom}"
        kind = BY_NUMBER.get(number)
        if kind is None:
            return f"{arrow} type {number}"
        try:
            message = unpack(header, kind)
        except RemoteProtocolError as fault:
            return f"{arrow} {kind.__name__} {fault}"
        fields = {
            name: _text(getattr(message, name))
            for name in message.__struct_fields__
            if name not in ("fence", "tensors", "traffic", "members")
        }
        if isinstance(message, Training):
            fields = {"epoch": str(message.fence.epoch)} | fields
        text = self._named(" ".join(f"{name}={value}" for name, value in fields.items()))
        if len(text) > MAX_TEXT_CHARS:
            text = text[:MAX_TEXT_CHARS] + "…"
        return f"{arrow} {kind.__name__} {text}"

    @contextlib.contextmanager
    def logging(self) -> Iterator[None]:
        """Take in what the daemons log, and keep it from everybody else."""
        handler = _Handler(self)
        logger = logging.getLogger("swarm")
        before = logger.level, logger.propagate
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
        try:
            yield
        finally:
            logger.removeHandler(handler)
            logger.level, logger.propagate = before
            logger.setLevel(before[0])


_Frame = tuple[bool, PeerId, int, bytes]


@dataclass(frozen=True, slots=True)
class _Logged:
    """A line of a daemon's log, with whole names of peers."""

    text: str


class _Handler(logging.Handler):
    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self._trace = trace

    def emit(self, record: logging.LogRecord) -> None:
        process = running.get()
        if process is not None and not process.dead:
            level = "" if record.levelno <= logging.INFO else f"{record.levelname} "
            self._trace.log(process.name, f"{level}{record.getMessage()}")


def _text(value: object) -> str:
    match value:
        case bytes():
            return value.hex() if len(value) <= 8 else f"{value[:4].hex()}…{len(value)}"
        case CertifiedPlan():
            header = decode_record(value.header, PlanHeader)
            signers = value.certificate.signatures if value.certificate is not None else ()
            return f"plan({header.kind} epoch {header.epoch}, {len(signers)} signatures)"
        case AcceptedPlan():
            return f"accepted(term {value.term}, {_text(value.plan)})"
        case Signed() | Certificate():
            return type(value).__name__
        case tuple():
            return "(" + ", ".join(_text(each) for each in value) + ")"
        case _:
            return str(value)
