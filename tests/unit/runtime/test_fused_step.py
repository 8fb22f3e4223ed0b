"""A fused step that is repeated is the step that torch would have taken, and what torch alone can do is left to it."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, adam
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from holdfast.runtime.update import fused_step
from holdfast.runtime.update.fused_step import FusedStep

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = ((5, 3), (7,), (2, 2, 2), (1,))
STEPS = 12


def parameters() -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=draw).to(DEVICE)) for shape in SHAPES]


class Pair:
    """The same optimizer twice: one stepped by torch, one by ours, with the same gradients and the same vetoes."""

    def __init__(self, make: Callable[[list[nn.Parameter]], Optimizer], *, told: bool = False) -> None:
        """`told`: ours is told what the gate knows already, whether the step lands and what the gradients are."""
        self.told = told
        self.theirs, self.ours = make(parameters()), make(parameters())
        self.step = FusedStep(self.ours, list)
        self._draw = torch.Generator().manual_seed(1)
        self.asked = 0
        """how often torch's own `step` has been called for ours"""
        self.ours._optimizer_step_code = self._count  # which `step` calls at its end
        self.without: set[int] = set()

    def _count(self) -> None:
        self.asked += 1

    def both(self) -> list[Optimizer]:
        return [self.theirs, self.ours]

    def go(self, steps: int = 1, *, vetoed: bool = False) -> int:
        """So many steps; how many of them were left to torch."""
        before = self.asked
        for _ in range(steps):
            self._one(torch.tensor(1.0 if vetoed else 0.0, device=DEVICE))
            self.compare()
        return self.asked - before

    def _one(self, veto: Tensor) -> None:
        listed = [[p for group in o.param_groups for p in group["params"]] for o in self.both()]
        for n, (theirs, ours) in enumerate(zip(*listed, strict=True)):
            gradient = torch.randn(theirs.shape, generator=self._draw).to(DEVICE, theirs.dtype)
            theirs.grad, ours.grad = (None, None) if n in self.without else (gradient, gradient.clone())
        self.theirs.found_inf, self.theirs.grad_scale = veto, None
        self.theirs.step()
        del self.theirs.found_inf, self.theirs.grad_scale
        with torch.no_grad():
            self.step.take(*self._given(veto))

    def _given(self, veto: Tensor) -> tuple[Any, ...]:
        gradients = [p.grad for group in self.ours.param_groups for p in group["params"] if p.grad is not None]
        kinds = {(g.dtype, g.is_sparse) for g in gradients}
        kind = next(iter(kinds))[0] if len(kinds) == 1 and not any(g.is_sparse for g in gradients) else None
        return (veto, 1.0 - veto, kind) if self.told else (veto,)

    def compare(self) -> None:
        theirs, ours = (o.state_dict() for o in self.both())
        assert theirs["param_groups"] == ours["param_groups"]
        assert theirs["state"].keys() == ours["state"].keys()
        for n, state in theirs["state"].items():
            for name, value in state.items():
                other = ours["state"][n][name]
                assert (value is None and other is None) or torch.equal(value, other), (n, name)
        for a, b in zip(self.theirs.param_groups, self.ours.param_groups, strict=True):
            assert all(map(torch.equal, a["params"], b["params"]))

    def in_both(self, change: Callable[[Optimizer], None]) -> None:
        for optimizer in self.both():
            change(optimizer)


def adamw(**options: Any) -> Callable[[list[nn.Parameter]], Optimizer]:
    return lambda ps: AdamW(ps, lr=0.01, fused=True, **options)


def settled(make: Callable[[list[nn.Parameter]], Optimizer] | None = None) -> Pair:
    pair = Pair(make or adamw())
    pair.go(4)
    assert pair.go(2) == 0, "it is repeated by now"
    return pair


