"""What recipes can ask for beside the plain step: each is trained on the device and on the CPU.

The whole loop runs, with evaluation and saves in a thread. Counters and the loss scale must be the
same, and the weights as near as the two devices' arithmetic lets them be.
"""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import gan_parts
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, default_collate

from ampctl.recipe.load import parse_recipe
from ampctl.run import worker
from gpu_checks import parts
from gpu_checks.check import (
    Check,
    CheckFailed,
    CheckSkipped,
    Finding,
    Setup,
    first_difference,
    require,
)
from gpu_checks.parts import Batch, Block, Images, target

NUM_STEPS = 12
COUNTERS = ("step", "updates", "skipped", "samples", "epoch", "batch_in_epoch")
FLOAT16 = {"dtype": "float16", "init_scale": 1024.0, "growth_interval": 4, "clip_norm": 1.0}


@dataclass
class Encoded:
    """A batch that moves and pins itself, as a tokenizer's output does; no tuple, no mapping."""

    images: Tensor
    labels: Tensor
    was_pinned: bool = False

    def to(self, device: torch.device, non_blocking: bool = False) -> Encoded:
        """Return the batch on a device."""
        moved = (part.to(device, non_blocking=non_blocking) for part in (self.images, self.labels))
        return Encoded(*moved, was_pinned=self.images.is_pinned())

    def pin_memory(self) -> Encoded:
        """Return the batch in page-locked memory."""
        return Encoded(self.images.pin_memory(), self.labels.pin_memory())


class EncodedImages(Images):
    """Images that a collator of their own makes batches of."""

    @staticmethod
    def collate_fn(samples: list[Batch]) -> Encoded:
        """Return the samples as one object."""
        return Encoded(*default_collate(samples))


class ImageStream(IterableDataset[Batch]):
    """The images of `Images`, one after the other."""

    def __init__(self, size: int, bad: tuple[int, ...] = ()) -> None:
        self.images = Images(size, bad)

    def __iter__(self) -> Iterator[Batch]:
        for index in range(len(self.images)):
            yield self.images[index]


class Encodings:
    """Cross entropy of an `Encoded` batch, which must have been pinned where that is of use."""

    def loss(self, model: nn.Module, batch: Encoded) -> Tensor:
        """Return the mean loss."""
        if batch.images.is_cuda and not batch.was_pinned:
            raise CheckFailed("the batch did not come from page-locked memory")
        return nn.functional.cross_entropy(model(batch.images).float(), batch.labels)

    def num_items(self, batch: Encoded) -> int:
        """Count the samples."""
        return len(batch.labels)


@dataclass(frozen=True)
class Feature:
    """A recipe's blocks, and how far the weights of the two devices may be apart."""

    blocks: Mapping[str, Block]
    bound: float = 2e-2
    data: Block = field(default_factory=lambda: target(Images, size=40, bad=[5]))
    evaluated: Block | None = None


def _gan(penalty: float, **amp: Any) -> Feature:
    module = gan_parts.__name__
    optimizer = {"_target_": "torch.optim.Adam", "lr": 1e-2}
    return Feature(
        {
            "model": {"_target_": f"{module}.Pair"},
            "task": {"_target_": f"{module}.Gan", "every": 2, "penalty": penalty},
            "optimizer": {
                "critic": {**optimizer, "params": "critic.*"},
                "generator": {**optimizer, "params": "generator.*"},
            },
            "amp": {**FLOAT16, **amp},
        },
        data={"_target_": f"{module}.Points", "size": 40, "bad_real": [5]},
    )


ADAGRAD = {"_target_": "torch.optim.Adagrad", "lr": 1e-2}
FEATURES: Mapping[str, Feature] = {
    "turns": _gan(0.0),
    "all-or-nothing": _gan(0.0, all_or_nothing=True),
    "penalty": _gan(0.1),
    "lbfgs": Feature(
        {
            "model": target(parts.SmallNet, width=2),
            "optimizer": {"_target_": "torch.optim.LBFGS", "lr": 0.1, "max_iter": 3},
            "amp": {"dtype": "bfloat16", "clip_norm": 1.0},
        },
        bound=0.2,  # its line of steps ends where rounding says
    ),
    "ema": Feature({"train": {"ema_decay": 0.8}, "amp": FLOAT16}),
    "adagrad-fused": Feature({"optimizer": ADAGRAD | parts.FUSED, "amp": FLOAT16}),
    "stream": Feature(
        {"amp": FLOAT16},
        data=target(ImageStream, size=40, bad=[5]),
        evaluated=target(Images, size=8),
    ),
    "workers": Feature(
        {"task": target(Encodings), "data": {"num_workers": 2}, "amp": FLOAT16},
        data=target(EncodedImages, size=40, bad=[5]),
    ),
}


def feature(name: str) -> Check:
    """Return the check that a feature trains on the device as it does on the CPU."""
    return partial(_alike, FEATURES[name])


