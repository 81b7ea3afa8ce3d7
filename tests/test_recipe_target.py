"""``_target_`` blocks: where paths lead, how arguments are checked, whose fault an exception is."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ampctl.errors import RecipeError
from ampctl.recipe.current_folder import open_current_folder
from ampctl.recipe.load import parse_recipe, to_plain
from ampctl.recipe.target import TargetError, blocks, build, locate

MODULE = """\
from collections import OrderedDict


class Net:
    def __init__(self, width: int, depth=2, *, bias: bool = True, scale: float = 1.0, tag: str = "",
                 inner=None, seed=None):
        self.__dict__.update(locals())


class Broken:
    def __init__(self, kind="own"):
        if kind == "own":
            raise ValueError("mine")
        if kind == "library":
            OrderedDict(3)


def optimizer(params, lr=1.0, *, optional: "bool | None" = None):
    return params, lr, optional


def anything(*args, **kwargs):
    return args, kwargs


CONSTANT = 3
"""


@pytest.fixture
def user(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current folder with a module of the user's in it."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (folder / "my_net.py").write_text(MODULE)
    (folder / "my_bug.py").write_text("import no_such_package\n")
    open_current_folder()
    yield folder
    for name in ("my_net", "my_bug"):
        sys.modules.pop(name, None)


def make(block: dict[str, Any], **kwargs: Any) -> Any:
    origins = {f"model.{name}": f"r.yaml:{line}" for line, name in enumerate(block, 1)}
    return build(block, key="model", origins=origins, **kwargs)


def problems(block: dict[str, Any], **kwargs: Any) -> list[tuple[str, str, str]]:
    with pytest.raises(RecipeError) as caught:
        make(block, **kwargs)
    return [(p.where, p.key, f"{p.message} {p.advice}") for p in caught.value.problems]


def net(**arguments: Any) -> dict[str, Any]:
    return {"_target_": "my_net.Net", **arguments}


def test_locate_finds_modules_attributes_and_methods(user: Path) -> None:
    assert locate("os.path.join") is __import__("os").path.join
    assert locate("collections.OrderedDict.fromkeys")
    assert locate("xml.etree.ElementTree.Element")
    assert locate("my_net.CONSTANT") == 3


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("my_net.Nett", "did you mean my_net.Net?"),
        ("my_nett.Net", "did you mean my_net?"),
        ("collections.OrderdDict", "did you mean collections.OrderedDict?"),
        ("no_such_thing_at_all.X", "or install the package"),
        ("my_net.Net.width.deep", "has no attribute 'width'"),
    ],
)
def test_a_path_that_leads_nowhere_names_what_is_near(user: Path, path: str, says: str) -> None:
    with pytest.raises(TargetError) as caught:
        locate(path)
    assert says in f"{caught.value}"
    assert caught.value.exit_code == 2


def test_a_missing_own_module_names_the_folder_that_was_searched(user: Path) -> None:
    with pytest.raises(TargetError, match=str(user)):
        locate("no_such_thing_at_all.X")


@pytest.mark.parametrize(
    ("package", "extra"), [("torchvision", "vision"), ("timm", "vision"), ("transformers", "text")]
)
def test_a_missing_optional_package_names_the_extra(
    package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [_Hidden(package), *sys.meta_path])
    with pytest.raises(TargetError, match=rf'pip install "ampctl\[{extra}\]"'):
        locate(f"{package}.something")


class _Hidden:
    """An importer that knows one package as not installed."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == self.package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("import no_such_package", "No module named 'no_such_package'"),
        ("def broken(:", "SyntaxError"),
        ("raise SystemExit(3)", "sys.exit(3)"),
        ("1 / 0", "ZeroDivisionError"),
        ("raise RuntimeError", "RuntimeError"),
    ],
)
def test_d6_what_a_module_raises_on_import_is_told_with_its_line(
    user: Path, text: str, says: str
) -> None:
    (user / "my_bug.py").write_text(f"\n\n{text}\n")
    ((where, key, message),) = problems({"_target_": "my_bug.Net"})
    assert (where, key) == ("r.yaml:1", "model._target_")
    assert message.startswith("importing my_bug.Net failed: ")
    assert says in message
    assert text in message
    assert "my_bug.py:3" in message or f'{user / "my_bug.py"}", line 3' in message


def test_the_current_folder_goes_on_the_path_once(user: Path) -> None:
    open_current_folder()
    assert sys.path.count(f"{user}") == 1
    assert sys.path[0] == f"{user}"


def test_nested_blocks_are_built_first_in_mappings_and_lists(user: Path) -> None:
    inner = net(width=1)
    built = make(net(width=2, inner={"a": [inner, 3], "b": inner}))
    assert built.inner["a"][0].width == built.inner["b"].width == 1
    assert built.inner["a"][1] == 3


