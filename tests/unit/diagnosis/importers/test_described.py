"""Formats that a description is enough for: each log gives its losses, steps and unit, with evaluations apart."""
# ruff: noqa: E501

from __future__ import annotations

import json
from importlib.metadata import EntryPoint
from types import SimpleNamespace

import pytest

from holdfast.core.base.errors import LogRefused
from holdfast.diagnosis.diagnose import diagnose
from holdfast.diagnosis.importers import read
from holdfast.diagnosis.importers.formats import described
from holdfast.diagnosis.importers.reading.described_line import LogDescription

N = 12


def loss(i: int) -> float:
    return 5.0 - 0.25 * i


def text(line, count: int = N) -> str:
    return "\n".join(line(i) for i in range(count)) + "\n"


def box(i: int) -> str:
    rows = [("rollout/", ""), ("   ep_rew_mean", f"{20 + i}"), ("train/", ""), ("   loss", f"{loss(i)}")]
    width = "-" * 34
    return "\n".join([width, *(f"| {key:<18} | {value:<9} |" for key, value in rows), width])


def coqui(i: int) -> str:
    lines = [
        f"   --> STEP: {i}/36 -- GLOBAL_STEP: {25 * i}",
        f"     | > loss_0: 1.0  ({i})",
        f"     | > loss_1: {loss(i) - 1}  (9.0)",
    ]
    return "\n".join(
        [*lines, "     | > current_lr_1: 0.0002 ", "", "  --> EVAL PERFORMANCE", f"     | > avg_loss_1: {i}.5 (+0.1)"]
    )


