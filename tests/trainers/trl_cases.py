"""Small real runs of TRL's trainers: a tiny Llama, a tokenizer built here, data whose tokens carry the faults."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from hf_cases import QUICK, Run
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import Sampler
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

import holdfast

BATCH = 4
WORDS = [f"w{i}" for i in range(40)]
NAN, GARBAGE = "nan", "garbage"


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", NAN, GARBAGE, *WORDS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def tiny_llama(kind: Any = LlamaForCausalLM, **more: Any) -> Any:
    """A Llama for which the word `nan` is NaN, and a text with `garbage` in it is far off: the fault comes with the data."""
    torch.manual_seed(3)
    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = kind(LlamaConfig(vocab_size=48, max_position_embeddings=64, pad_token_id=0, eos_token_id=1, **size, **more))

    def fault(module: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        model.factor = torch.where((inputs[0] == 4).any(1), -30.0, 1.0)[:, None, None]
        return output * torch.where(inputs[0] == 3, float("nan"), 1.0).unsqueeze(-1)

    model.get_input_embeddings().register_forward_hook(fault)
    model.model.norm.register_forward_hook(lambda module, inputs, output: output * model.factor)
    return model


class InOrder(Sampler):
    """The samples in order, less the excluded batches."""

    def __init__(self, count: int, excluded: tuple[int, ...]) -> None:
        self.count, self.excluded = count, excluded

    def __len__(self) -> int:
        return self.count

    def __iter__(self):
        yield from (i for i in range(self.count) if i // BATCH not in self.excluded)


def text(i: int, fault: str | None) -> str:
    """A sentence that is easy to learn: each word follows from the one before."""
    dice = random.Random(i)
    start, step = dice.randrange(len(WORDS)), dice.choice([1, 3])
    words = [WORDS[(start + step * k) % len(WORDS)] for k in range(6)]
    return " ".join([*words[:2], fault, *words[3:]] if fault else words)


def texts(batches: int, faults: dict[int, str]) -> list[str]:
    return [text(i, faults.get(i // BATCH)) for i in range(batches * BATCH)]


class TRLCase:
    """One TRL trainer over `batches` batches, in order; `faults` are words by batch."""

    def __init__(self, kind: str, batches: int = 24, faults: dict[int, str] | None = None, **args: Any) -> None:
        self.kind, self.batches, self.faults, self.args = kind, batches, faults or {}, args
        self.config: dict[str, Any] = QUICK
        self.on_trainer: Callable[[Any], None] = lambda trainer: None

    def trainer(self, folder: Path, excluded: tuple[int, ...] = (), faults: bool = True) -> Any:
        made = texts(self.batches, self.faults if faults else {})
        other = [" ".join(reversed(each.split())) for each in made]
        arguments = {
            "output_dir": str(folder / "out"),
            "per_device_train_batch_size": BATCH,
            "num_train_epochs": 1,
            "learning_rate": 1e-2,
            "logging_steps": 3,
            "save_strategy": "no",
            "report_to": [],
            "use_cpu": True,
            "bf16": False,
            "disable_tqdm": True,
            "dataloader_pin_memory": False,
            "gradient_checkpointing": False,
            **self.args,
        }
        if self.kind == "sft":
            base, model = SFTTrainer, tiny_llama()
            config, data = SFTConfig(max_length=32, **arguments), Dataset.from_dict({"text": made})
        elif self.kind == "dpo":
            base, model = DPOTrainer, tiny_llama()
            config = DPOConfig(max_length=32, **arguments)
            data = Dataset.from_dict({"prompt": ["w1 w2"] * len(made), "chosen": made, "rejected": other})
        elif self.kind == "kto":
            base, model = KTOTrainer, tiny_llama()
            config = KTOConfig(max_length=32, **arguments)
            labels = [i % 2 == 0 for i in range(len(made))]
            data = Dataset.from_dict({"prompt": ["w1 w2"] * len(made), "completion": made, "label": labels})
        else:
            base, model = RewardTrainer, tiny_llama(LlamaForSequenceClassification, num_labels=1)
            config = RewardConfig(max_length=32, **arguments)
            data = Dataset.from_dict({"chosen": made, "rejected": other})

        class OwnOrder(base):  # type: ignore[valid-type, misc]
            def _get_train_sampler(self, dataset: Any = None) -> Sampler:
                return InOrder(len(self.train_dataset), excluded)

        more = {"ref_model": tiny_llama()} if self.kind in ("dpo", "kto") else {}
        trainer = OwnOrder(model=model, args=config, train_dataset=data, processing_class=tokenizer(), **more)
        self.on_trainer(trainer)
        return trainer

    def plain(self, folder: Path, excluded: tuple[int, ...] = ()) -> Run:
        trainer = self.trainer(folder / "plain", excluded, faults=False)
        trainer.train()
        return Run(trainer)

    def guarded(self, folder: Path, **options: Any) -> Run:
        trainer = holdfast.hf.guard(
            self.trainer(folder / "guarded"), run_dir=folder / "run", config=self.config, **options
        )
        trainer.train()
        return Run(trainer, folder / "run")
