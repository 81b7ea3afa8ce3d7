"""The events of ``metrics.jsonl``: what each means, when it is written, and its fields.

The run's log writes them; a test holds what runs write against this table, and the page
``reference-events`` of the manual is made from it. ``NAME`` in a field stands for any name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal


@dataclass(frozen=True)
class Field:
    """A field of an event; ``only``: when it is there, if that is not always.

    A ``float`` that is not finite is written as the text ``nan``, ``inf`` or ``-inf``.
    """

    type: Any
    meaning: str
    only: str = ""


@dataclass(frozen=True)
class Event:
    """An event: what it tells and when, and its fields beside those of every event."""

    meaning: str
    fields: Mapping[str, Field]


_SEVERAL = "with several optimizers"
_FIRST: Mapping[str, Field] = MappingProxyType(
    {
        "recipe_digest": Field(str, "the SHA-256 of the resolved recipe"),
        "dtype": Field(Literal["float32", "bfloat16", "float16"], "the dtype of autocast"),
        "device": Field(str, "the device of the first rank: `cpu` or `cuda:0`, for example"),
        "world_size": Field(int, "how many ranks train together"),
        "parameters": Field(int, "how many values the parameters of the model have"),
        "matmul_precision": Field(
            Literal["highest", "high", "medium"], "the precision of float32 matrix products"
        ),
    }
)

COMMON: Mapping[str, Field] = MappingProxyType(
    {
        "event": Field(str, "the name of the event"),
        "step": Field(int, "optimizer steps done so far, skipped ones too"),
        "time": Field(float, "when the line was written, in seconds since 1970 (Unix time)"),
    }
)
"""The fields of every event; ``time`` is the last on its line."""

EVENTS: Mapping[str, Event] = MappingProxyType(
    {
        "start": Event("A run begins.", _FIRST),
        "resume": Event(
            "A run continues from a checkpoint. Steps that an earlier process took after that "
            "checkpoint are taken again: leave out earlier lines whose `step` is larger than this "
            "one's.",
            {
                **_FIRST,
                "checkpoint": Field(str, "the name of the checkpoint's file or folder"),
                "epoch": Field(int, "the epoch that it continues in, from 0"),
            },
        ),
        "train": Event(
            "The figures of one step: of every `log.every_steps`-th, and of the last one. They are "
            "of the whole job, not of one rank.",
            {
                "epoch": Field(int, "the epoch of the step, from 0"),
                "loss": Field(
                    float | None,
                    "the mean loss over the items of the step; null if it had no items. With "
                    "several optimizers: the sum of their losses",
                ),
                "lr": Field(
                    float,
                    "the learning rate, the largest of the parameter groups; with several "
                    "optimizers that of the first one that took part",
                ),
                "grad_norm": Field(
                    float | None,
                    "the 2-norm of the gradient, unscaled and before clipping; null if it was not "
                    "measured, because nobody knew that this step would be the last, or if the "
                    "step had no items",
                ),
                "underflow": Field(
                    float | None,
                    "the share of the gradient's values that float16 loses (they become 0) at this "
                    "scale; null in other dtypes, or if it was not measured",
                ),
                "headroom": Field(
                    float | None,
                    "how many times the scale could double before the largest gradient value "
                    "overflows float16; null in other dtypes, or if it was not measured",
                ),
                "activation_headroom": Field(
                    float | None,
                    "how many times the largest output of a module could double before it "
                    "overflows float16; null in other dtypes, or if it was not measured",
                ),
                "scale": Field(float, "the loss scale that the next step uses; 1 without scaling"),
                "skipped": Field(int, "steps skipped so far"),
                "updates": Field(int, "steps applied so far"),
                "samples": Field(int, "samples read so far"),
                "samples_per_s": Field(
                    float | None,
                    "samples in a second, over the last `log.every_steps` steps and at least one "
                    "second, without evaluations and saves; null if no step was timed yet",
                ),
                "step_ms": Field(
                    float | None, "milliseconds for a step, measured as `samples_per_s` is"
                ),
                "memory_mb": Field(
                    float,
                    "the peak of memory so far, in MiB: of the GPU (CUDA, XPU), or else of the "
                    "process",
                ),
                "loss/NAME": Field(
                    float, "the loss of optimizer NAME", f"{_SEVERAL}, if it took part in the step"
                ),
                "lr/NAME": Field(
                    float,
                    "the learning rate of optimizer NAME",
                    f"{_SEVERAL}, if it took part in the step",
                ),
                "grad_norm/NAME": Field(
                    float,
                    "the `grad_norm` of the parameters of optimizer NAME",
                    f"{_SEVERAL}, if it took part in the step and `grad_norm` was measured",
                ),
                "skipped/NAME": Field(int, "turns of optimizer NAME skipped so far", _SEVERAL),
                "updates/NAME": Field(int, "turns of optimizer NAME applied so far", _SEVERAL),
            },
        ),
        "skip": Event(
            "A step was skipped, because its gradient was not finite. Each one is written.",
            {
                "scale_before": Field(float, "the loss scale of this step"),
                "scale_after": Field(float, "the loss scale of the next step"),
                "consecutive": Field(
                    int,
                    "skipped steps in a row, this one counted; with several optimizers the skipped "
                    "turns in a row of one of them, if those are more",
                ),
                "optimizers": Field(list[str], "which optimizers made no update", _SEVERAL),
            },
        ),
        "eval": Event(
            "An evaluation has ended.",
            {
                "epoch": Field(int, "the epoch that it belongs to, from 0"),
                "eval/NAME": Field(
                    float, "the metric NAME of the task; every task has `eval/loss`"
                ),
            },
        ),
        "checkpoint": Event(
            "A checkpoint is on the disk, complete. `step` is the one that it holds.",
            {
                "path": Field(str, "its file or folder, relative to the run folder"),
                "seconds": Field(
                    float | None,
                    "how long training stood still for it; null if that is not known, because the "
                    "save was stuck",
                ),
                "bytes": Field(int, "its size"),
            },
        ),
        "diagnosis": Event(
            "The run stops, because too many steps in a row were not finite: what is at fault.",
            {
                "cause": Field(str, "what is at fault, in words"),
                "module": Field(str | None, "the module at fault, if one can be named"),
                "tensor": Field(str | None, "the tensor at fault, if one can be named"),
                "advice": Field(str, "what to change"),
            },
        ),
        "stop": Event(
            "The run has ended. It is missing if the process was killed.",
            {
                "reason": Field(
                    Literal[
                        "complete", "early_stop", "interrupted", "preempted", "nonfinite", "error"
                    ],
                    "why it ended",
                ),
                "exit_code": Field(int, "the exit code of the command"),
            },
        ),
    }
)
"""The fields of each event, in the order in which they are written."""
