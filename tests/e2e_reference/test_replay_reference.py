"""A bundle of the reference trainer needs no entry: model and loss follow from its configuration."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from holdfast.cli import main
from holdfast.core.base.config import ReplaySection
from holdfast.reference.config import ModelSection, TrainConfig, TrainSection
from holdfast.reference.trainer import build

BAD = 9


class NanWeight(Dataset[Any]):
    """The reference trainer's data with one weight of NaN."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, i: int) -> dict[str, Any]:
        item = dict(self.inner[i])
        if i == BAD:
            item["weight"] = torch.tensor(float("nan"))
        return item


class Faults:
    def wrap_dataset(self, dataset: Any) -> Any:
        return NanWeight(dataset)

    def before_step(self, *_: Any) -> None:
        """Break nothing else."""


def test_a_bundle_of_the_reference_trainer_replays_without_an_entry(tmp_path, capsys):
    config = TrainConfig(
        model=ModelSection(width=16, layers=1, heads=2, context=16),
        train=TrainSection(run_dir=str(tmp_path / "run"), steps=4, batch_size=4, threads=1, device="cpu"),
        replay=ReplaySection(keep_batch=True),
    )
    build(config, faults=Faults()).run()
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main.run(["replay", str(tmp_path / "run"), "--device", "cpu", "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert not ended.value.code, answer
    assert answer["verdict"]["cause"] == "data_row" and answer["sample_id"] == BAD
    assert answer["origin"]["path"][0]["module"] == "embedding"
