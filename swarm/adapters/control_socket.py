"""How commands on this machine talk to a running daemon: JSON lines over a socket in its home.

The rule: who may open the home folder may command the daemon; nobody else can. The socket is
addressed through the folder's descriptor, so that a long path does not meet the kernel's limit
of 107 characters.
"""

import json
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import trio

from swarm.errors import NotRunning, SwarmError

log = logging.getLogger(__name__)

SOCKET_NAME = "control.sock"
MAX_REQUEST_BYTES = 64 * 1024
REQUEST_SECONDS = 10.0
ANSWER_SECONDS = 10.0

Handler = Callable[[str, dict[str, object]], Awaitable[dict[str, object]]]


async def serve_commands(
    home: Path, handler: Handler, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Answer commands until cancelled; then the socket is gone. The home must be locked by us:
    a socket that is there already was left by a crash."""
    folder = os.open(home, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(FileNotFoundError):
            os.unlink(SOCKET_NAME, dir_fd=folder)
        listener = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        await listener.bind(f"/proc/self/fd/{folder}/{SOCKET_NAME}")
        os.chmod(home / SOCKET_NAME, 0o600)
        listener.listen()
        try:
            task_status.started()
            await trio.serve_listeners(
                partial(_serve_one, handler), [trio.SocketListener(listener)]
            )
        finally:
            with suppress(FileNotFoundError):
                os.unlink(SOCKET_NAME, dir_fd=folder)
    finally:
        os.close(folder)


async def _serve_one(handler: Handler, stream: trio.SocketStream) -> None:
    with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
        async with stream:
            request = await _read_line(stream)
            if request is not None:
                await stream.send_all(json.dumps(await _answer(request, handler)).encode() + b"\n")


async def _read_line(stream: trio.SocketStream) -> bytes | None:
    line = bytearray()
    with trio.move_on_after(REQUEST_SECONDS):
        while not line.endswith(b"\n"):
            data = await stream.receive_some(4096)
            line += data
            if not data or len(line) > MAX_REQUEST_BYTES:
                return None
        return bytes(line)
    return None


async def _answer(request: bytes, handler: Handler) -> dict[str, object]:
    try:
        asked = json.loads(request)
        command, arguments = str(asked["command"]), dict(asked.get("arguments", {}))
    except (ValueError, KeyError, TypeError) as error:
        return {"error": {"what": f"not a command: {error}", "evidence": [], "hint": "", "code": 1}}
    try:
        return {"answer": await handler(command, arguments)}
    except SwarmError as error:
        return {
            "error": {
                "what": error.what,
                "evidence": list(error.evidence),
                "hint": error.hint,
                "code": error.exit_code,
            }
        }


def call(
    home: Path, command: str, *, seconds: float = ANSWER_SECONDS, **arguments: object
) -> dict[str, object]:
    """Send a command to the daemon of `home` and return its answer within `seconds`; blocks.

    Raises NotRunning if no daemon answers there, or the error that the daemon reports."""
    request = json.dumps({"command": command, "arguments": arguments}).encode() + b"\n"
    try:
        reply = _exchange(home, request, seconds)
        answer = json.loads(reply)
    except (OSError, ValueError) as error:
        gone = isinstance(error, FileNotFoundError)
        if isinstance(error, TimeoutError):
            raise NotRunning(
                f"the daemon of {home} does not answer",
                evidence=(f"no answer to {command!r} within {seconds:g} s",),
                hint="is its process stopped, or the machine overloaded? Ask again, or end it",
            ) from error
        raise NotRunning(
            f"no daemon answers in {home}",
            evidence=(f"{home / SOCKET_NAME} does not exist" if gone else str(error),),
            hint=f"start it with `swarm run --home {home}`",
        ) from error
    if "error" in answer:
        fault = answer["error"]
        error_ = SwarmError(fault["what"], evidence=tuple(fault["evidence"]), hint=fault["hint"])
        error_.exit_code = fault["code"]
        raise error_
    result: dict[str, object] = answer["answer"]
    return result


def _exchange(home: Path, request: bytes, seconds: float) -> bytes:
    folder = os.open(home, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(seconds)
            client.connect(f"/proc/self/fd/{folder}/{SOCKET_NAME}")
            client.sendall(request)
            reply = bytearray()
            while data := client.recv(65536):
                reply += data
            return bytes(reply)
    finally:
        os.close(folder)
