"""The recipe as data: every key, its type, its limits and its default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

T = TypeVar("T")

Block = Mapping[str, Any]
"""A ``_target_`` block: an import path and the keyword arguments to call it with."""

DType = Literal["float32", "bfloat16", "float16"]

TARGET = "_target_"

FLOAT32_MAX = 3.4e38
INT32_MAX = 2**31 - 1
MINUTES_OF_A_YEAR = 525_600


def key(
    default: T,
    help: str,
    *,
    many: bool = False,
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
) -> T:
    """Declare a recipe key: its default, a line of help and its limits (read by ``load``).

    ``many``: a block, or a mapping of names to blocks.
    """
    limits = {"above": above, "at_least": at_least, "below": below, "at_most": at_most}
    metadata = {
        "help": help,
        **{name: value for name, value in limits.items() if value is not None},
        **({"many": True} if many else {}),
    }
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def required(help: str, **limits: float) -> Any:
    """Declare a recipe key without a default."""
    return field(metadata={"help": help, **limits})


def by_name(block: Block | None) -> dict[str, Block]:
    """Return the blocks of a key that takes one or several: by name, one alone as ``""``."""
    if block is None:
        return {}
    return {"": block} if TARGET in block else dict(block)


def block_key(section: str, name: str) -> str:
    """Return the key of one of the blocks of :func:`by_name`: ``optimizer.NAME``, say."""
    return f"{section}.{name}" if name else section


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where samples come from, and how they form optimizer steps."""

    train: Block = required("any Dataset or IterableDataset")
    eval: Block | None = key(None, "the Dataset to evaluate on")
    batch_size: int = required("samples per optimizer step, summed over all ranks", at_least=1)
    micro_batch_size: int | Literal["auto"] | None = key(
        None,
        "samples per forward pass on one rank; null: batch_size / ranks; auto: what fits",
        at_least=1,
    )
    eval_batch_size: int | None = key(
        None, "samples per forward pass in evaluation; null: as in training", at_least=1
    )
    num_workers: int = key(0, "processes that load data; 0: in the training process", at_least=0)
    shuffle: bool = key(True, "a new order each epoch, a pure function of (seed, epoch)")
    drop_last: bool = key(False, "leave out the last batch of an epoch if it is short")
    collate_fn: Block | None = key(
        None, "a function that makes a batch of a list of samples; null: the data set's, or torch's"
    )


