"""A recipe out of a checkpoint may be a stranger's: what it may import, and what never runs."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest
import torch

from ampctl.errors import CheckpointError
from ampctl.recipe.load import LoadedRecipe, parse_recipe
from ampctl.recipe.trust import record, require_trusted, wants_current_folder

GOOD = {
    "model": "{_target_: ampctl.models.ConvNet, num_classes: 10}",
    "task": "{_target_: ampctl.tasks.Classification}",
    "train": "{_target_: ampctl.data.Digits, split: train}",
    "eval": "null",
    "optimizer": "{_target_: torch.optim.AdamW, lr: 3e-3}",
    "scheduler": "null",
    "compile": "false",
}


GPT2 = """{{_target_: transformers.GPT2LMHeadModel, config:
  {{_target_: transformers.GPT2Config, {}}}}}"""
CIFAR = """{_target_: torchvision.datasets.CIFAR10, root: /data, transform:
  {_target_: torchvision.transforms.v2.Compose, transforms:
  [{_target_: torchvision.transforms.v2.ToImage},
   {_target_: torchvision.transforms.Normalize, mean: [0], std: [1]}]}}"""


def recipe(**blocks: str) -> LoadedRecipe:
    parts = {**GOOD, **blocks}
    return parse_recipe(
        f"""\
