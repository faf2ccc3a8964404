"""Hosts of their own for daemons: they reach each other, and each direction can be cut."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.processes.namespaces import Namespaces, why_not

pytestmark = [pytest.mark.processes, pytest.mark.skipif(bool(why_not()), reason=why_not())]

ECHO = """
import socket
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("0.0.0.0", 4000))
print("listening", flush=True)
while True:
    data, sender = server.recvfrom(100)
    print(f"heard {data.decode()}", flush=True)
    server.sendto(data, sender)
"""

ASK = """
import socket, sys
client = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
client.settimeout(0.5)
try:
    client.sendto(sys.argv[2].encode(), (sys.argv[1], 4000))
    print(client.recv(100).decode())
except OSError as error:
    print("silence")
"""


class Hosts:
    """Two hosts, "a" and "b"; an echo runs on b."""

    def __init__(self, network: Namespaces) -> None:
        self.network = network
        self.prefix = network.place("a").prefix
        self.echo = subprocess.Popen(
            [*network.place("b").prefix, sys.executable, "-c", ECHO],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.says() == "listening"

    def ask(self, word: str) -> str:
        """Return what comes back to a."""
        words = [*self.prefix, sys.executable, "-c", ASK, self.network.address("b"), word]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()

    def says(self) -> str:
        """Return what b says next."""
        assert self.echo.stdout is not None
        return self.echo.stdout.readline().strip()


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Namespaces() as network:
        made = Hosts(network)
        yield made
        made.echo.kill()
        made.echo.communicate()


def test_a_cut_of_one_way_lets_the_other_pass(hosts: Hosts) -> None:
    assert (hosts.ask("one"), hosts.says()) == ("one", "heard one")
    hosts.network.cut(["b"], ["a"], one_way=True)
    assert (hosts.ask("two"), hosts.says()) == ("silence", "heard two")
    hosts.network.heal()
    hosts.network.cut(["a"], ["b"], one_way=True)
    assert hosts.ask("three") == "silence"
    hosts.network.heal()
    assert (hosts.ask("four"), hosts.says()) == ("four", "heard four")  # three was lost


def test_a_cut_and_an_unplugged_host_are_silent_until_healed(hosts: Hosts) -> None:
    hosts.network.cut(["a"], ["b"])
    assert hosts.ask("one") == "silence"
    hosts.network.heal()
    with hosts.network.unplugged("b"):
        assert hosts.ask("two") == "silence"
    assert (hosts.ask("three"), hosts.says()) == ("three", "heard three")


def test_nothing_is_left() -> None:
    def known() -> str:
        words = ["ip", "netns", "list"]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout

    before = known()
    with Namespaces() as network:
        network.place("a")
        assert network.namespace("a") in known()
    assert known() == before
