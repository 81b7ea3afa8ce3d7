"""A small convolutional network for images of 8x8 to 32x32 pixels."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class ConvNet(nn.Module):
    """Two 3x3 convolutions with BatchNorm, ReLU and pooling, then a classifier of two layers.

    Takes images [batch, ``in_channels``, height, width] of at least 8x8 pixels; what is left of
    them after pooling is averaged to 2x2. The convolutions have ``width`` and twice ``width``
    channels; the classifier has ``hidden`` units, ``dropout`` before them, and ``num_classes``
    logits. Much of its arithmetic is in matrix products, since float16 convolutions have no fast
    backward on a CPU.
    """

    def __init__(
        self,
        num_classes: int = 10,
        in_channels: int = 1,
        width: int = 32,
        hidden: int = 128,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.features = nn.Sequential(_block(in_channels, width), _block(width, 2 * width))
        self.classifier = nn.Sequential(
            nn.Dropout(dropout),
            nn.Linear(4 * 2 * width, hidden),
            nn.ReLU(inplace=True),
            nn.Linear(hidden, num_classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [batch, num_classes]; ValueError for images below 8x8 pixels."""
        if min(images.shape[-2:]) < 8:
            raise ValueError(f"ConvNet takes images of 8x8 pixels or more, not {images.shape[-2:]}")
        features: Tensor = self.features(images)
        height, width = features.shape[-2:]
        if (height, width) != (2, 2):
            stride = (height // 2, width // 2)
            features = F.avg_pool2d(features, (height - stride[0], width - stride[1]), stride)
        logits: Tensor = self.classifier(features.flatten(1))
        return logits


def _block(in_channels: int, out_channels: int) -> nn.Sequential:
    return nn.Sequential(
        # BatchNorm subtracts the mean, so a bias before it would do nothing.
        nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
    )