name: a
model: {parts["model"]}
task: {parts["task"]}
data: {{train: {parts["train"]}, eval: {parts["eval"]}, batch_size: 1}}
optimizer: {parts["optimizer"]}
scheduler: {parts["scheduler"]}
train: {{max_steps: 1, compile: {parts["compile"]}}}
""",
        where="checkpoint.pt",
    )


def is_trusted(**blocks: str) -> bool:
    try:
        assert require_trusted(recipe(**blocks), trust=False) == []
    except CheckpointError:
        return False
    return True


@pytest.mark.parametrize(
    ("slot", "block"),
    [
        ("model", "{_target_: ampctl.models.GPT}"),
        ("model", "{_target_: torch.nn.Linear, in_features: 1, out_features: 2}"),
        (
            "model",
            "{_target_: torch.nn.Sequential, a: {_target_: torch.nn.modules.activation.ReLU}}",
        ),
        ("model", "{_target_: torchvision.models.resnet18, num_classes: 3, weights: null}"),
        ("model", "{_target_: torchvision.models.get_model, name: resnet18}"),
        ("model", "{_target_: torchvision.models.resnet.ResNet}"),
        ("model", "{_target_: timm.create_model, model_name: resnet18, pretrained: false}"),
        ("model", GPT2.format("n_layer: 2, id2label: {0: jack-o'-lantern (pumpkin)}")),
        ("model", "{_target_: timm.models.SwinTransformerV2, pretrained_window_sizes: [8, 8]}"),
        ("task", "{_target_: ampctl.tasks.LanguageModel}"),
        ("train", "{_target_: ampctl.data.PythonSource}"),
        ("eval", CIFAR),
        ("eval", "{_target_: torch.utils.data.ConcatDataset, a: [{_target_: ampctl.data.Digits}]}"),
        (
            "model",
            "{_target_: torchvision.models.detection.fcos_resnet50_fpn, weights_backbone: null}",
        ),
        (
            "model",
            "{_target_: torchvision.models.get_model, name: fcos_resnet50_fpn, "
            "weights_backbone: null}",
        ),
        ("train", "{_target_: torchvision.datasets.MNIST, root: x, download: false}"),
        ("compile", "true"),
        ("compile", "{mode: max-autotune, fullgraph: true, dynamic: null}"),
        ("compile", "{backend: aot_eager}"),
        ("optimizer", "{_target_: torch.optim.SGD}"),
        ("optimizer", "{_target_: timm.optim.Lamb}"),
        ("scheduler", "{_target_: ampctl.schedules.Cosine}"),
        ("scheduler", "{_target_: torch.optim.lr_scheduler.StepLR, step_size: 3}"),
    ],
)
def test_objects_that_fit_their_slot_are_trusted(slot: str, block: str) -> None:
    if "transformers" in block:
        pytest.importorskip("transformers")
    assert is_trusted(**{slot: block})


@pytest.mark.parametrize(
    ("slot", "block"),
    [
        # other packages, and the standard library behind a known one
        *[
            ("model", f"{{_target_: {path}}}")
            for path in (
                "os.system",
                "builtins.eval.x",
                "subprocess.run",
                "my_net.Net",
                "pickle.loads",
                "torch.os.system",
                "torch.serialization.os.system",
                "torch.nn.modules.linear.torch.os.system",
                "torch.nn.modules.linear.math.exp",
                "torch.hub.load",
                "torch.load",
                "torch.jit.load",
                "torch.utils.cpp_extension.load",
                "torch.nn.init.torch.load",
                "torch.nn.functional.relu",
                "ampctl.recipe.target.locate",
                "ampctl.recipe.target.build",
                "ampctl.models.convnet.nn.Linear",
                "torch.nn.parallel.DistributedDataParallel",
                "torch.distributed.nn.RemoteModule",
                "torch.nn.Linear.from_float",
                "torch.nn.Module.__init__.__globals__",
                "torch.nn.Linear.__init__",
                "torch.nn.Nothing",
                "torch.nn",
                "torchvision.models.get_weight",
                "torchvision.models.list_models",
                "torchvision.models.feature_extraction.create_feature_extractor",
                "torchvision.models.feature_extraction.DualGraphModule",
                "torchvision.models.resnet.conv3x3",
                "torchvision.models.detection.backbone_utils.resnet_fpn_backbone",
                "torchvision.models.detection.fcos_resnet50_fpn",
                "torch.nn.Lineаr",  # the a is Cyrillic
                "ｔorch.nn.Linear",
                "timm.create_modell",
                "transformers.AutoModel.from_pretrained",
                "transformers.pipeline",
                "torch.fx.GraphModule",
                "transformers.GPT2LMHeadModel.from_pretrained",
                "torchvision.datasets.utils.download_url",
            )
        ],
        # known objects in the wrong place
        ("model", "{_target_: torch.optim.AdamW}"),
        ("task", "{_target_: torch.nn.Linear}"),
        ("optimizer", "{_target_: torch.nn.Linear}"),
        ("optimizer", "{_target_: torch.optim.lr_scheduler.StepLR}"),
        ("scheduler", "{_target_: torch.optim.SGD}"),
        ("train", "{_target_: torch.nn.Linear}"),
        ("train", "{_target_: torchvision.datasets.LSUN, root: x}"),
        ("train", "{_target_: torchvision.datasets.DatasetFolder, root: x, loader: y}"),
        ("train", "{_target_: ampctl.data.order.Order}"),
        ("compile", "{backend: {_target_: torch.nn.Linear}}"),
        ("compile", "{backend: evil}"),
        ("compile", "{mode: evil}"),
        ("compile", "{options: {cpp.cxx: [./evil]}}"),
        ("compile", "{options: {max_autotune: true}}"),
        # hidden inside a good one
        ("model", "{_target_: torch.nn.Sequential, a: [{b: {_target_: os.system, command: x}}]}"),
        (
            "optimizer",
            "{_target_: torch.optim.SGD, groups: {x: {lr: {_target_: builtins.exec.y}}}}",
        ),
        # arguments that fetch files or code
        ("model", "{_target_: timm.create_model, model_name: resnet18, pretrained: true}"),
        ("model", "{_target_: timm.create_model, model_name: resnet18, pretrained: yes}"),
        ("model", "{_target_: timm.create_model, model_name: resnet18, checkpoint_path: evil.pth}"),
        ("model", "{_target_: timm.create_model, model_name: 'hf-hub:evil/model'}"),
        ("model", "{_target_: timm.create_model, model_name: r, pretrained_cfg: {url: x}}"),
        ("model", "{_target_: torchvision.models.resnet18, weights: DEFAULT}"),
        ("model", "{_target_: torchvision.models.get_model, name: FCOS_resnet50_fpn}"),
        ("train", "{_target_: torchvision.datasets.MNIST, root: x, download: true}"),
        ("model", GPT2.format("backbone: evil")),
        ("model", GPT2.format("name_or_path: evil")),
        ("model", GPT2.format("sub: [{_name_or_path: evil}]")),
        ("model", GPT2.format("target_lang: evil")),
        ("model", GPT2.format("use_kernels: true")),
        ("model", GPT2.format("auto_map: {a: b}")),
        ("model", GPT2.format("attn_implementation: evil/kernel")),
        ("model", GPT2.format("_attn_implementation: flash_attention_2")),
        ("model", GPT2.format("trust_remote_code: true")),
        # another name for one of these
        ("model", GPT2.format("attribute_map: {harmless: _attn_implementation}, harmless: x")),
        ("model", GPT2.format("experts_implementation: sonicmoe")),
        ("model", GPT2.format("__class__: x")),
        ("model", GPT2.format("detectron2_config_args: {MODEL.WEIGHTS: evil}")),
        # names that end the quotes they are put in, where code is written of a model
        ("model", "{_target_: torch.nn.ModuleDict, modules: {'a\") or evil(\"': 1}}"),
        ("model", "{_target_: torch.nn.ModuleDict, modules: [['a\") or evil(\"', 1]]}"),
        ("model", r"{_target_: torch.nn.ModuleDict, modules: [['a\', 1]]}"),
        ("model", r'{_target_: torch.nn.ModuleDict, modules: [["a\nb", 1]]}'),
        ("train", r'{_target_: torch.utils.data.StackDataset, "a\nb": 1}'),
        ("model", "{_target_: timm.models.GraphExtractNet, model: {_target_: torch.nn.Identity}}"),
        ("model", "{_target_: timm.models.FeatureGraphNet}"),
        ("model", "{_target_: timm.create_model, model_name: resnet18, feature_cls: fx}"),
    ],
)
def test_anything_else_is_refused(slot: str, block: str) -> None:
    if "transformers" in block:
        pytest.importorskip("transformers")
    assert not is_trusted(**{slot: block})


def test_a_refusal_lists_every_import_and_the_two_ways_on() -> None:
    loaded = recipe(
        model="{_target_: my_net.Net, a: {_target_: os.system}}", task="{_target_: x.Y}"
    )
    with pytest.raises(CheckpointError) as caught:
        require_trusted(loaded, trust=False)
    message = f"{caught.value}"
    assert caught.value.exit_code == 4
    for part in (
        "model: my_net.Net",
        "model.a: os.system",
        "task: x.Y",
        "--trust",
        "train that recipe",
    ):
        assert part in message
    assert "AdamW" not in message
    lines = require_trusted(loaded, trust=True)
    assert [line.split(" (")[0] for line in lines] == [
        "model: my_net.Net",
        "model.a: os.system",
        "task: x.Y",
    ]
    assert require_trusted(recipe(), trust=True) == []


def test_a_refusal_is_short_and_steers_no_terminal() -> None:
    inner = ", ".join(f"{{_target_: evil.{name * 999}}}" for name in "abcdefghijklmnop")
    loaded = recipe(model=f'{{_target_: torch.nn.ModuleList, "\\x9b2J": [{inner}]}}')
    with pytest.raises(CheckpointError) as caught:
        require_trusted(loaded, trust=False)
    assert "and 7 more" in f"{caught.value}"
    assert len(f"{caught.value}") < 4000
    assert "\x9b" not in f"{caught.value}"


def test_what_fetches_by_default_must_be_told_not_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """As configurations of transformers 4 did."""

    class Config(torch.nn.Identity):
        def __init__(self, use_pretrained_backbone: bool = True) -> None: ...

    Config.__module__ = "torch.nn.modules.linear"
    monkeypatch.setattr(torch.nn, "Config", Config, raising=False)
    assert not is_trusted(model="{_target_: torch.nn.Config}")
    assert is_trusted(model="{_target_: torch.nn.Config, use_pretrained_backbone: false}")


def test_hostile_modules_beside_the_user_never_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    canary = folder / "canary"
    plant = f"open({str(canary)!r}, 'w').close()\n"
    monkeypatch.syspath_prepend(str(folder))
    for name in ("evil", "torchmetrics", "torch_evil"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(plant + "class Net: pass\n")
        (folder / name / "classification.py").write_text(plant + "class Net: pass\n")
    refused = [
        {"model": "{_target_: evil.Net}"},
        {"model": "{_target_: torch_evil.classification.Net}"},
        {
            "task": "{_target_: ampctl.tasks.Classification, metric: "
            "{_target_: torchmetrics.classification.Net}}"
        },
        {"model": f"{{_target_: os.system, command: 'touch {canary}'}}"},
        {"model": f"{{_target_: torch.os.system, command: 'touch {canary}'}}"},
        {
            "model": "{_target_: pathlib.Path.touch, self: "
            f"{{_target_: pathlib.Path, x: '{canary}'}}}}"
        },
    ]
    for blocks in refused:
        assert not is_trusted(**blocks)
    assert not canary.exists()


def test_a_recipe_trained_here_is_trusted_and_one_that_differs_in_text_is_not() -> None:
    mine = "{_target_: my_net.Net, width: 3, path: a.bin}"
    assert not is_trusted(model=mine)
    assert record(recipe(model=mine))
    assert is_trusted(model=mine)
    assert is_trusted(model=mine.replace("3", "4"))
    assert is_trusted(model="{_target_: my_net.Net, path: a.bin, width: 3}")
    assert not is_trusted(model=mine.replace("a.bin", "b.bin"))
    assert not is_trusted(model=mine.replace("Net", "Other"))
    assert not is_trusted(model=mine, task="{_target_: my_net.Task}")


def test_options_of_the_compiler_are_trusted_as_they_were_trained() -> None:
    mine = {"model": "{_target_: my_net.Net}", "compile": "{options: {cpp.cxx: [clang]}}"}
    assert record(recipe(**mine))
    assert is_trusted(**mine)
    assert not is_trusted(**{**mine, "compile": "{options: {cpp.cxx: [evil]}}"})


def test_the_record_is_private_and_has_each_recipe_once() -> None:
    loaded = recipe(model="{_target_: my_net.Net}")
    assert record(loaded)
    assert record(loaded)
    assert record(recipe(model="{_target_: my_net.Other}"))
    (path,) = (Path(os.environ["XDG_STATE_HOME"]) / "ampctl").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert len(path.read_text().splitlines()) == 2
    path.chmod(0o666)  # others could have written it
    assert not is_trusted(model="{_target_: my_net.Net}")


def test_a_home_that_cannot_be_written_is_no_fault(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    loaded = recipe(model="{_target_: my_net.Net}")
    assert record(loaded) is False
    with pytest.raises(CheckpointError):
        require_trusted(loaded, trust=False)


def test_the_record_lies_in_the_home_where_no_state_folder_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert record(recipe())
    assert (tmp_path / ".local" / "state" / "ampctl").is_dir()


NET = "class Net:\n    pass\n"


def place(monkeypatch: pytest.MonkeyPatch, folder: Path, content: str = NET) -> Path:
    """Stand in a folder, with `my_net.py` beside the user."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "my_net.py").write_text(content)
    monkeypatch.chdir(folder)
    return folder


