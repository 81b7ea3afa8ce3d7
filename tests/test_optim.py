"""Parameter groups by glob and by what should decay, and optimizers that cannot train a model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ampctl.engine.parameter_groups import describe_groups, parameter_groups
from ampctl.errors import RecipeError, UsageError
from ampctl.models import GPT, ConvNet
from ampctl.state_dict.optimizers import needs_closure, refuse_closure


class ScaleNorm(nn.Module):
    """A norm of one's own, its weight of two dimensions and its bias too."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, width))
        self.offset = nn.Parameter(torch.zeros(1, width))


class Renamed(nn.LayerNorm):
    """A norm whose own name does not say so."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.linear = nn.Linear(4, 3)
        self.norm = nn.LayerNorm((2, 3))
        self.own_norm = ScaleNorm(3)
        self.renamed = Renamed((2, 3))
        self.normalised_linear = nn.Linear(3, 3, bias=False)
        self.layer_scale = nn.Parameter(torch.ones(3))
        self.heads = nn.ParameterDict({"bias": torch.zeros(2, 3)})

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs


class SAM(torch.optim.SGD):
    def step(self, closure):  # type: ignore[override]
        return super().step(closure)


def names(group) -> set[str]:
    return {name for name, _ in group["params"]}


def test_without_globs_there_is_one_named_group():
    model = Net()
    (group,) = parameter_groups(model, None, weight_decay=0.1)
    assert group["params"] == list(model.named_parameters())
    assert set(group) == {"params"}


def test_op10_norms_and_biases_do_not_decay_and_embeddings_do():
    model = Net()
    decay, no_decay = parameter_groups(model, {}, weight_decay=0.1)
    assert names(decay) == {"embedding.weight", "linear.weight", "normalised_linear.weight"}
    assert no_decay["weight_decay"] == 0
    assert names(no_decay) == {
        "layer_scale",
        "heads.bias",
        "linear.bias",
        "norm.weight",
        "norm.bias",
        "own_norm.weight",
        "own_norm.offset",
        "renamed.weight",
        "renamed.bias",
    }


@pytest.mark.parametrize(
    "norm", ["BatchNorm2d", "GroupNorm", "InstanceNorm2d", "RMSNorm", "SyncBatchNorm"]
)
def test_op10_the_norms_of_torch_do_not_decay(norm: str):
    make = getattr(nn, norm)
    module = (
        make(2, 4)
        if norm == "GroupNorm"
        else make((2, 4))
        if norm == "RMSNorm"
        else make(4, affine=True)
    )
    model = nn.Sequential(nn.Linear(4, 4, bias=False), module)
    groups = parameter_groups(model, {}, weight_decay=0.1)
    assert names(groups[0]) == {"0.weight"}
    assert all(name.startswith("1.") for group in groups[1:] for name in names(group))


@pytest.mark.parametrize("globs", [{}, {"embedding*": {"lr": 0.1}, "*.bias": {}}])
@pytest.mark.parametrize("weight_decay", [None, 0.0, 0.1])
def test_op10_each_parameter_is_in_exactly_one_group(globs, weight_decay):
    model = Net()
    groups = parameter_groups(model, globs, weight_decay=weight_decay)
    found = [name for group in groups for name, _ in group["params"]]
    assert sorted(found) == sorted(dict(model.named_parameters()))


def test_without_weight_decay_nothing_is_split():
    assert len(parameter_groups(Net(), {}, weight_decay=None)) == 1
    assert len(parameter_groups(Net(), {}, weight_decay=0.0)) == 1


def test_the_first_glob_that_matches_takes_a_parameter_with_its_options():
    groups = parameter_groups(
        Net(), {"linear.bias": {"lr": 1.0}, "linear.*": {"lr": 2.0}}, weight_decay=None
    )
    assert [names(group) for group in groups[:2]] == [{"linear.bias"}, {"linear.weight"}]
    assert [group.get("lr") for group in groups] == [1.0, 2.0, None]


def test_a_globs_own_weight_decay_stands():
    groups = parameter_groups(
        Net(), {"linear.*": {"weight_decay": 0.5}, "norm.*": {"lr": 1.0}}, weight_decay=0.1
    )
    assert groups[0]["weight_decay"] == 0.5
    assert names(groups[0]) == {"linear.weight", "linear.bias"}
    assert groups[1]["weight_decay"] == 0
    assert groups[1]["lr"] == 1.0


def test_a_tied_parameter_is_taken_once_by_any_of_its_names():
    model = GPT(vocab_size=7, context=4, num_layers=1, num_heads=1, width=4)
    groups = parameter_groups(model, {"head.*": {"lr": 1.0}}, weight_decay=0.1)
    assert names(groups[0]) == {"tokens.weight"}
    parameters = [id(parameter) for group in groups for _, parameter in group["params"]]
    assert sorted(parameters) == sorted(map(id, model.parameters()))


def test_frozen_parameters_are_left_out():
    model = Net()
    model.embedding.requires_grad_(False)
    groups = parameter_groups(model, {}, weight_decay=0.1)
    assert "embedding.weight" not in names(groups[0])
    (group,) = parameter_groups(model, None, weight_decay=None)
    assert "embedding.weight" not in names(group)


def test_globs_without_effect_are_all_named_with_what_to_do():
    model = Net()
    model.embedding.requires_grad_(False)
    globs = {"liner.wieght": {}, "*.bias": {}, "linear.bias": {}, "embedding.*": {}}
    with pytest.raises(RecipeError) as raised:
        parameter_groups(model, globs, weight_decay=0.1, where="recipe.yaml:7")
    typo, narrow, frozen = raised.value.problems
    assert typo.where == "recipe.yaml:7"
    assert typo.key == "optimizer.groups[liner.wieght]"
    assert "no parameter of Net matches" in typo.message
    assert "linear.weight" in typo.advice
    assert "'*.bias'" in narrow.message
    assert "frozen" in frozen.message


def test_options_that_the_optimizer_does_not_know_are_named():
    allowed = ["lr", "weight_decay"]
    globs = {"*.bias": {"weight_decya": 0.0}, "norm.*": None, "linear.*": {"params": []}}
    with pytest.raises(RecipeError) as raised:
        parameter_groups(Net(), globs, weight_decay=0.1, allowed=allowed)
    unknown, no_mapping, params = raised.value.problems
    assert unknown.message == "'weight_decya' is not an option of a group"
    assert unknown.advice == "did you mean weight_decay? allowed: lr, weight_decay"
    assert "not a mapping" in no_mapping.message
    assert params.message == "'params' is not an option of a group"
    with pytest.raises(RecipeError, match="'params' is not an option"):
        parameter_groups(Net(), {"linear.*": {"params": []}}, weight_decay=0.1)


@pytest.mark.parametrize("globs", [None, {}, {"classifier.*": {"lr": 0.5}}])
def test_torch_takes_the_groups_and_keeps_the_names(globs):
    model = ConvNet(width=4)
    groups = parameter_groups(model, globs, weight_decay=0.1)
    expected = [[name for name, _ in group["params"]] for group in groups]
    optimizer = torch.optim.AdamW(groups, lr=0.1, weight_decay=0.1)
    assert [group["param_names"] for group in optimizer.state_dict()["param_groups"]] == expected


def test_groups_are_described_by_counts_and_options():
    groups = parameter_groups(Net(), {"embedding.*": {"lr": 0.5}}, weight_decay=0.1)
    assert describe_groups(groups) == [
        "tensors 1, parameters 20: lr 0.5",
        "tensors 2, parameters 21: the optimizer's own options",
        "tensors 9, parameters 42: weight_decay 0",
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    assert describe_groups(optimizer.param_groups)[0].startswith("tensors 1, parameters 20: lr 0.5")


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, SAM])
def test_op4_an_optimizer_with_a_closure_is_refused_by_name(kind):
    model = nn.Linear(2, 2)
    with pytest.raises(UsageError, match=rf"{kind.__name__} .* float32 or bfloat16"):
        refuse_closure(kind(model.parameters(), lr=0.1))
    refuse_closure(torch.optim.AdamW(model.parameters()))


def test_op4_a_closure_is_seen_through_a_schedulers_wrapping():
    lbfgs = torch.optim.LBFGS([torch.zeros(1, requires_grad=True)])
    adam = torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
    for optimizer in (lbfgs, adam):
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 1.0)
    assert needs_closure(lbfgs)
    assert not needs_closure(adam)
