"""Whether a run will come to a micro-batch of one sample that its BatchNorm layers refuse.

They want more than one value a channel to take a variance of. Where the last batch of an epoch is
short that is met after an epoch of work, so it is tried beforehand, on fake tensors.
"""

from __future__ import annotations

from torch import nn

from ampctl.builder.job import Job
from ampctl.data.loader import MapData
from ampctl.data.order import Order, deal
from ampctl.doctor.dry_run import traced_findings
from ampctl.doctor.torch_errors import LONE_SAMPLE
from ampctl.errors import RecipeError
from ampctl.torch_private import BatchNorm


def refuse_lone_sample(job: Job) -> None:
    """Raise RecipeError if a step has a micro-batch of one sample that cannot be trained.

    Nothing is read or run where there is no such micro-batch, or no BatchNorm in train mode. How
    long an iterable data set is cannot be known before its end.
    """
    if not isinstance(job.train_data, MapData):
        return
    order = job.train_data.order
    always, ends = _has_lone(order, order.batch_size), _ends_lone(job, order)
    layer = next(filter(None, map(_batch_norm, job.state.bare.named_modules())), "")
    if not layer or not (always or ends):
        return
    found = traced_findings(job.state, [job.train_data.alone()])
    if not any(LONE_SAMPLE in finding.reason for finding in found):
        return
    wants = f"{layer} (BatchNorm) takes the variance of more than one value"
    if always:
        key = "data.batch_size" if job.recipe.data.micro_batch_size is None else _MICRO
        message = f"it leaves micro-batches of one sample, and {wants}"
        raise RecipeError([job.loaded.problem(key, message, "raise it")])
    rest = order.num_samples % order.batch_size
    message = (
        f"the last step of an epoch has {rest} of {order.num_samples:,} samples, so that a "
        f"micro-batch holds one, and {wants}"
    )
    advice = "set data.drop_last=true, or another data.batch_size"
    raise RecipeError([job.loaded.problem("data.drop_last", message, advice)])


_MICRO = "data.micro_batch_size"


def _batch_norm(named: tuple[str, nn.Module]) -> str:
    name, module = named
    is_active = isinstance(module, BatchNorm) and module.training
    return (f"model.{name}" if name else "model") if is_active else ""


def _has_lone(order: Order, samples: int) -> bool:
    """Return whether a step of so many samples has a micro-batch of one, on any rank."""
    return any(
        high - low == 1
        for rank in range(order.world_size)
        for low, high, _ in deal(samples, order.micro_batch_size, rank, order.world_size)
    )


def _ends_lone(job: Job, order: Order) -> bool:
    """Return whether the run comes to the short last step of an epoch, and that has one."""
    rest = order.num_samples % order.batch_size
    if order.drop_last or not rest or not _has_lone(order, rest):
        return False
    return job.total_steps is None or job.total_steps >= order.steps_per_epoch
