"""Hugging Face Trainer, guarded by one line. One sample is NaN and one weight is overwritten with NaN.

pip install 'holdfast[hf]'
python -m holdfast.examples.hf_trainer [RUN_DIR]
"""

import sys

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

import holdfast

torch.manual_seed(0)
x = torch.randn(2048, 32)
y = x[:, :4].sum(1, keepdim=True).tanh()
x[1234] = float("nan")  # a broken sample


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))

    def forward(self, inputs, labels):
        return {"loss": nn.functional.mse_loss(self.layers(inputs), labels)}


class BrokenMemory(TrainerCallback):
    """Overwrites a weight once, as a bug or a broken memory would."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == 100 and trainer.holdfast.summary().rollbacks == 0:
            model.layers[0].weight.data[0, 0] = float("nan")


run_dir = sys.argv[1] if len(sys.argv) > 1 else "runs/hf"
arguments = TrainingArguments(
    output_dir=f"{run_dir}-checkpoints",
    num_train_epochs=3,
    per_device_train_batch_size=16,
    gradient_accumulation_steps=2,
    learning_rate=3e-3,
    logging_steps=50,
    save_strategy="no",
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
    dataloader_pin_memory=False,
)
trainer = Trainer(
    model=Model(),
    args=arguments,
    train_dataset=[{"inputs": a, "labels": b} for a, b in zip(x, y, strict=True)],
    callbacks=[BrokenMemory()],
)
trainer = holdfast.hf.guard(trainer, run_dir=run_dir)  # the one line
trainer.train()

print(f"{trainer.state.global_step} steps, loss {trainer.state.log_history[-1]['train_loss']:.4f}")
print(trainer.holdfast.summary())
