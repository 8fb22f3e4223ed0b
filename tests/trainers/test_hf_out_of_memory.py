"""A Hugging Face Trainer that runs out of memory: the step is undone and served in parts, and ends as if it had fitted."""

from __future__ import annotations

import json
import logging
import os
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("transformers")
from hf_ranks import run_on_two_ranks
from torch import nn
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import holdfast
from holdfast.core.base.errors import StepError
from holdfast.drill.memory_limit import MemoryLimit
from marks import slow

BOUND = 1e-6
SAMPLES, LENGTH, STEPS = 64, 24, 6


class Texts(Dataset):
    """Token sequences. The labels of each end earlier than those of the one before it, up to a length."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, n: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 50, (LENGTH,), generator=torch.Generator().manual_seed(n))
        labels = tokens.clone()
        labels[LENGTH - n % 17 :] = -100
        return {"input_ids": tokens, "labels": labels}


class Points(Dataset):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, n: int) -> dict[str, torch.Tensor]:
        x = torch.randn(LENGTH, 4, generator=torch.Generator().manual_seed(n))
        return {"x": x, "labels": x.sum(-1)}


class Mean(nn.Module):
    """A loss that is a mean, and knows of no number of labels."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.mse_loss(self.layers(x).squeeze(-1), labels)}


def language_model(dropout: float = 0.0) -> GPT2LMHeadModel:
    drops = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=50, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2, use_cache=False, **drops)
    )


class Limited(Trainer):
    """Has so many bytes for the tensors of forward and backward, in micro-batches that `when` names."""

    limit = MemoryLimit()
    nbytes: int | None = None
    calls = 0

    def when(self, call: int) -> bool:
        return True

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.calls += 1
        self.limit.nbytes = self.nbytes if self.when(self.calls) else None
        with self.limit:
            return super().training_step(*args, **kwargs)


