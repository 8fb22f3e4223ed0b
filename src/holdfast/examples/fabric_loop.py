"""A loop of Fabric, guarded by two lines. One sample is NaN and one weight is overwritten with NaN.

pip install 'holdfast[lightning]'
python -m holdfast.examples.fabric_loop [RUN_DIR]
"""

import sys

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast

torch.manual_seed(0)
x = torch.randn(4096, 32)
y = x[:, :4].sum(1, keepdim=True).tanh()
x[1234] = float("nan")  # a broken sample

fabric = Fabric(accelerator="cpu", devices=1)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))
model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 384)
loader = fabric.setup_dataloaders(DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True))

run_dir = sys.argv[1] if len(sys.argv) > 1 else "runs/fabric"
guard = holdfast.Guard.wrap(model, optimizer, scheduler, run_dir=run_dir)
for epoch in range(3):
    for inputs, targets in guard.data(loader):
        loss = nn.functional.mse_loss(model(inputs), targets)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)  # under the guard it does not raise for NaN
        optimizer.step()  # asks the guard
        scheduler.step()
        optimizer.zero_grad()
        if guard.step == 100 and guard.summary().rollbacks == 0:
            model.module[0].weight.data[0, 0] = float("nan")  # a stray write into a weight
    print(f"epoch {epoch}: {guard.step} steps, loss {loss:.4f}")
guard.close()

print(guard.summary())
