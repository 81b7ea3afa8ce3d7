"""Files that other programs saved: what they are, and the weights in those that hold some."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ampctl.errors import as_argument

SAFETENSORS = ".safetensors"

_KEYS = ("state_dict", "model_state_dict", "model")
"""Under which other programs keep a model's weights beside what else they save."""


def is_safetensors(path: Path, head: bytes, size: int) -> bool:
    """Return whether a file is of safetensors, by its name or its first bytes.

    It begins with the length of a JSON header; see https://huggingface.co/docs/safetensors.
    """
    length = int.from_bytes(head[:8], "little")
    if head.startswith(b"PK"):  # of torch.save, whatever its name
        return False
    return path.suffix == SAFETENSORS or (head[8:9] == b"{" and length <= size - 8)


def state_dict_in(content: Any) -> tuple[str, dict[str, Any]] | None:
    """Return a model's weights out of what a file holds, and under which key; "" if bare."""
    if _is_state_dict(content):
        return "", dict(content)
    for key in _KEYS if isinstance(content, dict) else ():
        if _is_state_dict(content.get(key)):
            return key, dict(content[key])
    return None


def describe(content: Any) -> str:
    """Describe what another program has saved."""
    if isinstance(content, dict) and "pytorch-lightning_version" in content:
        return "a checkpoint of PyTorch Lightning"
    found = state_dict_in(content)
    if found is not None and not found[0]:
        return "a bare state dict (weights alone), of which no run can go on"
    return "a file of another tool (no `format: ampctl` in it)"


def start_from(path: Path) -> str:
    """Describe what can be done with a file of weights."""
    return f"`ampctl train RECIPE --init-from {as_argument(path)}` starts a new run from it"


def _is_state_dict(content: Any) -> bool:
    """Return whether something maps names to tensors, but for what modules save of their own."""
    if not isinstance(content, Mapping) or not all(isinstance(name, str) for name in content):
        return False
    rest = [name for name, value in content.items() if not isinstance(value, Tensor)]
    return len(rest) < len(content) and all(name.endswith("_extra_state") for name in rest)
