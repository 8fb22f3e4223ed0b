"""After a skip or a rollback the state is bit-identical to the reference run: the same program without the bad data."""

from __future__ import annotations

import pytest
import torch
from cases import Case, assert_same

from marks import slow

NAN = {"nan": lambda x: x * float("nan"), "inf": lambda x: x + float("inf")}
QUICK = {
    "snapshot": {"every_steps": 4, "certify_after": 3},
    "recover": {"rollback_margin": 2, "skip_batches": 6, "lr_ramp_steps": 7, "probation_steps": 8},
    "quarantine": {"nonfinite_samples": False},
}


def quick(gate: str = "host", **recover) -> dict:
    config = {section: dict(body) for section, body in QUICK.items()}
    config["recover"] |= recover
    config["detect"] = {"gate": gate, "warmup_steps": 8}
    return config


def bad(*batches: int, batch: int = 8, how: str = "nan") -> dict:
    """Faults in the first sample of each of these batches, for data in sequence."""
    return {b * batch: NAN[how] for b in batches}


def garbage(x: torch.Tensor) -> torch.Tensor:
    """Finite, and of about the same loss in every batch, far above what an untrained model has."""
    return torch.full_like(x, 30.0)


def without(case: Case, *batches: int) -> dict:
    """The index stream less these batches, counted over the whole run."""
    per_epoch = -(-case.count // case.batch)
    spans = [(b // per_epoch, b % per_epoch * case.batch, (b % per_epoch + 1) * case.batch) for b in batches]
    return {"spans": spans, "samples": {}}


class Heals:
    """A fault in the data that is gone after so many returns, as if the state or the LR had been its cause."""

    def __init__(self, returns: int) -> None:
        self.left = returns

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * float("nan") if self.left > 0 else x

    def on_recovery(self, outcome) -> None:
        self.left -= outcome.status == "rolled_back"


def causes(run) -> list[str]:
    return [e["cause"] for e in run.journal() if e["event"] == "cause"]


def check(case: Case, tmp_path, *actions: str):
    run = case.guarded(tmp_path / "run")
    for action in actions:
        assert action in run.actions(), run.actions()
    reference = case.reference(run)
    assert_same(run, reference)
    return run


QUICK_GATES = [("adamw", "host"), ("sgd_fused", "device")]
OTHER_GATES = [("adamw_fused", "host"), ("adamw_fused", "device"), ("sgd", "host")]
GATES = [*QUICK_GATES, *slow(*OTHER_GATES)]


@pytest.mark.shows("steps", "nan")
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("optimizer", "gate"), [*QUICK_GATES, *OTHER_GATES])
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("shuffle", ["none", "global", "generator", "seeded"])
def test_skip(optimizer, gate, accumulate, shuffle, tmp_path):
    case = Case(optimizer=optimizer, accumulate=accumulate, shuffle=shuffle, augment=True, epochs=3)
    case.faults, case.config = bad(5), quick(gate)
    run = check(case, tmp_path, "skip")
    assert run.guard.summary().skipped >= 3


WHERE = {
    "the first step": [0],
    "the first two steps": [0, 1],
    "the last step": [35],
    "the last step of an epoch": [11],
    "the first step of an epoch": [12],
    "both sides of an epoch border": [11, 12],
    "three in a row": [5, 6, 7],
    "every other": [5, 7, 9],
    "far apart": [3, 20, 33],
}


def at(case: Case, *batches: int, how=NAN["nan"]) -> dict:
    """Faults in the first sample of each of these batches, counted over the whole run, for data with ids of its own in
    every epoch. Where the order comes from a generator, it is read off the loader itself."""
    loader = case.loader(faults=False)
    order = []
    for epoch in range(case.epochs):
        loader.batch_sampler.sampler.set_epoch(epoch)
        iter(loader)  # draws the base seed, as a loop does
        order += [batch[0] for batch in loader.batch_sampler]
    return {order[b]: how for b in batches}


@pytest.mark.slow
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("where", sorted(WHERE))
@pytest.mark.parametrize(("optimizer", "gate"), GATES)
@pytest.mark.parametrize("shuffle", ["unique", "unique_generator"])
def test_skip_anywhere(where, optimizer, gate, shuffle, tmp_path):
    case = Case(optimizer=optimizer, shuffle=shuffle, epochs=3, augment=True, config=quick(gate))
    case.faults = at(case, *WHERE[where])
    run = check(case, tmp_path, "skip")
    assert run.guard.summary().skipped == len(WHERE[where])


@pytest.mark.parametrize(("optimizer", "gate"), [("adamw", "host"), ("adamw_fused", "device")])
def test_epoch_schedule_moves_after_the_last_step_of_the_epoch_has_settled(optimizer, gate, tmp_path):
    """On a device the next epoch's first batch is computed before the last step of the epoch before is judged."""
    case = Case(optimizer=optimizer, scheduler="exponential", interval="epoch", shuffle="unique", epochs=3)
    case.config, case.faults = quick(gate), at(case, 11, 23)
    run = check(case, tmp_path, "skip")
    assert run.scheduler.last_epoch == 3


@pytest.mark.parametrize(("optimizer", "gate"), GATES)
def test_a_finite_loss_with_a_non_finite_gradient(optimizer, gate, tmp_path):
    class Rooted(Case):
        def loss(self, model, batch):
            x, y = batch
            marked = bool((x[:, 0] == 77.0).any())
            value = super().loss(model, (torch.where(x == 77.0, 0.0, x), y))
            return value + torch.sqrt(model.last.bias.sum() * 0) if marked else value

    def mark(x):
        x = x.clone()
        x[0] = 77.0
        return x

    case = Rooted(optimizer=optimizer, faults={40: mark, 80: mark}, config=quick(gate))
    run = check(case, tmp_path, "skip")
    findings = [e for e in run.journal() if e["event"] == "finding"]
    assert {f["kind"] for f in findings} == {"nonfinite_grad"}
    assert all(torch.isfinite(torch.tensor(f["evidence"]["loss"])) for f in findings)


@pytest.mark.parametrize(("optimizer", "gate"), GATES)
def test_fp16_a_nan_batch_does_not_move_the_loss_scale(optimizer, gate, tmp_path):
    case = Case(optimizer=optimizer, precision="fp16", init_scale=256.0, config=quick(gate), faults=bad(5, 17))
    run = check(case, tmp_path, "skip")
    assert run.guard.summary().overflowed == 0


@pytest.mark.shows("steps", "border")
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("optimizer", "gate"), GATES)
@pytest.mark.parametrize("shuffle", ["unique", "unique_generator"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_rollback_across_an_epoch_border(optimizer, gate, shuffle, accumulate, tmp_path):
    """Non-finite batches on both sides of an epoch border: the fourth bad step in a row is rolled back to the epoch before,
    what was skipped is put back, fails again, and is left out for good. Nothing else is."""
    case = Case(optimizer=optimizer, shuffle=shuffle, accumulate=accumulate, epochs=5, augment=True, clip=0.5)
    case.config = quick(gate, max_consecutive=3)
    bad = range(22, 22 + 4 * accumulate)
    case.faults = at(case, *bad)
    run = check(case, tmp_path)
    assert run.actions() == [*["replay", "skip"] * 3, "replay", "rollback", "replay", *["skip"] * 4]
    rollback = next(e for e in run.journal() if e.get("action") == "rollback")
    assert rollback["to_step"] < rollback["from_step"]
    back = next(e for e in run.journal() if e.get("status") == "rolled_back")
    assert back["data"][0][0] == 2
    (released,) = [e for e in run.journal() if e["event"] == "released"]
    assert len(released["spans"]) >= 3
    assert run.guard.summary().status == "recovered"
    assert set(causes(run)) == {"data"}
    assert_same(run, case.plain(without(case, *bad)))


@pytest.mark.slow
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("gate", ["host", "device"])
@pytest.mark.parametrize("batches", [[20, 21, 22, 26], [20, 21, 22, 23, 24, 25, 26, 27, 28], [21, 22, 23, 40, 41, 42]])
def test_several_faults_close_together(batches, gate, tmp_path):
    """Another one right after a recovery, on its probation, and one long after."""
    case = Case(optimizer="adamw_fused", shuffle="unique", epochs=6, augment=True)
    case.config = quick(gate, max_consecutive=2, skip_batches=9)
    case.faults = at(case, *batches)
    run = check(case, tmp_path, "rollback")
    assert_same(run, case.plain(without(case, *batches)))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("optimizer", "gate"), GATES)
@pytest.mark.parametrize("scheduler", ["cosine", "onecycle", "exponential"])
def test_a_second_return_cuts_the_lr_and_leaves_nothing_out(optimizer, gate, scheduler, tmp_path):
    """NaN that neither the same data nor other data explains, and that is gone at a lower LR."""
    case = Case(optimizer=optimizer, scheduler=scheduler, shuffle="unique", epochs=5, augment=True)
    case.interval = "epoch" if scheduler == "exponential" else "step"
    case.config = quick(gate, max_consecutive=2, skip_batches=2)
    heals = Heals(returns=2)
    case.faults = at(case, 22, 23, 24, how=heals)
    run = case.guarded(tmp_path / "run", hooks=[heals])
    first, second = [*["replay", "skip"] * 2, "replay"], ["replay", "skip", "skip"]
    assert run.actions() == [*first, "rollback", *second, "rollback", "cut_lr"]
    assert causes(run)[-1] == "lr"
    assert run.excluded() == {"spans": [], "samples": {}}
    assert_same(run, case.reference(run))


@pytest.mark.slow
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("optimizer", "gate"), GATES)
@pytest.mark.parametrize("scheduler", ["cosine", "onecycle", "exponential"])
def test_rollback_from_a_real_spike(optimizer, gate, scheduler, tmp_path):
    """A stretch of garbage data: it lands, comes back on the same data, and is left out; nothing else is."""
    case = Case(
        optimizer=optimizer, scheduler=scheduler, shuffle="unique", count=160, epochs=7, norm=False, linear=True
    )
    case.config = quick(gate, watch_steps=8)
    case.interval = "epoch" if scheduler == "exponential" else "step"
    case.faults = at(case, *range(90, 95), how=garbage)
    run = check(case, tmp_path)
    assert run.actions() == ["rollback", "rollback", *["skip"] * 5]
    assert {e["kind"] for e in run.journal() if e["event"] == "finding"} >= {"loss_spike"}
    (cause,) = [e for e in run.journal() if e["event"] == "cause"]
    assert (cause["cause"], cause["data"]) == ("data", [list(span) for span in without(case, *range(90, 95))["spans"]])
    assert_same(run, case.plain(without(case, *range(90, 95))))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("optimizer", "gate"), GATES)
