"""A small convolutional classifier with GroupNorm, and generated pictures for it to learn.

GroupNorm and not BatchNorm: a forward must be a function of its microbatch. Shapes: N batch,
C channels, H and W pixels, K classes.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

GROUPS = 4
COLOURS = 3
FORMS = ("disc", "ring", "square", "frame", "plus")


def classifier(channels: int = 16, classes: int = 10, image: int = 16) -> "Classifier":
    """Return a classifier of pictures_NCHW of 3 x `image` x `image` into logits_NK.

    Raises ValueError if `channels` is not a multiple of 4 or `image` of 4.
    """
    if channels % GROUPS or image % 4:
        raise ValueError(f"channels {channels} and image {image} must be multiples of 4")
    return Classifier(channels, classes)


class Classifier(nn.Module):
    """Five layers; the picture is halved twice, the channels doubled twice."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            (
                _convolution(COLOURS, channels, stride=1),
                _convolution(channels, 2 * channels, stride=2),
                Residual(2 * channels),
                _convolution(2 * channels, 4 * channels, stride=2),
                nn.Sequential(
                    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * channels, classes)
                ),
            )
        )

    def forward(self, pictures_NCHW: Tensor) -> Tensor:
        """Return logits_NK."""
        hidden = pictures_NCHW
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


class Residual(nn.Module):
    """A convolution whose result is added to its input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.change = _convolution(channels, channels, stride=1)

    def forward(self, hidden_NCHW: Tensor) -> Tensor:
        """Return hidden_NCHW."""
        changed: Tensor = self.change(hidden_NCHW)
        return hidden_NCHW + changed


class Shapes(Dataset[tuple[Tensor, Tensor]]):
    """Pictures of one form each; the class is the form and whether it is light or dark."""

    def __init__(self, samples: int, image: int, noise: float, seed: int) -> None:
        self._samples = samples
        self._image = image
        self._noise = noise
        self._seed = seed

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return picture_CHW (float32) and its class (int64, 0-dim): a function of the index."""
        if not 0 <= index < self._samples:
            raise IndexError(f"sample {index} of {self._samples}")
        draw = np.random.default_rng((self._seed, index))
        label = index % (2 * len(FORMS))
        inside_HW = _form(FORMS[label // 2], self._image, draw)
        light = 1.0 if label % 2 else -1.0
        colour_C = light * draw.uniform(0.5, 1.0, COLOURS)
        picture = inside_HW[None] * colour_C[:, None, None]
        picture = picture + self._noise * draw.standard_normal(picture.shape)
        return torch.from_numpy(picture.astype(np.float32)), torch.tensor(label)


def shapes(samples: int = 1024, image: int = 16, noise: float = 0.1, seed: int = 0) -> Shapes:
    """Return a map-style dataset of 10 classes; `noise` is a standard deviation."""
    return Shapes(samples, image, noise, seed)


def _convolution(inputs: int, outputs: int, *, stride: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False),
        nn.GroupNorm(GROUPS, outputs),
        nn.ReLU(),
    )


def _form(name: str, image: int, draw: np.random.Generator) -> npt.NDArray[np.bool_]:
    radius = draw.uniform(0.2, 0.35) * image
    centre_y, centre_x = draw.uniform(radius, image - 1 - radius, 2)
    y, x = np.mgrid[:image, :image]
    round_HW = np.hypot(y - centre_y, x - centre_x)
    square_HW = np.maximum(abs(y - centre_y), abs(x - centre_x))
    cross_HW = np.minimum(abs(y - centre_y), abs(x - centre_x))
    masks: dict[str, npt.NDArray[np.bool_]] = {
        "disc": round_HW <= radius,
        "ring": (round_HW <= radius) & (round_HW > radius / 2),
        "square": square_HW <= radius,
        "frame": (square_HW <= radius) & (square_HW > radius / 2),
        "plus": (square_HW <= radius) & (cross_HW <= radius / 3),
    }
    return masks[name]
