"""A new run that starts from the weights of another: which are taken, what is said of the rest."""

from __future__ import annotations

import math
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from own_parts import Net
from safetensors.torch import save_file
from test_export import Tied
from test_export import run as export
from test_resume_exact import RECIPE, last, train
from torch import Tensor, nn
from typer.testing import CliRunner, Result

from ampctl.cli import app
from ampctl.recipe import trust
from ampctl.track.metrics import read_metrics

TESTS = Path(__file__).parent
LAST = "recipe.yaml", "train.max_steps=1", "optimizer.lr=0.0"
"""With a rate of 0 the weights after a step are those that the run started from."""


class Wider(Net):
    """With a head for five classes."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 5)


class Spoiled(Net):
    """With a value of one of its tensors that is not finite; the mask is none of its weights."""

    def __init__(self, name: str, value: float, trained: bool = True) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tensor([0.0, -math.inf]))
        weight = self.get_parameter(name)
        weight.requires_grad_(trained)
        with torch.no_grad():
            weight.view(-1)[0] = value


@pytest.fixture(autouse=True)
def _here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TESTS))
    (folder / "recipe.yaml").write_text(RECIPE)


def ampctl(*argv: str, code: int = 0) -> Result:
    result = CliRunner().invoke(app, list(argv))
    assert result.exit_code == code, (result.output, result.exc_info)
    return result


def assert_equal(run_dir: str, weights: dict[str, Any], but: tuple[str, ...] = ()) -> None:
    ours = last(Path(run_dir))["model"]
    for name, parameter in ours.items():
        if not name.endswith(("running_mean", "running_var", "num_batches_tracked")):
            assert torch.equal(parameter, weights[name]) != (name in but), name


@pytest.mark.parametrize("source", ["a", "a/checkpoints/latest.pt", "weights.safetensors"])
def test_a_run_starts_from_the_averaged_weights_of_another(source: str) -> None:
    train("a", "train.max_epochs=1")
    if source == "weights.safetensors":
        export("a", source)
    theirs = last(Path("a"))
    said = ampctl("train", *LAST, "--run-dir", "b", "--init-from", source, "seed=9").stdout
    assert f"starting from the weights of {source}" in said
    if source != "weights.safetensors":
        assert "(averaged weights of step 4)" in said
    assert_equal("b", theirs["ema"])
    ours = last(Path("b"))
    assert ours["progress"]["step"] == 1
    assert read_metrics("b/metrics.jsonl")[0]["event"] == "start"


class Renamed(Net):
    """With another name for its head."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.head = self.head, nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(super().forward(x))