MADE: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "AdamW": adamw(),
    "AdamW, AMSGrad": adamw(amsgrad=True),
    "AdamW, maximize": adamw(maximize=True, weight_decay=0.3, betas=(0.5, 0.7), eps=1e-3),
    "Adam": lambda ps: Adam(ps, lr=0.01, fused=True, weight_decay=0.1),
    "SGD": lambda ps: SGD(ps, lr=0.1, fused=True),
    "SGD, momentum": lambda ps: SGD(ps, lr=0.1, fused=True, momentum=0.9, nesterov=True, weight_decay=0.1),
    "two groups": lambda ps: AdamW(
        [{"params": ps[:1], "weight_decay": 0.0}, {"params": ps[1:], "lr": 0.03, "eps": 1e-4}], lr=0.01, fused=True
    ),
    "two kinds of numbers": lambda ps: AdamW(
        [*ps, nn.Parameter(torch.ones(4, dtype=torch.float64, device=DEVICE))], fused=True
    ),
}


@pytest.mark.parametrize("told", [False, True], ids=["", "told"])
@pytest.mark.parametrize("make", MADE.values(), ids=MADE.keys())
def test_repeated_steps_are_those_of_torch_bit_for_bit(make, told):
    pair = Pair(make, told=told)
    assert 0 < pair.go(4) < 4, "some are watched, some repeated"
    assert pair.go(STEPS) == 0
    assert pair.go(2, vetoed=True) == 0
    assert pair.go(2) == 0
    assert pair.go(1, vetoed=True) == 0
    assert pair.go(STEPS) == 0


@pytest.mark.parametrize("told", [False, True])
def test_steps_are_counted_in_one_launch_where_it_is_known_whether_they_land(told):
    pair = Pair(adamw(), told=told)
    pair.go(4)
    given = pair._given(torch.tensor(0.0, device=DEVICE))
    with torch.no_grad(), fused_step._Watching() as seen:
        pair.step.take(*given)
    names = [func.__name__ for func, _, _ in seen.calls if func.namespace == "aten"]
    counted = ["_foreach_add_.Tensor"] if told else ["_foreach_add_.Scalar", "_foreach_sub_.List"]
    assert sorted(names) == sorted([*counted, "_fused_adamw_.default"])


@pytest.mark.parametrize("make", MADE.values(), ids=MADE.keys())
def test_first_steps_that_are_vetoed_are_not_repeated_as_such(make):
    pair = Pair(make)
    for _ in range(3):
        pair._one(torch.tensor(1.0, device=DEVICE))
        pair.in_both(lambda o: o.state.clear())  # as the gate does: what a step that was not brought into being goes
    pair.go(4)
    assert pair.go(STEPS) == 0


def test_the_lr_may_be_another_at_every_step():
    pair = Pair(adamw())
    schedules = [CosineAnnealingLR(o, T_max=STEPS) for o in pair.both()]
    lrs = set()
    for n in range(STEPS):
        left = pair.go()
        assert left == 0 or n < 4
        lrs.add(pair.ours.param_groups[0]["lr"])
        for schedule in schedules:
            schedule.step()
    assert len(lrs) == STEPS


def test_a_parameter_that_never_has_a_gradient_is_left_alone():
    pair = Pair(adamw())
    pair.without = {2}
    pair.go(4)
    assert pair.go(STEPS) == 0


# ---- what it goes by has changed: torch finds out anew, and then that is repeated


def _replace_moment(o: Optimizer) -> None:
    o.state[o.param_groups[0]["params"][0]]["exp_avg"] = torch.full(SHAPES[0], 0.5, device=DEVICE)


def _replace_shelf(o: Optimizer) -> None:
    p = o.param_groups[0]["params"][1]
    o.state[p] = {name: value.clone() for name, value in o.state[p].items()}


def _load(o: Optimizer) -> None:
    o.load_state_dict(copy.deepcopy(o.state_dict()))


def _drop_state(o: Optimizer) -> None:
    del o.state[o.param_groups[0]["params"][3]]


def _add_group(o: Optimizer) -> None:
    o.add_param_group({"params": [nn.Parameter(torch.ones(3, device=DEVICE))], "lr": 0.5})


def _replace_parameter(o: Optimizer) -> None:
    old = o.param_groups[0]["params"][0]
    new = nn.Parameter(old.detach() + 1)
    o.param_groups[0]["params"][0] = new
    o.state[new] = o.state.pop(old)