class OwnLoss(Limited):
    """The mean of its own, whatever the number of labels is."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        logits = model(input_ids=inputs["input_ids"]).logits
        return nn.functional.cross_entropy(logits[:, :-1].reshape(-1, 50), inputs["labels"][:, 1:].reshape(-1))


class Run(NamedTuple):
    parameters: list[torch.Tensor]
    logs: list[dict[str, Any]]
    limit: MemoryLimit
    trainer: Any

    def log(self) -> list[dict[str, Any]]:
        return self.logs


def train(
    folder, model=language_model, data=Texts, kind=Limited, nbytes=None, when=None, config=None, **arguments
) -> Run:
    torch.manual_seed(0)
    # Not Adam, which makes large updates of gradients that are zero but for rounding, as of the bias of attention keys.
    settings = {
        "per_device_train_batch_size": 8,
        "max_steps": STEPS,
        "logging_steps": 1,
        "optim": "sgd",
        "learning_rate": 0.1,
    }
    trainer = kind(
        model=model(),
        args=TrainingArguments(
            output_dir=str(folder / "out"),
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            **{**settings, **arguments},
        ),
        train_dataset=data(),
    )
    trainer.limit, trainer.nbytes = MemoryLimit(), nbytes
    if when is not None:
        trainer.when = when
    trainer = holdfast.hf.guard(trainer, run_dir=folder / "run", config=config)
    trainer.train()
    logs = [
        {k: v for k, v in each.items() if k in ("loss", "grad_norm", "learning_rate", "epoch", "step")}
        for each in trainer.state.log_history
    ]
    return Run([p.detach().clone() for p in trainer.model.parameters()], logs[:-1], trainer.limit, trainer)


def splits(folder) -> list[dict[str, Any]]:
    events = [json.loads(line) for line in (folder / "run/journal.jsonl").read_text().splitlines()]
    return [event for event in events if event.get("action") == "split"]


def assert_close(run: Run, whole: Run) -> None:
    for a, b in zip(run.parameters, whole.parameters, strict=True):
        assert float((a - b).norm() / b.norm().clamp(min=1e-3)) < BOUND
    assert len(run.logs) == len(whole.logs)
    for a, b in zip(run.logs, whole.logs, strict=True):
        assert a == pytest.approx(b, rel=2e-5)


@pytest.mark.parametrize(
    ("model", "data", "kind", "accumulate"),
    [
        (language_model, Texts, Limited, 1),
        *slow((language_model, Texts, Limited, 3)),
        (Mean, Points, Limited, 2),
        (language_model, Texts, OwnLoss, 1),
    ],
)
@pytest.mark.parametrize(("share", "parts"), [(0.9, [2]), *slow((0.3, [2, 4]))])
def test_the_run_ends_as_if_the_batch_had_fitted(model, data, kind, accumulate, share, parts, tmp_path):
    setting = {"model": model, "data": data, "kind": kind, "gradient_accumulation_steps": accumulate}
    whole = train(tmp_path / "whole", **setting)
    run = train(tmp_path / "split", nbytes=int(share * whole.limit.peak), **setting)
    assert_close(run, whole)
    assert run.limit.raised == len(parts)
    assert [each["parts"] for each in splits(tmp_path / "split")] == parts
    assert run.trainer.state.global_step == STEPS


def test_a_later_micro_batch_of_a_step_undoes_the_step(tmp_path):
    whole = train(tmp_path / "whole", gradient_accumulation_steps=4, max_steps=2)
    run = train(
        tmp_path / "split",
        gradient_accumulation_steps=4,
        max_steps=2,
        nbytes=int(0.6 * whole.limit.peak),
        when=lambda call: call == 7,  # the third of the second step
    )
    assert_close(run, whole)
    (split,) = splits(tmp_path / "split")
    assert (split["step"], split["parts"]) == (2, 2)
    assert run.limit.raised == 1


def test_it_says_once_that_dropout_is_not_exact_and_refuses_it_if_told_to(tmp_path, caplog):
    whole = train(tmp_path / "whole", lambda: language_model(0.1))
    nbytes = int(0.7 * whole.limit.peak)
    with caplog.at_level(logging.WARNING, "holdfast"):
        train(tmp_path / "split", lambda: language_model(0.1), nbytes=nbytes)
    assert caplog.text.count("A SPLIT MICRO-BATCH IS NOT EXACT HERE") == 2  # each mask, and that numbers were drawn
    with pytest.raises(torch.OutOfMemoryError) as caught:
        config = {"oom": {"allow_inexact": False}}
        train(tmp_path / "exact", lambda: language_model(0.1), nbytes=nbytes, config=config)
    assert "a split would not be exact" in caught.value.__notes__[0]


def test_a_loss_of_which_only_a_part_is_divided_by_the_labels_is_reported(tmp_path, caplog):
    class Auxiliary(Limited):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            loss = super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
            return loss + model.transformer.wte.weight.square().mean() * 1e3

    whole = train(tmp_path / "whole", kind=Auxiliary, max_steps=2)
    with caplog.at_level(logging.WARNING, "holdfast"):
        train(tmp_path / "split", kind=Auxiliary, max_steps=2, nbytes=int(0.7 * whole.limit.peak))
    assert "only a part of the loss is divided by the number of labels" in caplog.text
    with pytest.raises(StepError, match="only a part of the loss"):
        nbytes = int(0.7 * whole.limit.peak)
        train(tmp_path / "exact", kind=Auxiliary, nbytes=nbytes, config={"oom": {"allow_inexact": False}})


def test_one_sample_that_does_not_fit_ends_the_run_with_advice(tmp_path):
    with pytest.raises(torch.OutOfMemoryError) as caught:
        train(tmp_path, nbytes=100)
    assert "cannot be split further" in caught.value.__notes__[0]
    assert [each["parts"] for each in splits(tmp_path)] == [2, 4, 8]


def test_a_resumed_run_knows_the_split(tmp_path):
    whole = train(tmp_path / "whole")
    nbytes = int(0.7 * whole.limit.peak)
    train(tmp_path / "split", nbytes=nbytes, max_steps=3, lr_scheduler_type="constant")
    run = train(tmp_path / "split", nbytes=nbytes, max_steps=STEPS, lr_scheduler_type="constant")
    assert run.limit.raised == 0 and len(splits(tmp_path / "split")) == 1


@pytest.mark.slow
def test_of_two_ranks_all_restart_and_split_alike(tmp_path):
    """Its peer may wait in a collective, so a rank that ran out of memory ends all. The next start serves parts."""
    setting = {"ddp_backend": "gloo", "ddp_find_unused_parameters": False, "per_device_train_batch_size": 4}
    whole = run_on_two_ranks(lambda folder: train(folder, **setting), tmp_path / "whole")
    config = {"checkpoint": {"every_steps": 1, "certify_after": 1}}

    def limited(folder: Any) -> Run:
        is_limited = os.environ["RANK"] == "1"
        return train(folder, nbytes=230_000 if is_limited else None, config=config, **setting)

    for _ in range(2):  # two parts do not fit either
        with pytest.raises(AssertionError):
            run_on_two_ranks(limited, tmp_path / "split")
    ends = run_on_two_ranks(limited, tmp_path / "split")
    for end, other in zip(ends, whole, strict=True):
        assert end["schedule"] == other["schedule"]
        for name, value in end["model"].items():
            assert float((value - other["model"][name]).norm() / value.norm().clamp(min=1e-3)) < BOUND, name


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sft", "dpo", "reward", "kto"])
def test_trl_pairs_stay_together_and_what_compares_texts_is_reported(kind, tmp_path, caplog):
    """The batches of DPO and of reward models have the rejected texts below the chosen ones."""
    pytest.importorskip("trl")
    from trl_cases import TRLCase

    def ended(folder: Any, is_limited: bool, config: Any = None) -> Any:
        calls = []

        def starve(trainer: Any) -> None:
            plain = trainer.compute_loss

            def compute_loss(*args: Any, **kwargs: Any) -> Any:
                calls.append(1)
                with MemoryLimit(100 if is_limited and len(calls) == 3 else None):
                    return plain(*args, **kwargs)

            trainer.compute_loss = compute_loss

        case = TRLCase(kind, batches=5, optim="sgd", max_grad_norm=0.0)
        case.on_trainer, case.config = starve, config or {}
        return case.guarded(folder)

    whole = ended(tmp_path / "whole", False)
    with caplog.at_level(logging.WARNING, "holdfast"):
        run = ended(tmp_path / "split", True)
    (split,) = splits(tmp_path / "split")
    assert (split["step"], split["parts"]) == (3, 2)
    assert ("THE LOSS OF KTO" in caplog.text.upper()) == (kind == "kto")
    assert run.trainer.state.global_step == whole.trainer.state.global_step == 5
    if kind != "kto":
        assert "NOT EXACT" not in caplog.text
        pairs = zip(run.trainer.model.parameters(), whole.trainer.model.parameters(), strict=True)
        assert all(float((a - b).norm() / b.norm()) < BOUND for a, b in pairs)


class Contrastive(Mean):
    """Compares the samples of a batch, so parts have another loss than the whole."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        features = self.layers(x).squeeze(-1)
        return {"loss": nn.functional.cross_entropy(features @ features.T, torch.arange(len(x)))}


def test_a_loss_that_compares_samples_is_found_by_the_loss_of_the_whole(tmp_path, caplog):
    whole = train(tmp_path / "whole", Contrastive, Points)
    with caplog.at_level(logging.WARNING, "holdfast"):
        train(tmp_path / "split", Contrastive, Points, nbytes=int(0.7 * whole.limit.peak))
    assert caplog.text.count("the parts give a loss of") == 1


def test_rows_that_are_not_samples_are_not_split(tmp_path):
    """Two rows for each sample, by a collator that the guard does not know: which belong together is not known."""

    class Paired(Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            with MemoryLimit(100):
                return super().training_step(*args, **kwargs)

    def collate(items: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        rows = [each["x"] for each in items]
        return {"x": torch.stack([*rows, *rows]), "labels": torch.stack([each["labels"] for each in items] * 2)}

    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[], save_strategy="no", max_steps=2)
    trainer = Paired(model=Mean(), args=arguments, train_dataset=Points(), data_collator=collate)
    trainer = holdfast.hf.guard(trainer, run_dir=tmp_path / "run")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        trainer.train()
    assert "it is not known where to split it" in caught.value.__notes__[0]
