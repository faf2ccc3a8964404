"""Train one PyTorch model together, on machines that nobody owns together."""

__version__ = "0.1.0"