def _decay_more(o: Optimizer) -> None:
    o.param_groups[0]["weight_decay"] = 0.25


def _other_betas(o: Optimizer) -> None:
    o.param_groups[0]["betas"] = (0.8, 0.9)


def _replace_group(o: Optimizer) -> None:
    o.param_groups[:] = [{**group, "lr": group["lr"] / 10} for group in o.param_groups]


def _swap_states(o: Optimizer) -> None:
    a, b = o.param_groups[0]["params"][1], nn.Parameter(torch.zeros(SHAPES[1], device=DEVICE))
    o.param_groups[0]["params"].append(b)
    o.state[b] = o.state.pop(a)


CHANGES = [
    _replace_group,
    _swap_states,
    _load,
    _drop_state,
    _add_group,
    _replace_parameter,
    _decay_more,
    _other_betas,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda c: c.__name__.strip("_"))
def test_a_change_of_what_it_goes_by_is_followed(change):
    pair = settled()
    pair.in_both(change)
    assert pair.go() == 1, "the next one is torch's"
    pair.go(3)
    assert pair.go(2) == 0, "and then it is repeated again"


@pytest.mark.parametrize("change", [_replace_moment, _replace_shelf], ids=["moment", "shelf"])
def test_other_moments_in_the_place_of_those_that_were_there_are_the_ones_updated(change):
    pair = settled()
    pair.in_both(change)
    assert pair.go(3) == 0


def _to_double(o: Optimizer) -> None:
    shelf = o.state[o.param_groups[0]["params"][0]]
    shelf["exp_avg"] = shelf["exp_avg"].double()


def _renamed(o: Optimizer) -> None:
    shelf = o.state[o.param_groups[0]["params"][0]]
    shelf["exp_avg_old"] = shelf.pop("exp_avg")


def _forgotten_on_the_host(o: Optimizer) -> None:
    shelf = o.state[o.param_groups[0]["params"][0]]
    shelf["exp_avg_sq"] = shelf["exp_avg_sq"].to("meta")


@pytest.mark.parametrize("change", [_to_double, _renamed, _forgotten_on_the_host])
def test_moments_that_torch_refuses_are_refused_in_the_same_words_and_nothing_is_counted(change):
    pair = settled()
    pair.in_both(change)
    said: list[str] = []
    counts = [[shelf["step"].clone() for shelf in o.state.values()] for o in pair.both()]
    pair.theirs.found_inf, pair.theirs.grad_scale = veto, _ = torch.zeros((), device=DEVICE), None
    for o, step in ((pair.theirs, pair.theirs.step), (pair.ours, lambda: pair.step.take(veto))):
        for p in o.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
        with pytest.raises((RuntimeError, KeyError)) as error, torch.no_grad():
            step()
        said.append(str(error.value).splitlines()[0])
    assert said[0] == said[1]
    for o, before in zip(pair.both(), counts, strict=True):
        after = [shelf["step"] for shelf in o.state.values()]
        assert [float(a - b) for a, b in zip(after, before, strict=True)] == [
            float(a["step"] - b) for a, b in zip(pair.theirs.state.values(), counts[0], strict=True)
        ]


def test_new_data_in_an_old_tensor_is_seen():
    pair = settled()

    def move(o: Optimizer) -> None:
        p = o.param_groups[0]["params"][0]
        p.data = p.data.clone() * 2
        o.state[p]["exp_avg"].data = o.state[p]["exp_avg"].clone() * 2

    pair.in_both(move)
    assert pair.go(3) == 0


def test_an_option_that_is_another_at_every_step_is_never_repeated():
    pair = Pair(adamw())
    for n in range(6):
        for o in pair.both():
            o.param_groups[0]["weight_decay"] = 0.1 / (n + 1)
        assert pair.go() == 1


def test_states_that_two_parameters_have_exchanged_go_with_them():
    pair = settled(lambda ps: AdamW([ps[0], nn.Parameter(torch.zeros_like(ps[0]))], lr=0.01, fused=True))

    def exchange(o: Optimizer) -> None:
        a, b = o.param_groups[0]["params"]
        of_a, of_b = o.state.pop(a), o.state.pop(b)
        o.state[b], o.state[a] = of_a, of_b

    pair.in_both(exchange)
    assert pair.go() == 1
    pair.go(4)


