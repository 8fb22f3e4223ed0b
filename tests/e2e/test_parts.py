"""What a run may be made of: harmless without a fault, exact after a skip and after a rollback, whatever its parts."""

from __future__ import annotations

import copy

import pytest
import torch
from cases import OPTIMIZERS, SCHEDULERS, WIDTH, Case, Net, assert_same
from parts import Done, Parts, Recipe, assert_equal
from test_exact import Heals, at, check, quick, without
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim import lr_scheduler as schedules
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import holdfast
from holdfast.core.record.journal import read

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


def fp16_one_of_two_overflows(fused=False):
    """Gradients of one optimizer overflow at a scale that the other's bear: torch steps that one and not this."""
    model = Net()
    model.loud = nn.Linear(WIDTH, 1)
    first = AdamW([p for n, p in model.named_parameters() if "loud" not in n], lr=1e-2, fused=fused)
    second = AdamW(model.loud.parameters(), lr=1e-6, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=4)

    def loss(batch):
        with torch.autocast("cpu", dtype=torch.float16):
            quiet, loud = model(batch[0]).float(), model.loud(batch[0]).float()
        return mse(quiet, batch[1]) + 64.0 * loud.mean()

    return Parts(model, [first, second], loss, [schedules.CosineAnnealingLR(first, 40)], ["step"], scaler)


def rarely_used(fused=False):
    """A layer that few batches reach: its first gradient comes late, and in the vetoed first step."""
    model = Net()
    model.rare = nn.Linear(WIDTH, 1)

    def loss(batch):
        value = mse(model(batch[0]), batch[1])
        if batch[0].isnan().any() or batch[0].sum() > 12:
            value = value + mse(model.rare(batch[0]), batch[1])
        return value

    # Torch's fused SGD itself does not take a parameter whose momentum begins later than that of the others.
    optimizer = AdamW(model.parameters(), fused=True) if fused else SGD(model.parameters(), lr=3e-2, momentum=0.9)
    return one(model, optimizer, loss=loss)


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
    fp16_one_of_two_overflows,
    rarely_used,
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


def ways(turn, share=2):
    """Every recipe with the gate on the host and on the device. One of the two is quick, the other one is slow: they take
    turns over the recipes, and over the tests by `turn`. With share=4 half of the recipes have both slow."""
    cases = [pytest.param(lambda r=r: r(), "host", id=r.__name__) for r in HOST]
    for number, r in enumerate(EITHER, turn):
        for device, gate in enumerate(("host", "device")):
            marks = [] if number % share == device else [pytest.mark.slow]
            make = lambda r=r, fused=bool(device): r(fused=fused)  # noqa: E731
            cases.append(pytest.param(make, gate, id=f"{r.__name__}-{gate}", marks=marks))
    return cases


UNCLIPPED = (sparse_beside_dense,)  # torch's own clip does not take sparse gradients


def recipe(make, gate, request, **case) -> Recipe:
    case = {
        "shuffle": "unique",
        "count": 64,
        "epochs": 4,
        "augment": True,
        "config": quick(gate, max_consecutive=2),
    } | case
    if "sparse" in request.node.name:
        case["clip"] = None
    return Recipe(make, Case(**case))


@pytest.mark.slow
@pytest.mark.parametrize(("make", "gate"), ways(turn=2, share=4))
def test_without_a_fault_it_is_the_plain_run(make, gate, request, tmp_path):
    r = recipe(make, gate, request)
    run, plain = r.guarded(tmp_path / "run"), r.plain()
    assert run.actions() == []
    assert run.losses == plain.losses
    assert_equal(run.state, plain.state)


@pytest.mark.slow
@pytest.mark.parametrize(("make", "gate"), ways(turn=1, share=4))  # the others are skipped in test_rollback
def test_skip(make, gate, request, tmp_path):
    r = recipe(make, gate, request)
    r.case.faults = at(r.case, 0, 9, 15)
    run = r.guarded(tmp_path / "run")
    assert run.actions() == ["replay", "skip"] * 3
    assert_equal(run.state, r.plain(without(r.case, 0, 9, 15)).state)


@pytest.mark.slow
@pytest.mark.parametrize(("make", "gate"), ways(turn=0))
def test_rollback(make, gate, request, tmp_path):
    r = recipe(make, gate, request)
    r.case.faults = at(r.case, 21, 22, 23)
    run = r.guarded(tmp_path / "run")
    assert run.actions() == [*["replay", "skip"] * 2, "replay", "rollback", "replay", *["skip"] * 3]
    assert_equal(run.state, r.plain(without(r.case, 21, 22, 23)).state)


