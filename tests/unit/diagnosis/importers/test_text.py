"""Text logs: each format is detected, and its numbers arrive in their columns, whatever the encoding or line prefix."""

from __future__ import annotations

import gzip
import math

import numpy as np
import pytest

from holdfast.core.base.errors import LogRefused
from holdfast.diagnosis.importers import FORMATS, detect_format, read
from holdfast.diagnosis.importers.reading import column_blocks, log_source


def write(tmp_path, text, name="log.txt"):
    path = tmp_path / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def read_one(path, **options):
    (table,) = read(path, **options)
    return table


def values(table, name):
    return table.series(name).value.tolist()


def limit_codes(table):
    return {limit.code for limit in table.limits}


LOGS = {
    "nanogpt": [
        f"step:{i}/99 train_loss:{5 - i * 0.01:.4f} train_time:{i * 200}ms step_avg:200.00ms" for i in range(1, 61)
    ],
    "megatron": [
        f" iteration {i:8d}/      99 | consumed samples: {i * 8:12d} | elapsed time per iteration (ms): 200.0 | "
        f"learning rate: 1.000E-04 | lm loss: {5 - i * 0.01:.6E} | loss scale: 1.0 | grad norm: 1.500 |"
        for i in range(1, 61)
    ],
    "torchtitan": [
        f"[rank0]:\x1b[31m[titan] 2025-01-01 00:00:00,123 - root - INFO - step: {i:2d}  loss: {5 - i * 0.01:7.4f}  "
        f"grad_norm:  1.5000  memory:  2.47GiB(3.12%)  tps: {3000 + i:,}  mfu: 0.19%\x1b[39m"
        for i in range(1, 61)
    ],
    "kempnerforge": [
        f"[rank 0] INFO     [step {i}] loss={5 - i * 0.01:.4f} | lr=1.00e-04 | grad_norm=1.500 | tok/s=3,000 | mem=71.2/80GB"
        for i in range(1, 61)
    ],
    "composer": [
        line
        for i in range(1, 61)
        for line in (f"[batch={i}/99]:", "\t Train time/batch: 3", f"\t Train loss/train/total: {5 - i * 0.01:.4f}")
    ],
    "fairseq": [
        f"| epoch 001:    {i} / 99 loss={5 - i * 0.01:.3f}, wps=100, num_updates={i}, lr=0.0001, gnorm=1.500, clip=1%"
        for i in range(1, 61)
    ],
    "mlperf": [
        f"0: TRAIN [0][{i}/99]\tTime 0.200 (0.2)\tTok/s 100 (100)\tLoss/tok {5 - i * 0.01:.4f} (5.0)\tLR 1.0e-04"
        for i in range(1, 61)
    ],
    "deepspeed": [
        f"epoch: 0|step: {i}|ppo_ep: 1|act_loss: {5 - i * 0.01:.4f}|cri_loss: 0.5|unsuper_loss: 0.0"
        for i in range(1, 61)
    ],
    "generic_text": [
        f"[worker] global_step={i} train loss: {5 - i * 0.01:.4f} grad_norm=1.5 lr 0.0001" for i in range(1, 61)
    ],
}


@pytest.mark.parametrize("name", LOGS)
def test_format_is_detected_from_content_and_loss_and_steps_are_read(tmp_path, name):
    path = write(tmp_path, "\n".join(["starting up", *LOGS[name]]) + "\n", "anything.csv")
    assert detect_format(path) == name
    table = read_one(path)
    assert table.format == name
    assert table.step.tolist() == list(range(1, 61))
    assert values(table, "loss") == pytest.approx([5 - i * 0.01 for i in range(1, 61)], abs=1e-3)
    if name in ("megatron", "torchtitan", "kempnerforge", "fairseq", "generic_text"):
        assert values(table, "grad_norm") == [1.5] * 60
    if name in ("megatron", "kempnerforge", "fairseq", "mlperf", "generic_text"):
        assert values(table, "lr") == [1e-4] * 60
    assert name in FORMATS


