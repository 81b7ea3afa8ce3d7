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
    example: str = "",
    *,
    many: bool = False,
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
) -> T:
    """Declare a recipe key: its default, a line of help and its limits (read by ``load``).

    ``example``: another value than the default, as YAML; a boolean needs none. ``many``: a block,
    or a mapping of names to blocks.
    """
    limits = {"above": above, "at_least": at_least, "below": below, "at_most": at_most}
    if isinstance(default, bool):
        example = example or ("false" if default else "true")
    metadata = {
        "help": help,
        "example": example,
        **{name: value for name, value in limits.items() if value is not None},
        **({"many": True} if many else {}),
    }
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def required(help: str, example: str, **limits: float) -> Any:
    """Declare a recipe key without a default; see :func:`key`."""
    return field(metadata={"help": help, "example": example, **limits})


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

    train: Block = required(
        "the data to train on: any Dataset or IterableDataset",
        "{_target_: ampctl.data.Digits, split: train}",
    )
    eval: Block | None = key(
        None,
        "the data to evaluate on; null: no evaluation",
        "{_target_: ampctl.data.Digits, split: test}",
    )
    batch_size: int = required(
        "samples per optimizer step, summed over all ranks", "64", at_least=1
    )
    micro_batch_size: int | Literal["auto"] | None = key(
        None,
        "samples per forward pass on one rank; null: batch_size / ranks; auto is refused so far",
        "16",
        at_least=1,
    )
    eval_batch_size: int | None = key(
        None, "samples per forward pass in evaluation; null: as in training", "256", at_least=1
    )
    num_workers: int = key(
        0, "processes that load data; 0: the training process loads it", "4", at_least=0
    )
    shuffle: bool = key(True, "a new order in each epoch, which depends on seed and epoch alone")
    drop_last: bool = key(False, "leave out the last batch of an epoch if it is short")
    collate_fn: Block | None = key(
        None,
        "a function that makes a batch of a list of samples; null: the data set's own, or torch's",
        "{_target_: torch.utils.data.default_collate}",
    )


