"""A loop that keeps its own lines, guarded by `Guard.wrap` and `guard.data`. The same faults as in the classic loop.

python -m holdfast.examples.wrap [RUN_DIR]
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

guard = holdfast.Guard.wrap(model, optimizer, scheduler, run_dir=sys.argv[1] if len(sys.argv) > 1 else "runs/wrap")
for epoch in range(3):
    for inputs, targets in guard.data(loader):
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()  # asks the guard
        scheduler.step()
        optimizer.zero_grad()
        if guard.step == 200 and guard.summary().rollbacks == 0:
            model[0].weight.data[0, 0] = float("nan")  # a stray write into a weight
    print(f"epoch {epoch}: {guard.step} steps, loss {loss:.4f}")
guard.close()

print(guard.summary())
