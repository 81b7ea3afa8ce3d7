"""The arguments of a ``_target_`` block against the signature of what it names, before the call."""

from __future__ import annotations

import functools
import inspect
import re
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Union, get_args, get_origin

from ampctl.errors import Problem
from ampctl.recipe.fault import error_in_words
from ampctl.recipe.keys import child
from ampctl.recipe.load import place
from ampctl.recipe.scalar import boolean, list_meant, number, number_meant
from ampctl.recipe.schema import TARGET
from ampctl.recipe.suggest import nearest

_NUMBERS = frozenset({"int", "float", "complex"})
_LISTS = frozenset({"tuple", "list", "Tuple", "List", "Sequence", "Iterable"})
_LIST = re.compile(rf"(\w+\.)?({'|'.join(_LISTS)})(\[.*\])?")
# What may stand beside numbers and lists in an annotation that takes no text.
_NO_TEXT = frozenset(
    {*_NUMBERS, *_LISTS, "bool", "None", "NoneType", "Optional", "Union", "Tensor", "torch"}
    | {"typing", "t"}
)
_SCALARS = _NO_TEXT - _LISTS  # a tensor too
_SWITCH = frozenset({"bool", "None", "NoneType", "Optional"})
_UNKNOWN_NAME = re.compile(r"unexpected keyword argument '(\w+)'")


@dataclass(frozen=True)
class Context:
    """Where the keys of a recipe stand, what ampctl itself gives, and what was found wrong."""

    origins: Mapping[str, str]
    provide: Mapping[str, Any]
    problems: list[Problem]

    def tell(self, key: str, message: str, advice: str = "") -> None:
        """Add a problem."""
        self.problems.append(Problem(self.place(key), key, message, advice))

    def place(self, key: str) -> str:
        """Return where a key stands."""
        return place(self.origins, key)


@dataclass(frozen=True)
class Call:
    """A checked call that has not been made; the arguments may hold calls."""

    key: str
    path: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    arguments: dict[str, Any]
    provided: dict[str, Any]