@dataclass(frozen=True, kw_only=True)
class AmpConfig:
    """Mixed precision: the autocast dtype, the loss scale and what a non-finite step does."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = key(
        "auto", "autocast dtype; auto: what the device does natively"
    )
    init_scale: float = key(65536.0, "the first loss scale", above=0, at_most=FLOAT32_MAX)
    growth_factor: float = key(
        2.0, "factor on the scale after growth_interval clean steps", above=1
    )
    backoff_factor: float = key(0.5, "factor on the scale after an overflow", above=0, below=1)
    growth_interval: int = key(
        2000, "clean steps in a row before the scale grows", at_least=1, at_most=INT32_MAX
    )
    min_scale: float = key(
        1.0, "floor of the scale; torch itself has none and falls to 0", at_least=0
    )
    max_scale: float | None = key(None, "ceiling of the scale", above=0)
    hysteresis: int = key(
        1, "overflows tolerated before the scale backs off", at_least=1, at_most=INT32_MAX
    )
    static: bool = key(False, "init_scale for ever; an overflowing step is still skipped")
    clip_norm: float | None = key(
        None, "largest 2-norm of the unscaled gradient; null: measured, not clipped", above=0
    )
    clip_value: float | None = key(
        None, "largest absolute value of an unscaled gradient element", above=0, at_most=FLOAT32_MAX
    )
    max_skips: int = key(25, "non-finite steps in a row after which the run stops", at_least=1)
    nonfinite: Literal["skip", "stop"] = key(
        "skip", "what a non-finite gradient does, in every dtype"
    )
    modules: Mapping[str, DType] = key({}, "glob of module name -> dtype")
    upcast: bool = key(False, "make float32 masters of trainable half-precision parameters")
    all_or_nothing: bool = key(
        False, "several optimizers: an overflow of one takes back the step of all"
    )
    matmul_precision: Literal["highest", "high", "medium"] = key(
        "highest", "float32 matrix products: highest: float32; high: tf32; medium: bfloat16"
    )
    reduced_precision_reduction: bool = key(
        True, "let CUDA add up half-precision matrix products in half precision"
    )
    cache_enabled: bool = key(True, "let autocast keep the low-precision copies of weights")


@dataclass(frozen=True, kw_only=True)
class EarlyStopConfig:
    """Stop when a metric has not improved for some evaluations."""

    monitor: str = key("eval/loss", "the metric to watch")
    mode: Literal["min", "max"] = key("min", "whether less or more of it is better")
    patience: int = key(5, "evaluations without improvement before the run stops", at_least=1)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long to train, on what, and what is kept beside the weights."""

    max_steps: int | None = key(None, "optimizer steps attempted; this or max_epochs", at_least=1)
    max_epochs: int | None = key(None, "passes over the training data", at_least=1)
    eval_every_steps: int | None = key(
        None, "evaluate each so many steps; null: at each epoch's end", at_least=1
    )
    device: str = key("auto", "auto, cpu, cuda, cuda:1, mps or xpu")
    compile: bool | Mapping[str, Any] = key(False, "true, or the arguments of torch.compile")
    channels_last: bool = key(False, "channels-last memory format for 4-d and 5-d tensors")
    ema_decay: float | None = key(
        None, "decay of an exponential moving average of the weights", above=0, below=1
    )
    deterministic: bool = key(False, "deterministic kernels only; slower on a GPU")
    early_stop: EarlyStopConfig | None = key(None, "stop when a metric no longer improves")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When the state is saved, and which files are kept."""

    every_steps: int | None = key(
        None, "save each so many steps; null: each epoch's end", at_least=1
    )
    every_minutes: float | None = key(None, "save each so many minutes", above=0)
    keep_last: int = key(3, "newest files kept", at_least=1)
    keep_best: int = key(1, "best files kept, by monitor", at_least=0)
    monitor: str = key("eval/loss", "the metric that tells the best")
    mode: Literal["min", "max"] = key("min", "whether less or more of it is better")
    asynchronous: bool = key(True, "write while training goes on")


@dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """Several processes."""

    strategy: Literal["ddp", "fsdp"] = key("ddp", "how the model is spread over ranks")
    backend: Literal["auto", "nccl", "gloo"] = key("auto", "auto: nccl on CUDA, gloo elsewhere")
    blocks: str | tuple[str, ...] | None = key(
        None, "fsdp: globs of the modules that are sharded; null: the largest list of like modules"
    )
    find_unused_parameters: bool = key(False, "allow parameters that take no part in the loss")
    timeout_minutes: float = key(
        10.0, "how long a rank waits for the others", above=0, at_most=MINUTES_OF_A_YEAR
    )


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """What is written while training."""

    every_steps: int = key(10, "a line of metrics each so many steps", at_least=1)
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = key(
        (), "tensorboard, wandb, mlflow"
    )


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One training run, completely: what a run folder's ``recipe.yaml`` holds."""

    name: str = required("names the run folder")
    seed: int = key(0, "every random number follows from it", at_least=0, at_most=2**63 - 1)
    model: Block = required("any callable that returns an nn.Module")
    task: Block = required("how a batch becomes a loss and metrics")
    data: DataConfig = required("what is trained on")
    optimizer: Block = required(
        "any torch optimizer; several: names, each with a block and its params, a glob", many=True
    )
    scheduler: Block | None = key(
        None, "a schedule of ampctl.schedules or of torch; several: by optimizer", many=True
    )
    amp: AmpConfig = field(default_factory=AmpConfig, metadata={"help": "mixed precision"})
    train: TrainConfig = field(default_factory=TrainConfig, metadata={"help": "the run"})
    checkpoint: CheckpointConfig = field(
        default_factory=CheckpointConfig, metadata={"help": "saving"}
    )
    distributed: DistributedConfig = field(
        default_factory=DistributedConfig, metadata={"help": "several processes"}
    )
    log: LogConfig = field(default_factory=LogConfig, metadata={"help": "what is written"})
