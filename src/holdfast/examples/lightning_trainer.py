"""Lightning's Trainer, guarded by one callback. One sample is NaN and one weight is overwritten with NaN.

pip install 'holdfast[lightning]'
python -m holdfast.examples.lightning_trainer [RUN_DIR]
"""

import sys

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast

torch.manual_seed(0)
x = torch.randn(4096, 32)
y = x[:, :4].sum(1, keepdim=True).tanh()
x[1234] = float("nan")  # a broken sample


class Regression(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.net(inputs), targets)
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 192)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class OverwriteWeight(pl.Callback):
    has_happened = False  # of the class: a rollback restores what a callback itself holds

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == 100 and not OverwriteWeight.has_happened:
            OverwriteWeight.has_happened = True
            module.net[0].weight.data[0, 0] = float("nan")


run_dir = sys.argv[1] if len(sys.argv) > 1 else "runs/lightning"
guard = holdfast.lightning.GuardCallback(run_dir=run_dir)
trainer = pl.Trainer(
    max_epochs=3,
    accelerator="cpu",
    accumulate_grad_batches=2,
    gradient_clip_val=1.0,
    callbacks=[guard, OverwriteWeight()],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Regression(), DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True))

print(f"{trainer.global_step} steps, loss {float(trainer.callback_metrics['loss_epoch']):.4f}")
print(guard.guard.summary())
