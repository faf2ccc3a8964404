"""The schedule: what it is made for, what it costs, how it is found, and how it is repaired."""