def test_what_lies_beside_the_state_of_parameters_is_left_alone():
    pair = settled()
    pair.in_both(lambda o: o.state.__setitem__("global_step", 7))
    before = pair.asked
    for _ in range(4):
        pair._one(torch.zeros((), device=DEVICE))
    assert pair.asked - before == 4
    assert pair.ours.state["global_step"] == 7


def test_an_option_that_can_be_written_to_is_read_every_time():
    pair = Pair(lambda ps: AdamW([{"params": ps, "betas": [0.9, 0.999]}], lr=0.01, fused=True))
    assert pair.go(4) == 4
    for o in pair.both():
        o.param_groups[0]["betas"][0] = 0.1
    assert pair.go() == 1


def test_a_parameter_of_two_groups_takes_the_lr_of_each():
    pair = Pair(lambda ps: AdamW([{"params": ps[:1]}, {"params": ps[1:2]}], lr=0.01, fused=True))
    for o in pair.both():
        o.param_groups[1]["params"][0] = o.param_groups[0]["params"][0]
    pair.go(4)
    pair.theirs.param_groups[0]["lr"] = pair.ours.param_groups[0]["lr"] = 0.5
    pair.go(2)


def test_neither_gradients_nor_parameters_that_are_gone_are_kept():
    pair = Pair(adamw())
    pair.without = {2}
    pair.go(3)
    kept = [weakref.ref(p.grad) for p in pair.ours.param_groups[0]["params"] if p.grad is not None]
    gone = weakref.ref(pair.ours.param_groups[0]["params"][2])
    for o in pair.both():
        for p in o.param_groups[0]["params"]:
            p.grad = None
        del o.param_groups[0]["params"][2]
    pair.without = set()
    pair.go(3)
    gc.collect()
    assert [ref() for ref in kept] == [None] * 3
    assert gone() is None


def test_state_that_is_moved_elsewhere_between_steps_gives_its_memory_back():
    pair = settled()
    held = [weakref.ref(v) for shelf in pair.ours.state.values() for v in shelf.values()]

    def move(o: Optimizer) -> None:
        for shelf in o.state.values():
            for name in shelf:
                shelf[name] = shelf[name].clone()

    pair.in_both(move)
    assert [ref() for ref in held] == [None] * len(held)
    for _ in range(4):  # at every step: what lies there now is what is updated, repeated or not
        pair.go()
        pair.in_both(move)


# ---- another gradient, the same optimizer


def test_a_gradient_that_is_missing_for_once_leaves_its_parameter_alone():
    pair = settled()
    pair.without = {1}
    assert pair.go() == 1
    pair.without = set()
    assert pair.go(2) == 0


def test_a_step_without_gradients_is_no_reason_never_to_repeat_one():
    pair = settled()
    pair.in_both(_decay_more)
    pair.without = set(range(len(SHAPES)))
    pair.go(5)
    pair.without = set()
    pair.go(4)
    assert pair.go(2) == 0


def test_gradients_that_stay_away_are_got_used_to():
    pair = settled()
    pair.without = {1}
    assert pair.go(12) < 12
    assert pair.go(2) == 0
    pair.without = set()
    assert pair.go(12) < 12
    assert pair.go(2) == 0


def test_a_gradient_that_comes_late_counts():
    pair = Pair(adamw())
    pair.go(2)
    pair.without = {3}
    pair.go(3)
    assert pair.go(2) == 0
    pair.without = set()
    assert pair.go() == 1


@pytest.mark.parametrize("make", [adamw(), MADE["SGD, momentum"]], ids=["AdamW", "SGD"])
def test_a_sparse_gradient_is_refused_as_torch_refuses_it(make):
    pair = settled(make)
    said = []
    for o in pair.both():
        p = o.param_groups[0]["params"][0]
        p.grad = torch.ones_like(p).to_sparse()
    pair.theirs.found_inf, pair.theirs.grad_scale = veto, _ = torch.zeros((), device=DEVICE), None
    for step in (pair.theirs.step, lambda: pair.step.take(veto)):
        with pytest.raises(RuntimeError) as error, torch.no_grad():
            step()
        said.append(str(error.value))
    assert said[0] == said[1]
    pair.compare()