class Deeper(Net):
    """With one layer more."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.more(x))


DEEPER = "model={_target_: test_init_from.Deeper}"


def paste(message: str) -> str:
    """Run the commands that an error names; return what the last one says."""
    said = ""
    for line in message.splitlines():
        if line.startswith("    ampctl "):
            words, _, file = line.partition(" > ")
            said = ampctl(*shlex.split(words)[1:]).stdout
            if file:
                Path(*shlex.split(file)).write_text(said)
    return said


@pytest.mark.parametrize(
    ("place", "change", "options", "told"),
    [
        ("run", "model.width=32", "--allow-missing '*'", "2 of 9 taken; as"),
        ("file", DEEPER, "--allow-missing 'more.*'", "9 of 11 taken; as"),
        ("auto", DEEPER, "--allow-missing 'more.*'", "9 of 11 taken; as"),
        (
            "run",
            "model={_target_: test_init_from.Renamed}",
            "--allow-missing 'head.*' --allow-missing 'last.*'",
            "7 of 9 taken; as the model builds them: last.bias, last.weight; "
            "in the file and left out: head.bias, head.weight",
        ),
        ("run", "optimizer={_target_: torch.optim.Adam, amsgrad: true}", "", "9 of 9 taken"),
    ],
)
def test_the_commands_that_a_misfit_names_start_a_run(
    place: str, change: str, options: str, told: str
) -> None:
    train("a b", "train.max_epochs=1", "train.ema_decay=null")
    change, more = shlex.quote(change), "train.max_steps=1"
    if place == "auto":
        flags = ("--run-dir", "a b", "--resume", "auto")
        message = ampctl("train", "recipe.yaml", *shlex.split(change), more, *flags, code=4).stderr
        recipe = "recipe.yaml"
    else:
        source = "a b" if place == "run" else "c/checkpoints/only.pt"
        Path("c/checkpoints").mkdir(parents=True)
        Path("c/recipe.yaml").write_text(RECIPE)  # another one than that of the checkpoint
        Path("c/checkpoints/only.pt").write_bytes(Path("a b/checkpoints/latest.pt").read_bytes())
        message = ampctl("resume", source, *shlex.split(change), more, code=4).stderr
        recipe = "'a b/recipe.yaml'" if place == "run" else "only.yaml"
    assert f"    ampctl train {recipe} {change} {more} --init-from " in message
    assert message.endswith(f"{options}\n")
    assert told in paste(message)


def test_no_command_is_named_where_no_weight_fits() -> None:
    train("a", "train.max_epochs=1")
    other = "model={_target_: torch.nn.Linear, in_features: 8, out_features: 4}"
    message = ampctl("resume", "a", other, code=4).stderr
    assert message.endswith("or start a new run: none of its weights fits\n")


WIDER = "model={_target_: test_init_from.Wider}"


def test_weights_that_do_not_fit_are_named_and_may_be_left_as_the_model_builds_them() -> None:
    train("a", "train.max_epochs=1", "train.ema_decay=null")
    theirs = last(Path("a"))["model"]
    message = ampctl("train", *LAST, WIDER, "--run-dir", "b", "--init-from", "a", code=4).stderr
    assert "do not fit the model:" in message
    assert "head.weight: [4, 16] saved, [5, 16] in the model" in message
    assert "7 of 9 weights of the model are in it" in message
    assert message.endswith("\n    --allow-missing 'head.*'\n")
    assert not Path("b/recipe.yaml").exists()
    flags = ("--init-from", "a", "--allow-missing", "head.*")
    said = ampctl("train", *LAST, WIDER, "--run-dir", "b", *flags).stdout
    assert ": 7 of 9 taken; as the model builds them: head.bias, head.weight\n" in said
    ours = last(Path("b"))["model"]
    assert torch.equal(ours["first.weight"], theirs["first.weight"])


def test_what_only_the_file_has_is_left_out_and_is_told_apart_from_what_is_built_anew() -> None:
    tensors = Wider().state_dict()
    tensors["old.weight"] = tensors.pop("norm.weight")
    torch.save(tensors, "x.pt")
    begin = ("train", *LAST, "--run-dir", "b", "--init-from", "x.pt")
    message = ampctl(*begin, code=4).stderr
    assert "  old.weight: not in the model\n" in message
    advice = "--allow-missing 'head.*' --allow-missing norm.weight --allow-missing 'old.*'"
    assert message.endswith(f"\n    {advice}\n")
    said = ampctl(*begin, *shlex.split(advice)).stdout
    anew = "as the model builds them: head.bias, head.weight, norm.weight; "
    assert f": 6 of 9 taken; {anew}in the file and left out: old.weight\n" in said


def test_a_checkpoint_of_which_nothing_fits_is_no_beginning() -> None:
    torch.save({f"other.{name}": value for name, value in Net().state_dict().items()}, "x.pt")
    flags = ("--init-from", "x.pt", "--allow-missing", "*")
    message = ampctl("train", *LAST, "--run-dir", "b", *flags, code=4).stderr
    assert "none of the weights of x.pt fits the model:\n  first.bias: missing in" in message
    assert not Path("b").exists() or not list(Path("b").glob("*.yaml"))


@pytest.mark.parametrize("out", ["x.safetensors", "x.pt"])
def test_tied_weights_come_back_from_an_export(out: str) -> None:
    tied = "model={_target_: test_export.Tied}"
    train("a", "train.max_epochs=1", tied, "train.ema_decay=null")
    export("a", out)
    said = ampctl("train", *LAST, tied, "--run-dir", "b", "--init-from", out).stdout
    assert f"starting from the weights of {out}: 4 of 4 taken\n" in said
    assert_equal("b", last(Path("a"))["model"])


def test_tied_weights_that_differ_in_a_file_are_not_taken_one_for_the_other() -> None:
    tensors = {n: value.clone() for n, value in Tied().state_dict().items()}
    tensors["head.weight"] += 1
    torch.save(tensors, "x.pt")
    tied = "model={_target_: test_export.Tied}"
    begin = ("train", *LAST, tied, "--run-dir", "b", "--init-from", "x.pt")
    message = ampctl(*begin, code=4).stderr
    assert "head.weight: one tensor with first.weight in the model" in message
    assert message.endswith("\n    --allow-missing head.weight\n")
    said = ampctl(*begin, "--allow-missing", "head.weight").stdout
    assert "x.pt: 4 of 4 taken; in the file and left out: head.weight\n" in said
    assert torch.equal(last(Path("b"))["model"]["head.weight"], tensors["first.weight"])


def other_weights(prefix: str = "") -> dict[str, Any]:
    """Return weights as another seed builds them, with other names."""
    torch.manual_seed(77)
    return {f"{prefix}{name}": value for name, value in Net().state_dict().items()}


@pytest.mark.parametrize("key", ["", "state_dict", "model_state_dict", "model"])
def test_a_state_dict_that_another_program_saved_is_a_beginning(key: str) -> None:
    theirs = other_weights()
    torch.save({key: theirs, "epoch": 3} if key else theirs, "x.pt")
    said = ampctl("train", *LAST, "--run-dir", "b", "--init-from", "x.pt").stdout
    where = f"x.pt (its `{key}`)" if key else "x.pt"
    assert f"starting from the weights of {where}: 9 of 9 taken\n" in said
    assert_equal("b", theirs)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "model."])
def test_a_prefix_that_all_names_of_a_file_have_is_taken_off_and_told(prefix: str) -> None:
    theirs = other_weights(prefix)
    if prefix == "model.":
        save_file(theirs, "x")  # known by its content
    else:
        torch.save(theirs, "x")
    said = ampctl("train", *LAST, "--run-dir", "b", "--init-from", "x").stdout
    assert f"of x, without the `{prefix}` before its names: 9 of 9 taken\n" in said
    assert_equal("b", other_weights())
    theirs["epoch"] = torch.ones(1)
    torch.save(theirs, "y")
    message = ampctl("train", *LAST, "--run-dir", "c", "--init-from", "y", code=4).stderr
    assert "none of the weights of y fits" in message


def test_weights_that_are_rounded_or_not_finite_are_told() -> None:
    theirs = other_weights()
    torch.save({n: v.double() if n == "head.bias" else v for n, v in theirs.items()}, "x.pt")
    said = ampctl("train", *LAST, "--run-dir", "b", "--init-from", "x.pt").stdout
    assert "1 of 9 tensors were saved in float64 and are float32 in the model" in said
    theirs["head.weight"][0] = float("nan")
    torch.save(theirs, "x.pt")
    message = ampctl("train", *LAST, "--run-dir", "c", "--init-from", "x.pt", code=4).stderr
    assert "  head.weight: NaN or infinity in it\n" in message


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ({"epoch": 3}, "it is a file of another tool"),
        (nn.Linear(1, 1), "it would import torch.nn.modules.linear.Linear"),
        ({"a": torch.ones(1, device="meta")}, "no plain tensor with a name in a;"),
    ],
)
def test_a_file_without_a_state_dict_is_told_what_to_bring(content: Any, told: str) -> None:
    torch.save(content, "x.pt")
    message = ampctl("train", *LAST, "--init-from", "x.pt", code=4).stderr
    assert told in message
    assert "or a state dict that torch.save(model.state_dict(), FILE) has written" in message


def test_a_glob_that_names_nothing_and_flags_that_miss_each_other_are_mistakes() -> None:
    train("a", "train.max_epochs=1")
    flags = ("--init-from", "a", "--allow-missing", "tail.*")
    message = ampctl("train", *LAST, "--run-dir", "b", *flags, code=4).stderr
    assert message.endswith("  --allow-missing tail.*: no weight is called so\n")
    message = ampctl("train", *LAST, "--allow-missing", "head.*", code=2).stderr
    assert "--allow-missing is about the weights of --init-from" in message
    for wrong in ("nowhere", "recipe.yaml", "no.safetensors"):
        message = ampctl("train", *LAST, "--run-dir", "b", "--init-from", wrong, code=4).stderr
        assert wrong in message


def test_a_damaged_safetensors_file_is_told_in_words() -> None:
    save_file({"a": torch.ones(9)}, "x.safetensors")
    whole = Path("x.safetensors").read_bytes()
    cut = "it is damaged: it is cut off, or something was added at its end"
    for content, told in (
        (b"", "it is empty"),
        (whole[:5], "it is cut off, or no safetensors file"),
        (whole[:40], "it is cut off, or no safetensors file"),
        (whole[:-1], cut),
        (whole + b"x", cut),
        (b"\x02\0\0\0\0\0\0\0[]", "its header cannot be read"),
        (whole.replace(b"F32", b"F99"), "its header cannot be read"),
        (b"name: digits\n" * 9, "it is cut off, or no safetensors file"),
    ):
        Path("x.safetensors").write_bytes(content)
        message = ampctl("train", *LAST, "--init-from", "x.safetensors", code=4).stderr
        assert "x.safetensors cannot be used: it is " in message
        assert told in message
        assert message.endswith("; bring back an intact copy\n")


def test_a_requeued_run_goes_on_with_its_own_weights() -> None:
    train("a", "train.max_epochs=1")
    flags = ("--run-dir", "b", "--init-from", "a", "--resume", "auto")
    ampctl("train", "recipe.yaml", "train.max_steps=2", *flags)
    first = last(Path("b"))
    said = ampctl("train", "recipe.yaml", "train.max_steps=2", *flags).stdout
    assert "complete" in said
    assert torch.equal(last(Path("b"))["model"]["head.weight"], first["model"]["head.weight"])


def test_nothing_of_the_recipe_in_the_other_checkpoint_is_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    train("a", "train.max_epochs=1")
    monkeypatch.setattr(trust, "require_trusted", lambda *args, **kwargs: pytest.fail("asked"))
    ampctl("train", *LAST, "--run-dir", "b", "--init-from", "a")


@pytest.mark.parametrize(
    ("value", "trained"), [(math.nan, True), (math.inf, True), (math.nan, False)]
)
def test_weights_that_are_not_finite_from_the_start_begin_no_run(
    value: float, trained: bool
) -> None:
    model = {"_target_": "test_init_from.Spoiled", "name": "head.bias"}
    model |= {"value": "nan" if math.isnan(value) else "inf", "trained": trained}
    block = ", ".join(f"{key}: {value}" for key, value in model.items())
    block = f"model={{{block}}}".replace(" nan", " .nan").replace(" inf", " .inf")
    for command in (("train", *LAST, "--run-dir", "b"), ("check", *LAST)):
        said = ampctl(*command, block, code=2).stderr
        assert "model: its weights are not finite from the start: head.bias" in said
    assert not list(Path("b").glob("checkpoints/*"))


def test_a_frozen_infinity_is_a_mask() -> None:
    block = "{_target_: test_init_from.Spoiled, name: head.bias, value: -.inf, trained: false}"
    ampctl("train", *LAST, "--run-dir", "b", f"model={block}", "amp.clip_norm=null")
    assert last(Path("b"))["model"]["head.bias"][0] == -math.inf


def test_a_file_with_nan_begins_no_run() -> None:
    train("a", "train.max_epochs=1")
    weights = last(Path("a"))["ema"]
    weights["head.bias"][0] = math.nan
    save_file(weights, "bad.safetensors")
    start = ("train", *LAST, "--run-dir", "b", "--init-from", "bad.safetensors")
    said = ampctl(*start, code=4).stderr
    assert "head.bias: NaN or infinity in it" in said
    assert not list(Path("b").glob("checkpoints/*"))
