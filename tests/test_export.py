"""The weights of a checkpoint alone: they load into the bare model, and nothing is built for it."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from safetensors.torch import load_model as load_tied
from test_checkpoint_file import saved
from test_resume_exact import RECIPE
from torch import Tensor, nn
from typer.testing import CliRunner, Result

import ampctl
from ampctl.checkpoint import store
from ampctl.checkpoint.export import export
from ampctl.cli import app
from ampctl.recipe import target
from ampctl.recipe.load import load_recipe
from ampctl.run import worker

TESTS = Path(__file__).parent


@pytest.fixture(autouse=True)
def _here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TESTS))
    (folder / "recipe.yaml").write_text(RECIPE)


def train(run_dir: str = "a", *overrides: str) -> dict[str, Any]:
    loaded = load_recipe("recipe.yaml", ("train.max_epochs=1", *overrides))
    worker.train(loaded, run_dir=Path(run_dir), resume=False, quiet=True)
    return store.load(Path(run_dir), notify=print).payload


def run(*argv: str, code: int = 0) -> Result:
    result = CliRunner().invoke(app, ["export", *argv])
    assert result.exit_code == code, (result.stdout, result.stderr, result.exc_info)
    assert result.stderr.count("error: ") == (1 if code else 0)
    assert not list(Path().glob(".*.tmp"))
    return result


def assert_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert value.dtype == b[name].dtype
        assert torch.equal(value, b[name]), name


def metadata(path: str) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        found: dict[str, str] = file.metadata()
        return found


class Tied(nn.Module):
    """Its head is its first layer, the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 4)
        self.head = nn.Linear(8, 4)
        self.head.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x) + self.first(x)


def test_the_weights_load_into_the_bare_model_and_say_where_they_are_from() -> None:
    payload = train()
    text = run("a", "out.safetensors").stdout
    assert "weights:    averaged (EMA)" in text
    assert_equal(load_file("out.safetensors"), payload["ema"])
    model = ampctl.load_model("a", ema=False)
    model.load_state_dict(load_file("out.safetensors"))
    found = metadata("out.safetensors")
    assert found.pop("recipe_digest") == load_recipe("a/recipe.yaml").digest
    assert found == {
        "format": "pt",
        "ampctl": ampctl.__version__,
        "name": "exact",
        "step": "4",
        "weights": "ema",
        "dtype": "float32, int64",
        "tied": "{}",
    }
    run("a/checkpoints/latest.pt", "raw.safetensors", "--raw")
    assert_equal(load_file("raw.safetensors"), payload["model"])
    assert metadata("raw.safetensors")["weights"] == "raw"
    assert not torch.equal(payload["model"]["head.weight"], payload["ema"]["head.weight"])
    facts = json.loads(run("a", "out.pt", "--ema", "--json").stdout)
    assert (facts["weights"], facts["step"]) == ("ema", 4)
    assert facts["bytes"] == Path("out.pt").stat().st_size
    assert facts["values"] == sum(value.numel() for value in payload["ema"].values())
    assert_equal(torch.load("out.pt", weights_only=True), payload["ema"])
    train("b", "train.ema_decay=null")
    assert "as trained (raw)" in run("b", "b.pt").stdout
    assert "holds no EMA" in run("b", "c.pt", "--ema", code=4).stderr


def test_weights_that_are_not_finite_are_written_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    payload = train()
    payload["model"]["head.bias"][0] = float("nan")
    torch.save(payload, "nan.pt")
    told = "nan.pt holds NaN or infinity in head.bias"
    assert f"{told}\n" in run("nan.pt", "raw.pt", "--raw").stderr
    assert run("nan.pt", "ema.pt").stderr == ""
    ampctl.load_model("nan.pt", ema=False)
    assert caplog.messages[-1].endswith(told)
    result = CliRunner().invoke(app, ["eval", "nan.pt", "--raw"])
    assert (result.exit_code, told in result.stderr) == (0, True)
    payload["environment"]["nonfinite_by_design"] = ["head.bias"]
    torch.save(payload, "mask.pt")
    assert run("mask.pt", "mask.safetensors", "--raw").stderr == ""


def test_one_export_is_always_the_same_file_which_others_may_read() -> None:
    train()
    for suffix in ("safetensors", "pt"):
        contents = set()
        for i in range(4):
            run("a", f"{i}.{suffix}")
            contents.add(Path(f"{i}.{suffix}").read_bytes())
        assert len(contents) == 1
        plain = Path("plain")
        plain.touch()
        assert Path(f"0.{suffix}").stat().st_mode == plain.stat().st_mode


