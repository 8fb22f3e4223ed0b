"""A step's measurements equal the same numbers computed by their formulas."""

from __future__ import annotations

import copy
import json
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from holdfast.core.base.types import Flag
from holdfast.runtime.state.optimizers import Optimizers
from holdfast.runtime.update.measurements import DeviceMeasurements, MeasurementPacker, rms_of_worst
from holdfast.runtime.update.update_size import UpdateSize, sums_of_squares

STEPS = 12


def by_hand(optimizer, parameters, unscale: float = 1.0) -> float | None:
    """sqrt(mean(g^2 / max(v, eps^2))) over whole tensors, in double precision."""
    squares: list[np.ndarray] = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            state = optimizer.state.get(p, {})
            if not any(p is q for q in parameters) or p.grad is None or not state:
                continue
            v = state.get("max_exp_avg_sq", state.get("exp_avg_sq", state.get("square_avg")))
            v = v.double().numpy()
            if "betas" in group:
                v = v / (1.0 - group["betas"][1] ** float(state["step"]))
            g = p.grad.double().numpy() / unscale
            squares.append((g**2 / np.maximum(v, group["eps"] ** 2)).ravel())
    return float(np.sqrt(np.concatenate(squares).mean())) if squares else None


class Net(nn.Module):
    """Every element is sampled: there are few tensors, each of a whole number of runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 64), nn.Linear(64, 16, bias=False)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


class SignalHook:
    late = True

    def __init__(self) -> None:
        self.signals = []

    def on_step_end(self, outcome) -> None:
        self.signals.append(outcome.signal)


def train(optimizer_of, *, scaler=None, config=None, steps=STEPS, batches=None, run_dir=None, look=None, accumulate=1):
    """Run a short guarded loop. Return its signals, and what `look` returned at the end of each step's body."""
    torch.manual_seed(0)
    model = Net()
    optimizers = optimizer_of(model)
    x = torch.randn(64, 16)
    loader = batches or DataLoader(TensorDataset(x, x.sin()), batch_size=8)
    hook, looked = SignalHook(), []
    guard = holdfast.Guard(
        model, optimizers, scaler=scaler, clip_grad_norm=0.5, hooks=[hook], config=config, run_dir=run_dir
    )
    with guard:
        for step in guard.steps(loader, max_steps=steps, accumulate=accumulate):
            with step:
                for x, y in step.microbatches():
                    step.backward(nn.functional.mse_loss(model(x), y))
                if look is not None:
                    looked.append(look(model, optimizers))
    assert guard.summary().status == "clean"
    return hook.signals, looked


OPTIMIZERS = {
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=False),
    "adamw foreach": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=True),
    "adamw fused": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True),
    "amsgrad": lambda m: torch.optim.Adam(m.parameters(), lr=1e-2, amsgrad=True),
    "wide eps": lambda m: torch.optim.Adam(m.parameters(), lr=1e-2, eps=1e-2),
    "nadam": lambda m: torch.optim.NAdam(m.parameters(), lr=1e-2),
    "radam": lambda m: torch.optim.RAdam(m.parameters(), lr=1e-2),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=1e-3),
    "two groups": lambda m: torch.optim.AdamW(
        [{"params": m.first.parameters(), "betas": (0.9, 0.95)}, {"params": m.last.parameters(), "eps": 1e-4}], lr=1e-2
    ),
}


# ---- update size


@pytest.mark.parametrize(("name", "gate"), [*((n, "host") for n in sorted(OPTIMIZERS)), ("adamw fused", "device")])
def test_update_size_equals_the_formula(name, gate):
    signals, known = train(
        OPTIMIZERS[name], config={"detect": {"gate": gate}}, look=lambda m, o: by_hand(o, list(m.parameters()))
    )
    seen = [s.update_rms for s in signals]
    assert seen[0] is None
    assert known[0] is None
    assert seen[1:] == pytest.approx(known[1:], rel=1e-4)
    assert all(math.isfinite(v) and v > 0 for v in seen[1:])


