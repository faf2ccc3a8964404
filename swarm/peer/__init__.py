"""Runs: trio tasks that drive the core."""
