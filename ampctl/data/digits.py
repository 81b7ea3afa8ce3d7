"""The 8x8 handwritten digits, carried in the package: real images on every machine."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

TEST_EVERY = 5


class Digits(Dataset[tuple[Tensor, Tensor]]):
    """1,797 handwritten digits: image float32 [1, 8, 8] in [0, 1], label int64.

    ``split``: every fifth image of each class, in file order, is ``test`` (355 images); the rest is
    ``train``.
    ``__getitems__`` gathers a whole batch at once: images [batch, 1, 8, 8], labels [batch].

    Source: E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine
    Learning Repository, 1998, https://doi.org/10.24432/C50P49, licence CC BY 4.0. This is its test
    part as scikit-learn ships it (``load_digits``); the pixels, 0 to 16, are divided by 16.
    """

    def __init__(self, split: Literal["train", "test"] = "train") -> None:
        if split not in ("train", "test"):
            raise ValueError(f'split is {split!r}; it must be "train" or "test"')
        file = resources.files("ampctl.data").joinpath("digits.npz")
        with file.open("rb") as stream, np.load(stream) as arrays:
            images, labels = arrays["images"], arrays["labels"]
        chosen = _is_test(labels) == (split == "test")
        self.images = torch.from_numpy(images[chosen].astype(np.float32) / 16).unsqueeze(1)
        self.labels = torch.from_numpy(labels[chosen].astype(np.int64))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], self.labels[index]

    def __getitems__(self, indices: Tensor | Sequence[int]) -> tuple[Tensor, Tensor]:
        chosen = torch.as_tensor(indices, dtype=torch.int64)
        return self.images.index_select(0, chosen), self.labels.index_select(0, chosen)


def _is_test(labels: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Mark every fifth sample of each class, so that both parts hold all classes alike."""
    test = np.zeros(len(labels), dtype=np.bool_)
    for label in np.unique(labels):
        test[np.flatnonzero(labels == label)[TEST_EVERY - 1 :: TEST_EVERY]] = True
    return test