@pytest.mark.parametrize("name", ["adamw", "adamw foreach", "adamw fused"])
def test_update_size_under_a_loss_scaler_uses_unscaled_gradients(name):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    signals, known = train(
        OPTIMIZERS[name],
        scaler=scaler,
        look=lambda m, o: by_hand(o, list(m.parameters()), scaler.get_scale()),
    )
    assert [s.update_rms for s in signals][1:] == pytest.approx(known[1:], rel=1e-4)
    assert signals[0].loss_scale == 1024.0


def test_update_size_of_several_optimizers_is_the_largest():
    def two(m):
        slow = torch.optim.AdamW(m.last.parameters(), lr=1e-2, betas=(0.9, 0.5))
        return [torch.optim.AdamW(m.first.parameters(), lr=1e-2), slow]

    def both(m, optimizers):
        return [by_hand(o, list(m.parameters())) for o in optimizers]

    signals, known = train(two, look=both)
    assert [s.update_rms for s in signals][1:] == pytest.approx([max(pair) for pair in known[1:]], rel=1e-4)
    assert {a > b for a, b in known[1:]} == {True, False}, "each is the largest at times"


@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad", "Adafactor", "Adamax"])
def test_optimizer_without_a_second_moment_has_no_update_size(optimizer):
    signals, _ = train(lambda m: getattr(torch.optim, optimizer)(m.parameters(), lr=1e-3))
    assert {s.update_rms for s in signals} == {None}


def test_optimizer_without_a_second_moment_is_ignored_beside_another():
    def two(m):
        sgd = torch.optim.SGD(m.first.parameters(), lr=1e-2, momentum=0.9)
        return [sgd, torch.optim.AdamW(m.last.parameters(), lr=1e-2)]

    signals, known = train(two, look=lambda m, o: by_hand(o[1], list(m.parameters())))
    assert [s.update_rms for s in signals][1:] == pytest.approx(known[1:], rel=1e-4)


def test_update_size_is_not_measured_if_its_detector_is_off():
    signals, _ = train(OPTIMIZERS["adamw"], config={"detect": {"update_spike": False}})
    assert {s.update_rms for s in signals} == {None}


def stepped(*shapes, steps=2, **options):
    """An AdamW after some steps over parameters of these shapes, with gradients for the next."""
    generator = torch.Generator().manual_seed(1)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    optimizer = torch.optim.AdamW(parameters, **options)
    for n in range(steps + 1):
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=generator)
        if n < steps:
            optimizer.step()
    return optimizer, parameters


def size_of(optimizer) -> float | None:
    return current_size(UpdateSize(Optimizers([optimizer])))


def current_size(sizes: UpdateSize) -> float | None:
    """Return the update size as the host computes it."""
    samples = sizes.sample()
    return None if samples is None else update_size(samples)


def update_size(samples) -> float | None:
    return rms_of_worst(torch.cat(sums_of_squares(samples)).tolist(), samples.counts)


def test_the_eight_largest_parameters_are_sampled():
    optimizer, parameters = stepped(*[(n, 64) for n in range(1, 21)])
    assert size_of(optimizer) == pytest.approx(by_hand(optimizer, parameters[12:]), rel=1e-5)


def test_a_gradient_that_was_missing_is_sampled_when_it_is_back():
    optimizer, parameters = stepped((64, 8), (64, 4))
    sizes, gradients = UpdateSize(Optimizers([optimizer])), [p.grad for p in parameters]
    for present in ([0, 1], [0], [0], [0, 1], [1], [0, 1], [0, 1]):
        for n, (p, g) in enumerate(zip(parameters, gradients, strict=True)):
            p.grad = g * (n + 1) if n in present else None
        expected = by_hand(optimizer, [parameters[n] for n in present])
        assert current_size(sizes) == pytest.approx(expected, rel=1e-5), present


def test_options_are_read_from_the_current_param_groups():
    optimizer, parameters = stepped((64, 8), (64, 4))
    sizes = UpdateSize(Optimizers([optimizer]))
    assert current_size(sizes) == pytest.approx(by_hand(optimizer, parameters), rel=1e-5)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # which makes new groups
    for _ in range(2):
        optimizer.param_groups[0]["betas"] = (0.9, 0.5)
        assert current_size(sizes) == pytest.approx(by_hand(optimizer, parameters), rel=1e-5)


