"""What the checks train: models, data and tasks that recipes name, and the states built of them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import yaml
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from ampctl.builder.job import build_job
from ampctl.engine.state import StepReport, TrainState
from ampctl.engine.step import settle, train_step
from ampctl.recipe.load import LoadedRecipe, parse_recipe

Block = Mapping[str, Any]
Batch = tuple[Tensor, Tensor]

DTYPES = ("float32", "bfloat16", "float16")
ADAMW = {"_target_": "torch.optim.AdamW", "lr": 1e-2, "weight_decay": 0.1}
SGD = {"_target_": "torch.optim.SGD", "lr": 0.1, "momentum": 0.9}
PLAIN, FOREACH, FUSED = {"foreach": False, "fused": False}, {"foreach": True}, {"fused": True}
OPTIMIZERS: Mapping[str, Mapping[str, Any]] = {
    "AdamW, plain": ADAMW | PLAIN,
    "AdamW, foreach": ADAMW | FOREACH,
    "AdamW, fused": ADAMW | FUSED,
    "SGD, fused": SGD | FUSED,
    "SGD, plain": SGD | PLAIN,
    "SGD, foreach": SGD | FOREACH,
}

SEED = 1
CLASSES = 4
SIZE = 8  # pixels of a small image, a side


class SmallNet(nn.Module):
    """Convolutions with BatchNorm, and dropout if asked: what a skipped step could spoil."""

    def __init__(self, width: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, width, 3, padding=1)
        self.first_norm = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.second_norm = nn.BatchNorm2d(2 * width)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(2 * width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [batch, classes]."""
        hidden = F.relu(self.first_norm(self.first(images)))
        hidden = F.relu(self.second_norm(self.second(hidden)))
        # A mean, not a pooling layer: the backward of those is not deterministic on CUDA.
        logits: Tensor = self.head(self.dropout(hidden.mean((2, 3))))
        return logits


class HalfNet(nn.Module):
    """Linear layers whose weights, and so gradients, are bfloat16 themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(SIZE * SIZE, 16), nn.ReLU(), nn.Linear(16, CLASSES))
        self.to(torch.bfloat16)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [batch, classes]."""
        logits: Tensor = self.layers(images.flatten(1).to(torch.bfloat16))
        return logits


class ResNet(nn.Module):
    """A residual network of bottlenecks; the defaults are ResNet-50, with 25.6 M parameters.

    Source: He et al., "Deep Residual Learning for Image Recognition", 2016; the stride is in the
    3x3 convolution, as torchvision has it.
    """

    def __init__(
        self, depths: Sequence[int] = (3, 4, 6, 3), width: int = 64, num_classes: int = 1000
    ) -> None:
        super().__init__()
        self.stem = _convolution(3, width, 7, 2)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        blocks: list[nn.Module] = []
        channels = width
        for stage, depth in enumerate(depths):
            for i in range(depth):
                stride = 2 if stage > 0 and i == 0 else 1
                blocks.append(Bottleneck(channels, width * 2**stage, stride))
                channels = 4 * width * 2**stage
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map images [batch, 3, height, width] to logits [batch, num_classes]."""
        hidden = self.blocks(self.pool(F.relu(self.stem(images))))
        logits: Tensor = self.head(hidden.mean((2, 3)))
        return logits


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions, added to a shortcut; four times as wide at the end."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.narrow = _convolution(inputs, width, 1)
        self.spatial = _convolution(width, width, 3, stride)
        self.widen = _convolution(width, 4 * width, 1)
        alike = stride == 1 and inputs == 4 * width
        self.shortcut = nn.Identity() if alike else _convolution(inputs, 4 * width, 1, stride)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map [batch, inputs, height, width] to [batch, 4 * width, ...]."""
        hidden = F.relu(self.spatial(F.relu(self.narrow(inputs))))
        return F.relu(self.widen(hidden) + self.shortcut(inputs))


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(outputs),
    )


class Probability(nn.Module):
    """One probability for each image, as a network has it that is trained with BCELoss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(SIZE * SIZE, 1), nn.Sigmoid())

    def forward(self, images: Tensor) -> Tensor:
        """Return probabilities [batch]."""
        probabilities: Tensor = self.layers(images).squeeze(1)
        return probabilities


class BinaryTask:
    """Cross entropy of probabilities, which CUDA autocast refuses."""

    def __init__(self) -> None:
        self.criterion = nn.BCELoss()

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean loss of the batch: whether the label is the first one."""
        images, labels = batch
        loss: Tensor = self.criterion(model(images), (labels == 0).float())
        return loss


class Images(Dataset[Batch]):
    """Images and labels made from their index alone; those in ``bad`` hold an inf."""

    def __init__(self, size: int = 64, bad: Sequence[int] = (), pause_s: float = 0.0) -> None:
        self.size, self.bad, self.pause_s = size, frozenset(bad), pause_s

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Batch:
        time.sleep(self.pause_s)
        image, label = (part[0] for part in image_batch(1, seed=index))
        return (spoiled((image[None], label))[0][0] if index in self.bad else image), label


class Unread(Dataset[Batch]):
    """Stands where a recipe wants data, for a check that has its own batches."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Batch:
        raise AssertionError("the check reads no data of the recipe's")


def image_batch(count: int, seed: int = 0) -> Batch:
    """Return small images [count, 1, SIZE, SIZE] and labels, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(count, 1, SIZE, SIZE, generator=generator)
    return images, torch.randint(0, CLASSES, (count,), generator=generator)


def token_batch(count: int, time_steps: int, vocab_size: int, seed: int = 0) -> Batch:
    """Return tokens [count, time_steps] and the ones that follow them, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocab_size, (count, time_steps + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def spoiled(batch: Batch) -> Batch:
    """Return the batch with an inf in its first image."""
    images = batch[0].clone()
    images[0, 0, 0, 0] = torch.inf
    return images, batch[1]


def moved(batch: Batch, device: torch.device) -> Batch:
    """Return the batch on a device."""
    return batch[0].to(device), batch[1].to(device)


def target(kind: type, **arguments: Any) -> Block:
    """Return the block of a recipe that builds an object of this class."""
    return {"_target_": f"{kind.__module__}.{kind.__qualname__}", **arguments}


def recipe_text(device: torch.device, **blocks: Block) -> str:
    """Return a recipe; ``blocks`` are laid over one that trains a SmallNet for 1000 steps."""
    whole: dict[str, Any] = {
        "name": "gpu-check",
        "model": target(SmallNet),
        "task": {"_target_": "ampctl.tasks.Classification"},
        "data": {"train": target(Unread), "batch_size": 1},
        "optimizer": {"_target_": "torch.optim.AdamW", "lr": 1e-2},
    }
    whole |= blocks
    whole["train"] = {"max_steps": 1000, "device": str(device), **blocks.get("train", {})}
    return yaml.safe_dump(whole, sort_keys=False)


def load(device: torch.device, **blocks: Block) -> LoadedRecipe:
    """Return :func:`recipe_text`, loaded."""
    return parse_recipe(recipe_text(device, **blocks), where="gpu_check")


def build_state(device: torch.device, **blocks: Block) -> TrainState:
    """Build the state that the recipe of :func:`recipe_text` trains."""
    return build_job(load(device, **blocks)).state


def run(state: TrainState, windows: Sequence[Sequence[Batch]]) -> list[StepReport]:
    """Train on the windows, with dropout seeded; return every step's report."""
    torch.manual_seed(SEED)
    reports = [train_step(state, window, measure=True) for window in windows]
    return [report for report in [*reports, settle(state)] if report is not None]