@dataclass(frozen=True, kw_only=True)
class AmpConfig:
    """Mixed precision: the autocast dtype, the loss scale and what a non-finite step does."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = key(
        "auto", "the dtype of autocast; auto: one that the device computes in natively", "bfloat16"
    )
    init_scale: float = key(65536.0, "the first loss scale", "1024.0", above=0, at_most=FLOAT32_MAX)
    growth_factor: float = key(
        2.0, "factor on the scale after growth_interval clean steps", "1.5", above=1
    )
    backoff_factor: float = key(
        0.5, "factor on the scale after an overflow", "0.25", above=0, below=1
    )
    growth_interval: int = key(
        2000, "clean steps in a row before the scale grows", "500", at_least=1, at_most=INT32_MAX
    )
    min_scale: float = key(
        1.0,
        "the smallest scale; torch's own scaler has no such floor and falls to 0",
        "128.0",
        at_least=0,
    )
    max_scale: float | None = key(None, "the largest scale; null: no limit", "16777216.0", above=0)
    hysteresis: int = key(
        1,
        "how many overflows, since the scale last grew, make it back off; 1: each of them does",
        "2",
        at_least=1,
        at_most=INT32_MAX,
    )
    static: bool = key(
        False, "keep the scale at init_scale; a step that overflows is still skipped"
    )
    clip_norm: float | None = key(
        None,
        "the largest 2-norm of the unscaled gradient; null: measured, not clipped",
        "1.0",
        above=0,
    )
    clip_value: float | None = key(
        None,
        "the largest absolute value in the unscaled gradient; null: not clipped",
        "0.5",
        above=0,
        at_most=FLOAT32_MAX,
    )
    max_skips: int = key(
        25, "non-finite steps in a row after which the run stops, with code 3", "10", at_least=1
    )
    nonfinite: Literal["skip", "stop"] = key(
        "skip",
        "what a non-finite gradient does, in every dtype: skip the step, or stop the run",
        "stop",
    )
    modules: Mapping[str, DType] = key(
        {},
        "modules that compute in a dtype of their own: globs of their names, each with a dtype",
        "{head: float32}",
    )
    upcast: bool = key(
        False,
        "keep float32 copies (masters) of trainable half-precision parameters, and train those",
    )
    all_or_nothing: bool = key(
        False, "with several optimizers, an overflow of one takes back the step of all"
    )
    matmul_precision: Literal["highest", "high", "medium"] = key(
        "highest",
        "how float32 matrix products are computed: in float32 (highest), tf32 (high) or bfloat16 "
        "(medium)",
        "high",
    )
    reduced_precision_reduction: bool = key(
        True, "let CUDA add up half-precision matrix products in half precision"
    )
    cache_enabled: bool = key(True, "let autocast keep the low-precision copies of weights")


@dataclass(frozen=True, kw_only=True)
class EarlyStopConfig:
    """Stop when a metric has not improved for some evaluations."""

    monitor: str = key("eval/loss", "the metric to watch", "eval/accuracy")
    mode: Literal["min", "max"] = key("min", "whether a lower or a higher value is better", "max")
    patience: int = key(
        5, "evaluations without improvement after which the run stops", "3", at_least=1
    )


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long to train, on what, and what is kept beside the weights."""

    max_steps: int | None = key(
        None,
        "optimizer steps, skipped ones too; this or max_epochs is needed, the first reached ends "
        "the run",
        "1000",
        at_least=1,
    )
    max_epochs: int | None = key(
        None, "passes over the training data; this or max_steps is needed", "20", at_least=1
    )
    eval_every_steps: int | None = key(
        None, "steps between evaluations; null: one at the end of each epoch", "200", at_least=1
    )
    device: str = key("auto", "the device: auto, cpu, cuda, cuda:1, mps or xpu", "cpu")
    compile: bool | Mapping[str, Any] = key(
        False, "compile the model: true, or the arguments of torch.compile", "{dynamic: false}"
    )
    channels_last: bool = key(False, "channels-last memory format for 4-d and 5-d tensors")
    ema_decay: float | None = key(
        None,
        "decay of an exponential moving average of the weights; null: no average",
        "0.999",
        above=0,
        below=1,
    )
    deterministic: bool = key(False, "deterministic kernels only; slower on a GPU")
    early_stop: EarlyStopConfig | None = key(
        None, "stop when a metric no longer improves; null: never", "{patience: 3}"
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When the state is saved, and which files are kept."""

    every_steps: int | None = key(
        None,
        "steps between saves; null: at the end of each epoch, unless every_minutes is set. The "
        "last step is always saved",
        "500",
        at_least=1,
    )
    every_minutes: float | None = key(
        None, "minutes between saves; null: not by the clock", "30", above=0
    )
    keep_last: int = key(3, "how many of the newest files are kept", "1", at_least=1)
    keep_best: int = key(1, "how many of the best files are kept, by monitor", "2", at_least=0)
    monitor: str = key("eval/loss", "the metric that decides which is best", "eval/accuracy")
    mode: Literal["min", "max"] = key("min", "whether a lower or a higher value is better", "max")
    asynchronous: bool = key(True, "write the file while training continues")


@dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """Several processes."""

    strategy: Literal["ddp", "fsdp"] = key(
        "ddp", "whether each rank holds the whole model (ddp) or a shard of it (fsdp)", "fsdp"
    )
    backend: Literal["auto", "nccl", "gloo"] = key(
        "auto", "how ranks communicate; auto: nccl on CUDA, gloo elsewhere", "gloo"
    )
    blocks: str | tuple[str, ...] | None = key(
        None,
        "with fsdp, globs of the modules that are sharded; null: the largest list of like modules",
        '["layers.*"]',
    )
    find_unused_parameters: bool = key(False, "allow parameters that take no part in the loss")
    timeout_minutes: float = key(
        10.0, "how long a rank waits for the others", "30.0", above=0, at_most=MINUTES_OF_A_YEAR
    )


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """What is written while training."""

    every_steps: int = key(10, "steps between train events in metrics.jsonl", "50", at_least=1)
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = key(
        (), "where else figures go; only the empty list is taken so far", "[]"
    )


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One training run, completely: what a run folder's ``recipe.yaml`` holds."""

    name: str = required("the name of the run, and of the folder of its runs", "my-run")
    seed: int = key(0, "every random number follows from it", "1", at_least=0, at_most=2**63 - 1)
    model: Block = required(
        "any callable that returns an nn.Module",
        "{_target_: ampctl.models.ConvNet, num_classes: 10}",
    )
    task: Block = required(
        "how a batch becomes a loss and metrics", "{_target_: ampctl.tasks.Classification}"
    )
    data: DataConfig = required(
        "the data, and how it forms batches",
        "{train: {_target_: ampctl.data.Digits, split: train}, batch_size: 64}",
    )
    optimizer: Block = required(
        "any torch optimizer; several: names, each with a block and its params, a glob",
        "{_target_: torch.optim.AdamW, lr: 3e-3}",
        many=True,
    )
    scheduler: Block | None = key(
        None,
        "a schedule of ampctl.schedules or of torch; null: a constant rate; several: by optimizer",
        "{_target_: ampctl.schedules.Cosine, warmup_steps: 20}",
        many=True,
    )
    amp: AmpConfig = field(default_factory=AmpConfig, metadata={"help": "mixed precision"})
    train: TrainConfig = field(
        default_factory=TrainConfig,
        metadata={"help": "how long to train, and on what", "example": "{max_epochs: 20}"},
    )
    checkpoint: CheckpointConfig = field(
        default_factory=CheckpointConfig, metadata={"help": "when to save, and what is kept"}
    )
    distributed: DistributedConfig = field(
        default_factory=DistributedConfig, metadata={"help": "several processes"}
    )
    log: LogConfig = field(default_factory=LogConfig, metadata={"help": "what is written"})