def parameters_of(target: Any) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a callable by name; none if it does not tell them."""
    try:
        return inspect.signature(target).parameters
    except (TypeError, ValueError, NameError):  # NameError: annotations that do not resolve
        return {}


def check(call: Call, context: Context) -> Call:
    """Hold the arguments of a call against the signature, and make text what the types want.

    An argument is refused, or missed, only where the call would surely not bind.
    """
    try:
        signature = inspect.signature(call.function)
    except (TypeError, ValueError, NameError):  # some built-in functions do not tell theirs
        return call
    parameters = signature.parameters.values()
    by_place = [
        p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    takes_anything = _takes_anything(call.function)
    takes_more = takes_anything or any(p.kind is p.VAR_POSITIONAL for p in parameters)
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
    takes_keywords = takes_anything or any(p.kind is p.VAR_KEYWORD for p in parameters)
    for name in call.arguments:
        if name in taken or (name not in named and not takes_keywords):
            _unknown_argument(call, name, taken, named, context)
    provided = {n: context.provide[n] for n in named if n in context.provide}
    for p in () if takes_anything else parameters:
        is_open = p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        if is_open and p.name not in taken | call.arguments.keys() | provided.keys():
            message = f"{call.path} needs the argument {p.name!r}"
            context.tell(call.key, message, f"add {p.name}: ...")
    arguments = {
        name: fitted(named[name], value, child(call.key, name), context) if name in named else value
        for name, value in call.arguments.items()
    }
    provided = {name: value for name, value in provided.items() if name not in arguments}
    return replace(call, arguments=arguments, provided=provided)


def fitted(parameter: inspect.Parameter, value: Any, key: str, context: Context) -> Any:
    """Make text a boolean or a number, and an exact float an integer, where the parameter is one.

    ``dropout: no`` would be a truthy text otherwise. Text that is no number is a problem where the
    parameter takes numbers and no text.
    """
    kinds = _kinds(parameter)
    is_annotated = parameter.annotation is not parameter.empty
    if is_annotated and kinds and kinds <= _SWITCH and isinstance(value, int | float | list | dict):
        if value not in (0, 1):
            context.tell(key, f"got {value!r}; allowed: true or false")
        return bool(value)
    if _is_of_lists(parameter) and _takes_numbers_alone(parameter, kinds):
        if isinstance(value, dict) or (value is None and parameter.default is not None):
            found = "null" if value is None else "a mapping"
            context.tell(key, f"got {found}; allowed: a list of numbers")
        if isinstance(value, list):
            item = parameter.replace(annotation=" | ".join(sorted(kinds & _NUMBERS)))
            return [fitted(item, each, child(key, n), context) for n, each in enumerate(value)]
    if isinstance(value, str) and "str" not in kinds:
        word = boolean(value) if "bool" in kinds else None
        read = number(value.strip()) if kinds & {"int", "float"} else None
        if word is None and kinds and kinds <= _SWITCH:
            context.tell(key, f"got {value!r} (text); allowed: true or false")
        value = word if word is not None else value if read is None else read
        if isinstance(value, str):
            meant = _meant(kinds, value)
            if meant or (_takes_numbers_alone(parameter, kinds)):
                allowed = "a list" if meant.startswith("[") else "a number"
                advice = f"write {meant}" if meant else ""
                context.tell(key, f"got {value!r} (text); allowed: {allowed}", advice)
    is_whole = isinstance(value, float) and value.is_integer()
    return int(value) if is_whole and "int" in kinds and "float" not in kinds else value


def why_it_may_fail(call: Call, error: BaseException, context: Context) -> list[str]:
    """Return the key that may be at fault for a call that failed, and advice: odd arguments.

    Odd is what looks like a number and is text, or is of another kind than the default.
    """
    parameters = parameters_of(call.function)
    said = error_in_words(error)
    unknown = _UNKNOWN_NAME.search(said) if isinstance(error, TypeError) else None
    if unknown and unknown[1] in call.arguments:
        close = nearest(unknown[1], parameters)
        return [child(call.key, unknown[1]), f"did you mean {close}?" if close else "leave it out"]
    odd = dict(
        found
        for name, value in call.arguments.items()
        for found in _odd(parameters.get(name), value, child(call.key, name), context)
    )
    named = [name for name, value in call.arguments.items() if _is_named(value, said)]
    if len(odd) != 1 and len(named) == 1:  # "Invalid learning rate: -1"
        return [child(call.key, named[0]), *odd.values()]
    return [next(iter(odd)) if len(odd) == 1 else call.key, *odd.values()]


def _odd(
    parameter: inspect.Parameter | None, value: Any, key: str, context: Context
) -> Iterator[tuple[str, str]]:
    """Yield the key of an argument that may be at fault, and what is odd about it."""
    kinds = _kinds(parameter) if parameter else set()
    default = parameter.default if parameter else None
    where = f" ({context.place(key)})" if context.place(key) else ""
    if isinstance(value, str) and "str" not in kinds:
        meant = _meant(kinds, value)
        if meant or kinds & (_NUMBERS | _LISTS):
            remedy = f": write {meant}" if meant else ", where a number or a list of them is usual"
            yield key, f"{key} is the text {value!r}{where}{remedy}"
    elif isinstance(value, list | dict) and kinds & _NUMBERS and not kinds - _SCALARS:
        like = value[0] if isinstance(value, list) and len(value) == 1 else default
        example = f": write it like {like!r}" if isinstance(like, int | float) else ""
        yield key, f"{key} is {value!r}{where}, where one number is wanted{example}"
    elif isinstance(value, list) and isinstance(default, tuple) and len(value) != len(default):
        many = f"{len(default)} numbers are wanted: write it like {list(default)}"
        yield key, f"{key} is {value!r}{where}, where {many}"
    elif isinstance(value, list):
        for place_, item in enumerate(value) if isinstance(default, tuple | list) else ():
            yield from _odd(_like(default, place_), item, child(key, place_), context)
    elif value is None and isinstance(default, int | float | tuple):
        yield key, f"{key} is null{where}; its default is {default!r}"
    elif value is None and kinds & _NUMBERS and not kinds & {"None", "NoneType", "Optional"}:
        yield key, f"{key} is null{where}, where a number is wanted"
    elif isinstance(value, int | float | dict | Call) and (
        isinstance(default, tuple | list) or (parameter and _is_of_lists(parameter))
    ):
        is_number = isinstance(value, int | float)
        found = f"{value!r}" if is_number else "a mapping" if isinstance(value, dict) else "a block"
        like = list(default) if isinstance(default, tuple | list) else [value] if is_number else []
        many = f"a list of {len(like)} numbers" if isinstance(default, tuple) else "a list"
        example = f": write it like {like}" if like else ""
        yield key, f"{key} is {found}{where}, where {many} is wanted{example}"


def _is_of_lists(parameter: inspect.Parameter) -> bool:
    """Return whether a list alone is allowed: ``list[int]``, not ``int | list[int]``."""
    annotation = parameter.annotation
    if isinstance(annotation, str):
        return bool(_LIST.fullmatch(annotation))
    return getattr(get_origin(annotation) or annotation, "__name__", "") in _LISTS


def _is_named(value: Any, said: str) -> bool:
    """Return whether an error's words hold a value of the recipe."""
    if isinstance(value, str) and (value.isidentifier() or not value.strip()):
        return False  # a word may stand there by chance
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        return False
    return bool(re.search(rf"(?<![\w.]){re.escape(f'{value}')}(?![\w.]\w)(?!\w)", said))


