"""A classic loop: `loss.backward()`, then `guard.step(loss)`. One sample is NaN and one weight is overwritten with NaN.

python -m holdfast.examples.classic [RUN_DIR]
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
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 384)
loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)

guard = holdfast.Guard(
    model,
    optimizer,
    scheduler=scheduler,
    clip_grad_norm=1.0,
    run_dir=sys.argv[1] if len(sys.argv) > 1 else "runs/classic",
)
seen = guard.counters(samples=0)
with guard:
    for epoch in range(3):
        for inputs, targets in guard.data(loader):
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            guard.step(loss)  # clips, steps, schedules and clears; or does none of it
            seen.samples += len(inputs)
            if guard.step == 200 and guard.summary().rollbacks == 0:
                model[0].weight.data[0, 0] = float("nan")  # a stray write into a weight
        print(f"epoch {epoch}: {guard.step} steps, {seen.samples} samples, loss {loss:.4f}")

print(guard.summary())
