"""Lightning's Trainer with one callback: the same run bit for bit, also after faults, kills and rollbacks over an epoch."""

from __future__ import annotations

import logging
import runpy
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.plugins import MixedPrecision
from lightning_data import CONFIG, Points, environment, garbage, inf_gradient, nan_weights, same, scaled, seed
from lightning_runs import Fit, Module, assert_same, guarded
from torch.utils.data import DataLoader, IterableDataset

import holdfast
from marks import slow


@pytest.fixture(autouse=True)
def quiet():
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", holdfast.HoldfastWarning)
        yield


# ---- harmless


@pytest.mark.shows("lightning", "harmless")
@pytest.mark.parametrize(
    "options",
    [
        {"accumulate_grad_batches": 5, "augment": True, "interval": "epoch", "seeded": False},
        *slow(
            {},
            {"workers": 2, "augment": True, "precision": "bf16-mixed"},
            {"workers": 2, "accumulate_grad_batches": 5, "seeded": False},
            {"limit_train_batches": 7, "seeded": False},
            {"val_check_interval": 0.25, "accumulate_grad_batches": 2},
            {"max_steps": 17, "max_epochs": -1},
            {"gradient_clip_val": None},
            {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"},
            {"num_sanity_val_steps": 0, "check_val_every_n_epoch": 2},
        ),
    ],
    ids=str,
)
def test_a_guarded_run_is_the_unguarded_one(tmp_path, options):
    run = guarded(tmp_path, None, **options)
    plain = Fit(tmp_path / "plain", **options)
    assert_same(run, plain)
    summary = run.guard.guard.summary()
    assert (summary.status, summary.committed) == ("clean", plain.trainer.global_step)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_a_shuffled_loader_with_a_generator_draws_as_often_as_unguarded(tmp_path, workers):
    one, other = (shuffled(generator=torch.Generator().manual_seed(5), num_workers=workers) for _ in range(2))
    assert_same(guarded(tmp_path, None, loader=one), Fit(tmp_path / "plain", loader=other))
    assert torch.equal(one.generator.get_state(), other.generator.get_state())


@pytest.mark.slow
def test_a_loss_scaler_overflows_and_grows_as_unguarded(tmp_path):
    def plugin() -> MixedPrecision:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=7)
        return MixedPrecision("16-mixed", "cpu", scaler)

    one, other = plugin(), plugin()
    assert_same(guarded(tmp_path, None, plugins=[one]), Fit(tmp_path / "plain", plugins=[other]))
    assert one.scaler.state_dict() == other.scaler.state_dict()
    assert one.scaler.get_scale() < 2.0**40


class Skipping(Module):
    """Returns no loss for every third batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx % 3 == 1 else loss


class Estimating(Module):
    """Asks for the number of steps before the optimizer is there, as one-cycle schedules do."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        steps = self.trainer.estimated_stepping_batches
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, steps)}]


def shuffled(**options: Any) -> DataLoader:
    return DataLoader(Points(96, True), 8, shuffle=True, **options)


class Clipping(Module):
    """Clips in a way of its own."""

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda: {"module": Skipping()},
        lambda: {"module": Skipping(), "accumulate_grad_batches": 2},
        lambda: {"module": Clipping()},
        lambda: {"module": Estimating(), "loader": shuffled()},
        lambda: {"module": Estimating(), "loader": shuffled(generator=torch.Generator().manual_seed(5))},
        lambda: {"callbacks": [pl.callbacks.GradientAccumulationScheduler({0: 1, 1: 3, 2: 2})]},
        lambda: {"loader": shuffled(num_workers=2, persistent_workers=True)},
        lambda: {"overfit_batches": 3, "callbacks": [pl.callbacks.LearningRateMonitor()]},
        lambda: {"detect_anomaly": True, "limit_val_batches": 0},
    ],
    ids=[
        "no loss",
        "no loss in a part",
        "own clipping",
        "estimated steps",
        "estimated steps, own generator",
        "changing parts",
        "persistent workers",
        "overfit",
        "anomalies",
    ],
)
def test_other_kinds_of_training_are_the_unguarded_ones(tmp_path, make):
    runs = []
    for name in ("run", "plain"):
        seed()
        runs.append(guarded(tmp_path, None, **make()) if name == "run" else Fit(tmp_path / name, **make()))
    assert_same(*runs)