def _like(default: Any, place_: int) -> inspect.Parameter:
    """Return a parameter whose default is an item of a list: the first one beyond its end."""
    item = next(iter(default[place_:] or default), None)
    return inspect.Parameter("item", inspect.Parameter.KEYWORD_ONLY, default=item)


def _takes_numbers_alone(parameter: inspect.Parameter, kinds: set[str]) -> bool:
    """Return whether an annotation says so; a default alone says little (``size="auto"``)."""
    is_annotated = parameter.annotation is not parameter.empty
    return is_annotated and bool(kinds & _NUMBERS) and kinds <= _NO_TEXT - {"bool"}


def _meant(kinds: set[str], value: str) -> str:
    """Return the number, or the list, that text for such a parameter was probably meant to be."""
    if kinds & _LISTS:
        return list_meant(value)
    return number_meant(value, whole="float" not in kinds) if kinds & _NUMBERS else ""


def _unknown_argument(
    call: Call, name: str, taken: set[str], named: Mapping[str, Any], context: Context
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


def _kinds(parameter: inspect.Parameter) -> set[str]:
    """Return the names of the types that a parameter takes, from its annotation and its default."""
    annotation, default = parameter.annotation, parameter.default
    is_plain = isinstance(default, bool | int | float | str | tuple | list)
    kinds = {type(default).__name__} if is_plain else set()
    if annotation is parameter.empty:
        return kinds
    if isinstance(annotation, str):
        return kinds | set(re.findall(r"\w+", annotation))
    is_union = get_origin(annotation) in (Union, types.UnionType)
    for member in get_args(annotation) if is_union else [annotation]:
        literals = get_args(member) if get_origin(member) is Literal else ()
        kinds |= {type(each).__name__ for each in literals} or {getattr(member, "__name__", "")}
    return kinds


def _takes_anything(function: Any) -> bool:
    """Return whether what Python really calls takes any keyword, whatever its signature says.

    A signature can be that of a function inside (``functools.wraps``), or be made up.
    """
    if isinstance(function, functools.partial):
        return _takes_anything(function.func)
    if isinstance(function, type):
        made_by = [type(function).__call__]
        made_by += [getattr(function, name) for name in ("__new__", "__init__")]
        codes = [f.__code__ for f in made_by if isinstance(f, types.FunctionType)]
    else:
        plain = getattr(function, "__func__", function)
        if not isinstance(plain, types.FunctionType):
            plain = getattr(type(function).__call__, "__func__", type(function).__call__)
        codes = [plain.__code__] if isinstance(plain, types.FunctionType) else []
    return bool(codes) and all(code.co_flags & inspect.CO_VARKEYWORDS for code in codes)