def test_a_veto_that_lies_elsewhere_is_left_to_torch():
    pair = settled()
    for p in pair.ours.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    with pytest.raises(NotImplementedError), torch.no_grad():
        pair.step.take(torch.zeros((), device="meta"))


# ---- not torch's alone


def test_hooks_are_called_every_time():
    pair = settled()
    called = []
    hook = pair.ours.register_step_pre_hook(lambda *_: called.append("before"))
    assert pair.go(5) == 5
    hook.remove()
    assert called == ["before"] * 5
    pair.go(3)
    assert pair.go() == 0


def test_hooks_of_all_optimizers_are_called_every_time():
    pair = settled()
    called = []
    hook = register_optimizer_step_post_hook(lambda o, *_: called.append(o is pair.ours))
    try:
        assert pair.go(5) == 5
    finally:
        hook.remove()
    assert called.count(True) == 5


def test_a_step_of_the_users_own_is_called_every_time():
    pair = settled()
    step, called = pair.ours.step, []

    def own() -> Any:
        called.append(1)
        return step()

    pair.ours.step = own
    assert pair.go(5) == 5
    assert len(called) == 5


def test_a_step_of_the_users_own_under_a_schedule_is_called_every_time():
    pair = Pair(adamw())
    called = []
    step = type(pair.ours).step

    def own(self: Optimizer) -> Any:
        called.append(1)
        return step(self)

    pair.ours.step = own.__get__(pair.ours)
    CosineAnnealingLR(pair.ours, T_max=5)
    CosineAnnealingLR(pair.theirs, T_max=5)
    assert pair.go(6) == len(called) == 6


def test_parameters_of_another_kind_are_not_even_watched(monkeypatch):
    class Own(nn.Parameter):
        pass

    monkeypatch.setattr(fused_step, "_Watching", None)
    pair = Pair(lambda ps: AdamW([Own(p.detach()) for p in ps], lr=0.01, fused=True))
    assert pair.go(6) == 6


def test_a_class_of_the_users_own_steps_by_itself():
    class Own(AdamW):
        pass

    pair = Pair(lambda ps: Own(ps, lr=0.01, fused=True))
    assert pair.go(6) == 6


def test_a_class_whose_step_was_replaced_steps_by_that(monkeypatch):
    step, called = AdamW.step, []

    def own(self: Optimizer, closure: Any = None) -> Any:
        called.append(1)
        return step(self, closure)

    own.hooked = True  # type: ignore[attr-defined]
    monkeypatch.setattr(AdamW, "step", own)
    pair = Pair(adamw())
    assert pair.go(6) == 6
    assert len(called) == 12


def test_another_way_to_gather_what_is_updated_is_used_every_time():
    pair = settled()
    called = []
    gather = pair.ours._init_group

    def own(*given: Any) -> Any:
        called.append(1)
        return gather(*given)

    pair.ours._init_group = own
    assert pair.go(5) == len(called) == 5


@pytest.mark.parametrize("at", [0, 6])
@pytest.mark.parametrize(("module", "name"), [(torch, "_fused_adamw_"), (adam, "adam")])
def test_a_function_of_torchs_that_was_replaced_is_called_once_a_step(module, name, at, monkeypatch):
    pair, called = Pair(adamw()), []
    pair.go(at)
    function = getattr(module, name)

    def own(*args: Any, **kwargs: Any) -> Any:
        called.append(1)
        return function(*args, **{**kwargs, "weight_decay": 10 * kwargs["weight_decay"]})

    monkeypatch.setattr(module, name, own)
    pair.go(6)
    assert len(called) == 12, "for both of the pair"


