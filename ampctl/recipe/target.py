"""``_target_`` blocks into objects: import the path, check the arguments, then call.

Whether a path may be imported at all is asked in ``trust``.
"""

from __future__ import annotations

import importlib
import inspect
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ampctl.errors import AmpctlError, Problem, RecipeError, UsageError
from ampctl.recipe.arguments import Call, Context, check, why_it_may_fail
from ampctl.recipe.fault import failure
from ampctl.recipe.keys import child
from ampctl.recipe.schema import TARGET, Block
from ampctl.recipe.suggest import nearest

_INSTALL = types.MappingProxyType(
    {
        "torchvision": 'pip install "ampctl[vision]"',
        "timm": 'pip install "ampctl[vision]"',
        "transformers": 'pip install "ampctl[text]"',
        "torchmetrics": "pip install torchmetrics",
    }
)


class TargetError(UsageError):
    """An import path leads nowhere; ``advice`` says what is near or what to install."""

    def __init__(self, message: str, advice: str) -> None:
        self.message = message
        self.advice = advice
        super().__init__(f"{message}\n    {advice}" if advice else message)


def locate(path: str) -> Any:
    """Import what a dotted path names.

    Raises ``TargetError`` if there is no such thing. What a module raises while it is imported
    comes through.
    """
    first, *rest = path.split(".")
    found = _import(first)
    if found is None:
        raise _no_package(first)
    done = first
    for part in rest:
        owner, done = done, f"{done}.{part}"
        if hasattr(found, part):
            found = getattr(found, part)
            continue
        module = _import(done) if isinstance(found, types.ModuleType) else None
        if module is None:
            every = dir(found)  # statically: an attribute may be imported when it is asked for
            names = [n for n in every if not _is_module(inspect.getattr_static(found, n, None))]
            close = nearest(part, names, cutoff=0.6) or nearest(part, every, cutoff=0.6)
            advice = f"did you mean {owner}.{close}?" if close else ""
            raise TargetError(f"{owner} has no attribute {part!r}", advice)
        found = module
    return found


def problems_of(
    block: Block,
    *,
    key: str,
    origins: Mapping[str, str],
    provide: Mapping[str, Any] | None = None,
    args: Sequence[Any] = (),
) -> list[Problem]:
    """Return what :func:`build` would find wrong before it calls anything."""
    context = Context(origins, provide or {}, [])
    _plan(block, key, context, args)
    return context.problems


def build(
    block: Block,
    *,
    key: str,
    origins: Mapping[str, str],
    provide: Mapping[str, Any] | None = None,
    args: Sequence[Any] = (),
) -> Any:
    """Build what a block describes, blocks inside it first.

    ``key`` is the dotted key of the block and ``origins`` that of its recipe, for messages.
    ``provide`` holds values for parameters, by name, of every target that has them and whose block
    does not set them; ``args`` are positional arguments of the outermost target. All arguments are
    checked before anything is called. Raises ``RecipeError`` for what is wrong with the block and
    for what a call raises, whosoever's code it is, and MachineError where disk or memory is full.
    """
    context = Context(origins, provide or {}, [])
    built = _planned_and_run(block, key, context, args)
    if built is None or isinstance(built, type) or inspect.iscoroutine(built):
        found = f"the class {built.__name__}" if isinstance(built, type) else type(built).__name__
        found = "nothing (None)" if built is None else found
        if inspect.iscoroutine(built):
            built.close()
        message = f"{block[TARGET]} gave {found}"
        context.tell(key, message, "name what returns the object itself when it is called")
        raise RecipeError(context.problems)
    return built


def build_inside(values: Mapping[str, Any], *, key: str, origins: Mapping[str, str]) -> Any:
    """Return plain values with each block in them built; raises what :func:`build` does."""
    return _planned_and_run(values, key, Context(origins, {}, []), ())


def _planned_and_run(value: Any, key: str, context: Context, args: Sequence[Any]) -> Any:
    plan = _plan(value, key, context, args)
    if context.problems:
        raise RecipeError(context.problems)
    return _run(plan, context)


