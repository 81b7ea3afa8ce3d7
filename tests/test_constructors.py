"""What a constructor that a recipe names can do wrong, and what a user is told of it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_recipe_target import make, problems

from ampctl.errors import InterruptedRunError, MachineError
from ampctl.recipe.current_folder import open_current_folder

MODULE = """\
import errno
import functools
import os
import sys


class Fails:
    def __init__(self, how, sizes=()):
        self.how = how
        if how == "chain":
            try:
                {}["width"]
            except KeyError as error:
                raise ConnectionError("the hub cannot be reached") from error
        if how == "group":
            raise ExceptionGroup("several", [ValueError("a"), OSError("b")])
        if how == "own":
            raise Unprintable
        if how == "base":
            raise Base("not an Exception")
        helper(how)


def helper(how):
    if how == "missing":
        open("no/such.csv")
    if how == "exit":
        sys.exit(0)
    if how == "empty":
        raise ValueError
    if how == "lines":
        raise RuntimeError("first\\nsecond\\x1b[31m\\n" + "more\\n" * 100)
    if how == "deep":
        helper(how)
    if how == "key":
        {}["width"]
    if how == "import":
        import no_such_dependency
    if how == "attribute":
        None.width
    if how == "assert":
        assert how is None, "sizes must agree"
    if how == "stop":
        next(iter(()))
    if how == "full":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "cache/x")
    if how == "memory":
        raise MemoryError
    if how == "allocator":
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried")
    if how == "interrupt":
        raise KeyboardInterrupt


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no words")


class Base(BaseException):
    pass


def wrapped(function):
    @functools.wraps(function)
    def inner(*args, **kwargs):
        kwargs.pop("extra", None)
        return function(*args, **kwargs)

    return inner


@wrapped
def decorated(width):
    return [width]


class Wrapped:
    @wrapped
    def __init__(self, width):
        self.width = width


class Made:
    __signature__ = __import__("inspect").Signature()

    def __init__(self, **given):
        self.given = given


class Meta(type):
    def __call__(cls, **given):
        given.pop("extra", None)
        return super().__call__(**given)


class OfMeta(metaclass=Meta):
    def __init__(self, width):
        self.width = width


class Callable:
    def __call__(self, width=3, **more):
        return [width, more]


instance = Callable()
partial = functools.partial(decorated, width=3)


def numbers(rate=0.1, betas=(0.9, 0.99), size: "int | None" = None, step: int = 1, kind="mean"):
    return [float(rate), [float(b) for b in betas], size, step, kind]


def checked(*, rate=0.1, betas=(0.9, 0.99)):
    first, second = betas
    return [rate >= 0, first >= 0, second >= 0]


async def coroutine():
    return 1


def nothing():
    pass


def a_class():
    return Callable
