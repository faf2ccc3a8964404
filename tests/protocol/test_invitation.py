"""Invitations survive people, and keys for different uses are different."""

import hashlib
import hmac
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import RemoteProtocolError
from protocol.invitation import (
    MAX_INVITATION_CHARS,
    Invitation,
    authority_seed,
    dht_key,
    parse,
    rendezvous,
)

SWARM_KEY = bytes(range(32))
RUN = bytes(range(100, 132))
INVITATION = Invitation(
    run=RUN,
    swarm_key=SWARM_KEY,
    addresses=("203.0.113.7:31337", "[2001:db8::1]:31337"),
    dht_addresses=("/ip4/203.0.113.7/tcp/31338/p2p/12D3KooW",),
)

keys = st.binary(min_size=32, max_size=32)
addresses = st.lists(st.text(min_size=1, max_size=200), max_size=5).map(tuple)
invitations = st.builds(Invitation, keys, keys, addresses, addresses)


@given(invitations)
def test_what_was_encoded_is_read_back(invitation: Invitation) -> None:
    assert parse(invitation.encode()) == invitation


def test_it_is_one_word_that_survives_any_messenger() -> None:
    text = INVITATION.encode()
    assert text.startswith("swarm1-")
    assert text.removeprefix("swarm1-").isalnum()


def test_white_space_and_case_do_not_matter() -> None:
    text = INVITATION.encode()
    wrapped = "\n".join(text[start : start + 40] for start in range(0, len(text), 40))
    assert parse(f"  {wrapped.upper()} \r\n") == INVITATION


def test_every_wrong_character_is_noticed() -> None:
    text = INVITATION.encode()
    for position in range(len("swarm1-"), len(text)):
        wrong = "a" if text[position] != "a" else "b"
        with pytest.raises(RemoteProtocolError, match="typing error"):
            parse(text[:position] + wrong + text[position + 1 :])


def test_every_cut_is_noticed() -> None:
    text = INVITATION.encode()
    for length in range(len("swarm1-"), len(text)):
        with pytest.raises(RemoteProtocolError, match="typing error"):
            parse(text[:length])


@given(st.text())
def test_any_other_text_is_no_invitation(text: str) -> None:
    with pytest.raises(RemoteProtocolError):
        parse(text)
    with pytest.raises(RemoteProtocolError):
        parse("swarm1-" + text)


def test_reasons_say_what_is_wrong() -> None:
    with pytest.raises(RemoteProtocolError, match="does not start with swarm1-"):
        parse("hello")
    with pytest.raises(RemoteProtocolError, match="too long"):
        parse(" " * (MAX_INVITATION_CHARS + 1))


def test_a_key_of_another_length_is_refused() -> None:
    short = Invitation(RUN, SWARM_KEY[:31], (), ())
    with pytest.raises(RemoteProtocolError, match="swarm_key"):
        parse(short.encode())


def test_the_key_does_not_show_in_logs() -> None:
    shown = f"{INVITATION!r} {INVITATION}"
    assert SWARM_KEY.hex() not in shown
    assert repr(SWARM_KEY) not in shown
    assert "203.0.113.7" in shown


def hkdf_sha256(key: bytes, label: bytes) -> bytes:
    """RFC 5869 for 32 bytes of output and no salt, by the standard library."""
    extracted = hmac.digest(bytes(32), key, hashlib.sha256)
    return hmac.digest(extracted, b"swarm/1/" + label + b"\x01", hashlib.sha256)


@pytest.mark.parametrize(
    ("derived", "label"),
    [
        (authority_seed(SWARM_KEY), b"authority"),
        (dht_key(SWARM_KEY, RUN), b"dht-record\0" + RUN),
        (rendezvous(SWARM_KEY, RUN), b"dht-rendezvous\0" + RUN),
    ],
)
def test_keys_are_derived_as_rfc_5869_says(derived: bytes, label: bytes) -> None:
    assert derived == hkdf_sha256(SWARM_KEY, label)


@given(keys, keys, keys, keys)
def test_keys_differ_by_use_swarm_and_run(
    key: bytes, other: bytes, run: bytes, next_run: bytes
) -> None:
    assert len({authority_seed(key), dht_key(key, run), rendezvous(key, run)}) == 3
    derivations: list[Callable[[bytes, bytes], bytes]] = [dht_key, rendezvous]
    for derive in derivations:
        assert (derive(key, run) == derive(other, run)) == (key == other)
        assert (derive(key, run) == derive(key, next_run)) == (run == next_run)
