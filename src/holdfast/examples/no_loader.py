"""A loop without a DataLoader: its own get_batch, learning rate and evaluation, as in many language-model scripts.

python -m holdfast.examples.no_loader [RUN_DIR]
"""

import math
import sys

import torch
from torch import nn

import holdfast

torch.manual_seed(0)
text = torch.randint(0, 16, (20_000,)).cumsum(0) % 16
model = nn.Sequential(nn.Embedding(16, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 16))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
max_steps, accumulate = 200, 2


def get_batch():
    starts = torch.randint(len(text) - 33, (8,))
    rows = torch.stack([text[i : i + 33] for i in starts.tolist()])
    return rows[:, :-1], rows[:, 1:]


def get_lr(step):
    return 1e-2 * min(1.0, (step + 1) / 20) * 0.5 * (1.0 + math.cos(math.pi * step / max_steps))


def loss_of(inputs, targets):
    return nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


guard = holdfast.Guard.wrap(model, optimizer, run_dir=sys.argv[1] if len(sys.argv) > 1 else "runs/no_loader")
batches = guard.data(lambda number: get_batch())
while guard.step < max_steps:  # guard.step counts what landed, also in earlier processes
    for group in optimizer.param_groups:
        group["lr"] = get_lr(guard.step)
    if guard.step % 50 == 0:
        with torch.no_grad():
            print(f"step {guard.step}: loss {loss_of(*get_batch()):.4f}")
    for _ in range(accumulate):
        inputs, targets = next(batches)
        loss = loss_of(inputs, targets) / accumulate
        if guard.step == 120 and guard.summary().replayed == 0:
            loss = loss * float("nan")  # a fault that does not come back
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
guard.close()

print(guard.summary())
