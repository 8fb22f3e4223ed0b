"""A guarded training loop. One sample is NaN and one weight is overwritten with NaN; the guard recovers from both.

python -m holdfast.examples.loop [RUN_DIR]
"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast

torch.manual_seed(0)
x = torch.randn(4096, 32)
y = x[:, :4].sum(1, keepdim=True).tanh()
x[1234] = float("nan")  # a broken sample

model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 300)
loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)

guard = holdfast.Guard(
    model, optimizer, scheduler=scheduler, clip_grad_norm=1.0, run_dir=sys.argv[1] if len(sys.argv) > 1 else "runs/loop"
)
with guard:
    for step in guard.steps(loader, max_steps=300):
        if step.number == 200 and step.attempt == 1 and guard.summary().rollbacks == 0:
            model[0].weight.data[0, 0] = float("nan")  # a stray write into a weight
        with step:
            for inputs, targets in step.microbatches():
                step.backward(nn.functional.mse_loss(model(inputs), targets))
        if step.number % 100 == 0:
            print(f"step {step.number}: loss {step.loss:.4f}")

print(guard.summary())