def test_a_tuner_trains_without_the_guard(tmp_path):
    module = Module()
    module.lr = 1e-2
    seed()
    finder = pl.callbacks.LearningRateFinder(num_training_steps=10)
    run = guarded(tmp_path, None, module=module, callbacks=[finder], max_epochs=1)
    assert run.trainer.global_step == run.guard.guard.summary().committed == 12
    assert len(finder.optimal_lr.results["loss"]) > 1


class Stopping(pl.Callback):
    """Ends a run after five steps."""

    def __init__(self, end: Any) -> None:
        self.end = end

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 5:
            self.end(trainer)


@pytest.mark.slow
def test_a_run_ends_when_the_guard_is_asked_to_stop_and_when_it_is_interrupted(tmp_path):
    def interrupt(trainer: Any) -> None:
        raise KeyboardInterrupt

    run = guarded(tmp_path, None, callbacks=[Stopping(lambda trainer: trainer.callbacks[-2].guard.stop("enough"))])
    assert run.trainer.global_step == 5
    with pytest.raises(SystemExit):
        guarded(tmp_path / "other", None, callbacks=[Stopping(interrupt)])
    assert "KeyboardInterrupt" in (tmp_path / "other" / "run" / "journal.jsonl").read_text()


@pytest.mark.slow
def test_pytorch_lightning_is_guarded_under_its_own_name(tmp_path):
    program = (
        "import sys, pytorch_lightning; sys.modules['lightning.pytorch'] = pytorch_lightning\n"
        "import pytorch_lightning.loggers.logger as logger; sys.modules['lightning.pytorch.loggers.logger'] = logger\n"
        "from pathlib import Path; from lightning_runs import Fit, assert_same, guarded\n"
        "folder = Path(sys.argv[1]); run = guarded(folder, None)\n"
        "assert type(run.trainer).__module__.startswith('pytorch_lightning')\n"
        "assert_same(run, Fit(folder / 'plain'))\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], env=environment(), timeout=200, check=False)
    assert done.returncode == 0


@pytest.mark.slow
def test_switched_off_the_callback_does_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("HOLDFAST_OFF", "1")
    run = guarded(tmp_path, None)
    assert run.guard.guard is None and not (tmp_path / "run").exists()
    assert_same(run, Fit(tmp_path / "plain"))


def test_lightnings_own_checkpoint_loads_without_the_guard(tmp_path):
    run = guarded(tmp_path, None, max_epochs=1)
    plain = Fit(tmp_path / "plain", max_epochs=1)
    more = [Fit(tmp_path / n, fit={"ckpt_path": r.checkpoint.best_model_path}) for n, r in (("a", run), ("b", plain))]
    assert_same(*more)
    assert more[0].trainer.global_step == 36


class Saving(pl.Callback):
    """Saves a checkpoint of Lightning's after a step."""

    def __init__(self, path: Path, step: int) -> None:
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


@pytest.mark.slow
@pytest.mark.parametrize("step", [7, 17, None])
def test_a_checkpoint_of_a_plain_run_continues_guarded(tmp_path, step):
    path = tmp_path / "plain.ckpt"
    plain = Fit(tmp_path / "plain", max_epochs=2, callbacks=[Saving(path, step)])
    path = path if step else plain.checkpoint.best_model_path
    run = guarded(tmp_path, None, fit={"ckpt_path": path})
    assert_same(run, Fit(tmp_path / "more", fit={"ckpt_path": path}))
    assert run.guard.guard.summary().committed >= 12


# ---- faults


@pytest.mark.shows("lightning", "nan")
@pytest.mark.parametrize(
    ("place", "accumulate"),
    [((1, 11), 5), *slow(((0, 0), 1), ((0, 5), 5), ((1, 0), 1), ((1, 0), 5), ((1, 11), 1), ((2, 11), 1), ((2, 3), 5))],
)
def test_a_nan_batch_is_left_out_and_the_epoch_ends_where_its_data_does(tmp_path, place, accumulate):
    options = {"accumulate_grad_batches": accumulate, "interval": "epoch", "augment": True}
    run = guarded(tmp_path, None, bad=[place], **options)
    epoch, first = place[0], place[1] // accumulate * accumulate
    left_out = [(epoch, n) for n in range(first, min(12, first + accumulate))]
    assert run.actions() == ["replay", "skip"]
    assert_same(run, Fit(tmp_path / "plain", without=left_out, **options))


@pytest.mark.shows("lightning", "weights")
@pytest.mark.shows("lightning", "inf")
@pytest.mark.parametrize(
    ("fault", "step", "options"),
    [
        (scaled, 13, {}),
        *slow(
            (inf_gradient, 7, {}),
            (inf_gradient, 12, {"accumulate_grad_batches": 2}),
            (scaled, 14, {}),
            (scaled, 26, {"limit_train_batches": 10}),
            (nan_weights, 26, {}),
            (nan_weights, 25, {"workers": 2}),
        ),
    ],
)
def test_a_fault_that_does_not_come_back_leaves_the_run_without_it(tmp_path, fault, step, options):
    run = guarded(tmp_path, faults={step: fault}, augment=True, **options)
    assert run.actions() == (["replay"] if fault is inf_gradient else ["rollback"])
    assert_same(run, Fit(tmp_path / "plain", augment=True, **options), logs=fault is inf_gradient)


class Fused(Module):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)


