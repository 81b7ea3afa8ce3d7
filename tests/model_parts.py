"""Models, tasks and optimizers of a user's own that do more than compute: modes, weights, state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Frozen(nn.Module):
    """A frozen backbone in eval mode under a head that trains; ``whole``: all in eval mode."""

    def __init__(self, whole: bool = False) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
        self.backbone.requires_grad_(False).eval()
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(8, 4)
        if whole:
            self.eval()

    def forward(self, x: Tensor) -> Tensor:
        modes = (self.training, self.dropout.training, any(m.training for m in self.backbone))
        if torch.is_grad_enabled():
            assert modes == (True, True, False), modes
        return self.head(self.dropout(self.backbone(x)))


class Keeps(Frozen):
    """Sees to its backbone's mode itself, and counts how often it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[bool] = []
        self.backbone.train()

    def train(self, mode: bool = True) -> Keeps:
        super().train(mode)
        self.backbone.eval()
        self.told.append(mode)
        return self


class Both:
    """One turn for the only optimizer, by name; the task of ``losses``."""

    def losses(self, model: nn.Module, batch: Any) -> Any:
        yield "all", self.loss(model, batch)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]).float(), batch[1])


class Complex(nn.Module):
    """A layer with complex weights between two of another dtype, and an empty parameter.

    torch leaves the gradient of a conjugated one conjugated.
    """

    def __init__(self, dtype: str = "float32", conjugates: bool = True) -> None:
        super().__init__()
        self.conjugates = conjugates
        self.first = nn.Linear(8, 6, dtype=getattr(torch, dtype))
        self.head = nn.Linear(6, 4)
        self.filter = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.shift = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.nothing = nn.Parameter(torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x.to(self.first.weight.dtype)).float()
        shift = self.shift.conj() if self.conjugates else self.shift
        spectrum = torch.fft.rfft(first) * self.filter + shift
        return self.head(torch.fft.irfft(spectrum, n=6) + self.nothing.sum())


class FunctionalBag(nn.Module):
    """Sparse gradients that no module announces."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(12, 4))

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.table, sparse=True).mean(1)


class Island(nn.Module):
    """A float32 island whose gradient no half precision can hold."""

    def __init__(self, factor: float = 2.0**21) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        with torch.autocast(x.device.type, enabled=False):
            return self.head(y.float() * self.factor) / self.factor


class Bounded(torch.optim.SGD):
    """An optimizer whose argument is infinite where nobody gives it."""

    def __init__(self, params: Any, lr: float, most: float = float("inf")) -> None:
        super().__init__(params, lr=lr)


class Spoils(torch.optim.SGD):
    """An optimizer that leaves infinities in the weights."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.fill_(float("inf"))


class Makes(nn.Module):
    """Makes something of its own in its first pass: ``what`` names it."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.first, self.what = nn.Linear(8, 4), what
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("later", None)
        self.register_buffer("cached", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.what == "replaced at once" and not hasattr(self, "old"):
            self.old, self.first = [self.first], nn.Linear(8, 4)
        y = self.first(x)
        if self.training == self.what.endswith("in eval mode"):
            return y  # it makes nothing in this mode
        if self.what == "buffer in eval mode" and not hasattr(self, "counts"):
            self.register_buffer("counts", torch.zeros(3))
        elif self.what == "parameter in eval mode" and not hasattr(self, "extra"):
            self.extra = nn.Parameter(torch.zeros(3))
        if self.what == "parameter" and not hasattr(self, "scale"):
            self.scale = nn.Parameter(torch.ones(4))
        elif self.what == "layer" and not hasattr(self, "head"):
            self.head = nn.Linear(4, 4)
        elif self.what == "buffer" and not hasattr(self, "mean"):
            self.register_buffer("mean", torch.zeros(4))
        elif self.what == "later":
            self.later = torch.zeros(4)
        elif self.what == "larger":
            self.seen = torch.zeros(len(self.seen) + 1)
        elif self.what == "resized":
            self.seen.resize_(4).zero_()
        elif self.what == "replaced":
            self.first.weight = nn.Parameter(self.first.weight.detach() * 1.0)
        elif self.what == "grown parameter":
            self.first.bias.data = torch.zeros(1, 4)
        elif self.what == "cached":
            self.cached = torch.zeros(len(self.cached) + 1)
        return y + (self.scale.sum() if hasattr(self, "scale") else 0)


class MakesTask:
    """A task that gives the model a parameter."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if not hasattr(model, "temperature"):
            model.temperature = nn.Parameter(torch.ones(()))
        return F.cross_entropy(model(batch[0]).float(), batch[1]) * model.temperature