"""


@pytest.fixture(autouse=True)
def _user(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (folder / "own.py").write_text(MODULE)
    open_current_folder()
    yield
    sys.modules.pop("own", None)


def told(block: dict[str, Any], **kwargs: Any) -> tuple[str, str]:
    ((_, key, message),) = problems({**block, "_target_": f"own.{block['_target_']}"}, **kwargs)
    return key, message


FAILURES = {
    "chain": ("ConnectionError: the hub cannot be reached", "from KeyError: 'width'", "own.py:14"),
    "group": ("ExceptionGroup: several (2 sub-exceptions)", "own.py:16"),
    "own": ("own.Unprintable: <exception str() failed>", "own.py:18"),
    "base": ("own.Base: not an Exception", "own.py:20"),
    "missing": (
        "FileNotFoundError",
        "'no/such.csv'",
        "own.py:26, in helper: open",
        "called from own.py:21, in __init__: helper(how)",
        "relative path begins at the current folder",
    ),
    "exit": ("it called sys.exit(0), which would end the run", "own.py:28"),
    "empty": ("failed: ValueError ", "own.py:30"),
    "lines": ("first\n    second\N{REPLACEMENT CHARACTER}[31m", "\n    ...", "own.py:32"),
    "deep": ("RecursionError", "own.py:34"),
    "key": ("KeyError: 'width'", "own.py:36"),
    "import": ("No module named 'no_such_dependency'", "own.py:38"),
    "attribute": ("'NoneType' object has no attribute 'width'", "own.py:40"),
    "assert": ("AssertionError: sizes must agree", "own.py:42"),
    "stop": ("StopIteration", "own.py:44"),
}


@pytest.mark.parametrize("how", FAILURES)
def test_d6_a_constructor_that_fails_is_told_as_what_failed_with_the_users_line(how: str) -> None:
    key, message = told({"_target_": "Fails", "how": how})
    assert key == "model"
    assert message.startswith("own.Fails failed: ")
    assert "refused" not in message
    for words in FAILURES[how]:
        assert words in message, message
    assert len(message.splitlines()) < 20


@pytest.mark.parametrize("how", ["full", "memory", "allocator"])
def test_d6_a_full_disk_or_memory_in_a_constructor_is_the_machines(how: str) -> None:
    with pytest.raises(MachineError) as caught:
        make({"_target_": "own.Fails", "how": how})
    assert caught.value.exit_code == 5
    assert "model: own.Fails failed" in f"{caught.value}"
    assert "own.py:" in f"{caught.value}"


def test_ctrl_c_in_a_constructor_stays_what_it_is() -> None:
    with pytest.raises(KeyboardInterrupt):
        make({"_target_": "own.Fails", "how": "interrupt"})
    assert InterruptedRunError.exit_code == 130


def test_d6_refused_arguments_are_a_call_that_does_not_bind() -> None:
    assert "builtins.range refused its arguments" in problems({"_target_": "builtins.range"})[0][2]
    key, message = told({"_target_": "decorated", "widht": 3})  # known when it is called
    assert key == "model.widht"
    assert "unexpected keyword argument 'widht'" in message
    assert "did you mean width?" in message


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("decorated", {"width": 1, "extra": 2}),
        ("Wrapped", {"width": 1, "extra": 2}),
        ("Made", {"anything": 1}),
        ("OfMeta", {"width": 1, "extra": 2}),
        ("instance", {"extra": 2}),
        ("partial", {"extra": 2}),
    ],
)
def test_d16_an_argument_behind_a_signature_that_hides_it_is_allowed(
    name: str, arguments: dict[str, Any]
) -> None:
    assert make({"_target_": f"own.{name}", **arguments})


def test_d16_what_would_surely_not_bind_is_told_before_anything_is_called() -> None:
    key, message = told({"_target_": "numbers", "rat": 1})
    assert (key, message) == ("model.rat", "own.numbers has no argument 'rat' did you mean rate?")


def test_d16_a_configuration_of_transformers_takes_what_it_always_took() -> None:
    pytest.importorskip("transformers")
    config = make({"_target_": "transformers.BertConfig", "num_labels": 3, "hidden_size": 8})
    assert (config.num_labels, config.hidden_size) == (3, 8)


@pytest.mark.parametrize(
    ("arguments", "key", "says"),
    [
        ({"rate": "1,5e-3"}, "rate", "got '1,5e-3' (text); allowed: a number write 1.5e-3"),
        ({"betas": "0.9,0.95"}, "betas", "'0.9,0.95' (text); allowed: a list write [0.9, 0.95]"),
        ({"betas": "(0.9, 0.95)"}, "betas", "write [0.9, 0.95]"),
        ({"step": "1_000"}, "step", "allowed: a number write 1000"),
        ({"step": "1,000"}, "step", "write 1000"),
        ({"step": "many"}, "step", "got 'many' (text); allowed: a number"),
        ({"size": "big"}, "size", "got 'big' (text); allowed: a number"),
        ({"rate": "\N{MINUS SIGN}1"}, "rate", "write -1"),
        ({"rate": "0.1f"}, "rate", "write 0.1"),
    ],
)
def test_d7_text_that_was_meant_as_a_number_is_told_with_what_to_write(
    arguments: dict[str, Any], key: str, says: str
) -> None:
    found, message = told({"_target_": "numbers", **arguments})
    assert found == f"model.{key}"
    assert says in message


@pytest.mark.parametrize(
    ("arguments", "key", "says"),
    [
        ({"rate": "fast"}, "model.rate", "model.rate is the text 'fast' (r.yaml:1)"),
        ({"betas": ["0,9", 0.9]}, "model.betas[0]", "the text '0,9': write 0.9"),
        ({"betas": 3}, "model.betas", "is 3 (r.yaml:1), where a list of 2 numbers is wanted"),
        ({"betas": [3]}, "model.betas", "is [3] (r.yaml:1), where 2 numbers are wanted: write"),
    ],
)
def test_d7_a_failure_names_the_arguments_that_are_odd(
    arguments: dict[str, Any], key: str, says: str
) -> None:
    found, message = told({**arguments, "_target_": "checked"})
    assert found == key
    assert message.startswith(("own.checked failed: TypeError", "own.checked failed: ValueError"))
    assert says in message


def test_d7_text_stays_text_where_it_may_be_meant() -> None:
    assert make({"_target_": "own.numbers", "kind": "1,5"})[-1] == "1,5"
    assert make({"_target_": "own.Made", "rate": "1,5"}).given == {"rate": "1,5"}


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("coroutine", "gave coroutine"),
        ("nothing", "gave nothing (None)"),
        ("a_class", "gave the class Callable"),
    ],
)
def test_d1_a_target_that_gives_no_object_is_told(name: str, says: str) -> None:
    assert says in told({"_target_": name})[1]


@pytest.mark.parametrize(
    "target", ["sys.exit", "os.abc.no_such", "builtins.exit", "builtins.print", "builtins.input"]
)
def test_d1_any_callable_may_be_named_and_is_told(target: str, capsys: Any) -> None:
    with capsys.disabled():
        ((_, key, _),) = problems({"_target_": target})
    assert key.startswith("model")