@pytest.mark.parametrize("fault", ["nan", pytest.param("weights", marks=pytest.mark.slow)])
def test_an_update_that_is_submitted_before_its_numbers_are_known_is_exact_too(tmp_path, fault):
    """As on a GPU: the device keeps a bad update from landing, and the callbacks after it see what landed."""
    config = CONFIG | {"detect": {"gate": "device", "warmup_steps": 8}}
    options = {"bad": [(1, 11)]} if fault == "nan" else {}
    seed()
    module = Fused(faults={} if fault == "nan" else {13: scaled})
    run = guarded(tmp_path, config, module=module, augment=True, **options)
    assert run.guard.guard._run.parts.gate.on_device
    assert run.actions() == (["replay", "skip"] if fault == "nan" else ["rollback"])
    seed()
    plain = Fit(tmp_path / "plain", module=Fused(), augment=True, without=options.get("bad", ()))
    assert_same(run, plain, logs=False)


@pytest.mark.shows("lightning", "border")
@pytest.mark.shows("lightning", "garbage")
@pytest.mark.slow
@pytest.mark.parametrize("window", [[(4, 3), (4, 4), (4, 5), (4, 6)], [(4, 18), (4, 19), (5, 0), (5, 1), (5, 2)]])
def test_a_window_of_garbage_is_left_out_also_over_the_end_of_an_epoch(tmp_path, window):
    options = {"count": 160, "max_epochs": 7, "norm": False, "augment": True}
    run = guarded(tmp_path, bad=window, how=garbage, **options)
    assert run.actions() == ["rollback", "rollback", *["skip"] * len(window)]
    assert_same(run, Fit(tmp_path / "plain", without=window, **options), logs=False)