def test_provided_values_reach_every_target_that_names_them_and_does_not_set_them(
    user: Path,
) -> None:
    built = make(net(width=1, inner=net(width=2, seed=None)), provide={"seed": 7, "other": 1})
    assert (built.seed, built.inner.seed) == (7, None)
    assert make({"_target_": "my_net.anything", "a": 1}, provide={"seed": 7}) == ((), {"a": 1})
    assert make({"_target_": "my_net.Net"}, provide={"width": 5}).width == 5


def test_positional_arguments_go_to_the_outermost_target(user: Path) -> None:
    assert make({"_target_": "my_net.optimizer", "lr": 2}, args=[[1]]) == ([1], 2, None)
    ((_, key, message),) = problems({"_target_": "my_net.optimizer", "params": 1}, args=[[1]])
    assert key == "model.params"
    assert "ampctl itself gives params" in message
    ((_, key, _),) = problems({"_target_": "my_net.Broken"}, args=[1, 2, 3])
    assert key == "model._target_"


def test_all_wrong_arguments_are_told_at_once_before_anything_is_called(user: Path) -> None:
    block = net(widht=3, inner={"_target_": "my_net.Broken", "kin": 1}, bias="maybe")
    told = problems(block)
    assert {(where, key) for where, key, _ in told} == {
        ("r.yaml:2", "model.widht"),
        ("r.yaml:1", "model"),
        ("r.yaml:4", "model.bias"),
        ("", "model.inner.kin"),
    }
    assert any("did you mean width?" in message for _, _, message in told)
    assert any("needs the argument 'width'" in message for _, _, message in told)


@pytest.mark.parametrize(
    ("text", "value"),
    [("no", False), ("off", False), ("False", False), ("yes", True), ("on", True)],
)
def test_yc6_a_boolean_word_becomes_a_boolean_where_the_parameter_is_one(
    user: Path, text: str, value: bool
) -> None:
    assert make(net(width=1, bias=text)).bias is value
    block = {"_target_": "my_net.optimizer", "optional": text}
    assert make(block, args=[1]) == (1, 1.0, value)
    assert make(net(width=1, tag=text)).tag == text


def test_yc1_numeric_text_becomes_a_number_where_the_parameter_is_one(user: Path) -> None:
    built = make(net(width="3", scale="1e-4", tag="1e-4", depth=2.0))
    assert (built.width, built.scale, built.tag) == (3, 1e-4, "1e-4")
    assert type(built.depth) is int


def test_a_target_that_cannot_be_called_is_a_problem(user: Path) -> None:
    ((_, key, message),) = problems({"_target_": "my_net.CONSTANT"})
    assert key == "model._target_"
    assert "is a int, which cannot be called" in message


def test_a_constructor_of_a_library_that_refuses_is_told_in_words() -> None:
    block = {"_target_": "torch.optim.AdamW", "lr": -1.0}
    import torch

    with pytest.raises(RecipeError) as caught:
        build(
            block,
            key="optimizer",
            origins={"optimizer._target_": "r.yaml:9"},
            args=[[torch.zeros(1, requires_grad=True)]],
        )
    assert f"{caught.value}" == (
        "optimizer.lr: torch.optim.AdamW failed: ValueError: Invalid learning rate: -1.0"
    )


def test_d6_an_exception_of_the_users_own_file_is_told_with_the_line(user: Path) -> None:
    ((_, key, message),) = problems({"_target_": "my_net.Broken"})
    assert key == "model"
    assert message.startswith("my_net.Broken failed: ValueError: mine ")
    assert 'my_net.py:13, in __init__: raise ValueError("mine")' in message
    ((_, _, message),) = problems({"_target_": "json.loads", "s": "{"})
    assert "json.loads failed: json.decoder.JSONDecodeError: Expecting property name" in message
    # Raised in C, called by the user's line.
    ((_, _, message),) = problems({"_target_": "my_net.Broken", "kind": "library"})
    assert "TypeError: 'int' object is not iterable" in message
    assert "my_net.py:15, in __init__: OrderedDict(3)" in message


def test_blocks_yields_every_block_with_its_key() -> None:
    text = """\
name: a
model: {_target_: a.Net, layers: [{_target_: a.Layer, act: {_target_: b.Act}}]}
task: {_target_: a.Task}
data: {train: {_target_: a.Data}, batch_size: 1}
optimizer: {_target_: a.Opt}
train: {max_steps: 1}
"""
    recipe = to_plain(parse_recipe(text, where="r.yaml").recipe)
    assert [(key, block["_target_"]) for key, block in blocks(recipe)] == [
        ("model", "a.Net"),
        ("model.layers[0]", "a.Layer"),
        ("model.layers[0].act", "b.Act"),
        ("task", "a.Task"),
        ("data.train", "a.Data"),
        ("optimizer", "a.Opt"),
    ]
