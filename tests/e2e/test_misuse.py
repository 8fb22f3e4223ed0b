"""Misuse gives one clear message that names the cure, and leaves nothing half-written."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from cases import Case, Points, loss_of, parts
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from holdfast.cli.ack import ack
from holdfast.core.record.journal import read

FORK = multiprocessing.get_context("fork")


@pytest.fixture
def ready(tmp_path):
    model, optimizer, loader = parts()
    return model, optimizer, loader, holdfast.Guard(model, optimizer, run_dir=tmp_path / "run"), tmp_path / "run"


def frozen(model):
    return {k: v.clone() for k, v in model.state_dict().items()}


def unchanged(model, before):
    return all(torch.equal(v, before[k]) for k, v in model.state_dict().items() if k in dict(model.named_parameters()))


def last_event(run_dir):
    record = read(run_dir / "journal.jsonl")
    assert record.torn == []
    return record.events[-1]


# ---- configuration


def test_every_config_error_at_once_and_no_run_directory_made(tmp_path):
    model, optimizer, _ = parts()
    path = tmp_path / "policy.toml"
    path.write_text('[recover]\nlr_facter = 0.5\nmax_consecutive = "ten"\n[snapshots]\n')
    with pytest.raises(holdfast.ConfigError) as error:
        holdfast.Guard(model, optimizer, run_dir=tmp_path / "run", config=path)
    assert len(error.value.errors) == 3
    assert "did you mean 'lr_factor'" in str(error.value)
    assert "did you mean 'snapshot'" in str(error.value)
    assert not (tmp_path / "run").exists()


def test_a_missing_config_names_the_command_that_writes_one(tmp_path):
    model, optimizer, _ = parts()
    with pytest.raises(holdfast.ConfigError, match="holdfast init"):
        holdfast.Guard(model, optimizer, config=tmp_path / "none.toml")


def test_a_malformed_config_names_the_line(tmp_path):
    model, optimizer, _ = parts()
    (tmp_path / "bad.toml").write_text("[recover\nlr_factor = 1\n")
    with pytest.raises(holdfast.ConfigError, match="line 1"):
        holdfast.Guard(model, optimizer, config=tmp_path / "bad.toml")


# ---- the run directory


def test_a_run_directory_held_by_a_live_process_is_refused_with_its_pid(tmp_path):
    def hold() -> None:
        with holdfast.Guard(*parts()[:2], run_dir=tmp_path / "run"):
            held.set()
            FORK.Event().wait(60)

    held = FORK.Event()
    child = FORK.Process(target=hold, daemon=True)
    child.start()
    try:
        assert held.wait(60)
        model, optimizer, _ = parts()
        with pytest.raises(holdfast.RunDirError, match=str(child.pid)):
            holdfast.Guard(model, optimizer, run_dir=tmp_path / "run").__enter__()
        child.kill()
        child.join(30)
        with holdfast.Guard(model, optimizer, run_dir=tmp_path / "run"):
            pass
    finally:
        child.kill()
        child.join(30)


def test_two_guards_of_one_process_on_one_directory(tmp_path):
    model, optimizer, _ = parts()
    other, its_optimizer, _ = parts()
    with (
        holdfast.Guard(model, optimizer, run_dir=tmp_path / "run"),
        pytest.raises(holdfast.RunDirError, match="another Guard of this process"),
    ):
        holdfast.Guard(other, its_optimizer, run_dir=tmp_path / "run").__enter__()


def test_a_run_directory_that_is_a_file(tmp_path):
    model, optimizer, _ = parts()
    (tmp_path / "file").write_text("x")
    with pytest.raises(holdfast.RunDirError, match="must be a folder"):
        holdfast.Guard(model, optimizer, run_dir=tmp_path / "file").__enter__()
    assert (tmp_path / "file").read_text() == "x"


# ---- what is handed to the guard


def test_lbfgs_is_refused():
    model, _, _ = parts()
    with pytest.raises(holdfast.SetupError, match="LBFGS.*use AdamW"):
        holdfast.Guard(model, torch.optim.LBFGS(model.parameters()))


def test_model_and_optimizer_in_the_wrong_order():
    model, optimizer, _ = parts()
    with pytest.raises(holdfast.SetupError, match=r"expected an nn\.Module.*; got AdamW$"):
        holdfast.Guard(optimizer, model)


def test_an_optimizer_over_other_parameters_than_the_models():
    model, _, _ = parts()
    other = torch.nn.Linear(3, 3)
    with pytest.raises(holdfast.SetupError, match=r"not the model's.*Guard\(\[model, other\]"):
        holdfast.Guard(model, torch.optim.SGD(other.parameters(), 0.1))
    both = torch.optim.SGD([*model.parameters(), *other.parameters()], 0.1)
    with pytest.raises(holdfast.SetupError, match="not the model's"):
        holdfast.Guard(model, both)
    holdfast.Guard([model, other], both)


def test_parameters_no_optimizer_updates_are_named():
    model, _, _ = parts()
    with pytest.warns(holdfast.HoldfastWarning, match=r"last\.weight"):
        holdfast.Guard(model, torch.optim.SGD([*model.first.parameters(), *model.norm.parameters()], 0.1))


def test_a_model_that_is_already_broken():
    model, optimizer, _ = parts()
    model.last.weight.data[0, 0] = float("nan")
    with pytest.raises(holdfast.SetupError, match=r"last\.weight holds NaN or Inf before the first step"):
        holdfast.Guard(model, optimizer)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"clip_grad_norm": -1}, "positive number"),
        ({"clip_grad_norm": "1"}, "positive number"),
        ({"scheduler": "cosine"}, "LR scheduler"),
        ({"scaler": 3}, "GradScaler"),
        ({"scheduler_interval": "often"}, "'step', 'epoch', 'eval', or 'loop'|for 0 schedulers"),
        ({"hooks": [object()]}, "none of the methods"),
        ({"hooks": holdfast.Hook()}, r"expected a list; write hooks=\[\.\.\.\]"),
        ({"detectors": 3}, r"Guard\(detectors=3\): expected a list"),
        ({"detectors": [object()]}, "not a detector"),
        ({"config": 7}, "expected a path"),
        ({"config": {"recover": {"nan_action": "explode"}}}, "'warn', 'skip', 'raise'"),
        ({"config": {"detect": {"gate": "device"}}}, "fused=True"),
    ],
)
def test_wrong_arguments(arguments, says):
    model, optimizer, _ = parts()
    if "scheduler_interval" in arguments:
        arguments = {**arguments, "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer)}
    with pytest.raises(holdfast.HoldfastError, match=says):
        holdfast.Guard(model, optimizer, **arguments)


def test_a_plateau_scheduler_that_is_given_no_metric():
    model, optimizer, _ = parts()
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(holdfast.SetupError, match="report_eval"):
        holdfast.Guard(model, optimizer, scheduler=plateau, scheduler_interval="step")


def test_a_scheduler_of_another_optimizer():
    model, optimizer, _ = parts()
    other = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), 0.1)
    with pytest.raises(holdfast.SetupError, match="another optimizer"):
        holdfast.Guard(model, optimizer, scheduler=torch.optim.lr_scheduler.ConstantLR(other))


# ---- the loop


def test_with_step_forgotten(ready):
    model, _, loader, guard, run_dir = ready
    with guard, pytest.raises(holdfast.StepError, match="never entered: write `with step:`"):
        for _step in guard.steps(loader, max_steps=3):
            pass
    assert last_event(run_dir)["event"] == "run_end"


def test_microbatches_outside_the_step(ready):
    _, _, loader, guard, _ = ready
    with guard, pytest.raises(holdfast.StepError, match="write `with step:` around it"):
        for step in guard.steps(loader, max_steps=3):
            step.microbatches()


def test_a_step_entered_twice(ready):
    model, _, loader, guard, _ = ready
    before = frozen(model)
    with guard, pytest.raises(holdfast.StepError, match="entered twice"):
        for step in guard.steps(loader, max_steps=3):
            with step, step:
                pass
    assert unchanged(model, before)


@pytest.mark.parametrize("how", ["break", "continue", "nothing", "no loop"])
def test_a_step_left_incomplete_applies_nothing(ready, how):
    model, optimizer, loader, guard, run_dir = ready
    before = frozen(model)
    with pytest.raises(holdfast.StepIncomplete, match="nothing was applied"), guard:
        for step in guard.steps(loader, accumulate=2, max_steps=3):
            with step:
                if how == "no loop":
                    continue
                for n, batch in enumerate(step.microbatches()):
                    if n == 1 and how == "break":
                        break
                    if n == 0 and how == "continue":
                        continue
                    if how == "nothing":
                        continue
                    step.backward(loss_of(model, batch))
    assert unchanged(model, before)
    assert not optimizer.state
    assert all(p.grad is None for p in model.parameters())
    end = last_event(run_dir)
    assert end["event"] == "run_end"
    assert "StepIncomplete" in end["error"]


def test_break_after_a_complete_step_is_legal(ready):
    model, _, loader, guard, _ = ready
    with guard:
        for step in guard.steps(loader, max_steps=30):
            with step:
                for batch in step.microbatches():
                    step.backward(loss_of(model, batch))
            if step.number == 3:
                break
    assert guard.step == 3


def test_the_users_own_error_passes_through_untouched(ready):
    model, _, loader, guard, run_dir = ready

    class Mine(Exception):
        pass

    mine = Mine("my own")
    with pytest.raises(Mine) as caught, guard:
        for step in guard.steps(loader, max_steps=30):
            with step:
                for batch in step.microbatches():
                    loss = loss_of(model, batch)
                    if step.number == 3:
                        raise mine
                    step.backward(loss)
    assert caught.value is mine
    assert mine.__cause__ is None
    end = last_event(run_dir)
    assert end["event"] == "run_end"
    assert end["error"] == "Mine: my own"
    assert end["step"] == 2


def test_the_users_own_optimizer_step_inside(ready):
    model, optimizer, loader, guard, _ = ready
    with guard, pytest.raises(holdfast.StepError, match="keep your own lines with Guard.wrap"):
        for step in guard.steps(loader, max_steps=3):
            with step:
                for batch in step.microbatches():
                    step.backward(loss_of(model, batch))
                optimizer.step()
    optimizer.step()  # outside, it is theirs again


def test_the_users_own_scheduler_step(tmp_path):
    model, optimizer, loader = parts()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    guard = holdfast.Guard(model, optimizer, scheduler=scheduler)
    with guard, pytest.raises(holdfast.StepError, match="ExponentialLR.step.. was called outside the guard"):
        for step in guard.steps(loader, max_steps=3):
            with step:
                for batch in step.microbatches():
                    step.backward(loss_of(model, batch))
            scheduler.step()


class Wrapper(torch.optim.Optimizer):
    """Steps the optimizer inside."""

    def __init__(self, inner):
        self.inner = inner
        super().__init__(inner.param_groups, {"lr": 0.1})

    def step(self, closure=None):
        self.inner.step(closure)


def test_an_optimizer_that_would_be_stepped_twice():
    model, optimizer, _ = parts()
    with pytest.raises(holdfast.SetupError, match="number 1, AdamW, is in the list twice.*name it once"):
        holdfast.Guard(model, [optimizer, optimizer])
    with pytest.raises(holdfast.SetupError, match="number 1, AdamW, is inside Wrapper.*pass only the Wrapper"):
        holdfast.Guard(model, [Wrapper(optimizer), optimizer])
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    with pytest.raises(holdfast.SetupError, match="number 1, ConstantLR, is in the list twice"):
        holdfast.Guard(model, optimizer, scheduler=[scheduler, scheduler])
    holdfast.Guard(model, Wrapper(optimizer))
    holdfast.Guard(model, [optimizer, torch.optim.SGD(model.parameters(), 0.1)])


@pytest.mark.parametrize("first", [lambda o: o, Wrapper], ids=["plain", "wrapped"])
@pytest.mark.parametrize("second", [lambda o: o, Wrapper], ids=["plain", "wrapped"])
def test_two_open_guards_on_one_optimizer(first, second):
    model, optimizer, loader = parts()
    one, other = holdfast.Guard(model, first(optimizer)), holdfast.Guard(model, second(optimizer))
    with one, pytest.raises(holdfast.SetupError, match="belongs to another Guard .* still open: close that one first"):
        other.__enter__()
    other.fit(loss_of, loader, max_steps=2)  # one after the other
    assert other.step == 2


def test_an_optimizer_without_param_groups_or_lr():
    model, optimizer, _ = parts()
    other = torch.optim.SGD(model.parameters(), 0.1)
    del other.param_groups[0]["lr"]
    with pytest.raises(holdfast.SetupError, match="no 'lr'.*give every group one"):
        holdfast.Guard(model, other)
    other.param_groups.clear()
    with pytest.raises(
        holdfast.SetupError, match=r"number 1, SGD, has no param groups; build it from model.parameters"
    ):
        holdfast.Guard(model, [optimizer, other])
    optimizer.param_groups[0]["params"].clear()
    with pytest.raises(holdfast.SetupError, match="hold no parameters"):
        holdfast.Guard(model, optimizer)


@pytest.mark.parametrize("after", [2, 14], ids=["in the first steps", "later"])
@pytest.mark.parametrize("which", ["groups", "parameters", "groups of one of two"])
def test_param_groups_emptied_during_the_run_apply_nothing(tmp_path, which, after):
    model, optimizer, loader = parts()
    head = torch.optim.SGD(model.last.parameters(), 0.1)
    optimizers = [optimizer, head] if which == "groups of one of two" else optimizer
    frozen_at = {}
    with (
        pytest.raises(holdfast.StepError, match=f"step {after + 1}: an optimizer was emptied during the run"),
        holdfast.Guard(model, optimizers, run_dir=tmp_path / "run") as guard,
    ):
        for step in guard.steps(loader, max_steps=20):
            with step:
                for batch in step.microbatches():
                    step.backward(loss_of(model, batch))
            if step.number == after:
                (optimizer.param_groups[0]["params"] if which == "parameters" else optimizer.param_groups).clear()
                frozen_at = frozen(model)
    assert unchanged(model, frozen_at)
    assert "emptied" in last_event(tmp_path / "run")["error"]


def test_parameters_and_buffers_without_values():
    with torch.device("meta"):
        model = torch.nn.Linear(2, 1)
    with pytest.raises(holdfast.SetupError, match=r"0\.weight of the model is on the meta device.*to_empty"):
        holdfast.Guard([model], torch.optim.SGD(model.parameters(), 0.1))
    model, optimizer, _ = parts()
    model.register_buffer("table", torch.empty(3, device="meta"))
    with pytest.raises(holdfast.SetupError, match="table of the model is on the meta device"):
        holdfast.Guard(model, optimizer)
    lazy = torch.nn.LazyLinear(1)
    with pytest.raises(holdfast.SetupError, match="weight of the model has no shape yet.*call the model once"):
        holdfast.Guard(lazy, torch.optim.SGD(lazy.parameters(), 0.1))


def test_complex_parameters_that_are_already_broken():
    model = torch.nn.Linear(2, 1, dtype=torch.complex64)
    model.weight.data[0, 0] = complex(0.0, float("nan"))
    with pytest.raises(holdfast.SetupError, match="weight holds NaN or Inf before the first step"):
        holdfast.Guard(model, torch.optim.SGD(model.parameters(), 0.1))


LOSSES = {
    "complex": (lambda m, b: loss_of(m, b) * (1 + 1j), r"torch\.complex64.*real part or its absolute value"),
    "whole numbers": (lambda m, b: loss_of(m, b).long(), r"torch\.int64"),
    "no values": (lambda m, b: loss_of(m, b).to("meta"), "on the meta device"),
    "sparse": (lambda m, b: loss_of(m, b).reshape(1).to_sparse(), "layout torch.sparse_coo"),
    "empty": (lambda m, b: m(b[0])[:0], r"shape \(0, 1\).*loss\.mean\(\)"),
    "no graph": (lambda m, b: loss_of(m, b).detach(), "no graph"),
    "not a scalar": (lambda m, b: (m(b[0]) - b[1]) ** 2, r"shape \(8, 1\)"),
    "a number": (lambda m, b: loss_of(m, b).item(), "pass the tensor, not its value"),
    "nothing": (lambda m, b: None, "NoneType"),
}


@pytest.mark.parametrize("kind", sorted(LOSSES))
def test_a_loss_that_cannot_be_backpropagated(ready, kind):
    model, _, loader, guard, _ = ready
    function, says = LOSSES[kind]
    before = frozen(model)
    with guard, pytest.raises(holdfast.StepError, match=says):
        for step in guard.steps(loader, max_steps=3):
            with step:
                for batch in step.microbatches():
                    step.backward(function(model, batch))
    assert unchanged(model, before)


def test_a_loss_of_one_element_is_a_scalar(ready):
    model, _, loader, guard, _ = ready
    guard.fit(lambda m, b: loss_of(m, b).reshape(1, 1), loader, max_steps=3)
    assert guard.step == 3


def test_backward_twice_for_one_batch(ready):
    model, _, loader, guard, _ = ready
    with guard, pytest.raises(holdfast.StepError, match="2 times for 1 parts"):
        for step in guard.steps(loader, max_steps=3):
            with step:
                for batch in step.microbatches():
                    loss = loss_of(model, batch)
                    step.backward(loss)
                    step.backward(loss_of(model, batch))


SENSELESS = [{}, {"max_steps": 0}, {"max_steps": 1.5}, {"epochs": -1}, {"accumulate": 0, "epochs": 1}]


@pytest.mark.parametrize("arguments", SENSELESS)
def test_steps_with_senseless_lengths(ready, arguments):
    _, _, loader, guard, run_dir = ready
    with pytest.raises(holdfast.StepError, match=r"steps\("):
        guard.steps(loader, **arguments)
    assert not run_dir.exists()


# ---- data


def test_an_iterator_has_no_position_to_return_to(ready):
    _, _, loader, guard, _ = ready
    with guard, pytest.raises(holdfast.DataError, match="read only once.*DataLoader over a map-style dataset"):
        guard.steps(iter(loader), max_steps=3)
    _, _, _, guard, _ = ready


def test_a_generator_is_refused_the_same_way(tmp_path):
    model, optimizer, loader = parts()
    with pytest.raises(holdfast.DataError, match="whose __iter__ starts again"):
        holdfast.Guard(model, optimizer).steps((b for b in loader), max_steps=3)


def test_a_stream_is_taken_with_a_word_about_what_it_costs(tmp_path):
    model, optimizer, loader = parts()
    guard = holdfast.Guard(model, optimizer, run_dir=tmp_path / "run")
    with guard, pytest.warns(holdfast.HoldfastWarning, match="no resumable position"):
        guard.fit(loss_of, list(loader), max_steps=12)
    assert guard.step == 12


def test_something_that_is_no_loader(tmp_path):
    model, optimizer, _ = parts()
    with pytest.raises(holdfast.DataError, match="cannot be iterated"):
        holdfast.Guard(model, optimizer).steps(3, max_steps=3)


def test_an_empty_loader(tmp_path):
    model, optimizer, _ = parts()
    with pytest.raises(holdfast.DataError, match="no batches"):
        holdfast.Guard(model, optimizer).fit(loss_of, DataLoader(Points(4), batch_size=8, drop_last=True), max_steps=3)


# ---- policy


def test_nan_action_raise_raises_before_anything_is_applied(tmp_path):
    case = Case(faults={8 * 5: lambda x: x * float("nan")}, shuffle="none", config={"recover": {"nan_action": "raise"}})
    with pytest.raises(holdfast.InstabilityError, match="nothing was applied"):
        case.guarded(tmp_path / "run")
    record = read(tmp_path / "run" / "journal.jsonl").events
    assert record[-1]["event"] == "run_end"
    assert record[-1]["step"] == 5
    # Raising is not a stop by policy: the run may be started again without an acknowledgement.
    assert case_again(tmp_path) is None


def case_again(tmp_path):
    model, optimizer, _ = parts()
    with holdfast.Guard(model, optimizer, run_dir=tmp_path / "run"):
        return None


def test_a_dataset_whose_rows_are_all_quarantined_ends_the_run(tmp_path):
    model = torch.nn.Linear(4, 1)
    guard = holdfast.Guard(model, torch.optim.SGD(model.parameters(), 0.1), run_dir=tmp_path / "run")
    loader = DataLoader(TensorDataset(torch.full((64, 4), float("nan"))), batch_size=4)
    with pytest.raises(holdfast.DataError, match="no sample left that is not quarantined .64 samples"):
        guard.fit(lambda m, b: m(b[0]).mean(), loader, max_steps=50)
    assert guard.summary().samples_quarantined == 64
    assert "no sample left" in last_event(tmp_path / "run")["error"]


def test_quarantined_data_is_served_again_after_it_was_released(tmp_path):
    """Deleting quarantine.json would not do: the next start rebuilds it from the journal."""

    def train(quarantined=()):
        model, optimizer, loader = parts()
        with holdfast.Guard(model, optimizer, run_dir=tmp_path / "run") as guard:
            guard.quarantine(quarantined, "known to be bad")
            return guard.fit(loss_of, loader, epochs=2).committed

    with pytest.raises(holdfast.DataError, match=f"holdfast ack {tmp_path / 'run'} --release-data"):
        train(range(64))
    (tmp_path / "run" / "quarantine.json").unlink()
    with pytest.raises(holdfast.DataError):
        train()
    ack = [sys.executable, "-m", "holdfast", "ack", str(tmp_path / "run"), "--release-data"]
    answer = subprocess.run(ack, capture_output=True, text=True, timeout=60, check=True)
    assert "served again from the next start on: 64 samples" in answer.stdout
    assert train() == 16


def test_sample_ids_for_a_stream_that_has_none(tmp_path):
    model, optimizer, loader = parts()
    with holdfast.Guard(model, optimizer, run_dir=tmp_path / "run") as guard:
        guard.quarantine([1], "known to be bad")
        with pytest.warns(holdfast.HoldfastWarning, match="no resumable position"):
            guard.fit(loss_of, list(loader), max_steps=2)
        guard.quarantine([2], "found to be bad")
    notes = [e["message"] for e in read(tmp_path / "run" / "journal.jsonl").events if e["event"] == "note"]
    assert len([n for n in notes if "a stream has no sample ids" in n]) == 2


@pytest.mark.slow
def test_a_script_stopped_by_policy_ends_with_status_70_says_why_and_needs_an_ack(tmp_path):
    script = textwrap.dedent("""
        import sys, torch, holdfast
        from torch.utils.data import DataLoader, TensorDataset
        model = torch.nn.Linear(4, 1)
        x = torch.full((64, 4), float("nan"))
        config = {"recover": {"skip_batches": 5}, "quarantine": {"nonfinite_samples": False}}
        guard = holdfast.Guard(model, torch.optim.SGD(model.parameters(), 0.1), run_dir=sys.argv[1], config=config)
        guard.fit(lambda m, b: m(b[0]).mean(), DataLoader(TensorDataset(x), batch_size=4), max_steps=50)
    """)
    command = [sys.executable, "-c", script, str(tmp_path / "run")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    first = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert first.returncode == 70
    assert "the run was stopped" in first.stderr
    assert "holdfast ack" in first.stderr
    assert "Traceback" not in first.stderr
    with pytest.raises(holdfast.PolicyStop, match="was stopped by policy") as second:
        holdfast.Guard(*parts()[:2], run_dir=tmp_path / "run").__enter__()
    assert second.value.code == 70
    ack(str(tmp_path / "run"))
    with holdfast.Guard(*parts()[:2], run_dir=tmp_path / "run"):
        pass