def test_elements_of_a_large_parameter_are_sampled_evenly():
    optimizer, (p,) = stepped((1000, 300), steps=20)
    whole = by_hand(optimizer, [p])
    assert size_of(optimizer) == pytest.approx(whole, rel=0.1)
    p.grad[:, :] = 0.0
    p.grad[500:] = 10.0
    assert size_of(optimizer) == pytest.approx(by_hand(optimizer, [p]), rel=0.2)


@pytest.mark.parametrize("shape", [(1,), (3, 2), (17,), ()])
def test_small_parameters_are_sampled(shape):
    optimizer, parameters = stepped(shape)
    value = size_of(optimizer)
    assert value is not None
    if math.prod(shape) <= 16:
        assert value == pytest.approx(by_hand(optimizer, parameters), rel=1e-5)


def test_elements_are_matched_in_channels_last_memory():
    images = nn.Parameter(torch.randn(8, 4, 4, 4).to(memory_format=torch.channels_last))
    optimizer = torch.optim.AdamW([images])
    for n in range(3):
        images.grad = torch.randn(8, 4, 4, 4).to(memory_format=torch.channels_last)
        if n < 2:
            optimizer.step()
    assert size_of(optimizer) == pytest.approx(by_hand(optimizer, [images]), rel=1e-5)
    images.grad = images.grad.contiguous()
    assert size_of(optimizer) is None, (
        "gradient and moment are laid out differently: not measured rather than mismatched"
    )


def test_parameters_with_different_step_counts_are_corrected_separately():
    optimizer, parameters = stepped((16, 16), (16, 8))
    late = nn.Parameter(torch.randn(16, 12))
    optimizer.add_param_group({"params": [late]})
    size = UpdateSize(Optimizers([optimizer]))
    for p in (*parameters, late):
        p.grad = torch.randn_like(p)
    optimizer.step()
    optimizer.param_groups[0]["params"].append(late)
    optimizer.param_groups.pop()
    assert {float(optimizer.state[p]["step"]) for p in (*parameters, late)} == {1.0, 3.0}
    assert current_size(size) == pytest.approx(by_hand(optimizer, [*parameters, late]), rel=1e-5)


def test_sparse_gradients_have_no_update_size():
    table = nn.Embedding(32, 16, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters())
    for _ in range(3):
        table(torch.tensor([1, 5])).square().sum().backward()
        optimizer.step()
        assert size_of(optimizer) is None
        table.weight.grad = None


def test_parameter_without_a_gradient_is_left_out_and_gets_no_state():
    optimizer, (first, second) = stepped((16, 16), (32, 16))
    second.grad = None
    assert size_of(optimizer) == pytest.approx(by_hand(optimizer, [first]), rel=1e-5)
    fresh = torch.optim.AdamW([nn.Parameter(torch.ones(4, 4))])
    assert size_of(fresh) is None
    assert len(fresh.state) == 0


def test_sampling_changes_nothing_and_draws_no_random_number():
    optimizer, parameters = stepped((64, 64), (64,), fused=True)
    before = [(p.clone(), p.grad.clone(), {k: v.clone() for k, v in optimizer.state[p].items()}) for p in parameters]
    rng = torch.get_rng_state()
    size_of(optimizer)
    assert torch.equal(rng, torch.get_rng_state())
    for p, (value, grad, state) in zip(parameters, before, strict=True):
        assert torch.equal(p, value) and torch.equal(p.grad, grad)
        assert all(torch.equal(state[k], v) for k, v in optimizer.state[p].items())


def test_update_size_of_a_nan_gradient_is_nan():
    optimizer, (p,) = stepped((16, 16))
    p.grad.fill_(math.nan)
    assert math.isnan(size_of(optimizer))


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 6, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        if step < steps - 1:
            optimizer.step()


def test_sum_of_squares_of_one_rank_gives_the_update_size():
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    sizes = UpdateSize(Optimizers([optimizer]))
    assert sizes.sum_of_squares(torch.device("cpu")) is None and sizes.sample() is None
    trained(model, optimizer, 3)
    shares, size = sizes.sum_of_squares(torch.device("cpu")), sizes.sample()
    assert shares is not None and size is not None
    squares, count = shares
    assert count > 0 and math.sqrt(float(squares) / count) == pytest.approx(update_size(size), rel=1e-6)


