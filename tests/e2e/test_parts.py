"""What a run may be made of: harmless without a fault, exact after a skip and after a rollback, whatever its parts."""

from __future__ import annotations

import copy

import pytest
import torch
from cases import OPTIMIZERS, SCHEDULERS, WIDTH, Case, Net
from parts import Parts, Recipe, assert_equal
from test_exact import at, quick
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim import lr_scheduler as schedules
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

mse = nn.functional.mse_loss


def loss_with(model):
    return lambda batch: mse(model(batch[0]).float(), batch[1])


def one(model, optimizer, **more) -> Parts:
    more.setdefault("schedulers", [schedules.CosineAnnealingLR(optimizer, 40)])
    more.setdefault("intervals", ["step"] * len(more["schedulers"]))
    more.setdefault("loss", loss_with(model))
    return Parts(model, [optimizer], **more)


# ---- optimizers


def several_optimizers(fused=False):
    model = Net()
    first = AdamW(model.first.parameters(), lr=1e-2, fused=fused)
    second = SGD([*model.norm.parameters(), *model.last.parameters()], lr=5e-2, momentum=0.9, fused=fused)
    return Parts(
        model,
        [first, second],
        loss_with(model),
        [
            schedules.CosineAnnealingLR(first, 40),
            schedules.ExponentialLR(second, 0.7),
            schedules.LambdaLR(second, lambda t: 0.9**t),
        ],
        ["step", "epoch", "step"],
    )


def param_groups(fused=False):
    model = Net()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = AdamW(
        [{"params": decayed, "lr": 2e-2, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=5e-3,
        fused=fused,
    )
    return one(
        model,
        optimizer,
        schedulers=[schedules.OneCycleLR(optimizer, max_lr=[3e-2, 6e-3], total_steps=400)],
    )


def amsgrad(fused=False):
    model = Net()
    return one(model, torch.optim.Adam(model.parameters(), lr=1e-2, amsgrad=True, fused=fused))


def nesterov(fused=False):
    model = Net()
    return one(model, SGD(model.parameters(), lr=3e-2, momentum=0.9, nesterov=True, weight_decay=0.01, fused=fused))


def lr_as_tensor(fused=False):
    model = Net()
    optimizer = AdamW(model.parameters(), lr=torch.tensor(1e-2), foreach=False if not fused else None, fused=fused)
    return one(model, optimizer)


def fp16_two_optimizers(fused=False):
    model = Net()
    first = AdamW(model.first.parameters(), lr=1e-2, fused=fused)
    second = AdamW([*model.norm.parameters(), *model.last.parameters()], lr=5e-3, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=7)

    def loss(batch):
        with torch.autocast("cpu", dtype=torch.float16):
            return mse(model(batch[0]).float(), batch[1])

    return Parts(model, [first, second], loss, [schedules.CosineAnnealingLR(first, 40)], ["step"], scaler)


class Embedded(nn.Module):
    """Words by number beside a dense layer; which words, follows from x."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(20, WIDTH, sparse=True)
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x):
        numbers = (x.nan_to_num()[:, :3].abs() * 10).long() % 20
        return self.last(self.drop(self.words(numbers).sum(1) + x))


def sparse_beside_dense():
    model = Embedded()
    sparse = torch.optim.SparseAdam(model.words.parameters(), lr=1e-2)
    dense = AdamW(model.last.parameters(), lr=1e-2)
    return Parts(model, [sparse, dense], loss_with(model), [schedules.CosineAnnealingLR(dense, 40)], ["step"])


def muon_beside_adamw():
    model = Net()
    muon = torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=1e-2)
    adamw = AdamW([p for p in model.parameters() if p.dim() != 2], lr=1e-2)
    return Parts(
        model,
        [muon, adamw],
        loss_with(model),
        [schedules.CosineAnnealingLR(muon, 40), schedules.CosineAnnealingLR(adamw, 40)],
        ["step", "step"],
    )


class Lookahead(torch.optim.Optimizer):
    """Wraps another optimizer: slow weights follow every third step. Keeps a count of its own as an attribute."""

    def __init__(self, inner, every=3, share=0.5):
        super().__init__([p for g in inner.param_groups for p in g["params"]], {"lr": inner.param_groups[0]["lr"]})
        self.inner, self.every, self.share, self.taken = inner, every, share, 0

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.inner.param_groups:
            group["lr"] = self.param_groups[0]["lr"]
        for p in self.param_groups[0]["params"]:
            if "slow" not in self.state[p]:
                self.state[p]["slow"] = p.detach().clone()
        self.inner.step()
        self.taken += 1
        if self.taken % self.every == 0:
            for p in self.param_groups[0]["params"]:
                slow = self.state[p]["slow"]
                slow.lerp_(p, self.share)
                p.copy_(slow)


def wrapped_optimizer():
    model = Net()
    return one(model, Lookahead(AdamW(model.parameters(), lr=1e-2)))


# ---- models


def frozen_part(fused=False):
    model = Net()
    model.first.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    return one(model, AdamW(trained, lr=1e-2, fused=fused))


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter on it."""

    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, base.in_features) * 0.1)
        self.up = nn.Parameter(torch.zeros(base.out_features, 2))

    def forward(self, x):
        return self.base(x) + x @ self.down.T @ self.up.T


def adapters(fused=False):
    model = Net(norm=False)
    model.first, model.last = Adapted(model.first), Adapted(model.last)
    return one(model, AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, fused=fused))


def models_in_a_list(fused=False):
    one_, two = nn.Sequential(nn.Linear(WIDTH, 8), nn.Dropout(0.2)), nn.Linear(8, 1)
    optimizer = AdamW([*one_.parameters(), *two.parameters()], lr=1e-2, fused=fused)
    return one([one_, two], optimizer, loss=lambda b: mse(two(one_(b[0])), b[1]))