SAMPLES = {
    "opennmt": (text(lambda i: f"[2021-02-05 10:00:00,123 INFO] Step {50 * i}/100000; acc:  4.71; ppl: 8342.21; xent: {loss(i):.2f}; "
                     f"lr: 0.00001; 16132/15941 tok/s;     12 sec\n[2021 INFO] Validation perplexity: 99.5"), 50, "step"),
    "joeynmt": (text(lambda i: f"2020-01-01 00:00:00 - INFO - joeynmt.training - Epoch   1, Step: {100 * i:8d}, Batch Loss: {loss(i):12.6f}, "
                     f"Tokens per Sec:     3456, Lr: 0.000200\nValidation result (greedy) at epoch 1, step {100 * i}: bleu: 2.34, loss: 9.5"), 100, "step"),
    "espnet": (text(lambda i: f"[host] 2021 (trainer:679) INFO: 1epoch:train:{i * 100 + 1}-{i * 100 + 100}batch: iter_time=0.123, "
                    f"loss_ctc=9.0, acc=0.5, loss={loss(i)}, optim0_lr0=1.0e-05, train_time=1.5"), 100, "step"),
    "darknet": (text(lambda i: f" {i + 1}: {loss(i):.6f}, {9:.6f} avg loss, 0.001000 rate, 3.100000 seconds, {64 * i} images"), 1, "step"),
    "caffe": (text(lambda i: f"I0613 17:29:58.112738  1860 solver.cpp:228] Iteration {500 * i}, loss = {loss(i)}\n"
                   f"I0613 17:29:58.112803  1860 solver.cpp:244]     Train net output #0: loss = {loss(i)} (* 1 = {loss(i)} loss)\n"
                   f"I0613 17:29:58.112829  1860 sgd_solver.cpp:106] Iteration {500 * i}, lr = 0.1"), 500, "step"),
    "paddle": (text(lambda i: f"[12/25 14:22:40] epoch:[{i + 1:3d}/25 ] train step:0    loss: {loss(i)} lr: 0.010000 top1: 0.01 batch_cost: 7.4 sec, "
                    f"ips: 8.6 instance/sec.\n[12/25 14:22:41] epoch:[{i + 1:3d}/25 ] val step:0    loss: 9.5 top1: 0.1 batch_cost: 4.2 sec\n"
                    f"[12/25 14:22:42] END epoch:{i + 1}   train loss_avg: 8.5 batch_cost_sum: 1 sec"), 1, "epoch"),
    "mmengine_text": (text(lambda i: f"2023/05/12 10:00:00 - mmengine - INFO - Epoch(train)  [{1 + i // 4}][{50 * (1 + i % 4):4d}/200]  lr: 1.9820e-03  "
                           f"eta: 7:52:41  time: 0.3230  data_time: 0.0090  memory: 3680  loss: {loss(i)}  loss_cls: 0.5"), 50, "step"),
    "detectron2_text": (text(lambda i: f"[11/18 14:20:37] d2.utils.events INFO:  eta: 21:48:59  iter: {20 * i + 19}  total_loss: {loss(i)}  "
                             f"loss_cls: 0.05  time: 0.6964  data_time: 0.3743  lr: 0.01019  max_mem: 11811M"), 20, "step"),
    "cyclegan": (text(lambda i: f"(epoch: 1, iters: {100 * (i + 1)}, time: 2.416, data: 9.430) D_A: 1.0 G_A: {loss(i) - 2} cycle_A: 1.0 "), 100, "step"),
    "vits": (text(lambda i: f"2023-07-22 21:56:12,356\t44k\tINFO\tLosses: [1.0, {loss(i) - 4}, 1.0, 1.0, 1.0], step: {800 * i}, lr: 0.0001"), 800, "step"),
    "yolo_txt": (text(lambda i: f"     {i}/299     4.54G    0.1096    0.1037   0.07185    {loss(i)}        78       640  0.008822    0.1143"), 1, "epoch"),
    "torchtune": (text(lambda i: f"Step {i + 1} | loss:{loss(i)} lr:2e-05 tokens_per_second_per_gpu:1234.5 grad_norm:1.5 "), 1, "step"),
    "sockeye": (text(lambda i: f"[2023-11-20:18:37:56:INFO:sockeye.training:__call__] E=0 B={50 * i}\ts/sec=228.85 ppl=9.5\n"
                     f"[2023-11-20:18:37:56:INFO:sockeye.training:_create_checkpoint] Checkpoint [{i + 1}]\tUpdates={4000 * i} Epoch=3 Time-cost=1.5\n"
                     f"[2023-11-20:18:37:56:INFO:sockeye.training:_create_checkpoint] Checkpoint [{i + 1}]\tTrain-ppl={2.718281828459045 ** loss(i):.9f}\n"
                     f"[2023-11-20:18:37:56:INFO:sockeye.training:_evaluate] Checkpoint [{i + 1}]\tValidation-ppl=110.5\tValidation-bleu=0.03"), 4000, "step"),
    "olmo": (text(lambda i: f"2025-12-12 11:05:02.009\thost:0\tolmo.train:979\tINFO\t[step={i + 1}/15000,epoch=0]\n    optim/total_grad_norm=0.2370\n"
                  f"    train/CrossEntropyLoss={loss(i)}\n    train/Perplexity=9.5\n    throughput/total_tokens=4,194"), 1, "step"),
    "boxes": (text(box), None, "record"),
    "coqui": (text(coqui), 25, "step"),
    "generic_text": (text(lambda i: f"Epoch: [0][{10 * i}/5005]\tTime  0.5 ( 0.6)\tLoss {loss(i):.4e} (6.9e+00)\tAcc@1   0.00 (  0.10)"), 10, "step"),
    "keras_csv": ("epoch,accuracy,loss,val_loss\n" + text(lambda i: f"{i},0.5,{loss(i)},9.5"), 1, "epoch"),
    "spinup": ("Epoch\tAverageEpRet\tLossPi\tLossV\n" + text(lambda i: f"{i}\t{i - 200}\t1.0\t{loss(i) - 1}"), 1, "epoch"),
    "yolo_csv": ("   epoch,  train/box_loss, train/cls_loss,  val/box_loss\n" + text(lambda i: f"  {i + 1},  1.0,  {loss(i) - 1}, 9.5"), 1, "epoch"),
    "sb3_csv": ("time/total_timesteps,train/loss,rollout/ep_rew_mean\n" + text(lambda i: f"{200 * i},{loss(i)},{i}"), None, "record"),
    "json_array": (json.dumps([{"main/loss": loss(i), "validation/main/loss": 9.5, "iteration": 100 * i, "epoch": i} for i in range(N)]), 100, "step"),
    "stylegan": (text(lambda i: json.dumps({"Loss/G/loss": {"num": 8, "mean": loss(i) - 1, "std": 1}, "Loss/D/loss": {"num": 8, "mean": 1.0, "std": 1},
                                            "Progress/tick": {"num": 1, "mean": i, "std": 0}})), 1, "tick"),
    "mmengine_json": (text(lambda i: json.dumps({"mode": "train", "epoch": 1, "iter": 10 * i, "lr": 0.01, "data_time": 0.2, "loss": loss(i)}) + "\n"
                           + json.dumps({"mode": "val", "epoch": 1, "iter": 64, "lr": 0.01, "loss": 9.5, "mIoU": 0.9})), 10, "step"),
    "detectron2_json": (text(lambda i: json.dumps({"iteration": 20 * i, "total_loss": loss(i), "lr": 0.01, "loss_cls": 0.1})), 20, "step"),
}  # fmt: skip