@pytest.mark.parametrize("ema", ["null", "0.9"])
def test_tied_weights_are_stored_once_and_load_into_the_bare_model(ema: str) -> None:
    train("a", "model={_target_: test_export.Tied}", f"train.ema_decay={ema}")
    text = run("a", "out.safetensors").stdout
    assert "tied:       head.weight is first.weight" in text
    assert load_file("out.safetensors").keys() == {"first.weight", "first.bias", "head.bias"}
    assert json.loads(metadata("out.safetensors")["tied"]) == {"head.weight": "first.weight"}
    model = Tied()
    load_tied(model, "out.safetensors")  # strict
    assert_equal(model.state_dict(), ampctl.load_model("a").state_dict())
    run("a", "out.pt", "--dtype", "bfloat16")
    state = torch.load("out.pt", weights_only=True)
    assert state["head.weight"].data_ptr() == state["first.weight"].data_ptr()
    model.load_state_dict(state)


def test_a_dtype_is_that_of_all_floating_tensors() -> None:
    payload = train("a", "model={_target_: own_parts.Masked}")
    for name in ("bfloat16", "float16"):
        run("a", f"{name}.safetensors", "--dtype", name)
        tensors = load_file(f"{name}.safetensors")
        dtype = getattr(torch, name)
        assert {value.dtype for value in tensors.values()} == {dtype}
        for key, value in payload["ema"].items():
            assert torch.equal(tensors[key], value.to(dtype)), key
        assert tensors["mask"].isinf().sum() == 28  # which it was before
        assert metadata(f"{name}.safetensors")["dtype"] == name
    raw = ("train.ema_decay=null", "amp.dtype=bfloat16")
    payload = train("b", "model={_target_: own_parts.HalfNet}", *raw)
    run("b", "wide.safetensors", "--dtype", "float32")
    assert_equal(
        load_file("wide.safetensors"),
        {n: v.float() if v.is_floating_point() else v for n, v in payload["model"].items()},
    )
    assert load_file("wide.safetensors")["norm.num_batches_tracked"].dtype == torch.int64


def test_a_cast_that_overflows_is_refused_by_name_and_one_that_loses_values_is_told() -> None:
    weights = {
        "fits": torch.full((4,), 6e4),
        "large": torch.tensor([1.0, -7e4]),
        "huge": torch.tensor([1e30]),
    }
    saved(Path("a.pt"), model=weights)
    message = run("a.pt", "out.safetensors", "--dtype", "float16", code=4).stderr
    assert "out of the range of float16, up to 65504" in message
    assert "large (up to 7e+04), huge (up to 1e+30)" in message
    assert "fits" not in message
    assert not Path("out.safetensors").exists()
    assert run("a.pt", "out.safetensors", "--dtype", "bfloat16").stderr == ""
    double = torch.tensor([1e300], dtype=torch.float64)
    saved(Path("b.pt"), model={"double": double, "inf": torch.tensor([math.inf])})
    assert "double (up to 1e+300)" in run("b.pt", "out.pt", "--dtype", "float32", code=4).stderr
    saved(Path("c.pt"), model={"small": torch.tensor([1e-9, 1e-3, 0.0])})
    told = run("c.pt", "out.pt", "--dtype", "float16").stderr
    assert told == "warning: 1 of 2 values that are not 0 are too small for float16: 0 there\n"
    assert (
        "Invalid value for '--dtype'"
        in CliRunner().invoke(app, ["export", "c.pt", "out.pt", "--dtype", "int8"]).stderr
    )


def test_channels_last_and_empty_tensors_are_written_in_plain_order() -> None:
    weights = {
        "conv": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "turned": torch.randn(3, 4).t(),
        "none": torch.zeros(0, 3),
        "nothing": torch.zeros(0, 3),
        "scalar": torch.tensor(3.0),
    }
    saved(Path("a.pt"), model=weights)
    run("a.pt", "out.safetensors")
    assert_equal(load_file("out.safetensors"), weights)