def models_in_a_dict(fused=False):
    body, head = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Dropout(0.2)), nn.Linear(8, 1)
    optimizer = AdamW([*body.parameters(), *head.parameters()], lr=1e-2, fused=fused)
    return one({"body": body, "head": head}, optimizer, loss=lambda b: mse(head(body(b[0])), b[1]))


def compiled_model(fused=False):
    model = torch.compile(Net(), backend="eager")
    return one(model, AdamW(model.parameters(), lr=1e-2, fused=fused))


# ---- what is registered


class Ema:
    """A plain object: an average of the weights, and how often it was updated."""

    def __init__(self, model):
        self.model, self.count = model, 0
        self.average = {n: p.detach().clone() for n, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, step):
        self.count += 1
        for name, p in self.model.named_parameters():
            self.average[name].lerp_(p, 0.1)

    def state_dict(self):
        return {"average": self.average, "count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]
        for name, value in state["average"].items():
            self.average[name].copy_(value)


def ema_object(fused=False):
    model = Net()
    ema = Ema(model)
    optimizer = AdamW(model.parameters(), lr=1e-2, fused=fused)
    return one(model, optimizer, registered={"ema": ema}, committed=ema.update)


def ema_module(fused=False):
    model = Net()
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = AdamW(model.parameters(), lr=1e-2, fused=fused)
    return one(model, optimizer, registered={"ema": ema}, committed=lambda step: ema.update_parameters(model))


def ema_with_buffers(fused=False):
    model = Net()
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    optimizer = AdamW(model.parameters(), lr=1e-2, fused=fused)
    return one(model, optimizer, registered={"ema": ema}, committed=lambda step: ema.update_parameters(model))


def noise_from_a_generator(fused=False):
    model, generator = Net(), torch.Generator().manual_seed(5)
    optimizer = AdamW(model.parameters(), lr=1e-2, fused=fused)

    def loss(batch):
        return mse(model(batch[0] + 0.1 * torch.randn(batch[0].shape, generator=generator)), batch[1])

    return one(model, optimizer, loss=loss, registered={"noise": generator})


def teacher_inside_the_model(fused=False):
    """A momentum encoder, as in MoCo or DINO: weights without a gradient, moved through `.data` after every step."""
    model = Net()
    model.teacher = copy.deepcopy(model.first).requires_grad_(False)
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, fused=fused)

    def loss(batch):
        near = mse(model.first(batch[0]), model.teacher(batch[0]))
        return mse(model(batch[0]), batch[1]) + 0.1 * near

    def follow(step):
        for slow, fast in zip(model.teacher.parameters(), model.first.parameters(), strict=True):
            slow.data.mul_(0.9).add_(fast.detach(), alpha=0.1)

    return one(model, optimizer, loss=loss, committed=follow)


# ---- schedules


def plateau(fused=False):
    model = Net()
    optimizer = AdamW(model.parameters(), lr=1e-2, fused=fused)
    held_out = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(1))

    def metric():
        model.eval()
        with torch.no_grad():
            value = model(held_out).square().mean().item()
        model.train()
        return value

    return one(
        model,
        optimizer,
        schedulers=[schedules.ReduceLROnPlateau(optimizer, patience=0, factor=0.7)],
        intervals=["eval"],
        metric=metric,
    )


EITHER = [
    several_optimizers,
    param_groups,
    amsgrad,
    nesterov,
    lr_as_tensor,
    fp16_two_optimizers,
    frozen_part,
    adapters,
    models_in_a_list,
    models_in_a_dict,
    compiled_model,
    ema_object,
    ema_module,
    ema_with_buffers,
    noise_from_a_generator,
    teacher_inside_the_model,
    plateau,
]
HOST = [sparse_beside_dense, muon_beside_adamw, wrapped_optimizer]
WAYS = [
    *[pytest.param(lambda r=r: r(), "host", id=r.__name__) for r in HOST],
    *[pytest.param(lambda r=r: r(fused=False), "host", id=f"{r.__name__}-host") for r in EITHER],
    *[pytest.param(lambda r=r: r(fused=True), "device", id=f"{r.__name__}-device") for r in EITHER],
]
UNCLIPPED = (sparse_beside_dense,)  # torch's own clip does not take sparse gradients


def recipe(make, gate, request, **case) -> Recipe:
    case = {"shuffle": "unique", "count": 64, "epochs": 4, "augment": True, "config": quick(gate, max_consecutive=2)} | case
    if "sparse" in request.node.name:
        case["clip"] = None
    return Recipe(make, Case(**case))


@pytest.mark.parametrize(("make", "gate"), WAYS)
def test_without_a_fault_it_is_the_plain_run(make, gate, request, tmp_path):
    r = recipe(make, gate, request)
    run, plain = r.guarded(tmp_path / "run"), r.plain()
    assert run.actions() == []
    assert run.losses == plain.losses
    assert_equal(run.state, plain.state)


@pytest.mark.parametrize(("make", "gate"), WAYS)
def test_skip(make, gate, request, tmp_path):
    r = recipe(make, gate, request)
    r.case.faults = at(r.case, 0, 9, 15)
    run = r.guarded(tmp_path / "run")
    assert run.actions() == ["skip"] * 3
    assert_equal(run.state, r.reference(run).state)


@pytest.mark.parametrize(("make", "gate"), WAYS)
def test_rollback(make, gate, request, tmp_path):
    r = recipe(make, gate, request)
    r.case.faults = at(r.case, 21, 22, 23)
    run = r.guarded(tmp_path / "run")
    assert run.actions()[:5] == ["skip", "replay", "rollback", "skip_data", "cut_lr"]
    assert_equal(run.state, r.reference(run).state)
