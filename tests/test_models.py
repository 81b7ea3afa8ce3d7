"""The models: shapes, what a GPT may see, and that each of them learns."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ampctl.data import Digits
from ampctl.models import GPT, MLP, ConvNet


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def small_gpt(**options) -> GPT:
    torch.manual_seed(0)
    return GPT(
        **{"vocab_size": 11, "context": 8, "num_layers": 2, "num_heads": 2, "width": 16} | options
    )


def test_mlp_flattens_its_input():
    model = MLP(64, [128, 32], 10, dropout=0.1)
    assert model(torch.rand(3, 1, 8, 8)).shape == (3, 10)
    assert [layer.out_features for layer in model.layers if isinstance(layer, nn.Linear)] == [
        128,
        32,
        10,
    ]


def test_mlp_without_hidden_layers_is_linear():
    assert num_parameters(MLP(4, [], 3)) == 4 * 3 + 3


@pytest.mark.parametrize("size", [8, 12, 15, 28, 32])
def test_convnet_takes_images_of_many_sizes(size: int):
    model = ConvNet(num_classes=7, in_channels=3)
    assert model(torch.rand(2, 3, size, size)).shape == (2, 7)


def test_convnet_is_small():
    assert 30_000 < num_parameters(ConvNet()) < 150_000


def test_convnet_reads_digits_better_than_99_in_100():
    torch.manual_seed(0)
    train, test = Digits("train"), Digits("test")
    model = ConvNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 3e-3, total_steps=15 * math.ceil(len(train) / 64)
    )
    for _ in range(15):
        for indices in torch.randperm(len(train)).split(64):
            images, labels = train.__getitems__(indices)
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
            schedule.step()
    with torch.no_grad():
        predictions = model.eval()(test.images).argmax(dim=1)
    assert (predictions == test.labels).float().mean() > 0.99


def test_gpt_gives_logits_for_each_token():
    assert small_gpt()(torch.zeros(3, 5, dtype=torch.int64)).shape == (3, 5, 11)


def test_gpt_sees_no_later_token():
    model = small_gpt().eval()
    tokens = torch.randint(11, (2, 8))
    with torch.no_grad():
        before = model(tokens)
        for time in range(8):
            changed = tokens.clone()
            changed[:, time] = (changed[:, time] + 1) % 11
            after = model(changed)
            assert torch.equal(before[:, :time], after[:, :time])
            assert (before[:, time:] != after[:, time:]).any(dim=-1).all()


def test_gpt_knows_positions():
    model = small_gpt().eval()
    logits = model(torch.full((1, 8), 3))
    assert not torch.allclose(logits[0, 0], logits[0, 1])


def test_gpt_head_is_tied_and_counted_once():
    model = small_gpt()
    assert model.head.weight is model.tokens.weight
    assert "head.weight" not in dict(model.named_parameters())
    assert model.state_dict()["head.weight"].data_ptr() == model.tokens.weight.data_ptr()


def test_gpt_default_size():
    assert num_parameters(GPT()) == 10_844_160


def test_gpt_begins_as_gpt2_does():
    torch.manual_seed(0)
    model = GPT(num_layers=8, num_heads=4, width=128)
    for block in model.blocks:
        assert block.feed_forward.expand.weight.std().item() == pytest.approx(0.02, rel=0.05)
        for layer in (block.attention.project, block.feed_forward.project):
            assert layer.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
            assert not layer.bias.any()
    loss = F.cross_entropy(
        model(torch.randint(256, (2, 64))).flatten(0, 1), torch.randint(256, (128,))
    )
    assert loss.item() == pytest.approx(math.log(256), rel=0.05)


def test_gpt_learns():
    model = small_gpt()
    tokens = torch.arange(9).repeat(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(40):
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]


def test_gpt_dropout_acts_in_training_only():
    model = small_gpt(dropout=0.5)
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_a_sequence_beyond_the_context_is_told_in_words():
    with pytest.raises(ValueError, match="9 tokens and the model a context of 8"):
        small_gpt()(torch.zeros(1, 9, dtype=torch.int64))


def test_a_width_that_the_heads_cannot_share_is_told_in_words():
    with pytest.raises(ValueError, match="width 16 cannot be divided among 3 heads"):
        small_gpt(num_heads=3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_each_model_runs_under_autocast(dtype: torch.dtype):
    cases = [
        (MLP(64, [16], 10), torch.rand(2, 1, 8, 8)),
        (ConvNet(width=8), torch.rand(2, 1, 8, 8)),
        (small_gpt(), torch.randint(11, (2, 8))),
    ]
    for model, inputs in cases:
        with torch.autocast("cpu", dtype):
            outputs = model(inputs)
        assert outputs.dtype == dtype
        assert outputs.isfinite().all()