def failure_of(
    block: Block, error: BaseException, doing: str, *, key: str, origins: Mapping[str, str]
) -> AmpctlError:
    """Return in words that what a block has built fails later, with the argument to blame."""
    context = Context(origins, {}, [])
    calls = _calls(_plan(block, key, context))
    told = [why_it_may_fail(call, error, context) for call in calls]
    odd = [(at, *advice) for at, *advice in told if advice]
    at, *advice = odd[0] if len(odd) == 1 else (key, *(line for _, *lines in odd for line in lines))
    return failure(error, doing, context.place(at), at, *advice)


def _calls(plan: Any) -> Iterator[Call]:
    """Yield the calls of a plan, outer before inner."""
    if isinstance(plan, Call):
        yield plan
    inner = plan.arguments if isinstance(plan, Call) else plan
    parts = inner.values() if isinstance(inner, dict) else inner if isinstance(inner, list) else ()
    for part in parts:
        yield from _calls(part)


def blocks(value: Any, key: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the dotted key and content of every block in plain values, outer before inner."""
    if isinstance(value, dict):
        if TARGET in value:
            yield key, value
        for name, item in value.items():
            yield from blocks(item, child(key, name))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from blocks(item, child(key, index))


def _plan(value: Any, key: str, context: Context, args: Sequence[Any] = ()) -> Any:
    """Turn plain values into values and checked calls, telling what is wrong."""
    if isinstance(value, list | tuple):
        return [_plan(item, child(key, i), context) for i, item in enumerate(value)]
    if not isinstance(value, Mapping):
        return value
    items = {n: _plan(v, child(key, n), context) for n, v in value.items() if n != TARGET}
    if TARGET not in value:
        return items
    path = f"{value[TARGET]}"
    at = child(key, TARGET)
    try:
        function = locate(path)
    except TargetError as error:
        context.tell(at, error.message, error.advice)
        return None
    except (AmpctlError, KeyboardInterrupt):
        raise
    except BaseException as error:  # SystemExit too, of a script that has no main guard
        told = failure(error, f"importing {path} failed", context.place(at), at)
        if not isinstance(told, RecipeError):
            raise told from error
        context.problems.extend(told.problems)
        return None
    if not callable(function):
        message = f"{path} is a {type(function).__name__}, which cannot be called"
        context.tell(at, message, "name a class or a function")
        return None
    return check(Call(key, path, function, tuple(args), items, {}), context)


def is_class(block: Mapping[str, Any] | None) -> bool:
    """Return whether a block names a class; False if it names nothing that is there."""
    try:
        return block is not None and isinstance(locate(f"{block[TARGET]}"), type)
    except TargetError:
        return False


def _run(plan: Any, context: Context) -> Any:
    """Make the calls of a plan, inner ones first."""
    if isinstance(plan, list):
        return [_run(item, context) for item in plan]
    if isinstance(plan, dict):
        return {name: _run(item, context) for name, item in plan.items()}
    if not isinstance(plan, Call):
        return plan
    arguments = {name: _run(value, context) for name, value in plan.arguments.items()}
    try:
        return plan.function(*plan.args, **arguments, **plan.provided)
    except (AmpctlError, KeyboardInterrupt):
        raise
    except BaseException as error:  # SystemExit too: no part of a recipe may end the program
        key, *advice = why_it_may_fail(plan, error, context)
        trace = error.__traceback__
        did_not_bind = isinstance(error, TypeError) and trace is not None and not trace.tb_next
        did = "refused its arguments" if did_not_bind else "failed"
        raise failure(error, f"{plan.path} {did}", context.place(key), key, *advice) from error


def _import(name: str) -> types.ModuleType | None:
    """Import a module; None if there is no such module, as against one that fails to import."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            return None
        raise


def _is_module(value: Any) -> bool:
    return isinstance(value, types.ModuleType)


def _no_package(name: str) -> TargetError:
    if name in _INSTALL:
        return TargetError(f"{name} is not installed", _INSTALL[name])
    folder = Path.cwd()
    close = nearest(name, [path.stem for path in folder.glob("*.py")])
    advice = f"did you mean {close}?" if close else f"put {name}.py there, or install the package"
    return TargetError(f"no module named {name!r} in {folder} or among the installed ones", advice)
