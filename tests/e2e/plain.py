"""The plain torch loop that a guarded run is compared with, bit for bit. docs/exactness.md prints `plain_loop` as it is."""

from __future__ import annotations

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau


def plain_loop(
    case, loader, *, model, optimizer, scheduler=None, scaler=None, clip=None, lr_factor=None, max_norm=None
):
    """Plain torch: accumulation over `case.accumulate` batches, epochs one after another, one update per window."""
    step, window, losses = 0, 0, []
    for _ in range(case.epochs):
        for batch in loader:
            loss = case.loss(model, batch)
            losses.append(loss.item())
            loss = loss / case.accumulate if case.accumulate > 1 else loss
            (loss if scaler is None else scaler.scale(loss)).backward()
            window += 1
            if window % case.accumulate:
                continue
            if scaler is not None:
                scaler.unscale_(optimizer)
            limit = clip if max_norm is None else max_norm(step, clip)
            if limit is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
            # An LR intervention of the guarded run applies to this update only.
            scheduled = [group["lr"] for group in optimizer.param_groups]
            if lr_factor is not None and lr_factor(step) != 1.0:
                for group in optimizer.param_groups:
                    group["lr"] = group["lr"] * lr_factor(step)
            if scaler is None:
                optimizer.step()
                overflowed = False
            else:
                before = scaler.get_scale()
                scaler.step(optimizer)
                scaler.update()
                overflowed = scaler.get_scale() < before
            for group, lr in zip(optimizer.param_groups, scheduled, strict=True):
                group["lr"] = lr
            optimizer.zero_grad()
            if overflowed:
                continue
            step += 1
            if scheduler is not None and case.interval == "step" and not isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step()
            if isinstance(scheduler, ReduceLROnPlateau) and step % case.eval_every == 0:
                scheduler.step(case.evaluate(model))
            if step == case.max_steps:
                return losses
        if scheduler is not None and case.interval == "epoch":
            scheduler.step()
    return losses
