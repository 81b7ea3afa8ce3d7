"""A forward pass on fake tensors, as the target device's autocast would run it: no GPU needed.

Fake tensors have shape, dtype and device, and no data. So the pass shows the dtype of every
operation and what the loss depends on, takes no memory, and leaves the real model as it was.

Source: https://docs.pytorch.org/docs/stable/user_guide/torch_compiler/torch.compiler_fake_tensor.html
"""

from __future__ import annotations

import copy
import logging
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from ampctl import rng, torch_private
from ampctl.amp.precision import Precision
from ampctl.amp.scaler import LossScaler
from ampctl.data.move import tensors
from ampctl.doctor.finding import REFUSED_REMEDY, Finding, Target
from ampctl.doctor.float16_constants import Constants
from ampctl.doctor.trace import Trace, place
from ampctl.engine.losses import backward_passes
from ampctl.engine.passes import NoGradientError
from ampctl.engine.state import TrainState
from ampctl.engine.updater import Updater
from ampctl.errors import AmpctlError, first_of
from ampctl.recipe.schema import block_key
from ampctl.state_dict.layout import changes, layout
from ampctl.tasks.task import Task

_REFUSAL = "unsafe to autocast"
_HIDES_PARAMETERS = "CheckpointFunctionBackward"  # reentrant: its own graph is made in the backward


def traced_findings(
    state: TrainState, window: Sequence[Any], target: Target | None = None
) -> list[Finding]:
    """Run the first micro-batch of a window on fake tensors of the target's; return what it shows.

    Model and task are copied, without the data of the model's tensors; the originals and all
    generators stay as they were. Where the pass cannot be run to its end, ``not-traced`` says why.
    What ampctl itself says of a wrong task is raised as in a step.
    """
    target = target or Target.of(state)
    with ExitStack() as around:
        around.enter_context(rng.preserved(state.device))
        # The real step gives them again, on the device that they are about.
        around.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        around.enter_context(_unlogged("torch._subclasses.fake_tensor"))
        if "torch._dynamo" in sys.modules:  # else nothing is compiled, and it takes seconds to load
            around.enter_context(torch.compiler.set_stance("force_eager"))
        mode = torch_private.fake_tensor_mode()
        unknown = _why_unknown(target.device_type, mode)
        if unknown:
            return [_not_traced(target.device_type, unknown)]
        try:
            run = _prepare(state, window[0], target, mode)
        except Exception as error:  # of somebody's own __deepcopy__ too
            return [_not_traced("model and task", f"they cannot be copied: {_first_line(error)}")]
        return _findings(run)


def owners(task: Task) -> list[Any]:
    """Return a task and the objects whose methods it has taken over: somebody's own task."""
    taken = (getattr(value, "__self__", None) for value in vars(task).values())
    found = {id(owner): owner for owner in (task, *taken) if hasattr(owner, "__dict__")}
    return list(found.values())


@dataclass
class _DryRun:
    """A run's state and a micro-batch with fake tensors, and the mode that they live in.

    ``originals`` has the id of the tensor that each fake one (by its id) stands for.
    """

    state: TrainState
    batch: Any
    mode: AbstractContextManager[Any]
    losses: _Losses
    originals: Mapping[int, int]


class _Losses(LossScaler):
    """Keep the losses that would be scaled, and give none of their graph to autograd.

    Without a GPU torch's engine cannot run the backward pass of a CUDA tensor, fake or not. What
    the losses depend on is in their graph.
    """

    def __init__(self, state: TrainState) -> None:
        super().__init__(state.amp, enabled=False, device=torch.device("cpu"))
        self.found: list[Tensor] = []

    def scale(self, loss: Tensor) -> Tensor:
        """Keep a loss; return a scalar that depends on nothing."""
        self.found.append(loss)
        return torch.zeros((), requires_grad=True)

    def grad(self, outputs: Tensor, inputs: Any) -> Any:
        """Return what has the shape and dtype of the gradient, and depends on the same."""
        total = outputs.float().sum()
        if isinstance(inputs, Tensor):
            return inputs.float() + total
        return tuple(each.float() + total for each in inputs)