def _alike(feature: Feature, setup: Setup) -> Finding:
    cpu = torch.device("cpu")
    runs = [_trained(feature, device) for device in (setup.device, cpu)]
    ours, theirs = runs
    kept = [
        {**run["scaler"], **{n: run["progress"][n] for n in COUNTERS}} for run in (ours, theirs)
    ]
    difference = first_difference(*kept)
    require(difference is None, f"{difference} ({setup.device}, cpu)")
    require(ours["progress"]["skipped"] > 0, "no step was skipped, so that none would be seen")
    furthest = max(
        _distance(ours[part][name], value)
        for part in ("model", "ema")
        for name, value in (theirs[part] or {}).items()
        if value.is_floating_point()
    )
    require(furthest <= feature.bound, f"weights are apart by {furthest:.2g}")
    return Finding(
        f"{ours['progress']['step']} steps, {ours['progress']['skipped']} skipped: counters and "
        f"scale of {setup.device} are those of the CPU, weights apart by at most {furthest:.2g}",
        {"furthest": furthest, "bound": feature.bound},
    )


def _distance(ours: Tensor, theirs: Tensor) -> float:
    return ((ours - theirs).abs() / (1 + theirs.abs())).max().item()


def _trained(feature: Feature, device: torch.device) -> dict[str, Any]:
    """Train a recipe with the real loop; return its last checkpoint."""
    evaluated = feature.evaluated or feature.data
    data = {"train": feature.data, "eval": evaluated, "batch_size": 8, "micro_batch_size": 4}
    blocks: dict[str, Any] = dict(feature.blocks)
    blocks["data"] = {**data, **blocks.get("data", {})}
    blocks["train"] = {"max_steps": NUM_STEPS, **blocks.get("train", {})}
    blocks["checkpoint"] = {"every_steps": 3}
    with tempfile.TemporaryDirectory() as folder, _records_in(Path(folder, "records")):
        run_dir = Path(folder, "run")
        _train(parts.recipe_text(device, **blocks), run_dir)
        path = run_dir / "checkpoints" / "latest.pt"
        saved: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return saved


def _train(text: str, run_dir: Path) -> None:
    """Train a recipe in this process, without a word."""
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        loaded = parse_recipe(text, where="gpu_check")
        worker.train(loaded, run_dir=run_dir, resume=False, quiet=True)


@contextmanager
def _records_in(folder: Path) -> Iterator[None]:
    """Keep what training records of trusted recipes away from the user's."""
    before = os.environ.get("XDG_STATE_HOME")
    os.environ["XDG_STATE_HOME"] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ["XDG_STATE_HOME"]
        else:
            os.environ["XDG_STATE_HOME"] = before


def compiled(setup: Setup) -> Finding:
    """Check that a compiled model trains as the plain one does, on one micro-batch and on two."""
    device = setup.device
    options = {"mode": "default"} if device.type == "cuda" else {"backend": "aot_eager"}
    furthest = _furthest_compiled(setup, options)
    return Finding(f"compiled and plain, apart by at most {furthest:.2g}", {"furthest": furthest})


def compiled_graphs(setup: Setup) -> Finding:
    """Check that CUDA graphs leave accumulated gradients as they are."""
    if setup.device.type != "cuda":
        raise CheckSkipped("mode: reduce-overhead makes graphs on CUDA only")
    furthest = _furthest_compiled(setup, {"mode": "reduce-overhead"})
    return Finding(
        f"CUDA graphs and plain, apart by at most {furthest:.2g}", {"furthest": furthest}
    )


def _furthest_compiled(setup: Setup, options: Block) -> float:
    furthest = 0.0
    batches = [parts.moved(parts.image_batch(6, seed=i), setup.device) for i in range(12)]
    for count in (1, 2):
        windows = [batches[i : i + count] for i in range(0, len(batches), count)]
        ends = []
        for compile_ in (False, options):
            train = {"compile": compile_, "max_steps": 12}
            state = parts.build_state(setup.device, train=train, amp={"dtype": "bfloat16"})
            reports = parts.run(state, windows)
            require(not any(r.skipped for r in reports), "a step was skipped")
            ends.append({n: v.detach().cpu() for n, v in state.bare.state_dict().items()})
        apart = (_distance(ends[1][n].float(), v.float()) for n, v in ends[0].items())
        furthest = max(furthest, *apart)
        require(furthest <= 5e-2, f"{count} micro-batches: weights are apart by {furthest:.2g}")
    return furthest


def saves(setup: Setup) -> Finding:
    """Check that files written beside the training are those of a run that waits for them."""
    files: list[dict[str, Any]] = []
    for asynchronous in (True, False):
        text = parts.recipe_text(
            setup.device,
            data={"train": target(Images, size=48, bad=[5]), "batch_size": 8},
            amp=FLOAT16,
            train={"max_steps": NUM_STEPS, "ema_decay": 0.9, "deterministic": True},
            checkpoint={"every_steps": 1, "keep_last": 99, "asynchronous": asynchronous},
        )
        with tempfile.TemporaryDirectory() as folder, _records_in(Path(folder, "records")):
            run_dir = Path(folder, "run")
            _train(text, run_dir)
            found = sorted((run_dir / "checkpoints").glob("step-*.pt"))
            read = [torch.load(path, map_location="cpu", weights_only=True) for path in found]
        kept = ("model", "optimizer", "ema", "scaler", "progress")
        files.append({f"step {i + 1}": {k: r[k] for k in kept} for i, r in enumerate(read)})
    difference = first_difference(*files)
    require(difference is None, f"{difference} (asynchronous, synchronous)")
    return Finding(f"{len(files[0])} files written beside the training, each equal to the bit")
