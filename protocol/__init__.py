"""What peers say to each other: messages, records, signatures and the sans-IO connection.

The rule of this package: no I/O, no clock, no randomness. Bytes come in, messages go out.
"""
