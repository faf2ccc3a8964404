"""Links through proxies: who dials is known, a cut stalls bytes one way or both, healing loses
nothing."""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.processes.places import Loopback
from tests.processes.proxies import PIECE_BYTES, Proxies, Shape, owner_of

QUIET_SECONDS = 0.3
LOST_SECONDS = 10.0

ECHO = """
import socket, sys
server = socket.create_server((sys.argv[1], int(sys.argv[2])))
print("listening", flush=True)
while True:
    client, _ = server.accept()
    with client:
        while data := client.recv(65536):
            print(f"heard {data.decode()}", flush=True)
            client.sendall(data)
        print("closed", flush=True)
"""


class Echo:
    """A process that sends back what it hears, and says what that was."""

    def __init__(self, listen: str) -> None:
        host, _, port = listen.rpartition(":")
        self.process = subprocess.Popen(
            [sys.executable, "-c", ECHO, host, port], stdout=subprocess.PIPE, text=True
        )
        assert self.says() == "listening"

    def says(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


class Two:
    """This process, called "me", and an echo called "echo", with proxies between them."""

    def __init__(self, proxies: Proxies) -> None:
        self.proxies = proxies
        proxies.place("me")
        proxies.running("me", os.getpid())
        self.place = proxies.place("echo")
        self.echo = Echo(self.place.listen)
        proxies.running("echo", self.echo.process.pid)

    def dial(self) -> socket.socket:
        port = int(self.place.listen.rpartition(":")[2])
        client = socket.create_connection((self.place.advertise, port))
        client.settimeout(LOST_SECONDS)
        return client

    def is_silent(self, client: socket.socket) -> bool:
        client.settimeout(QUIET_SECONDS)
        with contextlib.suppress(TimeoutError):
            client.recv(1)
            return False
        client.settimeout(LOST_SECONDS)
        return True


@pytest.fixture
def two() -> Iterator[Two]:
    with Proxies() as proxies:
        made = Two(proxies)
        yield made
        proxies.heal()
        made.echo.end()


def test_bytes_go_both_ways(two: Two) -> None:
    with two.dial() as client:
        client.sendall(b"one")
        assert client.recv(3) == b"one"
        client.shutdown(socket.SHUT_WR)
        assert client.recv(1) == b""
    assert [two.echo.says(), two.echo.says()] == ["heard one", "closed"]


def test_a_cut_stalls_both_ways_and_healing_loses_nothing(two: Two) -> None:
    with two.dial() as client:
        client.sendall(b"one")
        assert client.recv(3) == b"one"
        two.proxies.cut(["me"], ["echo"])
        client.sendall(b"two")
        assert two.is_silent(client)
        two.proxies.heal()
        assert client.recv(3) == b"two"
    assert [two.echo.says(), two.echo.says()] == ["heard one", "heard two"]


def test_a_cut_of_one_way_lets_the_other_pass(two: Two) -> None:
    with two.dial() as client:
        client.sendall(b"one")
        assert client.recv(3) == b"one"
        two.proxies.cut(["echo"], ["me"], one_way=True)
        client.sendall(b"two")
        assert [two.echo.says(), two.echo.says()] == ["heard one", "heard two"]
        assert two.is_silent(client)
        two.proxies.heal()
        assert client.recv(3) == b"two"


def test_the_end_of_a_process_does_not_pass_a_cut(two: Two) -> None:
    with two.dial() as client:
        client.sendall(b"one")
        assert client.recv(3) == b"one"
        two.proxies.cut(["echo"], ["me"], one_way=True)
        two.echo.process.kill()
        two.echo.process.wait()
        assert two.is_silent(client)
        two.proxies.heal()
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(1) == b""


def test_a_connection_that_is_made_during_a_cut_waits_for_its_end(two: Two) -> None:
    two.proxies.cut(["echo"], ["me"])
    with two.dial() as client:
        client.sendall(b"one")
        assert two.is_silent(client)
        two.proxies.heal()
        assert client.recv(3) == b"one"


def test_cuts_name_groups_and_leave_the_others_alone(two: Two) -> None:
    two.proxies.cut(["me", "echo"], ["somebody", "me"], one_way=True)  # me hears nothing of echo
    with two.dial() as client:
        client.sendall(b"one")
        assert two.echo.says() == "heard one"
        two.proxies.heal()
        two.proxies.cut(["me", "somebody"], ["another"])
        assert client.recv(3) == b"one"


def test_a_daemon_keeps_its_place(two: Two) -> None:
    assert two.proxies.place("echo") == two.place
    assert two.proxies.place("third").listen != two.place.listen


def test_the_owner_of_a_connection_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as client:
            ends = client.getsockname(), client.getpeername()
            assert owner_of(*ends, {"init": 1, "me": os.getpid()}) == "me"
            assert owner_of(*ends, {}) is None
            assert owner_of(ends[0], ("127.0.0.1", 1), {"me": os.getpid()}) is None


def test_the_plain_network_says_that_it_cannot_cut() -> None:
    with pytest.raises(NotImplementedError):
        Loopback().cut(["a"], ["b"])


def test_a_shape_bounds_the_rate_of_all_connections_and_delays_each_piece() -> None:
    """1 MB/s and 0.1 s: of two pieces of 0.5 MB the second leaves when the first is through."""
    shape = Shape(1e6, 0.1)
    assert shape.arrival(500_000, 10.0) == pytest.approx(10.6)
    assert shape.arrival(500_000, 10.2) == pytest.approx(11.1)
    assert shape.arrival(100, 20.0) == pytest.approx(20.1001)
    assert shape.pieces == round(0.15e6 / PIECE_BYTES)