@pytest.mark.parametrize("name", SAMPLES)
def test_losses_steps_and_unit_are_read_and_evaluations_are_apart(tmp_path, name):
    sample, interval, unit = SAMPLES[name]
    (tmp_path / "log").write_text(sample)
    (table,) = read(tmp_path / "log")
    assert (table.format, table.unit) == (name, unit)
    assert table.series("loss").value.tolist() == pytest.approx([loss(i) for i in range(N)], abs=0.01)
    if interval is not None:
        assert set(table.step[1:] - table.step[:-1]) == {float(interval)}
    assert all(9.5 not in table.columns[column] for column in table.columns if "loss" in column)


READ_WITHOUT_DESCRIPTION = sorted(
    set(SAMPLES) - {"generic_text", "json_array", "cyclegan", "vits", "yolo_txt", "darknet", "sockeye", "boxes"}
)


@pytest.mark.parametrize("name", READ_WITHOUT_DESCRIPTION)
def test_the_generic_reader_reads_a_format_whose_description_is_removed(tmp_path, name, monkeypatch):
    from holdfast.diagnosis import importers

    for registry in (importers._DESCRIBED_FORMATS, importers._TABLE_FORMATS):
        monkeypatch.delitem(registry, name, raising=False)
    (tmp_path / "log").write_text(SAMPLES[name][0])
    (table,) = read(tmp_path / "log")
    assert len(table.series("loss").value) == N


def test_a_keras_history_is_read_by_epochs(tmp_path):
    (tmp_path / "h.json").write_text(json.dumps({"loss": [3.0, 2.0, 1.0], "val_loss": [4.0, 5.0, 6.0]}))
    (table,) = read(tmp_path / "h.json")
    assert (table.unit, table.step.tolist(), table.series("loss").value.tolist()) == (
        "epoch",
        [1, 2, 3],
        [3.0, 2.0, 1.0],
    )
    assert table.evals["val_loss"].value.tolist() == [4.0, 5.0, 6.0]


def test_a_step_on_the_line_before_belongs_to_the_loss_and_best_lines_are_no_records(tmp_path):
    lines = [
        f"batch i:{i}, episode_len:28\nkl:0.01,loss:{loss(i)},entropy:4.3\nBest loss so far: 0.5" for i in range(2, 14)
    ]
    (tmp_path / "log").write_text("\n".join(lines))
    (table,) = read(tmp_path / "log")
    assert table.step.tolist() == list(range(2, 14))
    assert table.series("loss").value.tolist() == [loss(i) for i in range(2, 14)]


def test_evaluations_named_on_the_line_are_no_training_records(tmp_path):
    words = ("Valid | epoch {i} | loss 9.5", "DEV : loss 9.5 - score 0.7", "Test: loss 9.5 acc 0.4", "[val] loss: 9.5")
    for word in words:
        (tmp_path / "log").write_text(
            "".join(f"Train | epoch {i} | loss {loss(i)}\n{word.format(i=i)}\n" for i in range(N))
        )
        (table,) = read(tmp_path / "log")
        assert (table.unit, table.series("loss").value.tolist()) == ("epoch", [loss(i) for i in range(N)]), word
        assert any(9.5 in series.value for series in table.evals.values()), word