class TwoPoints(torch.optim.Optimizer):
    """Schedule-free SGD, as its paper has it: it trains at one point, and is evaluated at another.

    The way from one to the other and back is rounded.
    """

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "train_mode": False})

    def _move(self, training: bool) -> None:
        for group in self.param_groups:
            beta = group["beta"]
            for parameter in group["params"] if group["train_mode"] != training else ():
                if parameter in self.state:
                    z = self.state[parameter]["z"]
                    parameter.data.lerp_(z, 1 - beta if training else 1 - 1 / beta)
            group["train_mode"] = training

    def train(self) -> None:
        self._move(True)

    def eval(self) -> None:
        self._move(False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            assert group["train_mode"], "step was called in eval mode"
            lr, beta, share = group["lr"], group["beta"], 1 / (group["k"] + 1)
            for parameter in group["params"]:
                state = self.state[parameter]
                z = state.setdefault("z", parameter.detach().clone())
                parameter.lerp_(z, share)
                parameter.add_(parameter.grad, alpha=lr * (beta * (1 - share) - 1))
                z.sub_(parameter.grad, alpha=lr)
            group["k"] += 1


class Meddles:
    """A task that does more than to return a loss: ``how`` says what."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.optimizer: Any = None

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = F.cross_entropy(model(batch[0]).float(), batch[1])
        if torch.is_grad_enabled():
            self.meddle(model, model.first.weight, loss)
        return loss

    def meddle(self, model: nn.Module, weight: Any, loss: Tensor) -> None:
        if self.how in ("step", "backward"):
            self.optimizer = self.optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
            loss.backward(retain_graph=True)
            if self.how == "step":
                self.optimizer.step()
        elif self.how == "zero_grad":
            model.zero_grad()
        elif self.how == "by hand":
            (gradient,) = torch.autograd.grad(loss, weight, retain_graph=True)
            weight.data.sub_(0.1 * gradient)
        elif self.how == "no_grad":
            with torch.no_grad():
                weight.mul_(0.9)
        elif self.how == "replaces":
            weight.data = weight.detach() + 0.1
        elif self.how == "clamps":
            weight.data.clamp_(-0.1, 0.1)
        elif self.how == "half":
            model.half()


class TrainsItself:
    """A task that is a whole training loop, behind which nothing but the weights tells of it."""

    def __init__(self) -> None:
        self.optimizer: Any = None

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = F.cross_entropy(model(batch[0]).float(), batch[1])
        if torch.is_grad_enabled():
            self.optimizer = self.optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
            loss.backward(retain_graph=True)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss


class StepsItself(TrainsItself):
    """The same, which returns a loss that leads back to nothing."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return super().loss(model, batch).detach()


class StepsInBackward(nn.Linear):
    """Each parameter steps as soon as its gradient is there, as torch's tutorial does it."""

    def __init__(self, drops: bool = True) -> None:
        super().__init__(8, 4)
        self.drops = drops
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(self.step)

    @torch.no_grad()
    def step(self, parameter: Tensor) -> None:
        parameter -= 0.1 * parameter.grad
        if self.drops:
            parameter.grad = None


class MeddlesInTurns(Meddles):
    """The same between the turns of optimizers."""

    def losses(self, model: nn.Module, batch: Any) -> Any:
        loss = F.cross_entropy(model(batch[0]).float(), batch[1])
        yield "all", loss
        loss = F.cross_entropy(model(batch[0]).float(), batch[1])
        self.meddle(model, model.first.weight, loss)


class Teacher(nn.Module):
    """A student, and a teacher that follows it in the forward pass; spectral norm beside them."""

    def __init__(self, freezes: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(8, 4)
        self.teacher = nn.Linear(8, 4)
        self.teacher.requires_grad_(not freezes)
        self.normed = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for own, followed in zip(
                self.teacher.parameters(), self.first.parameters(), strict=True
            ):
                own.lerp_(followed + 1, 0.1)
            target = self.teacher(x)
        return self.first(x) + self.normed(x) + 0 * target
