"""A small decoder-only transformer, as layers that are built one by one.

Shapes: B batch, T tokens, C width, H heads, V vocabulary.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

INITIAL_DEVIATION = 0.02


def layers(
    width: int = 256,
    depth: int = 4,
    heads: int = 4,
    context: int = 128,
    vocabulary: int = 256,
    dropout: float = 0.0,
    tied: bool = True,
) -> dict[str, object]:
    """Return the constructors of the embedding, `depth` blocks and the head.

    int64 token ids (B, T <= context) go in, logits (B, T, V) come out. With `tied` the head's
    matrix is the token embedding's. Raises ValueError if `heads` does not divide `width`.
    """
    if width % heads:
        raise ValueError(f"width {width} is not a multiple of {heads} heads")
    block = partial(Block, width, heads, depth, dropout)
    made: list[tuple[str, Callable[[], nn.Module]]] = [
        ("embed", partial(Embedding, width, context, vocabulary, dropout)),
        *((f"block{number}", block) for number in range(depth)),
        ("head", partial(Head, width, vocabulary)),
    ]
    return {"layers": made, "tied": {"head.project.weight": "embed.token.weight"} if tied else {}}


class Embedding(nn.Module):
    """Token ids to vectors that know their position."""

    def __init__(self, width: int, context: int, vocabulary: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        nn.init.normal_(self.token.weight, std=INITIAL_DEVIATION)
        nn.init.normal_(self.position.weight, std=INITIAL_DEVIATION)

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Return hidden_BTC."""
        positions_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
        hidden: Tensor = self.dropout(self.token(ids_BT) + self.position(positions_T))
        return hidden


class Block(nn.Module):
    """Attention and a two-layer perceptron, each normalised before and added after."""

    def __init__(self, width: int, heads: int, depth: int, dropout: float) -> None:
        super().__init__()
        self.attend_norm = nn.LayerNorm(width)
        self.attend = Attention(width, heads, depth, dropout)
        self.think_norm = nn.LayerNorm(width)
        self.think_in = _linear(width, 4 * width)
        self.think_out = _linear(4 * width, width, residuals=2 * depth)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden_BTC: Tensor) -> Tensor:
        """Return hidden_BTC."""
        hidden_BTC = hidden_BTC + self.attend(self.attend_norm(hidden_BTC))
        thought_BTC = self.think_out(F.gelu(self.think_in(self.think_norm(hidden_BTC))))
        result: Tensor = hidden_BTC + self.dropout(thought_BTC)
        return result


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int, depth: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value = _linear(width, 3 * width)
        self.out = _linear(width, width, residuals=2 * depth)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden_BTC: Tensor) -> Tensor:
        """Return attended_BTC: every position sees itself and those before it."""
        B, T, C = hidden_BTC.shape
        split = (B, T, 3, self.heads, C // self.heads)
        query, key, value = self.query_key_value(hidden_BTC).view(split).permute(2, 0, 3, 1, 4)
        attended_BHTD = F.scaled_dot_product_attention(
            query,
            key,
            value,
            dropout_p=self.dropout.p if self.training else 0.0,
            is_causal=True,
        )
        attended_BTC = attended_BHTD.transpose(1, 2).reshape(B, T, C)
        result: Tensor = self.dropout(self.out(attended_BTC))
        return result


class Head(nn.Module):
    """Hidden vectors to logits over the vocabulary."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.project = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.project.weight, std=INITIAL_DEVIATION)

    def forward(self, hidden_BTC: Tensor) -> Tensor:
        """Return logits_BTV."""
        logits_BTV: Tensor = self.project(self.norm(hidden_BTC))
        return logits_BTV


def _linear(inputs: int, outputs: int, *, residuals: int = 1) -> nn.Linear:
    """Return a linear layer; what is added to `residuals` sums starts smaller by its root."""
    linear = nn.Linear(inputs, outputs)
    nn.init.normal_(linear.weight, std=INITIAL_DEVIATION / math.sqrt(residuals))
    nn.init.zeros_(linear.bias)
    return linear