@pytest.mark.parametrize("name", LOGS)
@pytest.mark.parametrize("wrapping", ["crlf", "bom", "utf16", "gzip", "rank", "nul"])
def test_encoding_and_line_prefixes_do_not_change_the_table(tmp_path, name, wrapping):
    text = "\n".join(LOGS[name]) + "\n"
    data = {
        "crlf": text.replace("\n", "\r\n").encode(),
        "bom": b"\xef\xbb\xbf" + text.encode(),
        "utf16": text.encode("utf-16"),
        "gzip": gzip.compress(text.encode(), mtime=0),
        "rank": "".join(
            f"[default0]:{line}\n" if name != "nanogpt" else f"0: {line}\n" for line in LOGS[name]
        ).encode(),
        "nul": text.replace("\n", "\0\n").encode(),
    }[wrapping]
    if name == "composer" and wrapping == "rank":
        data = "".join(f"0:{line}\n" for line in LOGS[name]).encode()
    table = read_one(write(tmp_path, data))
    assert len(table) == 60
    assert table.format == name
    assert values(table, "loss")[-1] == pytest.approx(4.4, abs=1e-3)


@pytest.mark.parametrize("name", ["nanogpt", "megatron", "generic_text", "torchtitan", "hf_console"])
def test_vectorized_reading_equals_line_by_line_reading(tmp_path, name, monkeypatch):
    rng = np.random.default_rng(7)
    losses = [f"{v:.4f}" if i % 17 else ("nan" if i % 2 else "inf") for i, v in enumerate(rng.lognormal(size=400))]
    norms = [f"{v:.3e}" for v in rng.lognormal(size=400)]
    line = {
        "nanogpt": "step:{i}/999 train_loss:{loss} train_time:{i}ms step_avg:{norm}ms",
        "megatron": " iteration {i}/  999 | learning rate: {norm} | lm loss: {loss} | grad norm: {norm} |",
        "generic_text": "step {i} | loss: {loss} | norm: {norm} | lr {norm}",
        "torchtitan": "2025-01-01 00:00:00,1 - root - INFO - step: {i}  loss: {loss}  grad_norm: {norm}  tps: 1,234",
        "hf_console": "{{'loss': {loss}, 'grad_norm': {norm}, 'epoch': {i}}}",
    }[name]
    text = "\n".join(line.format(i=i, loss=a, norm=b) for i, (a, b) in enumerate(zip(losses, norms, strict=True)))
    path = write(tmp_path, text)
    vectorized = read_one(path)
    monkeypatch.setattr("holdfast.diagnosis.importers.reading.text_reader.learn_template", lambda line, parsed: None)
    by_line = read_one(path)
    assert len(vectorized) == len(by_line) == 400
    assert set(vectorized.columns) == set(by_line.columns)
    for name in by_line.columns:
        np.testing.assert_array_equal(vectorized.columns[name], by_line.columns[name])
        np.testing.assert_array_equal(vectorized.present[name], by_line.present[name])
    assert (~np.isfinite(vectorized.columns["loss"])).sum() == sum(not math.isfinite(float(v)) for v in losses)


def test_a_line_with_an_extra_number_does_not_shift_the_values_of_other_lines(tmp_path):
    lines = [f"step:{i}/99 train_loss:{i}.5 train_time:{i}ms step_avg:1.00ms" for i in range(50)]
    lines[20] = "step:2 0/99 train_loss:20.5 train_time:20ms step_avg:1.00ms"
    lines[21] = "step:21/99 train_loss:21.5 train_time:ms step_avg:1.00ms"
    table = read_one(write(tmp_path, "\n".join(lines)))
    rows = list(zip(table.step.tolist(), table.columns["loss"].tolist(), strict=True))
    assert [(step, loss) for step, loss in rows if loss not in (20.5, 21.5)] == [
        (i, i + 0.5) for i in range(50) if i not in (20, 21)
    ]


