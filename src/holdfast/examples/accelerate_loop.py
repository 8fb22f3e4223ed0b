"""A loop through Accelerate, guarded by two lines. One sample is NaN and one weight is overwritten with NaN.

pip install accelerate
python -m holdfast.examples.accelerate_loop [RUN_DIR]
"""

import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast

torch.manual_seed(0)
x = torch.randn(4096, 32)
y = x[:, :4].sum(1, keepdim=True).tanh()
x[1234] = float("nan")  # a broken sample

accelerator = Accelerator(gradient_accumulation_steps=2)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 192)
loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)

run_dir = sys.argv[1] if len(sys.argv) > 1 else "runs/accelerate"
guard = holdfast.Guard.wrap(model, optimizer, scheduler, run_dir=run_dir)
for epoch in range(3):
    for inputs, targets in guard.data(loader):
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()  # asks the guard
            scheduler.step()
            optimizer.zero_grad()
        if guard.step == 100 and guard.summary().rollbacks == 0:
            accelerator.unwrap_model(model)[0].weight.data[0, 0] = float("nan")  # a stray write into a weight
    print(f"epoch {epoch}: {guard.step} steps, loss {loss:.4f}")
guard.close()

print(guard.summary())
