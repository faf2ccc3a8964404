"""Decides: pure functions and sans-IO state machines. No I/O, clock, threads or chance."""
