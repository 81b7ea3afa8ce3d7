"""Train PyTorch models in mixed precision: one YAML recipe in, an exact, resumable run out."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import os

    import torch

__version__ = "0.1.0"
__all__ = ["__version__", "load_model"]


def load_model(
    checkpoint: str | os.PathLike[str],
    *,
    device: str | torch.device = "cpu",
    ema: bool | None = None,
    trust: bool = False,
) -> torch.nn.Module:
    """Return the model of a checkpoint, with its weights, in evaluation mode.

    ``checkpoint`` is a file, or a run folder for its newest intact one. The model is the bare one,
    without autocast, in the dtype that its weights were saved in. ``ema``: the averaged weights
    (True) or the raw ones (False); by default the average, if ``train.ema_decay`` was set. Modules
    of your own must be importable, from the current folder say; a recipe that names any and was
    not trained on this machine needs ``trust=True``, which lets it import what it names. Warnings
    go to the logger ``ampctl``. Raises :class:`ampctl.errors.AmpctlError` in words.
    """
    from ampctl.recipe.current_folder import closed_current_folder

    with closed_current_folder():
        from ampctl.run import from_checkpoint

        return from_checkpoint.load_model(checkpoint, device=device, ema=ema, trust=trust)
