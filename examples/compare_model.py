"""A convolutional net of one's own for compare.toml: sordino sweep compare.toml --with compare_model.py."""

from torch import nn

import sordino as so


@so.add_model("digit_cnn")
def digit_cnn(shape: tuple[int, ...], classes: int, channels: int = 16) -> nn.Module:
    """Two convolutions and one linear layer for images of 8x8 pixels."""
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(channels, 2 * channels, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * channels, classes),
    )
