"""Commands on the same machine: whoever may open the home may talk to its daemon."""

import json
import os
import socket
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio

from swarm.adapters.control_socket import (
    MAX_REQUEST_BYTES,
    SOCKET_NAME,
    call,
    serve_commands,
)
from swarm.errors import ExportError, NotRunning, SwarmError


async def answer(command: str, arguments: dict[str, object]) -> dict[str, object]:
    if command == "fail":
        raise ExportError("cannot", evidence=("because",), hint="do this")
    return {"command": command, **arguments}


def served(home: Path, scenario: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                await nursery.start(serve_commands, home, answer)
                await scenario()
                nursery.cancel_scope.cancel()

    trio.run(main)


def ask(home: Path, command: str, **arguments: object) -> Awaitable[dict[str, object]]:
    return trio.to_thread.run_sync(lambda: call(home, command, **arguments))


def test_a_command_is_answered_and_the_socket_is_private_and_gone_afterwards(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        assert await ask(tmp_path, "greet", name="x") == {"command": "greet", "name": "x"}
        mode = (tmp_path / SOCKET_NAME).stat().st_mode
        assert stat.S_ISSOCK(mode) and stat.S_IMODE(mode) == 0o600

    served(tmp_path, scenario)
    assert not (tmp_path / SOCKET_NAME).exists()
    with pytest.raises(NotRunning) as caught:
        call(tmp_path, "greet")
    assert str(tmp_path) in caught.value.what


def test_the_daemons_error_is_raised_where_it_was_asked(tmp_path: Path) -> None:
    async def scenario() -> None:
        with pytest.raises(SwarmError) as caught:
            await ask(tmp_path, "fail")
        error = caught.value
        assert (error.what, error.evidence, error.hint) == ("cannot", ("because",), "do this")
        assert error.exit_code == ExportError.exit_code

    served(tmp_path, scenario)


def test_a_path_longer_than_the_kernel_allows_for_sockets(tmp_path: Path) -> None:
    home = tmp_path / ("long" * 40)
    home.mkdir()

    async def scenario() -> None:
        assert await ask(home, "greet") == {"command": "greet"}

    served(home, scenario)


def test_a_socket_that_a_crash_left_is_replaced(tmp_path: Path) -> None:
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(tmp_path / SOCKET_NAME))
    left.close()
    with pytest.raises(NotRunning):
        call(tmp_path, "greet")

    async def scenario() -> None:
        assert await ask(tmp_path, "greet") == {"command": "greet"}

    served(tmp_path, scenario)


def raw(home: Path, data: bytes) -> bytes:
    folder = os.open(home, os.O_RDONLY)
    try:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(10)
            client.connect(f"/proc/self/fd/{folder}/{SOCKET_NAME}")
            client.sendall(data)
            return client.recv(65536)
    finally:
        os.close(folder)


@pytest.mark.parametrize("garbage", [b"\xff\xfe\n", b"[]\n", b"{}\n", b'{"command": 1}\n', b"1\n"])
def test_what_is_no_command_is_told_so_and_others_are_served(
    garbage: bytes, tmp_path: Path
) -> None:
    async def scenario() -> None:
        reply = await trio.to_thread.run_sync(raw, tmp_path, garbage)
        assert json.loads(reply).keys() <= {"error", "answer"}
        assert await ask(tmp_path, "greet") == {"command": "greet"}

    served(tmp_path, scenario)


def test_a_line_without_end_is_cut_off(tmp_path: Path) -> None:
    def flood() -> bytes:
        try:
            return raw(tmp_path, b"x" * (MAX_REQUEST_BYTES + 5000))
        except (ConnectionResetError, BrokenPipeError):
            return b""

    async def scenario() -> None:
        assert await trio.to_thread.run_sync(flood) == b""
        assert await ask(tmp_path, "greet") == {"command": "greet"}

    served(tmp_path, scenario)
