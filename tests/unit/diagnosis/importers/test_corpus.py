"""Logs of real runs: each one gives the table that the index describes, or is refused with a reason.

The logs are not part of the project. HOLDFAST_CORPUS names their folder; the default is ../shared/corpus.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from holdfast.core.base.errors import LogRefused
from holdfast.diagnosis.importers import read
from holdfast.diagnosis.model.table import Table

CORPUS = Path(os.environ.get("HOLDFAST_CORPUS") or Path(__file__).resolve().parents[5] / "shared" / "corpus")
INDEX = CORPUS / "INDEX.jsonl"
FILES = [json.loads(line) for line in INDEX.read_text().splitlines()] if INDEX.is_file() else []
FORMATS = {
    "csv_measurements", "deepspeed_text", "edge_cases", "fairseq_text", "hf_console", "hf_trainer_state", "lightning_csv",
    "llamafactory_trainer_log", "megatron_text", "tensorboard", "text_mlperf", "text_nanogpt", "text_other", "wandb_csv",
}  # fmt: skip
"""the formats of the corpus that have an importer, or that a generic one reads in full"""
SUPPORTED = [entry for entry in FILES if entry["format"] in FORMATS]
needs_corpus = pytest.mark.skipif(not FILES, reason=f"no logs at {CORPUS}; set HOLDFAST_CORPUS to their folder")

PERPLEXITY = "the index counts lines without a perplexity too; the loss is the logarithm of the perplexity"
DEEPSPEED = "the index counts every line with a number"
NUMBERED = "the index numbers the records; the importer takes the step from [epoch][iteration]"
SCALE = "the loss scale is in overflow messages only, so it is the series `loss_scale`"
ONE_POINT = "the importer reads the only number, a learning rate at step 0, and reports the missing loss"
# Differences from the index, and their reasons: n (number of records), columns, nonfinite, steps.
EXPECTED_DIFFERENCES: dict[str, tuple[set[str], str]] = {
    "llamafactory_trainer_log/suzushi-tw__luojiu-7b-base__trainer_log.jsonl": (
        {"n", "steps"},
        "the last record of the index is the summary at the end, whose loss is null",
    ),
    "csv_measurements/mlcommons__submissions_algorithms__v05-ext-shampoo_submission-study_3-criteo1tb_pytorch-trial_3.csv": (
        {"nonfinite"},
        "35 losses are not finite, as in the event file of the same run; the index counts one less",
    ),
    "text_nanogpt/KellerJordan__modded-nanogpt__adamw_llmc.txt": (
        {"n", "steps"},
        "the index counts 76 test losses (`tel`) as records",
    ),
    "text_nanogpt/KellerJordan__modded-nanogpt__medium_valonly.txt": (
        {"n", "columns"},
        "the log holds 55 validation losses; its 6,710 other records hold times only",
    ),
    "text_mlperf/mlcommons__training_results_v0.7__v07gnmt_dgx1-20.06_pytorch_result_3.txt": ({"steps"}, NUMBERED),
    "text_mlperf/mlcommons__training_results_v0.6__v06gnmt_dgx2-19.05_pytorch_result_1.txt": ({"steps"}, NUMBERED),
    "text_mlperf/mlcommons__training_results_v0.7__v07gnmt_dgxa100_n2-20.06_pytorch_result_6.txt": ({"steps"}, NUMBERED),
    "megatron_text/bigscience-workshop__bigscience__meg_ds_zero_gpt2_perf_n16_nbs48_ms48.out": (
        {"n", "steps"},
        "DeepSpeed's line about step 0 is a record without a loss",
    ),
    "deepspeed_text/microsoft__DeepSpeedExamples__output1_check_train_my_implementation_fp16.log": (
        {"n", "columns"},
        f"{PERPLEXITY}. {SCALE}",
    ),
    "deepspeed_text/microsoft__DeepSpeedExamples__netuning_training_log_output_opt-350m_globalBatchSize-64.log": (
        {"n", "columns", "steps"},
        f"{DEEPSPEED}; the only loss is the mean of the epoch. {SCALE}",
    ),
    "deepspeed_text/microsoft__DeepSpeedExamples___output_actor_opt-1.3b_critic_opt-350m_globalBatchSize64.log": (
        {"n", "columns"},
        f"{DEEPSPEED}. {SCALE}",
    ),
    "text_other/HySonLab__ArcRoute__nohup.out": ({"n", "steps"}, "the progress bar draws each record twice"),
    "edge_cases/bigscience-workshop__bigscience__hf_ds_gpt2_perf_n16_bs4-mbs8.out": (
        {"n", "steps"},
        ONE_POINT,
    ),
    "edge_cases/bigscience-workshop__bigscience__hf_ds_gpt2_base_n4-1832555.out": (
        {"n", "steps"},
        ONE_POINT,
    ),
}  # fmt: skip
COLUMN_OF_INDEX = {"time": "seconds"}


def differences(table: Table, entry: dict) -> set[str]:
    differing = set()
    if len(table) != entry["n_points"]:
        differing.add("n")
    if any(COLUMN_OF_INDEX.get(name, name) not in table.columns for name in entry["columns"]):
        differing.add("columns")
    counts = [(name, entry[f"nonfinite_{short}"]) for name, short in (("loss", "loss"), ("grad_norm", "grad"))]
    if any((~np.isfinite(table.series(name).value)).sum() != count for name, count in counts):
        differing.add("nonfinite")
    if len(table) and (table.step[0], table.step[-1]) != (entry["first_step"], entry["last_step"]):
        differing.add("steps")
    return differing


@pytest.mark.slow
@needs_corpus
@pytest.mark.parametrize("entry", FILES, ids=[entry["file"][-60:] for entry in FILES])
def test_real_log_of_any_format_is_read_or_refused_with_a_reason(entry):
    tables, reason = [], ""
    try:
        tables = read(CORPUS / entry["file"])
    except LogRefused as refused:
        reason = refused.reason
    assert tables or len(reason) >= 20
    assert all(len(column) == len(table) for table in tables for column in table.columns.values())


@pytest.mark.slow
@needs_corpus
@pytest.mark.parametrize("entry", SUPPORTED, ids=[entry["file"][-60:] for entry in SUPPORTED])
def test_real_log_of_a_supported_format_matches_the_index(entry):
    try:
        table = read(CORPUS / entry["file"])[0]
    except LogRefused as refused:
        if entry["n_points"] or len(refused.reason) < 20:
            raise
        return
    expected, _ = EXPECTED_DIFFERENCES.get(entry["file"], (set(), ""))
    assert differences(table, entry) == expected
    assert all(len(column) == len(table) for column in [*table.columns.values(), *table.present.values()])
    if entry["blank_cell_nan"]:
        assert table.has_limit("nan_hidden")
    if not table.has("loss"):
        assert table.has_limit("no_loss")


@needs_corpus
def test_csv_and_event_file_of_one_run_agree_on_nonfinite_values():
    runs: dict[str, dict[str, Table]] = {}
    for entry in FILES:
        if (entry["run_group"] or "").startswith("algoperf:"):
            runs.setdefault(entry["run_group"], {})[entry["format"]] = read(CORPUS / entry["file"])[0]
    pairs = [(run["csv_measurements"], run["tensorboard"]) for run in runs.values() if len(run) == 2]
    assert pairs
    for csv, events in pairs:
        for name in ("loss", "grad_norm"):
            from_csv, from_events = csv.series(name), events.series(name)
            np.testing.assert_array_equal(from_csv.step, from_events.step)
            np.testing.assert_array_equal(np.isfinite(from_csv.value), np.isfinite(from_events.value))


@needs_corpus
def test_every_expected_difference_names_an_existing_file():
    assert set(EXPECTED_DIFFERENCES) <= {entry["file"] for entry in FILES}
