"""Models that do what models should not do, or do it in odd places."""

from torch import Tensor, nn


class Tokens(nn.Module):
    """Token ids (B, T) to hidden vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.embed(tokens)
        return hidden


class Chatty(nn.Linear):
    """Prints a line of a kilobyte whenever it is used."""

    def forward(self, hidden: Tensor) -> Tensor:
        print("x" * 1023, flush=True)
        return super().forward(hidden)


class Failing(nn.Linear):
    """Raises when its weights have changed: profiling does not take it there."""

    started_with: float | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        weights = float(self.weight.detach().sum())
        if self.started_with is None:
            self.started_with = weights
        if weights != self.started_with:
            raise RuntimeError("enough is enough")
        return super().forward(hidden)


def silent_middle() -> nn.Sequential:
    """Return layers of which the middle ones have no parameters."""
    return nn.Sequential(Tokens(), nn.ReLU(), nn.Tanh(), nn.Linear(8, 256))


def chatty() -> nn.Sequential:
    """Return a model that prints."""
    return nn.Sequential(Tokens(), Chatty(8, 8), nn.Linear(8, 256))


def failing() -> nn.Sequential:
    """Return a model that fails after some steps."""
    return nn.Sequential(Tokens(), Failing(8, 8), nn.Linear(8, 256))
