"""``_target_`` blocks into objects: import the path, check the arguments, then call.

Whether a path may be imported at all is asked in ``trust``.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sysconfig
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from ampctl.errors import AmpctlError, Problem, RecipeError, UsageError
from ampctl.recipe.layers import child
from ampctl.recipe.load import place
from ampctl.recipe.scalar import boolean, number
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

    Raises ``TargetError`` if there is no such thing. What a user's own module raises while it is
    imported is the user's to see, and comes through.
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
            names = [
                n for n in dir(found) if not isinstance(getattr(found, n, None), types.ModuleType)
            ]
            close = nearest(part, names, cutoff=0.6) or nearest(part, dir(found), cutoff=0.6)
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
    context = _Context(origins, provide or {}, [])
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
    checked before anything is called. Raises ``RecipeError`` for what is wrong with the block, and
    lets an exception of the user's own code through.
    """
    context = _Context(origins, provide or {}, [])
    plan = _plan(block, key, context, args)
    if context.problems:
        raise RecipeError(context.problems)
    return _run(plan, context)


def parameters_of(target: Any) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a callable by name; none if it does not tell them."""
    try:
        return inspect.signature(target).parameters
    except (TypeError, ValueError, NameError):  # NameError: annotations that do not resolve
        return {}


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


@dataclass(frozen=True)
class _Context:
    origins: Mapping[str, str]
    provide: Mapping[str, Any]
    problems: list[Problem]

    def tell(self, key: str, message: str, advice: str = "") -> None:
        self.problems.append(Problem(self.place(key), key, message, advice))

    def place(self, key: str) -> str:
        return place(self.origins, key)


@dataclass(frozen=True)
class _Call:
    """A checked call that has not been made; the arguments may hold calls."""

    key: str
    path: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    arguments: dict[str, Any]
    provided: dict[str, Any]


def _plan(value: Any, key: str, context: _Context, args: Sequence[Any] = ()) -> Any:
    """Turn plain values into values and checked calls, telling what is wrong."""
    if isinstance(value, list | tuple):
        return [_plan(item, child(key, i), context) for i, item in enumerate(value)]
    if not isinstance(value, Mapping):
        return value
    items = {n: _plan(v, child(key, n), context) for n, v in value.items() if n != TARGET}
    if TARGET not in value:
        return items
    path = f"{value[TARGET]}"
    try:
        function = locate(path)
    except TargetError as error:
        context.tell(child(key, TARGET), error.message, error.advice)
        return None
    if not callable(function):
        message = f"{path} is a {type(function).__name__}, which cannot be called"
        context.tell(child(key, TARGET), message, "name a class or a function")
        return None
    return _check(_Call(key, path, function, tuple(args), items, {}), context)


def _check(call: _Call, context: _Context) -> _Call:
    """Hold the arguments of a call against the signature, and make text what the types want."""
    try:
        signature = inspect.signature(call.function)
    except (TypeError, ValueError, NameError):  # some built-in functions do not tell theirs
        return call
    parameters = signature.parameters.values()
    by_place = [
        p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    takes_more = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if len(call.args) > len(by_place) and not takes_more:
        message = (
            f"{call.path} takes {len(by_place)} positional arguments and needs {len(call.args)}"
        )
        context.tell(child(call.key, TARGET), message, "name a target that fits this key")
        return call
    taken = set(by_place[: len(call.args)])
    named = {
        p.name: p
        for p in parameters
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in taken
    }
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        for name in (n for n in call.arguments if n not in named):
            _unknown_argument(call, name, taken, named, context)
    provided = {n: context.provide[n] for n in named if n in context.provide}
    for p in parameters:
        is_open = p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        if is_open and p.name not in taken | call.arguments.keys() | provided.keys():
            message = f"{call.path} needs the argument {p.name!r}"
            context.tell(call.key, message, f"add {p.name}: ...")
    arguments = {
        name: _fitted(named[name], value, child(call.key, name), context)
        if name in named
        else value
        for name, value in call.arguments.items()
    }
    provided = {name: value for name, value in provided.items() if name not in arguments}
    return replace(call, arguments=arguments, provided=provided)


def _unknown_argument(
    call: _Call, name: str, taken: set[str], named: Mapping[str, Any], context: _Context
) -> None:
    if name in taken:
        context.tell(
            child(call.key, name), f"ampctl itself gives {name} to {call.path}", "remove it"
        )
        return
    close = nearest(name, named)
    takes = ", ".join(named) or "no arguments"
    advice = f"did you mean {close}?" if close else f"it takes {takes}"
    context.tell(child(call.key, name), f"{call.path} has no argument {name!r}", advice)


def _fitted(parameter: inspect.Parameter, value: Any, key: str, context: _Context) -> Any:
    """Make text a boolean or a number, and an exact float an integer, where the parameter is one.

    ``dropout: no`` would be a truthy text otherwise.
    """
    kinds = _kinds(parameter)
    if isinstance(value, str) and "str" not in kinds:
        word = boolean(value) if "bool" in kinds else None
        read = number(value.strip()) if kinds & {"int", "float"} else None
        if word is None and kinds and kinds <= {"bool", "None", "NoneType", "Optional"}:
            context.tell(key, f"got {value!r} (text); allowed: true or false")
        value = word if word is not None else value if read is None else read
    is_whole = isinstance(value, float) and value.is_integer()
    return int(value) if is_whole and "int" in kinds and "float" not in kinds else value


def _kinds(parameter: inspect.Parameter) -> set[str]:
    """Return the names of the types that a parameter takes, from its annotation and its default."""
    annotation, default = parameter.annotation, parameter.default
    kinds = {type(default).__name__} if isinstance(default, bool | int | float | str) else set()
    if annotation is parameter.empty:
        return kinds
    if isinstance(annotation, str):
        return kinds | set(re.findall(r"\w+", annotation))
    is_union = get_origin(annotation) in (Union, types.UnionType)
    for member in get_args(annotation) if is_union else [annotation]:
        literals = get_args(member) if get_origin(member) is Literal else ()
        kinds |= {type(each).__name__ for each in literals} or {getattr(member, "__name__", "")}
    return kinds


def _run(plan: Any, context: _Context) -> Any:
    """Make the calls of a plan, inner ones first."""
    if isinstance(plan, list):
        return [_run(item, context) for item in plan]
    if isinstance(plan, dict):
        return {name: _run(item, context) for name, item in plan.items()}
    if not isinstance(plan, _Call):
        return plan
    arguments = {name: _run(value, context) for name, value in plan.arguments.items()}
    try:
        return plan.function(*plan.args, **arguments, **plan.provided)
    except AmpctlError:
        raise
    except Exception as error:
        if _is_users_own(error):
            raise
        reason = f"{error}" if isinstance(error, TypeError | ValueError) else ""
        reason = reason or f"{type(error).__name__}: {error}"
        message = f"{plan.path} refused its arguments: {reason}"
        raise RecipeError([Problem(context.place(plan.key), plan.key, message)]) from error


def _is_users_own(error: Exception) -> bool:
    """Tell whether an exception was raised in a file that is neither installed nor ampctl's."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    innermost = next(file for file in reversed(files) if not file.startswith("<"))
    return is_users_own_file(Path(innermost))


def is_users_own_file(file: Path) -> bool:
    """Tell whether a source file is neither the standard library's, installed, nor ampctl's."""
    if f"{file}".startswith("<"):  # made at run time
        return False
    file = file.resolve()
    paths = sysconfig.get_paths()
    libraries = [Path(paths[name]).resolve() for name in ("stdlib", "purelib", "platlib")]
    is_installed = {"site-packages", "dist-packages"} & set(file.parts)
    ours = Path(__file__).resolve().parents[1]
    return not is_installed and not any(file.is_relative_to(p) for p in [*libraries, ours])


def _import(name: str) -> types.ModuleType | None:
    """Import a module; None if there is no such module, as against one that fails to import."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            return None
        raise


def _no_package(name: str) -> TargetError:
    if name in _INSTALL:
        return TargetError(f"{name} is not installed", _INSTALL[name])
    folder = Path.cwd()
    close = nearest(name, [path.stem for path in folder.glob("*.py")])
    advice = f"did you mean {close}?" if close else f"put {name}.py there, or install the package"
    return TargetError(f"no module named {name!r} in {folder} or among the installed ones", advice)
