"""The import paths that are built for anybody: listed objects that fit their place in a recipe.

What is not clearly harmless is not listed, and nothing is built here.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import inspect
import os
import re
import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ampctl.recipe.arguments import parameters_of
from ampctl.recipe.schema import TARGET
from ampctl.recipe.target import locate

_SLOTS = types.MappingProxyType(
    {
        "model": "model",
        "task": "task",
        "data.train": "data",
        "data.eval": "data",
        "optimizer": "optimizer",
        "scheduler": "scheduler",
    }
)


@dataclass(frozen=True)
class _Rule:
    """Objects that may be built: of ``base``, defined under ``home``, reached through ``module``.

    ``slots`` are the places for one; ``inside`` are the places whose blocks may hold one.
    """

    module: str
    home: str
    base: str
    slots: frozenset[str] = frozenset()
    inside: frozenset[str] = frozenset()


def _rule(module: str, home: str, base: str, slots: str = "", inside: str = "") -> _Rule:
    return _Rule(module, home, base, frozenset(slots.split()), frozenset(inside.split()))


_MODULE = "torch.nn.Module"
_DATASET = "torch.utils.data.Dataset"
_RULES = (
    _rule("torch.nn", "torch.nn.modules", _MODULE, "model", "model task data"),
    _rule("ampctl.models", "ampctl.models", _MODULE, "model", "model"),
    _rule("torchvision.models", "torchvision.models", _MODULE, "model", "model"),
    _rule("torchvision.ops", "torchvision.ops", _MODULE, "model", "model"),
    _rule("timm.models", "timm.models", _MODULE, "model", "model"),
    _rule("timm.layers", "timm.layers", _MODULE, "model", "model"),
    _rule("timm", "timm.models._factory", _MODULE, "model", "model"),
    _rule("transformers", "transformers.models", "transformers.PreTrainedModel", "model", "model"),
    _rule("transformers", "transformers.models", "transformers.PretrainedConfig", "", "model"),
    _rule("ampctl.data", "ampctl.data", _DATASET, "data", "data"),
    _rule("torch.utils.data", "torch.utils.data.dataset", _DATASET, "data", "data"),
    _rule("torchvision.datasets", "torchvision.datasets", _DATASET, "data", "data"),
    _rule("torchvision.transforms.v2", "torchvision.transforms", "object", "", "data"),
    _rule("torchvision.transforms", "torchvision.transforms", "object", "", "data"),
    _rule("ampctl.tasks", "ampctl.tasks", "object", "task"),
    _rule("torchmetrics.classification", "torchmetrics.classification", _MODULE, "", "task"),
    _rule("torchmetrics.regression", "torchmetrics.regression", _MODULE, "", "task"),
    _rule("torch.optim", "torch.optim", "torch.optim.Optimizer", "optimizer", "optimizer"),
    _rule("timm.optim", "timm.optim", "torch.optim.Optimizer", "optimizer", "optimizer"),
    _rule("ampctl.schedules", "ampctl.schedules", "object", "scheduler", "scheduler"),
    _rule(
        "torch.optim.lr_scheduler",
        "torch.optim.lr_scheduler",
        "torch.optim.lr_scheduler.LRScheduler",
        "scheduler",
        "scheduler",
    ),
)

# Those that read no pickle but of a known digest, and call nothing that a recipe can name.
_TORCHVISION_DATASETS = frozenset(
    [
        "CIFAR10",
        "CIFAR100",
        "DTD",
        "EMNIST",
        "EuroSAT",
        "FGVCAircraft",
        "FakeData",
        "FashionMNIST",
        "Flowers102",
        "Food101",
        "GTSRB",
        "ImageFolder",
        "KMNIST",
        "MNIST",
        "OxfordIIITPet",
        "QMNIST",
        "STL10",
        "SUN397",
        "SVHN",
    ]
)
# Arguments that fetch files or code, or lead to others that do: each is refused unless it is off.
_FETCHING = re.compile(
    r".*pretrained(?!_window_size).*|.*remote.*|weights|weights_backbone|checkpoint_path|cache_dir|auto_map"
    r"|allow_all_kernels|use_kernels|kernel_config|quantization_config|download|target_lang"
    r"|_?name_or_path|attribute_map|detectron2.*|feature_cls"
)
_BACKBONE = "backbone"  # as a text the name of a repository
# What may be said to torch.compile: its options name compilers, libraries and folders.
_COMPILE = types.MappingProxyType(
    {
        "backend": ("inductor", "eager", "aot_eager", "cudagraphs"),
        "mode": ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
        "fullgraph": (True, False),
        "dynamic": (True, False),
        "disable": (True, False),
    }
)
# Of attention and of experts; others may be fetched from the hub.
_OWN_IMPLEMENTATIONS = ("eager", "sdpa", "batched_mm", "grouped_mm")


def objection(key: str, block: Mapping[str, Any]) -> str:
    """Describe why a block may not be built for a stranger; "" if it may."""
    slot, is_outermost = _slot(key)
    path = f"{block[TARGET]}"
    rules = [
        rule
        for rule in _RULES
        if path.startswith(f"{rule.module}.")
        and slot in (rule.slots if is_outermost else rule.inside)
    ]
    package = path.partition(".")[0]
    if rules and _is_shadowed(package):
        return f"another {package} lies in the current folder"
    if not any(_fits(path, rule) for rule in rules):
        return f"not known as safe for {slot or key}"
    fetching = _fetched_by_default(path, block)
    if fetching:
        return f"it fetches something unless {fetching} is off"
    names_no_place = path.startswith(("transformers.", "timm."))
    return _argument_objection(block, is_model=slot == "model", names_no_place=names_no_place)


def compile_objection(options: Any) -> str:
    """Describe why ``train.compile`` may not be handed to torch for a stranger; "" if it may."""
    for name, value in options.items() if isinstance(options, Mapping) else ():
        allowed = _COMPILE.get(name, ())
        if value is not None and not any(value is each or value == each for each in allowed):
            return f"its argument {name} may name a program to run"
    return ""


def _slot(key: str) -> tuple[str, bool]:
    """Return the place that a block is in, and whether it is the outermost block there."""
    for prefix, slot in _SLOTS.items():
        if key == prefix or key.startswith((f"{prefix}.", f"{prefix}[")):
            return slot, key == prefix
    return "", False


def _fits(path: str, rule: _Rule) -> bool:
    parts = path.removeprefix(f"{rule.module}.").split(".")
    if any(part.startswith("_") for part in parts):
        return False
    try:
        found = _walk(rule.module, parts)
        base = object if rule.base == "object" else locate(rule.base)
    except (AttributeError, ImportError, RuntimeError):  # RuntimeError: a lazy module's import
        return False
    if inspect.isclass(found):
        is_listed = rule.module != "torchvision.datasets" or parts[-1] in _TORCHVISION_DATASETS
        is_listed &= not _is_traced(found)
        return is_listed and issubclass(found, base) and _is_under(found.__module__, rule.home)
    return rule.base == _MODULE and _is_model_function(found, path, rule)


def _walk(module_name: str, parts: list[str]) -> Any:
    """Follow attributes from a listed module, through its own submodules and no other module."""
    found: Any = importlib.import_module(module_name)
    done = module_name
    for part in parts:
        if isinstance(found, types.ModuleType) and found.__name__ != done:
            raise AttributeError(f"{done} is the module {found.__name__}")
        if not isinstance(found, types.ModuleType):
            raise AttributeError(f"{done} is no module")
        found = getattr(found, part)
        done = f"{done}.{part}"
    return found


def _is_model_function(found: Any, path: str, rule: _Rule) -> bool:
    """Return whether a function returns a model: timm's factory, or one that torchvision lists."""
    if path == "timm.create_model":
        return True
    if not inspect.isfunction(found) or rule.module != "torchvision.models":
        return False
    return path == "torchvision.models.get_model" or found in _torchvision_builders().values()