class Recording(pl.Callback):
    """Notes what a callback may see: the losses of batches that ended, and the epochs."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.epochs: list[int] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.epochs.append(trainer.current_epoch)


def test_callbacks_and_loggers_see_only_steps_that_landed(tmp_path):
    seen, wanted = Recording(), Recording()
    run = guarded(tmp_path, None, bad=[(0, 4), (1, 7)], callbacks=[seen])
    plain = Fit(tmp_path / "plain", without=[(0, 4), (1, 7)], callbacks=[wanted])
    assert_same(run, plain)
    assert (seen.losses, seen.epochs) == (wanted.losses, wanted.epochs)
    assert run.seen.steps == plain.seen.steps == list(range(1, 35))


@pytest.mark.slow
def test_averages_and_early_stopping_go_back_with_the_run(tmp_path):
    def callbacks() -> list[Any]:
        return [pl.callbacks.WeightAveraging(), EarlyStopping("val_loss", patience=1, min_delta=10.0), Recording()]

    one, other = callbacks(), callbacks()
    run = guarded(tmp_path, faults={13: scaled}, callbacks=one)
    plain = Fit(tmp_path / "plain", callbacks=other)
    assert_same(run, plain, logs=False)
    same(one[0].state_dict(), other[0].state_dict(), "average")
    same(one[1].state_dict(), other[1].state_dict(), "early stopping")
    assert one[2].losses == other[2].losses
    assert run.trainer.global_step == 24


@pytest.mark.slow
def test_a_checkpoint_from_before_a_rollback_is_renamed(tmp_path):
    run = guarded(tmp_path, faults={13: scaled})
    assert sorted(p.name for p in (tmp_path / "guarded").iterdir()) == ["end.ckpt", "end.ckpt.abandoned"]
    assert run.saved["global_step"] == 36


class Opaque:
    """Something that counts and has no state_dict."""

    def __init__(self) -> None:
        self.count = 0


@pytest.mark.slow
def test_what_changes_and_is_not_restored_is_named_once(tmp_path, caplog):
    class Counting(Module):
        def __init__(self) -> None:
            super().__init__()
            self.opaque = Opaque()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.opaque.count += 1
            return super().training_step(batch, batch_idx)

    guarded(tmp_path, None, module=Counting())
    notes = [record.getMessage() for record in caplog.records if "opaque" in record.getMessage()]
    assert len(notes) == 1 and "GuardCallback(register=" in notes[0]


# ---- killed


@pytest.mark.shows("lightning", "killed")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kills", "options"),
    [
        ((8, 19, 30), "augment=True"),
        ((12, 13, 25), "augment=True, interval='epoch'"),
        ((2, 4), "accumulate_grad_batches=5"),
        ((9, 20), "workers=2, augment=True"),
        ((8, 17), "limit_train_batches=7"),
        ((16, 30), "augment=True, bad=[(1, 2)]"),
    ],
)
def test_killed_again_and_again_it_ends_as_if_it_never_was(tmp_path, kills, options):
    check_ended(tmp_path, [(kill, signal.SIGKILL, -signal.SIGKILL) for kill in kills], options)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_ends_it_with_status_75_and_the_next_process_continues(tmp_path, number):
    check_ended(tmp_path, [(17, number, 75)], "augment=True")


def check_ended(tmp_path, kills, options):
    """After these ends, each after a step, by a signal and with an exit status, the run is the plain one."""
    for kill, number, status in [*kills, (-1, 0, 0)]:
        program = Path(__file__).parent / "lightning_runs.py"
        done = subprocess.run(
            [sys.executable, str(program), str(tmp_path), str(kill), options, str(int(number))],
            env=environment(),
            timeout=200,
            check=False,
        )
        assert done.returncode == status
    arguments = eval(f"dict({options})")
    if "bad" in arguments:
        arguments["without"] = arguments.pop("bad")
    plain = Fit(tmp_path / "plain", **arguments)
    ended = torch.load(tmp_path / "ended.pt", weights_only=False)
    same(ended["model"], dict(plain.module.state_dict()), "model")
    same(ended["saved"], {k: v for k, v in plain.saved.items() if k != "callbacks"}, "saved")
    assert ended["random"] == plain.random
    assert ended["rows"] == plain.log.rows[-len(ended["rows"]) :]


def test_a_finished_run_is_not_trained_again_and_more_epochs_continue_it(tmp_path):
    guarded(tmp_path, None, max_epochs=2)
    again = guarded(tmp_path, None, max_epochs=2)
    assert again.trainer.global_step == 24 and again.log.rows == []
    more = guarded(tmp_path, None)
    same(more.module.state_dict(), Fit(tmp_path / "plain").module.state_dict(), "model")


def test_a_run_whose_accumulation_is_scheduled_continues_with_the_number_it_had(tmp_path):
    def run(make: Any, folder: Path, epochs: int) -> Fit:
        scheduler = pl.callbacks.GradientAccumulationScheduler({0: 1, 1: 3})
        return make(folder, callbacks=[scheduler], max_epochs=epochs)

    run(guarded, tmp_path, 2)
    more = run(guarded, tmp_path, 3)
    assert more.trainer.accumulate_grad_batches == 3
    same(more.module.state_dict(), run(Fit, tmp_path / "plain", 3).module.state_dict(), "model")


class Interrupted(pl.Callback):
    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 7:
            raise RuntimeError("interrupted")


def test_samples_that_lightning_leaves_out_of_an_epoch_with_larger_batches_are_named(tmp_path, caplog):
    small, large = (DataLoader(Points(70), batch_size=size) for size in (8, 16))
    config = {"checkpoint": {"every_steps": 1, "certify_after": 1}}
    with pytest.raises(RuntimeError, match="interrupted"):
        guarded(tmp_path, config, loader=small, callbacks=[Interrupted()])
    assert "leaves out" not in caplog.text
    guarded(tmp_path, config, loader=large, max_epochs=2)
    assert "Lightning ends this epoch at batch 5, and leaves out the last" in caplog.text


def test_fit_can_be_called_again(tmp_path):
    run = guarded(tmp_path, None, max_epochs=1)
    run.trainer.fit_loop.max_epochs = 2
    run.trainer.fit(run.module, run.loader)
    assert run.trainer.global_step == run.guard.guard.summary().committed == 24


# ---- refused


def _refused(match: str, tmp_path: Path, module: Any = None, callbacks: Any = (), **options: Any) -> None:
    with pytest.raises(holdfast.SetupError, match=match):
        guarded(tmp_path, None, module=module, callbacks=callbacks, **options)


def test_what_cannot_be_guarded_is_refused_at_the_start_with_the_alternative(tmp_path, monkeypatch):
    class Manual(Module):
        automatic_optimization = False

    class Iterating(Module):
        def training_step(self, dataloader_iter: Any) -> None: ...

    class Endless(IterableDataset):
        def __iter__(self) -> Any:
            return iter(Points(96))

    _refused("manual optimisation", tmp_path, Manual(), gradient_clip_val=None)
    _refused("dataloader_iter", tmp_path, Iterating())
    _refused("reload_dataloaders_every_n_epochs=1", tmp_path, reload_dataloaders_every_n_epochs=1)
    _refused("two GuardCallbacks", tmp_path, callbacks=[holdfast.lightning.GuardCallback()])
    _refused("StochasticWeightAveraging", tmp_path, callbacks=[pl.callbacks.StochasticWeightAveraging(1e-2)])
    _refused("has no length", tmp_path, loader=DataLoader(Endless(), 8))
    _refused("several training dataloaders", tmp_path, loader=[DataLoader(Points(96), 8), DataLoader(Points(96), 8)])
    monkeypatch.setattr(pl, "__version__", "2.0.9")
    monkeypatch.setattr(sys.modules["lightning"], "__version__", "2.0.9")
    _refused("works with Lightning 2.1 to 2.6, and this is 2.0.9", tmp_path)


def test_a_callback_that_comes_too_late_is_refused(tmp_path):
    late = holdfast.lightning.GuardCallback()
    adding = pl.callbacks.LambdaCallback(on_train_epoch_end=lambda trainer, module: trainer.callbacks.append(late))
    with pytest.raises(holdfast.SetupError, match="after fit had begun"):
        Fit(tmp_path, callbacks=[adding])


def test_a_version_without_a_method_that_is_needed_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(pl.plugins.Precision, "_clip_gradients", lambda self, model: None)
    _refused(r"Precision._clip_gradients\(model, optimizer", tmp_path)


def test_deepspeed_and_fsdp1_are_refused(tmp_path):
    class FSDPStrategy(pl.strategies.SingleDeviceStrategy):
        """Named like Lightning's, which starts only with a GPU."""

    _refused("FSDP2", tmp_path, strategy=FSDPStrategy("cpu"))


def test_the_example_recovers(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["lightning_trainer", str(tmp_path / "run")])
    runpy.run_module("holdfast.examples.lightning_trainer", run_name="__main__")
    assert "recovered: 191 steps committed, 1 skipped, 1 replayed, 1 rolled back" in capsys.readouterr().out