def test_sum_of_squares_is_of_the_first_optimizer_with_a_second_moment():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 6))
    plain = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
    adam = torch.optim.AdamW(model[1].parameters())
    both = UpdateSize(Optimizers([plain, adam]))
    for step in range(3):
        for optimizer in (plain, adam):
            optimizer.zero_grad()
        model(torch.randn(4, 6, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        if step < 2:
            plain.step()
            adam.step()
    alone = UpdateSize(Optimizers([adam])).sample()
    shares = both.sum_of_squares(torch.device("cpu"))
    assert shares is not None and alone is not None
    assert math.sqrt(float(shares[0]) / shares[1]) == pytest.approx(update_size(alone), rel=1e-6)


# ---- packing


def number(value):
    return None if value is None else torch.tensor(value)


@pytest.mark.parametrize("scale", [None, 64.0])
@pytest.mark.parametrize("update", [None, 1.5])
@pytest.mark.parametrize("weights", [None, 30.0])
@pytest.mark.parametrize("extra", [None, [1 << 62, -7, 3]])
def test_packed_measurements_are_read_back(scale, update, weights, extra):
    optimizer, parameters = stepped((16, 16), (16, 8))
    further = None if extra is None else torch.tensor(extra).view(torch.float64)
    measured = DeviceMeasurements(
        number(2.0),
        number(3.0),
        (None, 2.5),
        loss_scale=None if scale is None else torch.tensor([scale]),
        update_samples=None if update is None else UpdateSize(Optimizers([optimizer])).sample(),
        weight_norm=number(weights),
        extra=further,
    )
    read = MeasurementPacker().pack(measured).read()
    assert read[:5] == (2.0, 3.0, int(Flag.GRAD_HIGH), False, scale)
    assert read.update_rms == (update and pytest.approx(by_hand(optimizer, parameters), rel=1e-5))
    assert read.weight_norm == weights
    assert (read.extra is None) if extra is None else read.extra.view(torch.int64).tolist() == extra


# ---- weight norm


def test_weight_norm_is_measured_before_the_first_and_every_fiftieth_update():
    def norm(m, _):
        return math.sqrt(sum(float(p.detach().double().square().sum()) for p in m.parameters()))

    batches = DataLoader(TensorDataset(*(torch.randn(64, 16),) * 2), batch_size=8)
    signals, known = train(OPTIMIZERS["adamw"], steps=110, look=norm, batches=batches)
    seen = {s.step: s.weight_norm for s in signals if s.weight_norm is not None}
    assert seen == {n: pytest.approx(known[n - 1]) for n in (1, 50, 100)}


def test_weight_norm_and_fingerprint_are_not_measured_without_advisory_detectors():
    signals, _ = train(OPTIMIZERS["adamw"], steps=60, config={"detect": {"advisory": False}})
    assert {(s.weight_norm, s.batch) for s in signals} == {(None, None)}


@pytest.mark.filterwarnings("ignore::holdfast.HoldfastWarning")
def test_signal_has_the_fingerprint_of_the_batch_before_the_loop_changed_it():
    def overwrite(m, o):
        held[-1].mul_(0.0)

    held = []

    class Batches:
        def __iter__(self):
            for n in range(STEPS):
                x = torch.full((4, 16), float(n % 5))
                held.append(x)
                yield x, x.clone()

    signals, _ = train(OPTIMIZERS["adamw"], batches=Batches(), look=overwrite)
    fingerprints = [s.batch for s in signals]
    assert len(set(fingerprints)) == 5
    assert fingerprints[:5] == fingerprints[5:10]


def test_metrics_have_the_measurements_but_not_the_fingerprint(tmp_path):
    train(OPTIMIZERS["adamw"], steps=60, run_dir=tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert not any("batch" in row for row in rows)
    assert [n for n, row in enumerate(rows, 1) if "update_rms" not in row] == [1]
    assert [row["step"] for row in rows if "weight_norm" in row] == [1, 50]
