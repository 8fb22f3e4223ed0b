"""What a step is measured by, against the same computed by hand: update size, weight norm, fingerprint, length."""

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
from holdfast.runtime.data.fingerprint import BatchFingerprint, fingerprint, sequence_length
from holdfast.runtime.state.optimizers import Optimizers
from holdfast.runtime.update.measurements import DeviceMeasurements, MeasurementPacker
from holdfast.runtime.update.update_size import UpdateSize, rms_of_worst, sums_of_squares

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
    """Every tensor is a whole number of runs long, and there are fewer than are sampled: all of it is looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 64), nn.Linear(64, 16, bias=False)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


class Keep:
    late = True

    def __init__(self) -> None:
        self.signals = []

    def on_step_end(self, outcome) -> None:
        self.signals.append(outcome.signal)


def train(optimizer_of, *, scaler=None, config=None, steps=STEPS, batches=None, run_dir=None, look=None, accumulate=1):
    """A short guarded run; what its signals say, and what `look` says inside each step before it is left."""
    torch.manual_seed(0)
    model = Net()
    optimizers = optimizer_of(model)
    x = torch.randn(64, 16)
    loader = batches or DataLoader(TensorDataset(x, x.sin()), batch_size=8)
    keep, looked = Keep(), []
    guard = holdfast.Guard(
        model, optimizers, scaler=scaler, clip_grad_norm=0.5, hooks=[keep], config=config, run_dir=run_dir
    )
    with guard:
        for step in guard.steps(loader, max_steps=steps, accumulate=accumulate):
            with step:
                for x, y in step.microbatches():
                    step.backward(nn.functional.mse_loss(model(x), y))
                if look is not None:
                    looked.append(look(model, optimizers))
    assert guard.summary().status == "clean"
    return keep.signals, looked


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
def test_update_size_is_what_it_is_by_hand(name, gate):
    signals, known = train(
        OPTIMIZERS[name], config={"detect": {"gate": gate}}, look=lambda m, o: by_hand(o, list(m.parameters()))
    )
    seen = [s.update_rms for s in signals]
    assert seen[0] is None
    assert known[0] is None
    assert seen[1:] == pytest.approx(known[1:], rel=1e-4)
    assert all(math.isfinite(v) and v > 0 for v in seen[1:])


@pytest.mark.parametrize("name", ["adamw", "adamw foreach", "adamw fused"])
def test_update_size_under_a_loss_scaler_is_of_unscaled_gradients(name):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    signals, known = train(
        OPTIMIZERS[name],
        scaler=scaler,
        look=lambda m, o: by_hand(o, list(m.parameters()), scaler.get_scale()),
    )
    assert [s.update_rms for s in signals][1:] == pytest.approx(known[1:], rel=1e-4)
    assert signals[0].loss_scale == 1024.0


def test_update_size_of_several_optimizers_is_that_of_the_worst():
    def two(m):
        slow = torch.optim.AdamW(m.last.parameters(), lr=1e-2, betas=(0.9, 0.5))
        return [torch.optim.AdamW(m.first.parameters(), lr=1e-2), slow]

    def both(m, optimizers):
        return [by_hand(o, list(m.parameters())) for o in optimizers]

    signals, known = train(two, look=both)
    assert [s.update_rms for s in signals][1:] == pytest.approx([max(pair) for pair in known[1:]], rel=1e-4)
    assert {a > b for a, b in known[1:]} == {True, False}, "each is the worst at times"


@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad", "Adafactor", "Adamax"])
def test_optimizer_without_a_second_moment_has_none(optimizer):
    signals, _ = train(lambda m: getattr(torch.optim, optimizer)(m.parameters(), lr=1e-3))
    assert {s.update_rms for s in signals} == {None}


def test_beside_one_without_a_second_moment_it_is_that_of_the_other():
    def two(m):
        sgd = torch.optim.SGD(m.first.parameters(), lr=1e-2, momentum=0.9)
        return [sgd, torch.optim.AdamW(m.last.parameters(), lr=1e-2)]

    signals, known = train(two, look=lambda m, o: by_hand(o[1], list(m.parameters())))
    assert [s.update_rms for s in signals][1:] == pytest.approx(known[1:], rel=1e-4)


def test_turned_off_it_is_not_measured():
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


def sensed(optimizer) -> float | None:
    return size_now(UpdateSize(Optimizers([optimizer])))


def size_now(sizes: UpdateSize) -> float | None:
    """Return the update size as the host computes it."""
    samples = sizes.sample()
    return None if samples is None else rms_of_worst(torch.cat(sums_of_squares(samples)).tolist(), samples.counts())


def test_of_many_parameters_the_eight_largest_are_looked_at():
    optimizer, parameters = stepped(*[(n, 64) for n in range(1, 21)])
    assert sensed(optimizer) == pytest.approx(by_hand(optimizer, parameters[12:]), rel=1e-5)


def test_a_gradient_that_was_missing_is_looked_at_again_when_it_is_back():
    optimizer, parameters = stepped((64, 8), (64, 4))
    sizes, gradients = UpdateSize(Optimizers([optimizer])), [p.grad for p in parameters]
    for there in ([0, 1], [0], [0], [0, 1], [1], [0, 1], [0, 1]):
        for n, (p, g) in enumerate(zip(parameters, gradients, strict=True)):
            p.grad = g * (n + 1) if n in there else None
        expected = by_hand(optimizer, [parameters[n] for n in there])
        assert size_now(sizes) == pytest.approx(expected, rel=1e-5), there


def test_options_are_those_of_the_groups_there_are_now():
    optimizer, parameters = stepped((64, 8), (64, 4))
    sizes = UpdateSize(Optimizers([optimizer]))
    assert size_now(sizes) == pytest.approx(by_hand(optimizer, parameters), rel=1e-5)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # which makes new groups
    for _ in range(2):
        optimizer.param_groups[0]["betas"] = (0.9, 0.5)
        assert size_now(sizes) == pytest.approx(by_hand(optimizer, parameters), rel=1e-5)


def test_of_a_large_parameter_elements_from_everywhere_are_looked_at():
    optimizer, (p,) = stepped((1000, 300), steps=20)
    whole = by_hand(optimizer, [p])
    assert sensed(optimizer) == pytest.approx(whole, rel=0.1)
    p.grad[:, :] = 0.0
    p.grad[500:] = 10.0
    assert sensed(optimizer) == pytest.approx(by_hand(optimizer, [p]), rel=0.2)


@pytest.mark.parametrize("shape", [(1,), (3, 2), (17,), ()])
def test_small_parameters_are_looked_at_too(shape):
    optimizer, parameters = stepped(shape)
    value = sensed(optimizer)
    assert value is not None
    if math.prod(shape) <= 16:
        assert value == pytest.approx(by_hand(optimizer, parameters), rel=1e-5)


def test_elements_are_matched_where_memory_is_laid_out_otherwise():
    images = nn.Parameter(torch.randn(8, 4, 4, 4).to(memory_format=torch.channels_last))
    optimizer = torch.optim.AdamW([images])
    for n in range(3):
        images.grad = torch.randn(8, 4, 4, 4).to(memory_format=torch.channels_last)
        if n < 2:
            optimizer.step()
    assert sensed(optimizer) == pytest.approx(by_hand(optimizer, [images]), rel=1e-5)
    images.grad = images.grad.contiguous()
    assert sensed(optimizer) is None, "gradient and moment lie differently: not measured rather than mismatched"


def test_steps_counted_apart_are_corrected_apart():
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
    assert size_now(size) == pytest.approx(by_hand(optimizer, [*parameters, late]), rel=1e-5)


def test_sparse_gradients_have_none():
    table = nn.Embedding(32, 16, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters())
    for _ in range(3):
        table(torch.tensor([1, 5])).square().sum().backward()
        optimizer.step()
        assert sensed(optimizer) is None
        table.weight.grad = None


def test_parameter_without_a_gradient_is_left_out_and_none_makes_no_state():
    optimizer, (first, second) = stepped((16, 16), (32, 16))
    second.grad = None
    assert sensed(optimizer) == pytest.approx(by_hand(optimizer, [first]), rel=1e-5)
    fresh = torch.optim.AdamW([nn.Parameter(torch.ones(4, 4))])
    assert sensed(fresh) is None
    assert len(fresh.state) == 0


def test_looking_changes_nothing_and_draws_nothing():
    optimizer, parameters = stepped((64, 64), (64,), fused=True)
    before = [(p.clone(), p.grad.clone(), {k: v.clone() for k, v in optimizer.state[p].items()}) for p in parameters]
    rng = torch.get_rng_state()
    sensed(optimizer)
    assert torch.equal(rng, torch.get_rng_state())
    for p, (value, grad, state) in zip(parameters, before, strict=True):
        assert torch.equal(p, value) and torch.equal(p.grad, grad)
        assert all(torch.equal(state[k], v) for k, v in optimizer.state[p].items())


def test_gradient_that_is_not_finite_is_measured_as_such():
    optimizer, (p,) = stepped((16, 16))
    p.grad.fill_(math.nan)
    assert math.isnan(sensed(optimizer))


# ---- packed


def number(value, kind=torch.float32):
    return None if value is None else torch.tensor(value, dtype=kind)


@pytest.mark.parametrize("scale", [None, 64.0])
@pytest.mark.parametrize("update", [None, 1.5])
@pytest.mark.parametrize("weights", [None, 30.0])
@pytest.mark.parametrize("extra", [None, [1 << 62, -7, 3]])
def test_what_was_measured_is_read_back_by_its_name(scale, update, weights, extra):
    optimizer, parameters = stepped((16, 16), (16, 8))
    further = None if extra is None else torch.tensor(extra).view(torch.float64)
    sensed = DeviceMeasurements(
        number(2.0),
        number(3.0),
        (None, 2.5),
        loss_scale=None if scale is None else torch.tensor([scale]),
        update_samples=None if update is None else UpdateSize(Optimizers([optimizer])).sample(),
        weight_norm=number(weights),
        extra=further,
    )
    found = MeasurementPacker().pack(sensed).read()
    assert found[:5] == (2.0, 3.0, int(Flag.GRAD_HIGH), False, scale)
    assert found.update_rms == (update and pytest.approx(by_hand(optimizer, parameters), rel=1e-5))
    assert found.weight_norm == weights
    assert (found.extra is None) if extra is None else found.extra.view(torch.int64).tolist() == extra


# ---- weight norm


def test_weight_norm_is_of_the_weights_as_the_fiftieth_step_found_them():
    def norm(m, _):
        return math.sqrt(sum(float(p.detach().double().square().sum()) for p in m.parameters()))

    batches = DataLoader(TensorDataset(*(torch.randn(64, 16),) * 2), batch_size=8)
    signals, known = train(OPTIMIZERS["adamw"], steps=110, look=norm, batches=batches)
    seen = {s.step: s.weight_norm for s in signals if s.weight_norm is not None}
    assert seen == {50: pytest.approx(known[49]), 100: pytest.approx(known[99])}


def test_weight_norm_and_fingerprint_are_not_measured_where_nothing_is_watched():
    signals, _ = train(OPTIMIZERS["adamw"], steps=60, config={"detect": {"advisory": False}})
    assert {(s.weight_norm, s.batch) for s in signals} == {(None, None)}


# ---- fingerprint


def test_same_content_has_the_same_fingerprint_and_other_content_another():
    a, b = torch.arange(12).reshape(3, 4), torch.arange(12).reshape(3, 4)
    assert fingerprint(a) == fingerprint(b)
    b[1, 1] += 1
    assert fingerprint(a) != fingerprint(b)
    assert fingerprint({"x": a}) == fingerprint([a]) == fingerprint(a)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.bool, torch.int8, torch.complex64, torch.float64]
)
def test_every_type_has_one(dtype):
    a = torch.rand(6, 5).gt(0.5).to(dtype)
    assert fingerprint(a) == fingerprint(a.clone()) != fingerprint(~a.bool())


def test_first_two_tensors_count():
    a, b, c = (torch.full((4, 4), float(n)) for n in range(3))
    assert fingerprint((a, b, c)) == fingerprint((a, b, a)) != fingerprint((a, c, c))


def test_large_batch_is_looked_at_in_several_places_from_its_first_byte_to_its_last():
    big = torch.zeros(64, 4096, dtype=torch.int64)
    known = fingerprint(big)
    for place in ((0, 0), (63, 4095)):
        other = big.clone()
        other[place] = 7
        assert fingerprint(other) != known
    other = big.clone()
    other[:, 1000:] = 3
    assert fingerprint(other) != known


@pytest.mark.parametrize("batch", [torch.zeros(2, 2, device="meta"), {"a": 3}, [], "text", None])
def test_what_is_not_in_host_memory_has_none(batch):
    assert fingerprint(batch) is None


def test_what_is_not_contiguous_or_needs_a_gradient_has_one():
    a = torch.arange(24.0).reshape(4, 6)
    assert fingerprint(a.t()) is not None
    assert fingerprint(torch.arange(1000.0)[::3]) is not None
    assert fingerprint(nn.Parameter(a)) == fingerprint(a)
    assert fingerprint(torch.zeros(0, 4)) == 0


def test_step_has_one_for_all_its_batches_in_their_order():
    def look(*batches):
        seen = BatchFingerprint(fingerprint=True)
        for batch in batches:
            seen.add(batch)
        return seen.checksum

    a, b = torch.ones(2, 2), torch.zeros(2, 2)
    assert look(a, b) == look(a.clone(), b.clone()) != look(b, a)
    assert look(a, torch.zeros(2, 2, device="meta"), b) is None
    assert look() is None


@pytest.mark.filterwarnings("ignore::holdfast.HoldfastWarning")
def test_signals_carry_it_and_a_batch_changed_in_the_loop_is_known_by_what_it_was():
    def spoil(m, o):
        held[-1].mul_(0.0)

    held = []

    class Batches:
        def __iter__(self):
            for n in range(STEPS):
                x = torch.full((4, 16), float(n % 5))
                held.append(x)
                yield x, x.clone()

    signals, _ = train(OPTIMIZERS["adamw"], batches=Batches(), look=spoil)
    prints = [s.batch for s in signals]
    assert len(set(prints)) == 5
    assert prints[:5] == prints[5:10]


def test_metrics_carry_what_was_measured_and_not_the_fingerprint(tmp_path):
    train(OPTIMIZERS["adamw"], steps=60, run_dir=tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert not any("batch" in row for row in rows)
    assert [n for n, row in enumerate(rows, 1) if "update_rms" not in row] == [1]
    assert [row["step"] for row in rows if "weight_norm" in row] == [50]


# ---- length


@pytest.mark.parametrize(
    ("batch", "length"),
    [
        (torch.zeros(4, 128, dtype=torch.int64), 128),
        (torch.zeros(4, 128, dtype=torch.int32), 128),
        ({"mask": torch.ones(4, 7), "input_ids": torch.zeros(4, 64, dtype=torch.int64)}, 64),
        ({"tokens": torch.zeros(4, 32, dtype=torch.int64), "weight": torch.ones(4)}, 32),
        ((torch.zeros(4, 16, dtype=torch.int64), torch.zeros(4)), 16),
        (torch.zeros(4, 128), None),
        (torch.zeros(4, 128, dtype=torch.bool), None),
        (torch.zeros(4, 128, 3, dtype=torch.int64), None),
        (torch.zeros(4, dtype=torch.int64), None),
        ({"input_ids": [1, 2]}, None),
        ([], None),
        (None, None),
        (torch.zeros(4, 128, dtype=torch.int64, device="meta"), 128),
    ],
)
def test_length_of_sequences(batch, length):
    assert sequence_length(batch) == length


def test_batches_of_different_lengths_in_one_step_have_none():
    look = BatchFingerprint(fingerprint=False)
    look.add(torch.zeros(2, 8, dtype=torch.int64))
    assert look.sequence_length == 8
    look.add(torch.zeros(2, 9, dtype=torch.int64))
    assert (look.sequence_length, look.checksum) == (None, None)
