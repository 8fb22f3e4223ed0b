"""The replay entry of the reference trainer: its model and loss, from the configuration that a bundle holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch

from holdfast.core.base.errors import RunDirError
from holdfast.reference.config import ModelSection, TrainSection
from holdfast.reference.model import Transformer, batch_loss

NAME = "holdfast reference"
"""`trainer` in the description of a run"""


def make_entry(
    config: Mapping[str, Any], device: torch.device
) -> tuple[torch.nn.Module, Callable[[Any, Any], torch.Tensor]]:
    """Return model and step. RunDirError if the configuration is not that of the reference trainer."""
    try:
        shape, train = msgspec.convert(config["model"], ModelSection), msgspec.convert(config["train"], TrainSection)
    except (KeyError, TypeError, msgspec.ValidationError) as error:
        raise RunDirError(
            f"the bundle does not hold the configuration of the reference trainer ({error}); name your own code with --entry"
        ) from None
    return Transformer(shape), lambda model, batch: batch_loss(model, batch, device, train.precision, shape.z_loss)
