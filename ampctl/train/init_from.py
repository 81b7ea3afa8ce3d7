"""Where a new run's weights are from, if not from its model: another run's, or an exported file."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ampctl.build import Job, build_job
from ampctl.checkpoint.export import SAFETENSORS, chosen_weights
from ampctl.checkpoint.index import log_warning
from ampctl.checkpoint.store import load
from ampctl.distributed.ranks import ALONE, Ranks
from ampctl.errors import CheckpointError, RecipeError, UsageError, first_of
from ampctl.load_state import FirstWeights
from ampctl.recipe.load import LoadedRecipe
from ampctl.train import words
from ampctl.train.across_ranks import nonfinite_names


@dataclass(frozen=True)
class InitFrom:
    """A checkpoint, a run folder or a ``.safetensors`` file, and what of it may be missing."""

    source: Path
    allow_missing: Sequence[str] = ()

    def __str__(self) -> str:
        return " ".join([f"{self.source}", *(f"--allow-missing {g}" for g in self.allow_missing)])

    def read(self, notify: Callable[[str], None]) -> FirstWeights:
        """Read the weights: those that were averaged where there are any, as evaluations do.

        Nothing is built, so that there is nothing to trust. Raises CheckpointError for what cannot
        be read, UsageError if safetensors is missing.
        """
        if self.source.suffix == SAFETENSORS:
            return FirstWeights(_tensors(self.source), f"{self.source}", self.allow_missing)
        found = load(self.source, notify=notify)
        which, tensors = chosen_weights(found.payload, found.path, ema=None)
        kind = "averaged weights" if which == "ema" else "weights"
        where = f"{self.source} ({kind} of step {found.payload['progress'].get('step')})"
        return FirstWeights(tensors, where, self.allow_missing)


def build(
    loaded: LoadedRecipe,
    ranks: Ranks = ALONE,
    init_from: InitFrom | None = None,
    tell: Callable[[str], None] = log_warning,
) -> Job:
    """Build the job of a new run, with the weights that it starts from.

    Once they are in the model nothing holds on to those that were read. Raises as
    :func:`ampctl.build.build_job`, and RecipeError or CheckpointError for weights that are not
    finite, but for masks: no training mends them.
    """
    first = init_from.read(tell) if init_from else None
    job = build_job(loaded, ranks, first)
    if bad := nonfinite_names(job.state, job.state.parts()):
        names = first_of([n.removeprefix("model.") for n in bad if n.startswith("model.")])
        if first:
            raise CheckpointError(
                f"the weights of {first.where} hold NaN or infinity in {names}: no training mends "
                "them. Take an earlier checkpoint, or leave these as the model builds them with "
                "--allow-missing"
            )
        message = f"its weights are not finite from the start: {names}"
        advice = "look at how the model makes them (torch.empty holds anything), or what it loads"
        raise RecipeError([loaded.problem("model", message, advice)])
    if first:
        tell(words.first_weights(first, job))
    return job


def _tensors(path: Path) -> dict[str, object]:
    if importlib.util.find_spec("safetensors") is None:
        raise UsageError('safetensors is not installed\n    pip install "ampctl[export]"')
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return dict(load_file(path))
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be used: {str(error).splitlines()[0]}") from error