@pytest.mark.slow
@pytest.mark.parametrize(("make", "gate"), ways(turn=3, share=4))
def test_rollback_with_a_cut_lr(make, gate, request, tmp_path):
    r = recipe(make, gate, request)
    r.case.config["recover"] |= {"skip_batches": 2}
    heals = Heals(returns=2)
    r.case.faults = at(r.case, 21, 22, 23, how=heals)
    run = r.guarded(tmp_path / "run", hooks=[heals])
    assert run.actions()[-2:] == ["rollback", "cut_lr"]
    assert run.excluded() == {"spans": [], "samples": {}}
    assert_equal(run.state, r.reference(run).state)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
def test_every_optimizer_through_a_vetoed_first_step_and_a_rollback(optimizer, tmp_path):
    gate = "device" if optimizer.endswith("fused") else "host"
    case = Case(optimizer=optimizer, shuffle="unique", count=64, epochs=4, config=quick(gate, max_consecutive=2))
    case.faults = at(case, 0, 21, 22, 23)
    run = check(case, tmp_path, "skip", "rollback")
    assert_same(run, case.plain(without(case, 0, 21, 22, 23)))


@pytest.mark.slow
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("interval", ["step", "epoch"])
@pytest.mark.parametrize("scheduler", sorted(set(SCHEDULERS) - {"none", "plateau"}))
def test_every_scheduler_through_a_rollback(scheduler, interval, tmp_path):
    case = Case(scheduler=scheduler, interval=interval, shuffle="unique", count=64, epochs=4)
    case.config = quick(max_consecutive=2, skip_batches=2)
    heals = Heals(returns=2)
    case.faults = at(case, 21, 22, 23, how=heals)
    run = case.guarded(tmp_path / "run", hooks=[heals])
    assert run.actions()[-2:] == ["rollback", "cut_lr"]
    assert_same(run, case.reference(run))


def test_the_recipes_do_what_they_are_for(tmp_path):
    case = Case(shuffle="unique", count=64, epochs=4, augment=True)
    run = Recipe(fp16_one_of_two_overflows, case).guarded(tmp_path / "run")
    assert run.guard.summary().overflowed >= 2
    stepped = [int(o.state[o.param_groups[0]["params"][0]]["step"]) for o in run.parts.optimizers[:1]]
    assert stepped[0] > run.guard.step, "the quiet optimizer was stepped where the loud one overflowed"
    model = Recipe(rarely_used, case).plain().parts.model
    torch.manual_seed(case.seed)
    assert not torch.equal(model.rare.weight, rarely_used().model.rare.weight)


# ---- what is kept


def test_frozen_weights_are_stored_once_and_shared_by_every_snapshot(tmp_path):
    r = Recipe(adapters, Case(shuffle="unique", count=64, epochs=3, config=quick()))
    run = r.guarded(tmp_path / "run")
    snapshots = list(run.guard._run.parts.snapshots.ring)
    assert len(snapshots) >= 3
    names = {"frozen.first.base.weight", "frozen.first.base.bias", "frozen.last.base.weight", "frozen.last.base.bias"}
    for snapshot in snapshots:
        assert snapshot.frozen.keys() == names
        assert not any(
            "base" in name for copy in snapshot.copies for name in copy.tensors if not name.startswith("print.")
        )
    for name in names:
        assert len({s.frozen[name].data_ptr() for s in snapshots}) == 1


def test_a_flipped_bit_in_the_shared_copy_of_a_frozen_weight_is_never_restored(tmp_path):
    config = {**quick(max_consecutive=2), "checkpoint": {"enabled": False}}
    r = Recipe(adapters, Case(shuffle="unique", count=64, epochs=4, config=config))
    r.case.faults = at(r.case, 21, 22, 23)

    def flip(step, parts, guard):
        if step.number == 22 and step.attempt == 1:
            frozen = guard._run.context.state._frozen_copies["first.base.weight"]
            frozen.view(torch.int32).view(-1)[0] ^= 1

    with pytest.raises(holdfast.PolicyStop, match="no certified snapshot"):
        r.guarded(tmp_path / "run", in_the_loop=flip)
    notes = [e for e in read(tmp_path / "run" / "journal.jsonl").events if e["event"] == "note"]
    assert any("share" in p["why"] for e in notes for p in e.get("passed_over", ()))