def test_runs_appended_to_one_file_are_judged_each_by_itself(tmp_path):
    rows = "".join(f"step {i} loss {6.0 - 0.1 * i}\n" for i in range(40))
    (tmp_path / "log").write_text(rows * 3)
    tables = read(tmp_path / "log")
    assert [len(table) for table in tables] == [40, 40, 40]
    assert tables[0].facts["run"] == "run 1 of 3 in this file"


def test_of_a_page_only_the_fenced_blocks_are_logs(tmp_path):
    first = "".join(f"step {i} loss {loss(i)}\n" for i in range(5))
    second = "".join(f"step {i} loss {9 - i}\n" for i in range(4))
    page = (
        f"# Help\nAt step 900 loss 99.5 came. And step 901 loss 88.5.\n```\n{first}```\nThen:\n```text\n{second}```\n"
    )
    (tmp_path / "issue.md").write_text(page)
    tables = read(tmp_path / "issue.md")
    assert [table.series("loss").value.tolist() for table in tables] == [[loss(i) for i in range(5)], [9, 8, 7, 6]]
    (tmp_path / "issue.md").write_text("# Help\nAt step 900 loss 99.5 came.\n```\nno log\n```\n")
    with pytest.raises(LogRefused, match="fenced"):
        read(tmp_path / "issue.md")


def test_a_log_without_a_loss_is_not_judged_and_names_the_option(tmp_path):
    (tmp_path / "log.csv").write_text("step,acc,cost_total\n" + "".join(f"{i},0.5,{i}.5\n" for i in range(30)))
    (table,) = read(tmp_path / "log.csv")
    report = diagnose(table)
    assert not report.is_judged
    assert report.summary.startswith("Not judged: no training loss found. Columns: acc, cost_total.")
    assert report.summary.endswith("--map loss=cost_total")


def test_mapping_holds_for_evaluations_and_steps_of_any_format(tmp_path):
    (tmp_path / "log").write_text(
        "".join(f"step:{i}/9 val_loss:{i}.5 train_time:{i}ms step_avg:1ms\n" for i in range(30))
    )
    (table,) = read(tmp_path / "log", mapping={"loss": "val_loss"})
    assert table.series("loss").value.tolist() == [i + 0.5 for i in range(30)]


def test_an_installed_package_adds_a_format(tmp_path, monkeypatch):
    mine = LogDescription(name="mine", description="x", record=r"^@@ (?P<step>\d+) (?P<loss>[\d.]+)$")
    points = [
        SimpleNamespace(name="mine", load=lambda: mine),
        EntryPoint("broken", "no.such.module:x", "holdfast.formats"),
    ]
    monkeypatch.setattr(described, "entry_points", lambda group: points)
    assert described.all_descriptions()[-2] is mine


def test_the_console_of_keras_is_read_by_epochs_with_its_validation(tmp_path):
    lines = [
        f"Epoch {i + 1}/{N}\n1875/1875 [==============================] - 3s 2ms/step - loss: {loss(i)} - val_loss: 9.5"
        for i in range(N)
    ]
    (tmp_path / "log").write_text("\n".join(lines))
    (table,) = read(tmp_path / "log")
    assert (table.unit, table.step.tolist()) == ("epoch", list(range(1, N + 1)))
    assert table.series("loss").value.tolist() == [loss(i) for i in range(N)]
    assert table.evals["val_loss"].value.tolist() == [9.5] * N


