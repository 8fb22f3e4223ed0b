"""Logs of real runs: every one is read as its index says, or is refused with a reason.

The logs are not part of the project. They are looked for through HOLDFAST_CORPUS, then beside the checkout.
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
WHY = f"no corpus of real logs at {CORPUS}; set HOLDFAST_CORPUS to its folder"
needs_corpus = pytest.mark.skipif(not FILES, reason=WHY)

PERPLEXITY = "the perplexities the index counts as a loss are evaluations; DeepSpeed logs no training loss here"
DEEPSPEED = "the index counts every line with a number; here lines with a loss are records, the others series"
COUNTED = "the index numbers the records; the log's own [epoch][iteration] gives the step"
SCALE = "the loss scale is told by overflow lines only: it is the series `loss_scale`"
# what differs from the index, and why: n (records), columns, nonfinite, steps
DIFFERS: dict[str, tuple[set[str], str]] = {
    "llamafactory_trainer_log/suzushi-tw__luojiu-7b-base__trainer_log.jsonl": (
        {"n", "steps"},
        "the last of the index's records is the summary at the end: its loss is null",
    ),
    "csv_measurements/mlcommons__submissions_algorithms__v05-ext-shampoo_submission-study_3-criteo1tb_pytorch-trial_3.csv": (
        {"nonfinite"},
        "35 losses are not finite, as in the event file of the same run; the index counts one blank cell fewer",
    ),
    "text_nanogpt/KellerJordan__modded-nanogpt__adamw_llmc.txt": (
        {"n", "steps"},
        "76 of the index's records are `tel`, the test loss",
    ),
    "text_nanogpt/KellerJordan__modded-nanogpt__medium_valonly.txt": (
        {"n", "columns", "steps"},
        "only the validation loss is logged, 55 times; the 6,710 records hold times and no loss",
    ),
    "text_mlperf/mlcommons__training_results_v0.7__v07gnmt_dgx1-20.06_pytorch_result_3.txt": ({"steps"}, COUNTED),
    "text_mlperf/mlcommons__training_results_v0.6__v06gnmt_dgx2-19.05_pytorch_result_1.txt": ({"steps"}, COUNTED),
    "text_mlperf/mlcommons__training_results_v0.7__v07gnmt_dgxa100_n2-20.06_pytorch_result_6.txt": ({"steps"}, COUNTED),
    "deepspeed_text/microsoft__DeepSpeedExamples__output_check_base_training.log": ({"n", "columns", "steps"}, PERPLEXITY),
    "deepspeed_text/microsoft__DeepSpeedExamples__output_check_medium_training.log": ({"n", "columns", "steps"}, PERPLEXITY),
    "deepspeed_text/microsoft__DeepSpeedExamples__output1_check_train_my_implementation_fp16.log": (
        {"n", "columns"},
        f"{PERPLEXITY}. {SCALE}",
    ),
    "deepspeed_text/microsoft__DeepSpeedExamples__netuning_training_log_output_opt-350m_globalBatchSize-64.log": (
        {"n", "columns", "steps"},
        f"{DEEPSPEED}; its only loss is the mean of the epoch. {SCALE}",
    ),
    "deepspeed_text/microsoft__DeepSpeedExamples___output_actor_opt-1.3b_critic_opt-350m_globalBatchSize64.log": (
        {"n", "columns"},
        f"{DEEPSPEED}. {SCALE}",
    ),
    "text_other/HySonLab__ArcRoute__nohup.out": ({"n", "steps"}, "the progress bar draws each record twice; it counts once"),
    "edge_cases/bigscience-workshop__bigscience__hf_ds_gpt2_perf_n16_bs4-mbs8.out": (
        {"n", "steps"},
        "one line holds a learning rate at step 0: it is read, and the table says that there is no loss and one point",
    ),
    "edge_cases/bigscience-workshop__bigscience__hf_ds_gpt2_base_n4-1832555.out": (
        {"n", "steps"},
        "one line holds a learning rate at step 0: it is read, and the table says that there is no loss and one point",
    ),
}  # fmt: skip
OURS = {"time": "seconds"}


def differences(table: Table, entry: dict) -> set[str]:
    found = set()
    if len(table) != entry["n_points"]:
        found.add("n")
    if any(OURS.get(name, name) not in table.columns for name in entry["columns"]):
        found.add("columns")
    counts = [(name, entry[f"nonfinite_{short}"]) for name, short in (("loss", "loss"), ("grad_norm", "grad"))]
    if any((~np.isfinite(table.series(name).value)).sum() != count for name, count in counts):
        found.add("nonfinite")
    if len(table) and (table.step[0], table.step[-1]) != (entry["first_step"], entry["last_step"]):
        found.add("steps")
    return found


@needs_corpus
@pytest.mark.parametrize("entry", FILES, ids=[entry["file"][-60:] for entry in FILES])
def test_real_log_is_read_as_the_index_says(entry):
    try:
        table = read(CORPUS / entry["file"])[0]
    except LogRefused as refused:
        if entry["n_points"] or len(refused.reason) < 20:
            raise
        return
    expected, _ = DIFFERS.get(entry["file"], (set(), ""))
    assert differences(table, entry) == expected
    assert all(len(column) == len(table) for column in [*table.columns.values(), *table.present.values()])
    if entry["blank_cell_nan"]:
        assert table.has_limit("nan_hidden")
    if not table.has("loss"):
        assert table.has_limit("no_loss")


@needs_corpus
def test_csv_and_event_file_of_one_run_agree_on_what_is_not_finite():
    runs: dict[str, dict[str, Table]] = {}
    for entry in FILES:
        if (entry["run_group"] or "").startswith("algoperf:"):
            runs.setdefault(entry["run_group"], {})[entry["format"]] = read(CORPUS / entry["file"])[0]
    pairs = [(run["csv_measurements"], run["tensorboard"]) for run in runs.values() if len(run) == 2]
    assert pairs
    for csv, events in pairs:
        for name in ("loss", "grad_norm"):
            mine, theirs = csv.series(name), events.series(name)
            np.testing.assert_array_equal(mine.step, theirs.step)
            np.testing.assert_array_equal(np.isfinite(mine.value), np.isfinite(theirs.value))


@needs_corpus
def test_every_difference_is_about_a_file_that_is_there():
    assert set(DIFFERS) <= {entry["file"] for entry in FILES}
