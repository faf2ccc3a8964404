"""The GPT predicts from the past alone, and learns."""

from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from swarm.models.gpt import layers


def plain(**arguments: int | float) -> nn.Module:
    torch.manual_seed(0)
    made = layers(**arguments)["layers"]  # type: ignore[arg-type]
    return nn.Sequential(OrderedDict((name, make()) for name, make in made))  # type: ignore[attr-defined]


SMALL = {"width": 16, "depth": 2, "heads": 2, "context": 12, "vocabulary": 11}


def test_a_logit_depends_on_its_own_and_earlier_tokens_only() -> None:
    module = plain(**SMALL)
    ids = torch.arange(12).remainder(11).view(1, 12)
    changed = ids.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 11
    one, other = module(ids), module(changed)
    assert one.shape == (1, 12, 11)
    assert torch.equal(one[:, :7], other[:, :7])
    assert all(not torch.equal(one[:, t], other[:, t]) for t in range(7, 12))


def test_the_default_has_more_than_three_million_parameters() -> None:
    made = layers()
    assert made["tied"] == {"head.project.weight": "embed.token.weight"}
    assert layers(tied=False)["tied"] == {}
    assert sum(p.numel() for p in plain().parameters()) - 256 * 256 > 3_000_000


def test_it_begins_at_the_entropy_of_chance_and_learns_a_sequence() -> None:
    module = plain(**SMALL)
    ids = torch.arange(13).remainder(11).view(1, 13)
    optimiser = torch.optim.Adam(module.parameters(), 0.01)
    losses = []
    for _ in range(30):
        logits = module(ids[:, :-1])
        loss = F.cross_entropy(logits.view(-1, 11), ids[0, 1:])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(torch.tensor(11.0).log().item(), abs=0.1)
    assert losses[-1] < 0.1


def test_dropout_is_for_training_only() -> None:
    module = plain(**SMALL, dropout=0.5)
    ids = torch.zeros(1, 12, dtype=torch.int64)
    assert not torch.equal(module(ids), module(ids))
    module.eval()
    assert torch.equal(module(ids), module(ids))


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(ValueError, match="10 is not a multiple of 3"):
        layers(width=10, heads=3)