def test_events_and_evaluations_get_the_step_of_the_record_before_them(tmp_path, monkeypatch):
    lines = [f"step:{i}/9999 train_loss:{i % 97}.25 train_time:{i}ms step_avg:1.00ms" for i in range(3000)]
    lines.insert(100, "OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 2, reducing to 1")
    lines.insert(2500, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1 GiB")
    lines.insert(2600, "validation loss: 3.5")
    path = write(tmp_path, "\n".join(lines) + "\n")
    in_one_chunk = read_one(path)
    monkeypatch.setattr(log_source, "CHUNK_BYTES", 5000)
    for table in (in_one_chunk, read_one(path)):
        assert table.step.tolist() == list(range(3000))
        assert values(table, "loss") == [i % 97 + 0.25 for i in range(3000)]
        assert [(event.step, event.kind) for event in table.events] == [(99, "overflow"), (2498, "oom")]
        assert table.evals["validation loss"].step.tolist() == [2597]


@pytest.mark.parametrize(
    "error", ["OOM when allocating tensor with shape[8,4]", "Failed to CUDA calloc async 64 bytes"]
)
def test_out_of_memory_in_the_words_of_other_libraries_is_an_event(tmp_path, error):
    lines = [f"step:{i}/99 train_loss:{i}.25 train_time:{i}ms step_avg:1.00ms" for i in range(50)]
    table = read_one(write(tmp_path, "\n".join([*lines, error]) + "\n"))
    assert [event.kind for event in table.events] == ["oom"]


def test_records_without_a_step_are_numbered_across_chunks(tmp_path, monkeypatch):
    text = "".join(f"{{'loss': {i % 7}.5, 'grad_norm': 1.0, 'epoch': 0.1}}\n" for i in range(2000))
    path = write(tmp_path, text)
    monkeypatch.setattr(log_source, "CHUNK_BYTES", 5000)
    table = read_one(path)
    assert table.step.tolist() == list(range(1, 2001))
    assert "no_step" in limit_codes(table)


def test_thinning_keeps_spike_nan_first_and_last_record_and_adds_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(column_blocks, "MAX_ROWS", 1000)
    losses = [2.0 + (i % 10) * 0.01 for i in range(20_000)]
    losses[7777], losses[12_345] = 99.0, math.nan
    text = "".join(
        f"step:{i}/20000 train_loss:{loss:.4f} train_time:1ms step_avg:1ms\n" for i, loss in enumerate(losses)
    )
    table = read_one(write(tmp_path, text))
    assert len(table) <= 2000
    loss = table.series("loss")
    assert loss.step[loss.value > 90].tolist() == [7777]
    assert loss.step[np.isnan(loss.value)].tolist() == [12_345]
    assert (table.step[0], table.step[-1]) == (0, 19_999)
    assert "downsampled_on_import" in limit_codes(table)


def test_source_code_in_a_log_is_not_read_as_records(tmp_path):
    code = 'loss = 0.5\nlr = 0.0036\nprint(f"step:{step}/{n} train_loss:{loss:.4f}")\n    train_loss = 3.0\nstep = 7\n'
    table = read_one(write(tmp_path, code + "\n".join(LOGS["nanogpt"])))
    assert len(table) == 60
    with pytest.raises(LogRefused):
        read(write(tmp_path, code, "b.txt"))


def test_nanogpt_variants_and_evaluations(tmp_path):
    text = (
        "step 0: train loss 4.4501, val loss 4.4402\niter 0: loss 4.4512, time 23218.37ms, mfu -100.00%\n"
        "iter 1: loss nan, time 193.77ms, mfu -100.00%\n"
    )
    table = read_one(write(tmp_path, text))
    assert math.isnan(values(table, "loss")[1])
    assert values(table, "seconds") == pytest.approx([23.21837, 0.19377])
    assert table.evals["val loss"].value.tolist() == [4.4402]
    assert table.evals["epoch_mean/loss"].value.tolist() == [4.4501]
    llmc = read_one(write(tmp_path, "s:0 tel:10.9\ns:0 trl:10.8\ns:1 trl:10.7\ns:2 trl:10.6\n"))
    assert values(llmc, "loss") == [10.8, 10.7, 10.6]
    assert llmc.evals["tel"].value.tolist() == [10.9]
    words = read_one(write(tmp_path, "0 val 10.9\n0 hella 0.25\n0 train 10.8\n1 train 10.7\n2 train 10.6\n"))
    assert values(words, "loss") == [10.8, 10.7, 10.6]


def test_megatron_distinguishes_an_omitted_nan_from_a_skipped_step(tmp_path):
    tail = "| number of skipped iterations: {s} | number of nan iterations: {n} |"
    lines = [
        " iteration 1/ 9 | learning rate: 1.0E-04 | lm loss: 2.0E+00 | grad norm: 1.0 " + tail.format(s=0, n=0),
        " iteration 2/ 9 | learning rate: 1.0E-04 | grad norm: 1.0 " + tail.format(s=1, n=0),
        " iteration 3/ 9 | learning rate: 1.0E-04 " + tail.format(s=0, n=1),
        " validation loss at iteration 3 | lm loss value: 7.5E+00 | lm loss PPL: 1.8E+03 | ",
    ]
    table = read_one(write(tmp_path, "\n".join(lines)))
    assert table.present["loss"].tolist() == [True, False, True]
    assert math.isnan(table.columns["loss"][2])
    assert {"nan_hidden", "skipped_hidden"} <= limit_codes(table)
    assert table.evals["validation_loss"].value.tolist() == [7.5]


def test_megatron_records_wrapped_by_a_terminal_are_joined(tmp_path):
    wrapped = "\n".join(line[i : i + 80] for line in LOGS["megatron"] for i in range(0, len(line), 80))
    table = read_one(write(tmp_path, wrapped))
    assert table.step.tolist() == list(range(1, 61))
    assert values(table, "grad_norm") == [1.5] * 60


def test_steps_that_go_back_after_a_resume_are_kept_with_a_limit(tmp_path):
    lines = [*LOGS["megatron"][:40], "> loading checkpoint from /x at iteration 30", *LOGS["megatron"][30:]]
    table = read_one(write(tmp_path, "\n".join(lines)))
    assert table.step.tolist() == [*range(1, 41), *range(31, 61)]
    assert "steps_backwards" in limit_codes(table)
    assert [(event.step, event.kind) for event in table.events] == [(40, "restart")]


def test_steps_that_restart_every_epoch_are_unfolded(tmp_path):
    lines = [f"epoch: {e}|step: {i}|ppo_ep: 1|act_loss: 0.{i}1|cri_loss: 0.5" for e in range(3) for i in range(20)]
    lines.insert(25, "[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 4, reducing to 2")
    table = read_one(write(tmp_path, "\n".join(lines)))
    assert table.step.tolist() == list(range(60))
    assert "steps_unfolded" in limit_codes(table)
    assert table.events[0].step == 24
    assert (table.evals["loss_scale"].step.tolist(), table.evals["loss_scale"].value.tolist()) == ([24.0], [2.0])


def test_hf_console_has_no_step_and_reports_lines_missing_by_the_progress_bar(tmp_path):
    text, at = "", 0
    for i in range(100):
        at += 1 + (i * 7) % 13
        text += (
            f"\r 41%|####| {at}/4000 [1:16<26:54, 4s/it]\n{{'loss': {i}.5, 'grad_norm': 1.0, 'learning_rate': 1e-05}}\n"
        )
    text += "{'eval_loss': 2.5, 'epoch': 1.0}\n{'train_runtime': 5.0, 'train_loss': 3.0, 'epoch': 1.0}\n"
    table = read_one(write(tmp_path, text))
    assert table.step.tolist() == list(range(1, 101))
    assert {"no_step", "lines_lost"} <= limit_codes(table)
    assert table.evals["eval_loss"].value.tolist() == [2.5]
    assert values(table, "loss")[-1] == 99.5


def test_redrawn_progress_bar_counts_once(tmp_path):
    text = "".join(
        f"\rEpoch 0:  28%|##| {i}/489 [13:24<34:26,  0.17it/s, train/loss={i - 1}.5]\rEpoch 0:  28%|##| {i}/489 "
        f"[13:24<34:26,  0.17it/s, train/loss={i}.5]"
        for i in range(1, 41)
    )
    table = read_one(write(tmp_path, text))
    assert table.step.tolist() == list(range(1, 41))
    assert values(table, "loss") == [i + 0.5 for i in range(1, 41)]
    assert "duplicates_removed" in limit_codes(table)


def test_record_repeated_by_several_ranks_counts_once(tmp_path):
    lines = [f"[rank{r}]: {line}" for line in LOGS["torchtitan"] for r in range(4)]
    table = read_one(write(tmp_path, "\n".join(lines)))
    assert table.step.tolist() == list(range(1, 61))
    assert "duplicates_removed" in limit_codes(table)


def test_fairseq_epoch_means_are_records_only_if_nothing_finer_is_logged(tmp_path):
    means = [
        f"| epoch 00{e} | loss {9 - e}.5 | nll_loss 0.0 | num_updates {e * 100} | lr 0.001 | gnorm 2.5"
        for e in range(1, 6)
    ]
    valid = "| epoch 001 | valid on 'valid' subset | loss 4.2 | nll_loss 2.5 | num_updates 100"
    table = read_one(write(tmp_path, "\n".join([*means, valid])))
    assert table.step.tolist() == [100, 200, 300, 400, 500]
    assert table.evals["valid_loss"].value.tolist() == [4.2]
    new = [
        f'2020 | INFO | train_inner | {{"epoch": 1, "update": 0.1, "loss": "{i}.5", "num_updates": "{i}"}}'
        for i in range(1, 30)
    ]
    last = '2020 | INFO | train | {"epoch": 1, "train_loss": "7.1", "train_num_updates": "29"}'
    table = read_one(write(tmp_path, "\n".join([*new, last])))
    assert len(table) == 29
    assert table.evals["epoch_mean/loss"].value.tolist() == [7.1]


def test_mapping_names_columns_with_unknown_names(tmp_path):
    text = "".join(f"t={i} nats_per_token={5 - i * 0.1:.2f} other=3\n" for i in range(30))
    with pytest.raises(LogRefused):
        read(write(tmp_path, text))
    table = read_one(write(tmp_path, text), mapping={"loss": "nats_per_token", "step": "t"})
    assert table.step.tolist() == list(range(30))
    assert values(table, "loss")[10] == 4.0


def test_validation_loss_is_never_read_as_training_loss(tmp_path):
    text = "".join(f"step {i} val_loss: {i}.5 train_loss: {i}.25 eval/acc: 0.5\n" for i in range(30))
    table = read_one(write(tmp_path, text))
    assert values(table, "loss") == [i + 0.25 for i in range(30)]
    validation_only = read_one(write(tmp_path, "".join(f"step {i} val_loss: {i}.5\n" for i in range(30))))
    assert not validation_only.has("loss")
    assert "no_loss" in limit_codes(validation_only)
    assert len(validation_only.evals["val_loss"].value) == 30


def test_missing_loss_lists_the_columns_and_suggests_a_mapping(tmp_path):
    text = "epoch,accuracy,my cost\n" + "".join(f"{i},0.5,{i}.5\n" for i in range(30))
    table = read_one(write(tmp_path, text))
    (limit,) = [limit for limit in table.limits if limit.code == "no_loss"]
    assert limit.text == "no training loss found. Columns: accuracy, epoch, my cost. Try --map 'loss=my cost'"
    assert values(read_one(tmp_path / "log.txt", mapping={"loss": "my cost"}), "loss")[2] == 2.5


@pytest.mark.parametrize(
    "line",
    [
        "Epoch {i}/60 | train: loss {train:.3f} acc 0.5 | valid: loss {held_out:.3f} acc 0.4",
        "[{i}] Train - loss: {train:.3f}, acc: 0.5 Valid - loss: {held_out:.3f}, acc: 0.4",
        "epoch={i} train[loss={train:.3f} acc=0.5] valid[loss={held_out:.3f} acc=0.4]",
    ],
)
def test_training_and_evaluation_on_one_line_are_told_apart(tmp_path, line):
    lines = [line.format(i=i, train=3 - i / 100, held_out=4 - i / 100) for i in range(40)]
    table = read_one(write(tmp_path, "\n".join(lines)))
    assert values(table, "loss") == pytest.approx([3 - i / 100 for i in range(40)])
    assert table.evals["valid_loss"].value.tolist() == pytest.approx([4 - i / 100 for i in range(40)])
    assert set(table.evals["valid_acc"].value) == {0.4}


def bar(i: int, done: int, end: str = "") -> str:
    full = "=" * done + ">" * (done < 4) + "." * max(0, 3 - done)
    return f" {done}/4 [{full}] - {'ETA: 3s' if done < 4 else '2s 3ms/step'} - loss: {3 - i / 10 + (4 - done):.4f}{end}"


REDRAWN = {
    "keras bars drawn by backspaces": (
        "\n".join(
            f"Epoch {i + 1}/20\n" + ("\b" * 60 + "\r").join(bar(i, done) for done in (1, 2, 3)) + "\b" * 60 + "\r"
            + bar(i, 4, f" - val_loss: {4 - i / 10:.4f}")
            for i in range(20)
        ),
        "epoch",
    ),
    "a line drawn below a bar": (
        "\n".join(
            f"\rValidation: |    | 0/? [00:00<?, ?it/s]\x1b[A[\x1b[37m12:00\x1b[0m] Epoch {i + 1}: loss {3 - i / 10:.3e}"
            for i in range(20)
        ),
        "epoch",
    ),
    "TensorFlow's estimator": (
        "\n".join(f"loss = {3 - i / 10}, step = {i + 1} (0.4 sec)\nglobal_step/sec: 244.3" for i in range(20)),
        "step",
    ),
    "a header that is printed once, with the time of day": (
        "2021-01-25 05:58:00 [INFO]:    Epoch     Batch       box     total   nTargets\nimport done\n"
        + "\n".join(
            f"2021-01-25 05:{i:02}:59 [INFO]:     {i + 1}/29      0/165     0.227      {3 - i / 10:.2f}        83"
            for i in range(10)
        )
        + "\n2021-01-25 06:58:00 [INFO]:    Epoch     Batch       box     total   nTargets\n"
        + "\n".join(
            f"2021-01-25 06:{i:02}:59 [INFO]:     {i + 1}/29      0/165     0.227      {3 - i / 10:.2f}        83"
            for i in range(10, 20)
        ),
        "epoch",
    ),
    "Deeplearning4j": (
        "\n".join(f"06:38:16.402 [main] INFO o.d.ScoreIterationListener - Score at iteration {i + 1} is {3 - i / 10}"
                  for i in range(20)),
        "step",
    ),
    "a sentence above the log": (
        "The loss that is returned by the trainer sometimes has 'nan' as its value here.\n"
        + "\n".join(f"> step {i + 1} loss: {3 - i / 10}" for i in range(20)),
        "step",
    ),
    "a record behind the fence": (
        "It goes on:\n```{'loss': 3.0, 'step': 1}\n"
        + "\n".join(f"{{'loss': {3 - i / 10}, 'step': {i + 1}}}" for i in range(1, 20))
        + "\n```\n",
        "step",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REDRAWN)
def test_the_curve_is_read_as_a_person_sees_it(tmp_path, name):
    text, unit = REDRAWN[name]
    table = read_one(write(tmp_path, text))
    assert values(table, "loss") == pytest.approx([3 - i / 10 for i in range(20)], abs=0.006)
    assert (table.unit, table.step.tolist()) == (unit, [float(i + 1) for i in range(20)])


def test_runs_that_begin_again_are_separate_with_their_evaluations(tmp_path):
    lines = [
        f"[{n}] train-rmse: {first * (1 - n / 40):.2f} validation-rmse: {first + 1:.2f}"
        for first in (5.0, 9.0, 8.0)
        for n in range(21)
    ]
    tables = read(write(tmp_path, "\n".join(lines)))
    assert [values(table, "loss")[0] for table in tables] == [5.0, 9.0, 8.0]
    assert [set(table.evals["validation-rmse"].value) for table in tables] == [{6.0}, {10.0}, {9.0}]


def test_steps_within_epochs_are_unfolded_in_each_run(tmp_path):
    lines = [
        f"Epoch: [{epoch}][{step}/100] loss {5 - epoch / 10:.2f}"
        for epochs in (6, 4)
        for epoch in range(epochs)
        for step in (0, 50)
    ]
    tables = read(write(tmp_path, "\n".join(lines)))
    assert [(len(table), table.step[0], table.step[-1]) for table in tables] == [(12, 0, 550), (8, 0, 350)]


EVALUATIONS_BELOW_A_NAME = {
    "rule": ["=== Eval ===", "loss: {v}", "acc: 0.5"],
    "colon": ["Validation results:", "", "  accuracy: 0.5, loss: {v}"],
    "epoch": ["Validating epoch {i}", "Loss = {v}", "Acc = 0.5"],
    "logger": ["2024-03-02 11:22:33,123 - INFO - Running validation...", "2024-03-02 11:22:33,124 - INFO - loss {v}"],
    "json": ["***** Running Evaluation *****", "{{", '  "loss": {v},', '  "acc": 0.5,', "}}"],
}


@pytest.mark.parametrize("name", EVALUATIONS_BELOW_A_NAME)
@pytest.mark.parametrize("record", ["epoch {i} loss: {t} lr 0.1", "epoch {i}\nTraining:\nloss: {t}\nacc: 0.4"])
def test_metrics_below_the_name_of_an_evaluation_are_no_training_records(tmp_path, name, record):
    block = "\n".join([record, *EVALUATIONS_BELOW_A_NAME[name]])
    text = "\n".join(block.format(i=i, t=3 - i / 100, v=4 - i / 100) for i in range(1, 21))
    table = read_one(write(tmp_path, text))
    assert (table.unit, table.step.tolist()) == ("epoch", list(range(1, 21)))
    assert values(table, "loss") == pytest.approx([3 - i / 100 for i in range(1, 21)])
    (held_out,) = (series for series in table.evals.values() if series.value[0] > 3)
    assert held_out.value.tolist() == pytest.approx([4 - i / 100 for i in range(1, 21)])


@pytest.mark.parametrize(
    ("train", "held_out"),
    [("t_loss", "v_loss"), ("loss", "vloss"), ("trainLoss", "lossVal"), ("Loss (train)", "Loss (val)"),
     ("tr_loss", "va_loss"), ("Train Loss", "Vali Loss"), ("train loss", "held-out loss"), ("loss_tr", "loss_te")],
)  # fmt: skip
@pytest.mark.parametrize(
    "line", ["epoch {i} {train}: {t} {held_out}: {v}", "epoch: {i}\n{train}: {t}\n{held_out}: {v}"]
)
def test_names_of_held_out_data_are_told_from_those_of_training(tmp_path, train, held_out, line):
    names = {"train": train, "held_out": held_out}
    table = read_one(
        write(tmp_path, "\n".join(line.format(i=i, t=3 - i / 100, v=4 - i / 100, **names) for i in range(1, 21)))
    )
    assert values(table, "loss") == pytest.approx([3 - i / 100 for i in range(1, 21)])
    (series,) = table.evals.values()
    assert series.value.tolist() == pytest.approx([4 - i / 100 for i in range(1, 21)])


def test_the_loss_of_a_value_function_is_no_evaluation(tmp_path):
    table = read_one(
        write(tmp_path, "\n".join(f"update {i} pg_loss: 1.5 v_loss: {i}.5 entropy: 0.1" for i in range(20)))
    )
    assert values(table, "loss") == [i + 2.0 for i in range(20)]


@pytest.mark.parametrize(
    "line", ["step {i} loss {t} ids [{long}]", "step {i} ids [{long}] loss {t}", "step {i} loss={t} {long}"]
)
def test_a_long_line_is_read(tmp_path, line):
    long = ", ".join(["12.5"] * 2000)
    lines = [line.format(i=i, t=3 - i / 100, long=long) for i in range(20)]
    assert values(read_one(write(tmp_path, "\n".join(lines))), "loss") == pytest.approx(
        [3 - i / 100 for i in range(20)]
    )


@pytest.mark.parametrize(
    "heading", ["===== Fold {n}/3 =====", "Starting training with seed {n}", "$ python train.py --lr 0.{n}"]
)
@pytest.mark.parametrize("record", ["epoch {i} loss {t}", "step {i} loss: {t} lr 0.1"])
def test_runs_with_a_heading_are_separate_although_their_losses_are_alike(tmp_path, heading, record):
    runs = [
        [heading.format(n=n), *(record.format(i=i, t=0.5 + 0.01 * (i % 3)) for i in range(1, 11))] for n in range(1, 4)
    ]
    tables = read(write(tmp_path, "\n".join(line for run in runs for line in run)))
    assert [(table.step[0], table.step[-1]) for table in tables] == [(1, 10)] * 3
    assert tables[1].facts["run"] == "run 2 of 3 in this file"


def test_a_run_that_continues_below_a_second_command_is_one_run(tmp_path):
    lines = [f"step {i} loss {3 - i / 100}" for i in range(40)]
    lines = ["python train.py --lr 0.1", *lines[:20], "python train.py --lr 0.1 --continue", *lines[20:]]
    assert len(read_one(write(tmp_path, "\n".join(lines)))) == 40


@pytest.mark.parametrize("row", ["{i}00 {t} 0.001", "{i}00\t{t}", "{i}00, {t}, 0.5", "{i}00 | {t} | 12"])
def test_rows_of_numbers_between_other_lines_are_records(tmp_path, row):
    lines = ["Loading data", "The model has 123456 parameters"]
    for i in range(1, 25):
        lines += [row.format(i=i, t=round(3 - i / 10, 2)), *([f"saved model_{i}.pt"] if i % 4 == 0 else [])]
    table = read_one(write(tmp_path, "\n".join(lines)))
    assert values(table, "loss") == pytest.approx([3 - i / 10 for i in range(1, 25)])
    assert table.step.tolist() == [100.0 * i for i in range(1, 25)]


def test_rows_of_numbers_that_do_not_fall_are_no_log(tmp_path):
    rows = "\n".join(f"{i} {2 + 0.1 * (i % 7)} {5 + i / 10}" for i in range(40))
    with pytest.raises(LogRefused):
        read(write(tmp_path, f"Results of the survey\n{rows}\nSee the appendix.\n" * 3))


AS_PEOPLE_WRITE = {
    "a part with a digit in its name": ("epoch {i} Train Loss: {t} Train L1 Loss: 9.5", None),
    "a colon and a comma behind the step": ("iter {i}:, hard_loss={t}, mean_dist=0.5", None),
    "a total behind a path": ("step:{i} - actor/kl_loss:9.5 - actor/loss:{t} - critic/vf_loss:9.5", None),
    "an abbreviation before another loss": ("step {i} || KD Loss: 9.5 || Loss: {t}", None),
    "a counter before a semicolon": ("Epoch  1,  {i}/ 725; acc:  0.5; loss:  {t}; 5187 tok/s", None),
    "the data behind the metric": (
        "step {i} loss: {t}\nAccuracy of the network on the 10000 test images: {i} %",
        ("Accuracy test images", list(range(1, 25))),
    ),
}


@pytest.mark.parametrize("name", AS_PEOPLE_WRITE)
def test_lines_are_read_as_a_person_reads_them(tmp_path, name):
    line, held_out = AS_PEOPLE_WRITE[name]
    table = read_one(write(tmp_path, "\n".join(line.format(i=i, t=round(3 - i / 10, 2)) for i in range(1, 25))))
    assert table.step.tolist() == list(range(1, 25))
    assert values(table, "loss") == pytest.approx([3 - i / 10 for i in range(1, 25)])
    assert held_out is None or table.evals[held_out[0]].value.tolist() == held_out[1]


def test_statistics_of_observations_are_no_losses_of_a_game(tmp_path):
    lines = [f"epoch {i} stats_g/mean: 0.{i} stats_g/std: 0.1 stats_d/mean: 0.2 success: 0.5" for i in range(10, 40)]
    assert not read_one(write(tmp_path, "\n".join(lines))).has("loss")


def test_a_table_drawn_as_a_bar_has_one_record_for_each_full_bar(tmp_path):
    header = "     Epoch   gpu_mem       box       cls     total    labels  img_size"
    lines = [header, "Plotting labels...", ""]
    for i in range(12):
        row = f"     {i}/11     2.73G    0.0108    0.0037    {3 - i / 10:.4f}        15       640:"
        lines += [f"{row} {done:3d}%|###       | {done}/100 [00:39<35:04]" for done in (10, 60, 100, 100)]
    table = read_one(write(tmp_path, "\r".join(lines)))
    assert (table.unit, table.step.tolist()) == ("epoch", list(range(12)))
    assert values(table, "loss") == pytest.approx([3 - i / 10 for i in range(12)])


def test_a_program_that_prints_losses_is_no_log(tmp_path):
    body = "import torch\ndef train(model):\n    total_loss = 0\n    val_loss = 0\n    for x in y:\n        z = x\n"
    with pytest.raises(LogRefused):
        read(write(tmp_path, body, "train.py"))


@pytest.mark.parametrize(
    "text",
    [
        "As in the title, I get the error that loss value is NAN at 22800 steps (Second time: 29200) suddenly.\n\nThanks.\n",
        "Lowered the rate.\nusp loss: 1.1\nThe rest is as before.\n",
    ],
)
def test_a_sentence_or_one_value_in_a_text_is_no_log(tmp_path, text):
    with pytest.raises(LogRefused):
        read_one(write(tmp_path, text))
