"""Errors of the protocol: whose fault decides which of the two it is."""


class ProtocolError(Exception):
    """A rule of the protocol was broken."""


class LocalProtocolError(ProtocolError):
    """We tried to say something that the protocol forbids: a bug of ours."""


class RemoteProtocolError(ProtocolError):
    """The other side said something that the protocol forbids: it ends the connection."""