def test_an_average_that_turns_nan_is_not_restored_even_in_a_plain_object(tmp_path):
    r = Recipe(ema_object, Case(shuffle="unique", count=64, epochs=4, config=quick()))

    def strike(step, parts, guard):
        if step.number == 10 and not struck:
            struck.append(1)
            parts.registered["ema"].average["last.bias"].fill_(float("nan"))

    struck: list[int] = []
    run = r.guarded(tmp_path / "run", in_the_loop=strike)
    assert run.actions() == ["rollback"]
    assert_equal(run.state, r.plain().state)


class Bank(Net):
    """A large buffer that forward replaces by a new tensor, twice within a step of two batches."""

    def __init__(self):
        super().__init__()
        self.register_buffer("bank", torch.zeros(20_000))

    def forward(self, x):
        if self.training:
            self.bank = torch.cat([x.detach().flatten(), self.bank])[:20_000]
        return super().forward(x) + self.bank[:64].mean()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("gate", ["host", "device"])
@pytest.mark.parametrize("faults", [[8], [20, 21, 22, 23, 24, 25]])
def test_a_large_buffer_rebound_twice_a_step(gate, faults, tmp_path):
    def make():
        model = Bank()
        return one(model, AdamW(model.parameters(), lr=1e-2, fused=True))

    r = Recipe(make, Case(shuffle="unique", accumulate=2, count=64, epochs=6, config=quick(gate, max_consecutive=2)))
    r.case.faults = at(r.case, *faults)
    run = r.guarded(tmp_path / "run")
    assert ("rollback" in run.actions()) == (len(faults) > 1)
    assert_equal(run.state, r.reference(run).state)


def odd_buffers(kind):
    model = Net()
    if kind == "float8":
        model.register_buffer("odd", torch.randn(16).to(torch.float8_e4m3fn), persistent=False)
    else:
        eye = torch.eye(16)
        model.register_buffer("odd", eye.to_sparse() if kind == "coo" else eye.to_sparse_csr(), persistent=False)

    def loss(batch):
        seen = model.odd.float() if kind == "float8" else torch.sparse.mm(model.odd, torch.ones(16, 1))
        return mse(model(batch[0]) + 0.01 * seen.sum(), batch[1])

    return one(model, AdamW(model.parameters(), lr=1e-2), loss=loss)


@pytest.mark.parametrize("kind", ["float8", "coo", "csr"])
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_buffers_torch_cannot_ask_for_finite_values(kind, tmp_path):
    r = Recipe(lambda: odd_buffers(kind), Case(shuffle="unique", count=64, epochs=4, config=quick(max_consecutive=2)))
    r.case.faults = at(r.case, 21, 22, 23)
    run = r.guarded(tmp_path / "run")
    assert "rollback" in run.actions()
    parameters = dict(run.parts.model.named_parameters())
    assert_equal(parameters, dict(r.reference(run).parts.model.named_parameters()))


def test_a_group_added_on_the_way_is_clipped_and_cleared_like_the_others(tmp_path):
    """Gradual unfreezing, as plain torch does it: from step 8 on the first layer is trained too."""

    def make():
        model = Net()
        model.first.requires_grad_(False)
        return one(model, AdamW([*model.norm.parameters(), *model.last.parameters()], lr=1e-2), schedulers=[])

    def unfreeze(step, parts):
        if step == 7:
            parts.model.first.requires_grad_(True)
            parts.optimizers[0].add_param_group({"params": list(parts.model.first.parameters())})

    r = Recipe(make, Case(shuffle="unique", count=64, epochs=2))
    run = r.guarded(tmp_path / "run", in_the_loop=lambda step, parts, guard: unfreeze(step.number - 1, parts))
    plain_make = r._make

    def with_unfreezing():
        parts = plain_make()
        parts.committed = lambda step: unfreeze(step, parts)
        return parts

    r._make = with_unfreezing
    assert_equal(run.state, r.plain().state)


# ---- what a loop does between two steps