def _is_traced(found: Any) -> bool:
    """Return whether a class writes code of what is given to it, and runs that."""
    tracing = ("torchvision.models.feature_extraction", "timm.models._features_fx")
    return any(_is_under(found.__module__, module) for module in tracing)


def _torchvision_builders() -> dict[str, Any]:
    """Return the functions that torchvision lists as models, by name."""
    models = importlib.import_module("torchvision.models")
    return {name: models.get_model_builder(name) for name in models.list_models()}


def _fetched_by_default(path: str, block: Mapping[str, Any]) -> str:
    """Return the argument by which a target fetches something where nothing is said of it."""
    found = locate(path)
    if path == "torchvision.models.get_model":
        found = _torchvision_builders().get(f"{block.get('name')}".lower())
    for name, parameter in parameters_of(found).items():
        default = None if parameter.default is parameter.empty else parameter.default
        if name not in block and _FETCHING.fullmatch(name) and default:
            return name
    return ""


def _argument_objection(value: Any, *, is_model: bool, names_no_place: bool) -> str:
    """Describe which argument fetches something, or may come to be read as code.

    ``names_no_place``: no text may be a path or a URL.
    """
    if isinstance(value, str):
        if names_no_place and re.search(r"[/\\:]", value):
            return f"{value!r:.60} may name a place to load from"
        return f"{value!r:.60} may be read as code" if is_model and _breaks_out(value) else ""
    if isinstance(value, list):
        items = ((f"{index}", item) for index, item in enumerate(value))
    elif isinstance(value, dict):
        items = ((name, item) for name, item in value.items() if name != TARGET)
    else:
        return ""
    for name, item in items:
        if name.startswith("__") or _breaks_out(name):
            return f"its argument {name!r:.60} may be read as code"
        if item and (
            _FETCHING.fullmatch(name)
            or (name == _BACKBONE and isinstance(item, str))
            or ("implementation" in name and item not in _OWN_IMPLEMENTATIONS)
        ):
            return f"its argument {name} may load files or code"
        objection = _argument_objection(item, is_model=is_model, names_no_place=names_no_place)
        if objection:
            return objection
    return ""


def _breaks_out(text: str) -> bool:
    """Return whether a text can end its quotes: torch.fx writes code with names in it."""
    return '"' in text or "\\" in text or not text.isprintable()


def _is_under(name: str, package: str) -> bool:
    return f"{name}.".startswith(f"{package}.")


def _is_shadowed(package: str) -> bool:
    """Return whether a module beside the user goes by a known package's name.

    It is left out of imports; but a user who works on a copy of the package there means that one.
    """
    if package in sys.modules:  # it is running, so it is the right one
        return False
    spec = importlib.machinery.PathFinder.find_spec(package, [os.getcwd()])
    return spec is not None and spec.origin is not None