def test_what_a_mode_changes_while_it_is_on_is_not_repeated_without_it():
    class Decaying(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            more = {"weight_decay": 50.0} if func is torch._fused_adamw_ else {}
            return func(*args, **{**(kwargs or {}), **more})

    pair = Pair(adamw())
    pair.go(2)
    with Decaying():
        pair.go(2)
    pair.go(3)
    assert pair.go() == 0


def test_a_default_device_does_not_keep_it_from_being_repeated():
    pair = Pair(adamw())
    with torch.device("cpu"):
        pair.go(4)
        assert pair.go() == 0


@pytest.mark.parametrize("make", MADE.values(), ids=MADE.keys())
def test_what_torch_compile_does_to_optimizers_does_not_keep_it_from_being_repeated(make):
    pair = settled(make)
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))  # wraps a method of every optimizer of torch's
    assert "_dynamo" in AdamW._init_group.__code__.co_filename
    pair.go(4)
    assert pair.go() == 0
    assert settled(make).go() == 0


def test_a_step_that_is_compiled_is_called_every_time():
    pair = settled()
    pair.ours.step = torch.compile(pair.ours.step, backend="eager")
    pair.go(4)
    assert pair.step._launches is None


def test_an_lr_that_is_a_tensor_is_left_to_torch():
    pair = Pair(lambda ps: AdamW(ps, lr=torch.tensor(0.01), fused=True))
    assert pair.go(6) == 6


def test_an_lr_that_becomes_a_tensor_is_left_to_torch():
    pair = settled()

    def put(o: Optimizer) -> None:
        o.param_groups[0]["lr"] = torch.tensor(0.02)

    pair.in_both(put)
    assert pair.go(2) == 2


def test_a_profile_shows_the_step_by_its_name():
    pair = settled()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        assert pair.go() == 1
    assert any(e.key == "Optimizer.step#AdamW.step" for e in seen.key_averages())
    assert pair.go() == 0


def test_a_gradient_of_another_kind_is_refused_as_torch_refuses_it():
    pair = settled()
    for o in pair.both():
        for p in o.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
        with torch.no_grad():  # the last: torch has done nothing to those before it when it comes to refuse this one
            o.param_groups[0]["params"][-1].data = o.param_groups[0]["params"][-1].data.double()
    veto = torch.zeros((), device=DEVICE)
    pair.theirs.found_inf, pair.theirs.grad_scale = veto, None
    with pytest.raises(RuntimeError) as theirs:
        pair.theirs.step()
    with pytest.raises(RuntimeError) as ours, torch.no_grad():
        pair.step.take(veto)
    assert str(ours.value).splitlines()[0] == str(theirs.value).splitlines()[0]
    pair.compare()


# ---- in a run


@pytest.mark.parametrize("scheduled", [False, True])
def test_a_guarded_run_repeats_the_step_and_ends_where_a_plain_loop_does(scheduled, tmp_path):
    def made() -> tuple[nn.Module, Optimizer, Any]:
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(DEVICE)
        optimizer = AdamW(model.parameters(), lr=0.01, fused=True)
        return model, optimizer, CosineAnnealingLR(optimizer, T_max=40) if scheduled else None

    draw = torch.Generator().manual_seed(3)
    loader = DataLoader(TensorDataset(torch.randn(64, 4, generator=draw)), batch_size=4)
    model, optimizer, schedule = made()
    for _ in range(3):
        for (x,) in loader:
            (model(x.to(DEVICE)) ** 2).mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            if schedule is not None:
                schedule.step()
    guarded, stepped, schedule = made()
    asked = []
    stepped._optimizer_step_code = lambda: asked.append(1)
    guard = holdfast.Guard(
        guarded,
        stepped,
        clip_grad_norm=0.5,
        scheduler=schedule,
        run_dir=tmp_path / "run",
        config={"detect": {"gate": "device"}},
    )
    with guard:
        for step in guard.steps(loader, epochs=3):
            with step:
                for (x,) in step.microbatches():
                    step.backward((guarded(x.to(DEVICE)) ** 2).mean())
    assert guard.summary().committed == 48
    assert len(asked) <= 4, "the rest was repeated"
    assert all(map(torch.equal, model.parameters(), guarded.parameters()))
    for a, b in zip(optimizer.state.values(), stepped.state.values(), strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)