@pytest.mark.parametrize("what", ["parameter", "moment"])
def test_broken_state_is_rolled_back_to_the_run_that_never_had_it(optimizer, gate, what, tmp_path):
    case = Case(optimizer=optimizer, shuffle="global", epochs=4, config=quick(gate), augment=True)
    struck = []

    def strike(step, parts):
        if step.number == 21 and not struck:
            struck.append(step.number)
            weight = parts["model"].first.weight
            state = parts["optimizer"].state[weight]
            key = next(k for k in ("exp_avg", "momentum_buffer") if k in state)
            (weight.data if what == "parameter" else state[key])[3, 2] = float("nan")

    run = case.guarded(tmp_path / "run", before_step=strike)
    assert run.actions()[0] == "rollback"
    assert "skip_data" not in run.actions()
    assert "cut_lr" not in run.actions()
    assert_same(run, case.plain())


@pytest.mark.parametrize("gate", ["host", "device"])
def test_a_tighter_clip_comes_with_the_cut(gate, tmp_path):
    case = Case(optimizer="adamw_fused", shuffle="unique", epochs=5)
    case.config = quick(gate, max_consecutive=2, skip_batches=2, clip_after_rollback=0.05, clip_after_rollback_steps=9)
    heals = Heals(returns=2)
    case.faults = at(case, 15, 16, 17, how=heals)
    run = case.guarded(tmp_path / "run", hooks=[heals])
    assert run.actions()[-3:] == ["rollback", "cut_lr", "tighten_clip"]
    assert_same(run, case.reference(run))


def test_a_sample_with_nan_is_left_out_of_later_epochs(tmp_path):
    case = Case(shuffle="seeded", epochs=3, faults={10: NAN["nan"]})
    run = case.guarded(tmp_path / "run")
    assert run.guard.summary().skipped == 1
    assert run.guard.summary().samples_quarantined == 1
    excluded = run.excluded()
    assert excluded["samples"] == {10: 0}
    excluded["samples"] = {10: 1}
    assert_same(run, case.plain(excluded))


def test_replay_heals_what_was_transient_and_loses_nothing(tmp_path):
    config = quick(ladder=["replay", "rollback", "stop"])
    case = Case(epochs=2, config=config, augment=True)
    struck = []

    class Transient(Case):
        def loss(self, model, batch):
            value = super().loss(model, batch)
            struck.append(0)
            return value * float("nan") if len(struck) == 9 else value

    flaky = Transient(epochs=2, config=config, augment=True)
    run = flaky.guarded(tmp_path / "run")
    assert run.actions() == ["replay"]
    assert_same(run, case.plain())
    assert run.guard.summary().status == "recovered"