def test_nothing_is_written_over_unless_asked(folder: Path) -> None:
    train()
    Path("out.pt").write_text("mine")
    Path("link.pt").symlink_to("lost")
    for name in ("out.pt", "link.pt"):
        assert f"{name} exists already" in run("a", name, code=2).stderr
    assert Path("out.pt").read_text() == "mine"
    run("a", "out.pt", "--force")
    assert torch.load("out.pt", weights_only=True)
    before = {path: path.read_bytes() for path in Path("a").rglob("*") if path.is_file()}
    for out in ("a/checkpoints/latest.pt", "a/checkpoints/new.pt"):
        assert "in the checkpoints of a run" in run("a", out, "--force", code=2).stderr
    Path("copy.pt").write_bytes(Path("a/checkpoints/latest.pt").read_bytes())
    assert "in the checkpoints" in run("copy.pt", "copy.pt", "--force", code=2).stderr
    assert "there is no folder no" in run("a", "no/out.pt", code=2).stderr
    Path("folder.pt").mkdir()
    assert "folder.pt is a folder" in run("a", "folder.pt", "--force", code=2).stderr
    for name in ("out.bin", "out", "out.SAFETENSORS"):
        assert "allowed: NAME.safetensors" in run("a", name, code=2).stderr
    assert {path: path.read_bytes() for path in Path("a").rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_a_full_disk_ends_with_5_and_leaves_nothing(mount: Any, suffix: str) -> None:
    saved(Path("a.pt"), model={"weight": torch.randn(100_000)})
    disk = mount("size=100k")
    message = run("a.pt", f"{disk}/out.{suffix}", code=5).stderr
    assert f"cannot write {disk}/out.{suffix}: No space left on device" in message
    assert list(disk.iterdir()) == []


def test_a_full_disk_keeps_what_was_to_be_replaced(mount: Any) -> None:
    saved(Path("a.pt"), model={"weight": torch.randn(100_000)})
    out = mount("size=100k") / "out.pt"
    out.write_text("dear")
    run("a.pt", f"{out}", "--force", code=5)
    assert out.read_text() == "dear"


def test_without_safetensors_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    train()
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "safetensors" else found(name)
    )
    message = run("a", "out.safetensors", code=2).stderr
    assert 'pip install "ampctl[export]"' in message
    run("a", "out.pt")


def test_what_cannot_be_read_ends_with_4() -> None:
    train("a", "model={_target_: own_parts.Poisons}")
    (bad,) = Path("a/checkpoints").glob("*.nonfinite.pt")
    assert "it holds NaN or infinity in model.largest" in run(f"{bad}", "x.pt", code=4).stderr
    newest = Path("a/checkpoints/latest.pt").resolve()
    newest.write_bytes(newest.read_bytes()[:-50])
    assert "damaged" in run(f"{newest}", "x.pt", code=4).stderr
    assert f"checkpoint {newest.name} cannot be used" in run("a", "x.pt").stderr
    assert "no such file" in run("nowhere", "y.pt", code=4).stderr


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "weights",
    [
        {"extra_state": {"a": 1}},
        {3: torch.ones(1)},
        {"huge": torch.ones(1).expand(1 << 45)},
        {"sparse": torch.eye(3).to_sparse()},
        {"none": torch.empty(1 << 40, device="meta")},
        {"__metadata__": torch.ones(1)},
        {"\ud800": torch.ones(1)},
        {"bits": torch.zeros(4, dtype=torch.uint8).view(torch.bits8)},
    ],
    ids=lambda weights: ascii(next(iter(weights))),
)
@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_odd_weights_are_refused_by_name(weights: dict[Any, Any], suffix: str) -> None:
    saved(Path("a.pt"), model=weights)
    message = run("a.pt", f"out.{suffix}", code=4).stderr
    assert "no plain tensors are" in message
    assert not Path(f"out.{suffix}").exists()


def test_a_dtype_that_safetensors_has_not_is_told() -> None:
    saved(Path("a.pt"), model={"z": torch.ones(3, dtype=torch.complex128)})
    assert "no torch.complex128, in which are z" in run("a.pt", "a.safetensors", code=4).stderr
    run("a.pt", "out.pt")


def test_nothing_of_the_recipe_inside_is_built(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "hostile.py").write_text("open('canary', 'w').close()\nclass Net: pass\n")
    sys.modules.pop("hostile", None)
    monkeypatch.setattr(target, "locate", lambda path: pytest.fail(f"{path} is looked up"))
    recipe = load_recipe("recipe.yaml").text.replace("own_parts.Net", "hostile.Net")
    for i, text in enumerate((recipe, "name: [", "\ud800", "name: \x1b[31m")):
        saved(Path("a.pt"), recipe=text)
        run("a.pt", f"{i}.safetensors")
        assert metadata(f"{i}.safetensors")["name"] == ("" if i else "exact")
    assert not (folder / "canary").exists()


def test_a_kill_of_the_write_leaves_the_name_free(monkeypatch: pytest.MonkeyPatch) -> None:
    train()

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ampctl.checkpoint.disk.publish", stop)
    with pytest.raises(KeyboardInterrupt):
        export(Path("a"), Path("x.pt"), ema=None, dtype=None, force=False, notify=print)
    assert not list(Path().glob("*x.pt*"))