@dataclass(frozen=True)
class _Autocast(Precision):
    """Autocast of a device that need not be here, where ``torch.autocast`` switches itself off."""

    def __post_init__(self) -> None:
        pass

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context of the forward pass."""
        return _autocast(self.device_type, self.name != "float32", self.dtype, self.caches)


@contextmanager
def _autocast(device_type: str, enabled: bool, dtype: torch.dtype, caches: bool) -> Iterator[None]:
    before = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(caches)
    torch.set_autocast_enabled(device_type, enabled)
    if enabled:
        torch.set_autocast_dtype(device_type, dtype)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        torch.set_autocast_enabled(device_type, before[0])
        torch.set_autocast_dtype(device_type, before[1])
        torch.set_autocast_cache_enabled(cached)
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()


@contextmanager
def _unlogged(name: str) -> Iterator[None]:
    """Keep a library from logging what it raises too."""
    logger = logging.getLogger(name)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _why_unknown(device_type: str, mode: AbstractContextManager[Any]) -> str:
    """Describe why this build of torch has no fake tensors of a device; "" if it has."""
    try:
        with mode:
            torch.zeros(()).to(device_type)
    except RuntimeError as error:
        return _first_line(error)
    return ""


def _prepare(
    state: TrainState, batch: Any, target: Target, mode: AbstractContextManager[Any]
) -> _DryRun:
    # Nobody moves what a task holds; it is where its author has put it.
    held = [tensor for part in _held_modules(state.task) for tensor in _tensors_of(part)]
    with mode:
        fakes: dict[int, Any] = {id(t): _fake(t, t.device.type) for t in (*held, *tensors(batch))}
        fakes |= {id(t): _fake(t, target.device_type) for t in _tensors_of(state.bare)}
    model, task, batch = copy.deepcopy((state.bare, state.task, batch), dict(fakes))
    for module in model.modules():
        if hasattr(module, "_ampctl_device_type"):  # of amp.modules, set for the device of the run
            module.__dict__["_ampctl_device_type"] = target.device_type
    updaters = [copy.copy(updater) for updater in state.updaters]
    for updater in updaters:
        updater.parameters = [fakes[id(p)] for p in updater.parameters]
    losses = _Losses(state)
    fake_state = replace(
        state,
        model=model,
        bare=model,
        task=task,
        updaters=updaters,
        scaler=losses,
        precision=_Autocast(target.device_type, target.dtype, "the target's"),
        device=torch.device(target.device_type),
    )
    fake_state.counts_samples = True  # what has no values cannot be counted by them
    originals = {id(fake): original for original, fake in fakes.items()}
    return _DryRun(fake_state, batch, mode, losses, originals)


def _fake(tensor: Tensor, device_type: str) -> Tensor:
    fake = torch.empty_like(tensor, device=device_type)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake


def _tensors_of(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _held_modules(task: Task) -> Iterator[nn.Module]:
    for owner in owners(task):
        if isinstance(owner, nn.Module):
            yield owner
        yield from (value for value in vars(owner).values() if isinstance(value, nn.Module))


def _findings(run: _DryRun) -> list[Finding]:
    state = run.state
    constants = Constants(state.bare, state.device.type)
    turns: list[tuple[Sequence[Updater], list[Tensor]]] = []
    built = layout(state.bare)
    try:
        with run.mode, Trace(constants.observe):
            for updaters, _ in backward_passes(state, [run.batch]):
                turns.append((updaters, run.losses.found))
                run.losses.found = []
    except NoGradientError:
        # The first step says so too, and knows whether weights have moved.
        return list(constants.findings())
    except AmpctlError:
        raise
    except Exception as error:
        # A copy without values can raise anything: a value is read on the host, an operation has no
        # fake form, a hook has written into the original. A fault of the user's own comes again in
        # the first step.
        return [*constants.findings(), _ended(error, state.bare)]
    if changes(built, state.bare):
        return list(constants.findings())  # the first step says so
    return [*constants.findings(), *_without_gradient(run, turns)]


def _ended(error: Exception, model: nn.Module) -> Finding:
    """Describe why a pass did not end: the target refuses it, or fake tensors cannot run it."""
    where = str(place(model, _raised_in(error)))
    if _REFUSAL in str(error):
        return Finding(
            "refused-by-autocast",
            where,
            "autocast refuses binary cross entropy of probabilities, which round to 0 and 1 in "
            "half precision",
            REFUSED_REMEDY,
            "error",
        )
    return _not_traced(where, _first_line(error))


def _not_traced(where: str, why: str) -> Finding:
    return Finding(
        "not-traced",
        where,
        f"the pass on fake tensors, which have no values, ends here: {why}",
        "What comes after it is not examined; the first step on the device itself will tell.",
    )


def _raised_in(error: Exception) -> FrameType:
    """Return the frame that called the operation which raised."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    names = [frame.f_code.co_name for frame in frames]
    end = names.index("__torch_dispatch__") if "__torch_dispatch__" in names else len(frames)
    return frames[end - 1]


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"


def _without_gradient(
    run: _DryRun, turns: Sequence[tuple[Sequence[Updater], list[Tensor]]]
) -> Iterator[Finding]:
    """Find parameters that the losses of their optimizer's turn do not depend on.

    A lambda that a model keeps calls the original: what that reaches is reached.
    """
    names = {id(p): name for name, p in run.state.bare.named_parameters()}
    for updaters, losses in turns:
        reached = _reached(losses)
        if reached is None:
            continue
        for updater in updaters:
            own = [id(p) for p in updater.parameters if p.requires_grad]
            missed = [names[each] for each in own if not {each, run.originals[each]} & reached]
            if missed:
                nothing = len(missed) == len(own)
                yield Finding(
                    "no-gradient",
                    block_key("optimizer", updater.name) if nothing else first_of(missed),
                    f"{len(own) - len(missed)} of {len(own)} parameters received a gradient in a "
                    f"trial pass{f' ({first_of(missed, 3)})' if nothing else ''}: the loss does "
                    f"not depend on {'them' if nothing else 'these'}",
                    "Is the loss computed from a detached tensor, or a part of the model not "
                    "called? What gets no gradient stays as it is; freeze it if that is meant.",
                    "error" if nothing else "warning",
                )


def _reached(losses: Sequence[Tensor]) -> set[int] | None:
    """Return the ids of the leaves in the graph of losses; None if a part of it is not there."""
    reached: set[int] = set()
    seen: set[Any] = set()
    waiting: list[Any] = [loss.grad_fn for loss in losses]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == _HIDES_PARAMETERS:
            return None
        if hasattr(node, "variable"):
            reached.add(id(node.variable))
        waiting.extend(each for each, _ in node.next_functions)
    return reached