def evaluated_in_the_loop(r: Recipe, run_dir) -> Done:
    """As `guarded`, but the evaluation stands in the loop, after the step, where a script would have it."""
    case, parts = r.case, r.make()
    guard = holdfast.Guard(
        parts.model,
        parts.optimizers[0],
        scheduler=parts.schedulers,
        clip_grad_norm=case.clip,
        run_dir=run_dir,
        config=case.config,
    )
    losses = []
    with guard:
        for step in guard.steps(case.loader(), epochs=case.epochs):
            with step:
                for batch in step.microbatches():
                    loss = parts.loss(batch)
                    losses.append(loss.item())
                    step.backward(loss)
            if step.number % parts.eval_every == 0 and step.outcome.status == "committed":
                guard.report_eval(parts.metric())
    return Done(parts, losses, guard, run_dir)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("gate", ["host", "device"])
@pytest.mark.parametrize("faults", [[], [9], [21, 22, 23]])
def test_an_evaluation_in_the_loop_goes_back_with_the_step_it_follows(gate, faults, tmp_path):
    """Evaluations and snapshots fall on the same steps: a snapshot is of the moment after the evaluation."""

    def make():
        parts = plateau(fused=True)
        parts.eval_every = 4
        return parts

    r = Recipe(make, Case(shuffle="unique", count=64, epochs=5, config=quick(gate, max_consecutive=2)))
    r.case.faults = at(r.case, *faults)
    run = evaluated_in_the_loop(r, tmp_path / "run")
    assert ("rollback" in run.actions()) == (len(faults) > 1)
    assert_equal(run.state, r.reference(run).state)


@pytest.mark.slow
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("shuffle", ["unique", "unique_generator"])
@pytest.mark.parametrize("faults", [[], [0], [9], [7, 8], [21, 22, 23], [31]])
def test_settling_before_a_step_that_is_served_already(faults, shuffle, tmp_path):
    """guard.flush() at the top of the loop, under the device gate: the next step's data has been drawn by then."""
    case = Case(shuffle=shuffle, count=64, epochs=4, augment=True, config=quick("device", max_consecutive=2))
    r = Recipe(lambda: param_groups(fused=True), case)
    r.case.faults = at(r.case, *faults)
    numbers = []

    def settle(step, parts, guard):
        guard.flush()
        numbers.append((step.number, guard.step))

    run = r.guarded(tmp_path / "run", in_the_loop=settle)
    assert [a - 1 for a, b in numbers] == [b for a, b in numbers]
    assert_equal(run.state, r.reference(run).state)


@pytest.mark.parametrize("how", ["flush", "outcome", "report_eval", "expect_shift"])
def test_a_step_is_not_settled_inside_the_next_one(how, tmp_path):
    model = Net()
    guard = holdfast.Guard(
        model, AdamW(model.parameters(), fused=True), run_dir=tmp_path / "run", config={"detect": {"gate": "device"}}
    )
    ways = {
        "flush": lambda last: guard.flush(),
        "outcome": lambda last: last.outcome,
        "report_eval": lambda last: guard.report_eval(1.0),
        "expect_shift": lambda last: guard.expect_shift("why"),
    }
    last = None
    with guard, pytest.raises(holdfast.StepError, match="cannot be settled inside step 2.*between two steps"):
        for step in guard.steps(Case().loader(), max_steps=4):
            with step:
                for batch in step.microbatches():
                    step.backward(loss_with(model)(batch))
                if last is not None:
                    ways[how](last)
            last = step


def test_weights_loaded_after_steps_was_called_are_the_state_a_rollback_returns_to(tmp_path):
    case = Case(shuffle="unique", count=64, epochs=2, norm=False, config=quick(max_consecutive=1))
    case.faults = at(case, 1, 2)
    parts = case.build()
    other = Net(norm=False)
    with torch.no_grad():
        for p in other.parameters():
            p.fill_(0.1)
    guard = holdfast.Guard(**parts, clip_grad_norm=case.clip, run_dir=tmp_path / "run", config=case.config)
    with guard:
        steps = guard.steps(case.loader(), epochs=2)
        parts["model"].load_state_dict(other.state_dict())
        seen = []
        for step in steps:
            if step.number == 1:
                seen.append(parts["model"].first.weight.detach().clone())
            with step:
                for batch in step.microbatches():
                    step.backward(case.loss(parts["model"], batch))
    assert "rollback" in [e.get("action") for e in read(tmp_path / "run" / "journal.jsonl").events]
    assert len(seen) >= 2
    assert all(torch.equal(w, other.first.weight) for w in seen)
