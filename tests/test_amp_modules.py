"""``amp.modules``: single modules in a dtype of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from states import Net
from torch import Tensor, nn

from ampctl.amp.modules import set_module_dtypes
from ampctl.errors import RecipeError
from ampctl.recipe.load import load_recipe
from ampctl.run import worker


class Watched(nn.Module):
    """Two linear layers; keeps the dtype that each computed in."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.head = nn.Linear(4, 4)
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: Tensor) -> Tensor:
        for name, layer in (
            ("body.0", self.body[0]),
            ("body.1", self.body[1]),
            ("head", self.head),
        ):
            x = layer(x)
            self.seen[name] = x.dtype
        return x


def run(model: nn.Module, dtype: torch.dtype) -> None:
    with torch.autocast("cpu", dtype=dtype):
        model(torch.randn(2, 4)).float().sum().backward()


def test_a_glob_gives_its_modules_their_dtype_and_leaves_the_rest() -> None:
    model = Watched()
    chosen = set_module_dtypes(model, {"head": "float32", "body.1": "bfloat16"}, device_type="cpu")
    assert chosen == {"body.1": "bfloat16", "head": "float32"}
    run(model, torch.float16)
    assert model.seen == {
        "body.0": torch.float16,
        "body.1": torch.bfloat16,
        "head": torch.float32,
    }
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


def test_the_first_glob_that_matches_counts() -> None:
    model = Watched()
    chosen = set_module_dtypes(
        model, {"body.0": "float32", "body.*": "bfloat16"}, device_type="cpu"
    )
    assert chosen == {"body.0": "float32", "body.1": "bfloat16"}


def test_names_types_and_state_stay_as_they_were() -> None:
    model, plain = Watched(), Watched()
    set_module_dtypes(model, {"head": "float32"}, device_type="cpu")
    assert isinstance(model.head, nn.Linear)
    assert repr(model) == repr(plain)
    assert list(model.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(model.state_dict())


def test_a_glob_without_a_module_names_the_nearest() -> None:
    with pytest.raises(RecipeError, match=r"the nearest name is head"):
        set_module_dtypes(Watched(), {"haed": "float32"}, device_type="cpu")


def test_a_glob_near_no_module_is_answered_with_the_first_and_the_last_which_is_the_head() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(9)))
    with pytest.raises(RecipeError, match=r"its names are 0, 1, 2, 3, \.\.\., 8$"):
        set_module_dtypes(model, {"classifier.*": "float32"}, device_type="cpu")


def test_a_compiled_model_keeps_them() -> None:
    model = Watched()
    set_module_dtypes(model, {"head": "float32"}, device_type="cpu")
    plain = [p.detach().clone() for p in model.parameters()]
    x = torch.randn(2, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        eager = model(x)
        compiled = torch.compile(model, backend="eager")(x)
    assert compiled.dtype == torch.float32
    assert torch.equal(eager, compiled)
    assert all(torch.equal(a, b) for a, b in zip(plain, model.parameters(), strict=True))


def test_a_recipe_lists_them_and_an_island_of_float16_is_scaled(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    text = """
name: islands
model: {_target_: own_parts.Net}
task: {_target_: ampctl.tasks.Classification}
data: {train: {_target_: own_parts.Augmented}, batch_size: 6}
optimizer: {_target_: torch.optim.AdamW, lr: 1e-2}
amp: {dtype: float32, modules: {"fi*": float16}, init_scale: 256}
train: {max_steps: 3}
"""
    (folder / "recipe.yaml").write_text(text)
    worker.train(load_recipe("recipe.yaml"), run_dir=Path("run"), resume=False, quiet=False)
    said = capsys.readouterr().out
    assert "apart: first in float16" in said
    assert "no effect" not in said  # the island is scaled: amp.init_scale counts
    saved = torch.load("run/checkpoints/latest.pt", weights_only=True)
    assert saved["scaler"]["enabled"]
    assert saved["scaler"]["scale"] == 256
    assert list(saved["model"]) == list(Net().state_dict())
