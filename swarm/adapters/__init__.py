"""Touches the outside: TLS, hivemind, torch, files."""
