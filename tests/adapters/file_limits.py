"""A disk that is full, as far as this process can tell."""

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def largest_file(nbytes: int) -> Iterator[None]:
    """Let the kernel refuse to write files beyond `nbytes`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