def test_c1_a_recipe_is_trusted_with_the_code_it_was_trained_with(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = "{_target_: my_net.Net, width: 3}"
    home = place(monkeypatch, folder / "home")
    assert record(recipe(model=mine))
    assert is_trusted(model=mine)
    (home / "my_net.py").write_text("import json\n" + NET)  # the user's own is theirs to edit
    assert is_trusted(model=mine)
    strange = place(monkeypatch, folder / "strange")
    assert not is_trusted(model=mine)
    with pytest.raises(CheckpointError, match="you have trained it, but not with the code that"):
        require_trusted(recipe(model=mine), trust=False)
    for link in ("my_net.py", "my_net"):
        (strange / "my_net.py").unlink(missing_ok=True)
        (strange / link).symlink_to(home / "my_net.py" if "." in link else home)
        assert not is_trusted(model=mine), link
        (strange / link).unlink()
    monkeypatch.chdir(home)
    assert is_trusted(model=mine)
    (folder / "link").symlink_to(home)
    monkeypatch.chdir(folder / "link")  # the same folder by another name
    assert is_trusted(model=mine)


@pytest.mark.parametrize("kind", ["package", "namespace", "namespace of two"])
def test_c1_packages_count_as_modules_do(
    kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(where: Path) -> None:
        (where / "lib").mkdir(parents=True)
        (where / "lib/net.py").write_text(NET)
        if kind == "package":
            (where / "lib/__init__.py").write_text("")

    mine = "{_target_: lib.net.Net}"
    make(folder / "home")
    make(folder / "strange")
    if kind == "namespace of two":
        (folder / "site/lib").mkdir(parents=True)
        monkeypatch.syspath_prepend(str(folder / "site"))
    monkeypatch.chdir(folder / "home")
    assert record(recipe(model=mine))
    assert is_trusted(model=mine)
    monkeypatch.chdir(folder / "strange")
    assert not is_trusted(model=mine)
    monkeypatch.chdir(folder)
    assert not is_trusted(model=mine)


def test_c1_what_was_trained_with_installed_code_opens_no_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stranger's module could lie there by the name of one that the installed code imports."""
    loaded = recipe(model="{_target_: pip.Net, a: 1}", task="{_target_: json.Task}")
    home, strange = folder / "home", folder / "strange"
    for each in (home, strange):
        each.mkdir()
    monkeypatch.chdir(home)
    assert record(loaded)
    monkeypatch.chdir(strange)
    assert require_trusted(loaded, trust=False) == []
    assert not wants_current_folder(loaded, loaded, trust=False)
    assert wants_current_folder(loaded, loaded, trust=True)
    named = recipe(model="{_target_: my_net.Net}")
    assert wants_current_folder(loaded, named, trust=False)  # in the user's own words
    (strange / "pip.py").write_text(NET)
    if "pip" not in sys.modules:
        assert not is_trusted(model="{_target_: pip.Net, a: 1}", task="{_target_: json.Task}")
    place(monkeypatch, home)
    assert record(named)
    assert wants_current_folder(named, named, trust=False)


def test_c1_what_an_older_ampctl_recorded_opens_nothing(folder: Path) -> None:
    loaded = recipe(model="{_target_: my_net.Net}")
    known = Path(os.environ["XDG_STATE_HOME"]) / "ampctl/trained-recipes"
    known.parent.mkdir(parents=True)
    known.touch(mode=0o600)
    known.write_text(f"{loaded.digest} {loaded.digest}\n")
    with pytest.raises(CheckpointError, match="or with an older ampctl"):
        require_trusted(loaded, trust=False)


KINDS = ("1", "0", "true", "false", "null", "'1'", "'0'", "'true'", "'null'", "''", "[]", "{}")


@pytest.mark.parametrize("inside", ["{}", "[{}]", "{{b: {}}}", "[[1, {}]]"])
def test_c2_a_value_of_another_kind_is_another_recipe(inside: str) -> None:
    for trained in KINDS:
        known = Path(os.environ["XDG_STATE_HOME"]) / "ampctl/trained-recipes"
        known.unlink(missing_ok=True)
        mine = f"{{_target_: my_net.Net, a: {inside.format(trained)}}}"
        assert record(recipe(model=mine))
        trusted = [
            kind
            for kind in KINDS
            if is_trusted(model=f"{{_target_: my_net.Net, a: {inside.format(kind)}}}")
        ]
        assert trusted == [trained], (inside, trained)


def test_c2_numbers_other_than_0_are_alike() -> None:
    mine = "{_target_: my_net.Net, a: %s}"
    assert record(recipe(model=mine % "3"))
    for number in ("1", "1.0", "-2", "0.5", "1e-9", ".inf", ".nan"):
        assert is_trusted(model=mine % number), number
    for other in ("0", "0.0", "-0.0", "[number, true]", "null", "'3'", "true"):
        assert not is_trusted(model=mine % other), other
