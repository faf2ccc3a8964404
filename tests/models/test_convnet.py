"""The classifier is its layers, and the pictures can be told apart."""

import pytest
import torch
import torch.nn.functional as F

from swarm.models.convnet import classifier, shapes


def test_pictures_are_a_function_of_their_index() -> None:
    data, again = shapes(20, 16), shapes(40, 16)
    picture, label = data[7]
    assert (picture.dtype, picture.shape) == (torch.float32, (3, 16, 16))
    assert (label.dtype, label.shape, label.item()) == (torch.int64, (), 7)
    assert torch.equal(again[7][0], picture)
    assert not torch.equal(again[17][0], picture)
    assert not torch.equal(shapes(20, 16, seed=1)[7][0], picture)
    assert len(data) == 20
    assert {int(data[index][1]) for index in range(20)} == set(range(10))
    with pytest.raises(IndexError):
        data[20]


def test_a_form_is_there_at_every_size() -> None:
    for image in (8, 16, 32):
        data = shapes(10, image, noise=0.0)
        for picture, label in (data[index] for index in range(10)):
            inside = picture[0] != 0
            assert 0.01 < inside.float().mean() < 0.6
            assert bool((picture[:, inside] > 0).all()) == bool(label % 2)


def test_logits_and_the_names_of_layers() -> None:
    module = classifier(channels=8, classes=7, image=16)
    assert module(torch.zeros(2, 3, 16, 16)).shape == (2, 7)
    assert {name.split(".")[0] for name in module.state_dict()} == {"layers"}
    for wrong in ({"channels": 6}, {"image": 10}):
        with pytest.raises(ValueError, match="multiples of 4"):
            classifier(**wrong)


def test_it_learns_the_pictures() -> None:
    torch.manual_seed(0)
    data, module = shapes(60, 16), classifier(channels=8)
    pictures = torch.stack([data[index][0] for index in range(60)])
    labels = torch.stack([data[index][1] for index in range(60)])
    optimiser = torch.optim.AdamW(module.parameters(), 0.01)
    for _ in range(60):
        optimiser.zero_grad()
        F.cross_entropy(module(pictures), labels).backward()
        optimiser.step()
    assert (module(pictures).argmax(1) == labels).float().mean() > 0.8
