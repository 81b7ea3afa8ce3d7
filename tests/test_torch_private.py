"""The private names of torch: all in one module, and all there in this version of torch."""

from __future__ import annotations

import ast
import pkgutil
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from test_architecture import FILES, TREES
from torch import nn
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ChainedScheduler, ConstantLR
from torch.utils.data import DataLoader

HOMES = ("torch_private", "torch_private.agent")
# What has an underscore in front and is documented all the same: of Python.
DOCUMENTED = {"_fields"}
STANDARD = {"atexit", "os", "pickle", "sys", "threading"}
ASKING = ("getattr", "hasattr", "setattr", "delattr", "attrgetter")

# What a version of torch lacks of them; the functions there know a way without.
LACKING: dict[str, set[str]] = {}


def is_private(name: object) -> bool:
    return isinstance(name, str) and name.startswith("_") and not name.startswith(("__", "_ampctl"))


def defined(tree: ast.AST) -> set[str]:
    """Return the names with an underscore in front that a module makes for itself."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id == "self":
                names.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)  # of a class too
    return names


def private_uses(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and name of each private name in use that the module itself does not make."""
    own = defined(tree) | DOCUMENTED
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and not f"{node.module}".startswith("ampctl"):
            names = [f"{node.module}.{each.name}" for each in node.names]
        elif isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        elif isinstance(node, ast.Attribute) and node.attr not in own:
            of_python = isinstance(node.value, ast.Name) and node.value.id in STANDARD
            names = [] if of_python or not is_private(node.attr) else [ast.unparse(node)]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ASKING:
            words = [word.value for word in node.args[:2] if isinstance(word, ast.Constant)]
            names = [word for word in words if is_private(word) and word not in own]
        for name in names:
            if any(is_private(part) for part in name.split(".")):
                yield node.lineno, name


def test_no_other_module_uses_a_private_name_of_torch() -> None:
    found = [
        f"{FILES[module]}:{line}: {name}"
        for module, tree in TREES.items()
        if module not in HOMES
        for line, name in private_uses(tree)
    ]
    assert not found, "reach it through ampctl.torch_private:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "torch._foreach_norm(x)",
        "torch._C._autograd._get_sequence_nr()",
        "from torch._subclasses import fake_tensor",
        "from torch.nn.modules.batchnorm import _NormBase as Base",
        "import torch._dynamo",
        "loader._iterator = None",
        "getattr(model, '_ddp_params_and_buffers_to_ignore', ())",
        "class Agent(LocalElasticAgent):\n    def stop(self): self._shutdown()",
    ],
)
def test_a_private_name_of_torch_is_seen(source: str) -> None:
    assert list(private_uses(ast.parse(source)))
    assert not list(private_uses(ast.parse("os._exit(1)\nself._own = 1\nself._own.run()")))


def test_every_name_has_its_reason() -> None:
    """In a docstring, at the end of its line, or above the block of lines that it stands in."""
    for module in HOMES:
        lines = FILES[module].read_text(encoding="utf-8").splitlines()
        for node in TREES[module].body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                assert ast.get_docstring(node), node.name
            elif list(private_uses(ast.Module([node], []))):
                above = lines[: node.end_lineno]
                begin = max(number for number, line in enumerate(above) if not line)
                assert "# " in above[begin + 1] + above[-1], ast.unparse(node)


@pytest.fixture
def holders() -> Iterator[list[Any]]:
    """One object of each kind that has private names."""
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], 1.0, fused=True)
    loader: Any = DataLoader([0], num_workers=1, persistent_workers=True)  # type: ignore[arg-type]
    iterator = iter(loader)
    next(iterator)
    layer = nn.BatchNorm1d(1)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(layer, ["weight"])
    yield [
        parameter.sum().grad_fn,
        torch.ones(1).to_sparse(),
        torch.ops.aten.add_.Tensor,
        layer,
        optimizer,
        ChainedScheduler([ConstantLR(optimizer)]),
        loader,
        iterator,
        LocalElasticAgent(WorkerSpec("role", 1, Mock(), entrypoint=print), DefaultLogsSpecs()),
    ]
    iterator._shutdown_workers()


def test_this_version_of_torch_has_every_name_but_those_known_to_be_lacking(
    holders: list[Any],
) -> None:
    def is_here(name: str) -> bool:
        if name.startswith("torch."):
            place, _, last = name.rpartition(".")
            return hasattr(pkgutil.resolve_name(place), last)
        return any(hasattr(each, name.rpartition(".")[2]) for each in holders)

    used = {name for module in HOMES for _, name in private_uses(TREES[module])}
    assert len(used) > 20
    lacking = {name for name in used if not is_here(name)}
    version = ".".join(torch.__version__.split(".")[:2])
    assert lacking == LACKING.get(version, set()), f"torch {version} lacks {sorted(lacking)}"
