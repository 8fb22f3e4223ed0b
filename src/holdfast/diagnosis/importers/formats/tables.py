"""Formats with named columns, most special first. The last of each kind reads any table."""

from __future__ import annotations

from holdfast.diagnosis.importers.reading.described_table import CSV, JSON_LINES, JSON_VALUE, TableDescription

_EVAL_COLUMNS = {"score", "total_duration", "accumulated_submission_time", "accumulated_eval_time", "preemption_count"}

DESCRIPTIONS = (
    TableDescription(
        name="measurements_csv",
        description="AlgoPerf measurements.csv: `global_step`, `loss`, `grad_norm`, and evaluations on separate rows",
        kind=CSV,
        needs=("global_step",),
        when=lambda names: len(_EVAL_COLUMNS & set(names)) >= 2,
        counts_within_epoch=False,
        drop_repeats=False,
    ),
    TableDescription(
        name="lightning_csv",
        description="Lightning CSVLogger: metrics.csv with sparse `step` and `epoch` rows",
        kind=CSV,
        needs=("step", "epoch"),
        when=lambda names: names == sorted(names) or any(name.endswith(("_step", "_epoch")) for name in names),
        blanks_may_be_nan=False,  # the logger writes NaN as text
        counts_within_epoch=False,
        drop_repeats=False,
    ),
    TableDescription(
        name="yolo_csv",
        description="Ultralytics and YOLOv5 results.csv: one row an epoch, parts of the loss",
        kind=CSV,
        needs=("epoch", "train/box_loss"),
        counts_within_epoch=False,
    ),
    TableDescription(
        name="sb3_csv",
        description="Stable-Baselines3 progress.csv: `time/total_timesteps`, `rollout/ep_rew_mean`, `train/...`",
        kind=CSV,
        needs=("time/total_timesteps",),
        blanks_may_be_nan=False,
    ),
    TableDescription(
        name="baselines_csv",
        description="OpenAI baselines progress.csv: `eprewmean`, `total_timesteps`, `loss/...`",
        kind=CSV,
        needs=("eprewmean",),
        blanks_may_be_nan=False,
    ),
    TableDescription(
        name="spinup",
        description="Spinning Up progress.txt: `Epoch`, `AverageEpRet`, `LossPi`",
        kind=CSV,
        needs=("Epoch", "AverageEpRet"),
        blanks_may_be_nan=False,
    ),
    TableDescription(
        name="keras_csv",
        description="Keras CSVLogger: `epoch`, then metrics in the order of the alphabet",
        kind=CSV,
        needs=("epoch", "loss"),
        when=lambda names: names[0] == "epoch" and names[1:] == sorted(names[1:]),
        blanks_may_be_nan=False,
    ),
    TableDescription(
        name="llamafactory",
        description="LLaMA-Factory: trainer_log.jsonl with `current_steps`",
        kind=JSON_LINES,
        needs=("current_steps",),
        skip=("percentage", "elapsed_time", "remaining_time", "throughput"),
        facts={"total_steps": "planned_steps"},
        counts_within_epoch=False,
        averaged=True,
    ),
    TableDescription(
        name="detectron2_json",
        description="detectron2 metrics.json: `iteration`, `total_loss`",
        kind=JSON_LINES,
        needs=("iteration", "total_loss"),
        skip=("eta_seconds", "rank_data_time"),
        counts_within_epoch=False,
        averaged=True,
    ),
    TableDescription(
        name="mmengine_json",
        description="mmengine and mmcv: .log.json with `mode` and `iter`, or scalars.json with `step`",
        kind=JSON_LINES,
        needs=("loss", "data_time", "lr"),
        averaged=True,
    ),
    TableDescription(
        name="stylegan",
        description="StyleGAN and EDM stats.jsonl: one row a tick, values as {num, mean, std}",
        kind=JSON_LINES,
        needs=("Progress/tick",),
        parts=("Loss/G/loss", "Loss/D/loss"),
    ),
    TableDescription(
        name="json_array",
        description="one JSON value: a list of records (Chainer and others), or lists by name (Keras history)",
        kind=JSON_VALUE,
    ),
    TableDescription(
        name="generic_csv",
        description="any CSV, TSV or semicolon table with a header; --map names columns that are not recognized",
        kind=CSV,
    ),
    TableDescription(
        name="generic_jsonl",
        description="any JSON lines with numbers; --map names columns that are not recognized",
        kind=JSON_LINES,
    ),
)  # fmt: skip
"""Every format of tables."""
