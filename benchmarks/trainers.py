"""Measures what the guard costs inside Hugging Face Trainer and Lightning, beside the same trainer without it.

    python -m benchmarks.trainers [--device cuda] [--trainers hf lightning] [--rounds 7] [--steps 80] [--check] [--json F]

A small transformer in bf16. In every round each trainer trains once plain and once guarded, in turn, with the same data and
seeds; the time of a step is the mean over the second half of the steps. The guarded run must end bit for bit as the plain
one; otherwise the status is 1. With `--check` it is also 1 if a ratio is above 1.015.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.blocks import about, say, write
from benchmarks.options import count, writable

BAR = 1.015
SIZES = {
    "small": {"n_layer": 12, "n_head": 12, "n_embd": 768, "length": 512, "batch": 64},
    "quick": {"n_layer": 2, "n_head": 2, "n_embd": 64, "length": 64, "batch": 8},
}


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Random tokens, all in memory."""

    def __init__(self, samples: int, length: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(0, 1000, (samples, length), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class Clock:
    """Notes the time after every step: that of the device if there is one. It does not wait for the device."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._times: list[float] = []
        self._events: list[torch.cuda.Event] = []

    def tick(self) -> None:
        if self._device == "cuda":
            self._events.append(torch.cuda.Event(enable_timing=True))
            self._events[-1].record()
        else:
            self._times.append(time.perf_counter())

    def seconds(self) -> float:
        """Return the mean time of a step, over the second half."""
        if self._device == "cuda":
            torch.cuda.synchronize()
            self._times = [self._events[0].elapsed_time(event) / 1e3 for event in self._events]
        half = self._times[len(self._times) // 2 :]
        return (half[-1] - half[0]) / (len(half) - 1)


def make_model(size: dict[str, int]) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    shape = {name: size[name] for name in ("n_layer", "n_head", "n_embd")}
    config = GPT2Config(vocab_size=1000, n_positions=size["length"], **shape)
    config._attn_implementation = "eager"  # the fused kernels add in another order each time
    return GPT2LMHeadModel(config)


def train_hf(size: dict[str, int], device: str, steps: int, run_dir: Path | None, folder: Path) -> tuple[float, Any]:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    import holdfast

    clock = Clock(device)

    class Ticks(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.tick()

    model = make_model(size)
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=size["batch"],
        max_steps=steps,
        bf16=True,
        use_cpu=device == "cpu",
        save_strategy="no",
        report_to=[],
        logging_steps=50,
        disable_tqdm=True,
        dataloader_num_workers=2,
        dataloader_persistent_workers=True,
    )
    data = Tokens(steps * size["batch"], size["length"])
    trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=[Ticks()])
    if run_dir is not None:
        trainer = holdfast.hf.guard(trainer, run_dir=run_dir)
    trainer.train()
    return clock.seconds(), model


def train_lightning(
    size: dict[str, int], device: str, steps: int, run_dir: Path | None, folder: Path
) -> tuple[float, Any]:
    import lightning

    import holdfast

    clock = Clock(device)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model(size)

        def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(**batch).loss
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=5e-5, fused=device == "cuda")

        def on_train_batch_end(self, *_: Any) -> None:
            clock.tick()

    torch.manual_seed(0)
    module = Module()
    callbacks = [] if run_dir is None else [holdfast.lightning.GuardCallback(run_dir=run_dir)]
    trainer = lightning.Trainer(
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=1,
        max_steps=steps,
        precision="bf16-mixed",
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(folder),
    )
    data = Tokens(steps * size["batch"], size["length"])
    trainer.fit(
        module,
        DataLoader(
            data,
            batch_size=size["batch"],
            shuffle=True,
            num_workers=2,
            persistent_workers=True,
            pin_memory=device == "cuda",
        ),
    )
    return clock.seconds(), module.model


TRAINERS: dict[str, Callable[..., tuple[float, Any]]] = {"hf": train_hf, "lightning": train_lightning}


def is_same(a: Any, b: Any) -> bool:
    return all(torch.equal(p.cpu(), q.cpu()) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def measure(name: str, size: dict[str, int], device: str, steps: int, rounds: int) -> dict[str, Any]:
    """Train plain and guarded in turn. Return the ratios of the times of a step."""
    ratios, plain_seconds, equal = [], [], True
    for number in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            done: dict[str, tuple[float, Any]] = {}
            for variant in ("plain", "guarded") if number % 2 == 0 else ("guarded", "plain"):
                run_dir = Path(folder) / "run" if variant == "guarded" else None
                done[variant] = TRAINERS[name](size, device, steps, run_dir, Path(folder) / variant)
        ratios.append(done["guarded"][0] / done["plain"][0])
        plain_seconds.append(done["plain"][0])
        equal = equal and is_same(done["guarded"][1], done["plain"][1])
        say(f"{name} round {number + 1}: {1e3 * done['plain'][0]:.2f} ms plain, ratio {ratios[-1]:.4f}")
    return {
        "trainer": name,
        "plain_ms": 1e3 * statistics.median(plain_seconds),
        "ratio": statistics.median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
        "bit_for_bit": equal,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--trainers", nargs="+", choices=list(TRAINERS), default=list(TRAINERS))
    parser.add_argument("--rounds", type=count, default=7)
    parser.add_argument("--steps", type=count, default=80)
    parser.add_argument("--quick", action="store_true", help="a tiny model, to try the script")
    parser.add_argument("--check", action="store_true", help=f"exit with 1 if a ratio is above {BAR}")
    parser.add_argument("--json", type=writable)
    options = parser.parse_args()
    size = SIZES["quick" if options.quick else "small"]
    results = [measure(name, size, options.device, options.steps, options.rounds) for name in options.trainers]
    for result in results:
        print(
            f"{result['trainer']:10} {result['plain_ms']:8.2f} ms  ratio {result['ratio']:.4f} "
            f"({result['lowest']:.4f} to {result['highest']:.4f})  {'equal' if result['bit_for_bit'] else 'DIFFERS'}"
        )
    if options.json is not None:
        write(options.json, {**about(options.device), "size": size, "steps": options.steps, "results": results})
    is_slow = options.check and any(result["ratio"] > BAR for result in results)
    return int(is_slow or not all(result["bit_for_bit"] for result in results))


if __name__ == "__main__":
    sys.exit(main())
