"""Formats with named columns, most special first. The last of each kind reads any table."""

from __future__ import annotations

from holdfast.diagnosis.importers.reading.described_table import CSV, JSON_LINES, JSON_VALUE, TableDescription

_EVAL_COLUMNS = {"score", "total_duration", "accumulated_submission_time", "accumulated_eval_time", "preemption_count"}

DESCRIPTIONS = (
    TableDescription(
        "measurements_csv", "AlgoPerf measurements.csv: `global_step`, `loss`, `grad_norm`, evaluations on separate rows",
        CSV, ("global_step",), lambda names: len(_EVAL_COLUMNS & set(names)) >= 2,
        counts_within_epoch=False, drop_repeats=False,
    ),
    TableDescription(
        "lightning_csv", "Lightning CSVLogger: metrics.csv with sparse `step` and `epoch` rows", CSV, ("step", "epoch"),
        lambda names: names == sorted(names) or any(name.endswith(("_step", "_epoch")) for name in names),
        blanks_may_be_nan=False, counts_within_epoch=False, drop_repeats=False,  # the logger writes NaN as text
    ),
    TableDescription(
        "yolo_csv", "Ultralytics and YOLOv5 results.csv: one row an epoch, parts of the loss", CSV,
        ("epoch", "train/box_loss"), counts_within_epoch=False,
    ),
    *(TableDescription(name, description, CSV, needs, blanks_may_be_nan=False) for name, description, needs in (
        ("sb3_csv", "Stable-Baselines3 progress.csv: `time/total_timesteps`, `rollout/ep_rew_mean`, `train/...`",
         ("time/total_timesteps",)),
        ("baselines_csv", "OpenAI baselines progress.csv: `eprewmean`, `total_timesteps`, `loss/...`", ("eprewmean",)),
        ("spinup", "Spinning Up progress.txt: `Epoch`, `AverageEpRet`, `LossPi`", ("Epoch", "AverageEpRet")),
    )),
    TableDescription(
        "sb3_monitor", "Stable-Baselines3 and OpenAI monitor.csv: `r`, `l`, `t`, one row an episode", CSV, ("r", "l", "t"),
        signals={"reward": "r"}, blanks_may_be_nan=False,
    ),
    TableDescription(
        "keras_csv", "Keras CSVLogger: `epoch`, then metrics in the order of the alphabet", CSV, ("epoch", "loss"),
        lambda names: names[0] == "epoch" and names[1:] == sorted(names[1:]), blanks_may_be_nan=False,
    ),
    TableDescription(
        "llamafactory", "LLaMA-Factory: trainer_log.jsonl with `current_steps`", JSON_LINES, ("current_steps",),
        skip=("percentage", "elapsed_time", "remaining_time", "throughput"), facts={"total_steps": "planned_steps"},
        counts_within_epoch=False, averaged=True,
    ),
    TableDescription(
        "detectron2_json", "detectron2 metrics.json: `iteration`, `total_loss`", JSON_LINES, ("iteration", "total_loss"),
        skip=("eta_seconds", "rank_data_time"), counts_within_epoch=False, averaged=True,
    ),
    TableDescription(
        "mmengine_json", "mmengine and mmcv: .log.json with `mode` and `iter`, or scalars.json with `step`", JSON_LINES,
        ("loss", "data_time", "lr"), averaged=True,
    ),
    TableDescription(
        "stylegan", "StyleGAN and EDM stats.jsonl: one row a tick, values as {num, mean, std}", JSON_LINES,
        ("Progress/tick",), parts=("Loss/G/loss", "Loss/D/loss"),
    ),
    TableDescription(
        "json_array", "one JSON value: a list of records (Chainer and others), or lists by name (Keras history)", JSON_VALUE
    ),
    TableDescription(
        "generic_csv", "any CSV, TSV or semicolon table with a header; --map names columns that are not recognized", CSV
    ),
    TableDescription(
        "generic_jsonl", "any JSON lines with numbers; --map names columns that are not recognized", JSON_LINES
    ),
)  # fmt: skip
"""Every format of tables."""
