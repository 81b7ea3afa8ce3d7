"""A multilayer perceptron."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn


class MLP(nn.Module):
    """Linear layers with ReLU between them, and ``num_classes`` logits at the end.

    The input is flattened to [batch, ``in_features``]. ``hidden`` has the width of each hidden
    layer; ``dropout`` stands after each of them.
    """

    def __init__(
        self, in_features: int, hidden: Sequence[int], num_classes: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        width = in_features
        for next_width in hidden:
            layers += [nn.Linear(width, next_width), nn.ReLU(), nn.Dropout(dropout)]
            width = next_width
        self.layers = nn.Sequential(*layers, nn.Linear(width, num_classes))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits [batch, num_classes]."""
        logits: Tensor = self.layers(inputs.flatten(1))
        return logits
