"""Words for a wrong name: the key that was probably meant, the names that are near."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

_FEW = 5

# What other tools call a key, and arguments of blocks that people put one level too high.
_KNOWN_ELSEWHERE: Mapping[str, str] = MappingProxyType(
    {
        "learning_rate": "optimizer.lr",
        "lr": "optimizer.lr",
        "weight_decay": "optimizer.weight_decay",
        "momentum": "optimizer.momentum",
        "betas": "optimizer.betas",
        "lr_scheduler": "scheduler",
        "warmup_steps": "scheduler.warmup_steps",
        "final_ratio": "scheduler.final_ratio",
        "epochs": "train.max_epochs",
        "num_epochs": "train.max_epochs",
        "num_train_epochs": "train.max_epochs",
        "steps": "train.max_steps",
        "num_steps": "train.max_steps",
        "max_iters": "train.max_steps",
        "early_stopping": "train.early_stop",
        "ema": "train.ema_decay",
        "precision": "amp.dtype",
        "mixed_precision": "amp.dtype",
        "fp16": "amp.dtype",
        "bf16": "amp.dtype",
        "loss_scale": "amp.init_scale",
        "grad_clip": "amp.clip_norm",
        "gradient_clip_val": "amp.clip_norm",
        "max_grad_norm": "amp.clip_norm",
        "accumulate_grad_batches": "data.micro_batch_size",
        "gradient_accumulation_steps": "data.micro_batch_size",
        "dataset": "data.train",
        "train_dataset": "data.train",
        "eval_dataset": "data.eval",
        "workers": "data.num_workers",
        "loss": "task",
        "criterion": "task",
        "logger": "log.trackers",
    }
)


def nearest(word: str, known: Iterable[str], cutoff: float = 0.65) -> str | None:
    """Return the known word closest to a wrong one, or None where none is close."""
    by_form = {_form(name): name for name in known}
    found = difflib.get_close_matches(_form(word)[:80], by_form, n=1, cutoff=cutoff)
    return by_form[found[0]] if found else None


def names_near(glob: str, names: Sequence[str], *, what: str) -> str:
    """Describe which names a glob without a match may mean: close ones, or the first and last.

    The head of a model, which globs are often for, is its last ``what``.
    """
    if not names:
        return f"the model has no {what}"
    plain = glob.replace("*", "").replace("?", "").strip(".")
    near = difflib.get_close_matches(plain, names, n=_FEW, cutoff=0.4)
    if near:
        return f"the nearest {'names are' if len(near) > 1 else 'name is'} {', '.join(near)}"
    shown = names if len(names) <= _FEW else [*names[: _FEW - 1], "...", names[-1]]
    return f"its names are {', '.join(shown)}"


def right_key(section: str, name: str, keys: Iterable[str]) -> str | None:
    """Return the dotted key that an unknown ``name`` in ``section`` probably means.

    ``keys`` are all dotted keys of the schema. The order: the same name in another section, another
    tool's word for it, a close name in this section, a close name anywhere.
    """
    known = list(keys)
    form = _form(name)
    by_name = {key.rpartition(".")[2]: key for key in reversed(known)}
    here = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == section}
    for table in (here, by_name, _KNOWN_ELSEWHERE):
        if form in table:
            return table[form]
    for table in (here, {**_KNOWN_ELSEWHERE, **by_name}):
        close = nearest(form, table)
        if close is not None:
            return table[close]
    return None


def _form(word: str) -> str:
    return word.strip().lower().replace("-", "_")