UNKNOWN = {
    "counter_without_a_name": (lambda i, v: f"| epoch   1 | {i * 10:5d}/ 9999 batches | lr 20.00 | loss {v:5.2f}", 10, "step"),
    "number_in_front": (lambda i, v: f"[{i}]\ttrain-logloss:{v:.5f}\tvalid-logloss:{v + 1:.5f}", 1, "step"),
    "value_at_a_step": (lambda i, v: f"2017-08-18 02:43:53,914:\tLoss at step {i}: {v:.6f}", 1, "step"),
    "losses_by_custom": (lambda i, v: f"(epoch: 1, iters: {i * 10}, time: 2.4) D_A: {v / 2:.3f} G_A: {v / 2:.3f}", 10, "step"),
    "list_of_losses": (lambda i, v: f"INFO Losses: [{v / 2:.4f}, {v / 2:.4f}], step: {i}, lr: 0.0001", 1, "step"),
    "chinese": (lambda i, v: f"INFO \u635f\u5931\uff1a{v:.4f}\uff0c\u6b65\u6570\uff1a{i}\uff0c\u5b66\u4e60\u7387\uff1a0.0001", 1, "step"),
    "rows_below_a_header": (lambda i, v: f"{i:<9} {v:<11.6f} {v + 1:<11.6f} 00:12", 1, "epoch"),
    "rows_of_markdown": (lambda i, v: f"| {i} | {v:.4f} | {v + 1:.4f} |", 1, "epoch"),
    "sum_among_numbers": (lambda i, v: f" {i}/99  4.5G  {v / 4:.4f}  {v * 3 / 4:.4f}  {v:.4f}  78", 1, "epoch"),
    "step_in_thousands": (lambda i, v: f"INFO train.py:357 step:{i}K smpl:3M loss:{v:.3f} grdn:8.4 lr:1.0e-05", 1000, "step"),
}  # fmt: skip
HEADERS = {
    "rows_below_a_header": "epoch     train_loss  valid_loss  time",
    "rows_of_markdown": "| epoch | train_loss | val_loss |\n|---|---|---|",
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_log_of_unknown_origin_is_read_as_a_person_reads_it(tmp_path, name):
    line, factor, unit = UNKNOWN[name]
    wanted = [5 - 0.05 * i for i in range(1, 41)]
    lines = [HEADERS.get(name, ""), *(line(i, value) for i, value in enumerate(wanted, 1))]
    (tmp_path / "log").write_text("\n".join(lines).lstrip("\n") + "\n")
    (table,) = read(tmp_path / "log")
    assert table.unit == unit
    assert table.step.tolist() == [factor * i for i in range(1, 41)]
    assert table.series("loss").value.tolist() == pytest.approx(wanted, abs=0.01)
    if "valid" in lines[0] + lines[-1] or "val_loss" in lines[0]:
        assert len(table.evals) == 1


def test_batches_of_another_total_after_an_epoch_are_an_evaluation(tmp_path):
    lines = []
    for epoch in range(1, 6):
        lines += [f"Epoch {epoch}/5", *(f"step {i * 10}/60 - loss: {5 - epoch / 2:.4f}" for i in range(1, 7))]
        lines += ["Eval begin...", *(f"step {i * 10}/20 - loss: {6 - epoch / 2:.4f}" for i in range(1, 3))]
    (tmp_path / "log").write_text("\n".join(lines))
    (table,) = read(tmp_path / "log")
    assert table.step.tolist() == [10.0 * i for i in range(1, 31)]
    assert table.evals["eval_loss"].value.tolist() == [6 - epoch / 2 for epoch in range(1, 6) for _ in range(2)]


def test_a_metric_on_the_line_after_a_record_belongs_to_it(tmp_path):
    lines = [line for i in range(30) for line in (f"epoch: 0|step: {i}|loss: 0.{i}1", f"average reward score: {i}.5")]
    (tmp_path / "log").write_text("\n".join(lines))
    (table,) = read(tmp_path / "log")
    assert len(table) == 30
    assert table.series("reward").value.tolist() == [i + 0.5 for i in range(30)]


def test_mapped_name_that_no_line_has_is_refused(tmp_path):
    path = tmp_path / "train.log"
    path.write_text("".join(f"step {n} loss {3 - n / 1000:.4f}\n" for n in range(30)))
    for mapping in ({"loss": "nll"}, {"step": "iteration"}):
        with pytest.raises(LogRefused, match="the log has no column"):
            read(path, mapping=mapping)


def test_lines_after_the_last_loss_are_said_to_be_unread(tmp_path):
    lines = [f"step {n} loss {3 - n / 1000:.4f}" for n in range(100)]
    lines += [f"step {n} criterion 90.0" for n in range(100, 200)]
    path = tmp_path / "train.log"
    path.write_text("\n".join(lines))
    (table,) = read(path)
    assert any(limit.code == "lines_lost" and "100 lines after step 99" in limit.text for limit in table.limits)
