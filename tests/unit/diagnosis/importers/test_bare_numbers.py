"""Numbers without names, totals without a name, printed tensors, and other habits of home-made logs."""

from __future__ import annotations

import json

import numpy as np
import pytest
from home_made import losses, read_text

from holdfast.diagnosis.diagnose import diagnose

FALLING = [round(2.0 * 0.99**i + 0.01, 5) for i in range(60)]


@pytest.mark.parametrize("lines", [["loss", *map(str, FALLING)], [str(v) for v in FALLING], [f"{v}," for v in FALLING]])
def test_a_column_alone_has_the_name_above_it_or_that_of_its_file(tmp_path, lines):
    (table,) = read_text(tmp_path, lines, "train_losses.txt")
    assert (table.unit, losses(table)) == ("record", FALLING)


def test_numbers_in_a_file_of_another_name_are_not_judged(tmp_path):
    (table,) = read_text(tmp_path, map(str, FALLING), "measured.txt")
    assert not diagnose(table).is_judged
    assert any("--map loss=measured" in limit.text for limit in table.limits)


@pytest.mark.parametrize("count", [60, 4000])
def test_rows_without_names_whose_first_number_is_the_sum_of_the_rest_begin_with_the_loss(tmp_path, count):
    values = [2.0 + 0.5 ** (i / 20) for i in range(count)]
    (table,) = read_text(tmp_path, [f"{v:.6f},{0.75 * v:.6f},{0.25 * v:.6f}" for v in values], "out.csv")
    assert losses(table) == pytest.approx(values, abs=1e-5)


def test_each_name_of_a_deepxde_header_stands_for_every_part_of_the_loss(tmp_path):
    rows = [f"{i * 1000:e} {3 - i / 10:e} {1:e} {9 - i / 10:e} {7:e}" for i in range(12)]
    (table,) = read_text(tmp_path, ["# step, loss_train, loss_test, metrics_test", *rows], "loss.dat")
    assert table.step.tolist() == [i * 1000.0 for i in range(12)]
    assert losses(table) == pytest.approx([4 - i / 10 for i in range(12)])
    assert table.evals["val_loss_0"].value[0] == 9.0


def test_a_table_with_one_metric_in_each_row_has_a_column_for_each(tmp_path):
    rows = [f"a,{name},{i * 10},{value}" for i, v in enumerate(FALLING) for name, value in (("loss", v), ("acc", 0.5))]
    (table,) = read_text(tmp_path, ["Run,metric,step,value", *rows], "export.csv")
    assert losses(table) == FALLING
    assert table.step.tolist() == [i * 10.0 for i in range(60)]
    (summary,) = read_text(tmp_path, ["metric,value", "loss,0.5", "acc,0.9", "f1,0.8"], "results.csv")
    assert not diagnose(summary).is_judged


@pytest.mark.parametrize("form", ["tensor({0}, device='cuda:0', grad_fn=<NllLossBackward0>)", "np.float64({0})"])
def test_printed_tensors_and_numpy_numbers_are_numbers(tmp_path, form):
    printed = [form.format(v) for v in FALLING]
    (text,) = read_text(tmp_path, [f"epoch {i} loss: {p}" for i, p in enumerate(printed)])
    (table,) = read_text(tmp_path, ["step,loss", *(f'{i},"{p}"' for i, p in enumerate(printed))], "log.csv")
    (lists,) = read_text(tmp_path, [json.dumps({"loss": printed})], "history.json")
    assert [losses(each) for each in (text, table, lists)] == [FALLING] * 3


def test_a_list_of_thousands_of_losses_has_no_epochs(tmp_path):
    for count, unit in ((60, "epoch"), (3000, "record")):
        (table,) = read_text(tmp_path, [json.dumps({"loss": [1 + 1 / (i + 1) for i in range(count)]})], "history.json")
        assert (table.unit, len(table)) == (unit, count)


def test_a_part_that_is_the_sum_of_all_others_is_the_loss(tmp_path):
    lines = [f"Epoch: {i} avg_loss_a: {v + 2} origin_loss_a: {v} cluster_loss_a: 2.0" for i, v in enumerate(FALLING)]
    (table,) = read_text(tmp_path, lines)
    assert losses(table) == pytest.approx([v + 2 for v in FALLING])


def test_counters_below_a_path_are_steps_and_a_return_outranks_a_success_rate(tmp_path):
    rows = [f"{i * 0.1},{i - 9.0},{2000 * i}" for i in range(40)]
    (table,) = read_text(tmp_path, ["success_rate,rollout/return,total/steps", *rows], "progress.csv")
    assert table.step.tolist() == [2000.0 * i for i in range(40)]
    assert table.series("reward").value.tolist() == [i - 9.0 for i in range(40)]


def test_rows_that_share_an_episode_are_records_of_their_own(tmp_path):
    rows = [f"{i // 20},{i % 7},{i * 0.01:.2f}" for i in range(200)]
    (table,) = read_text(tmp_path, ["episode,action,reward", *rows], "actions.csv")
    assert (table.unit, len(table)) == ("record", 200)


WRITTEN = {
    "a heading between dashes": ("{0}\n----Iteration: {1}000----\nLoss: {2} Loss_u: 1.0 Loss_v: 2.0", "step", 1000),
    "a cost in seconds": ("Epoch {1} Train, reg:0.1, mae:{2}, Cost: 71.7 sec", "epoch", 1),
    "dashes as separators": ("0000000{1}) perceptual - 53.9; warp_loss - {2:.5f}", "step", 1),
    "a step right behind a time": ("2019-11-08 23:37:0{1}iters: {1}, loss:{2}, accuracy:0.5", "step", 1),
    "an epoch without a gap": ("2020-04-19 - root - Epoch{1} loss = {2}", "epoch", 1),
    "a bar behind its percents": (
        "Steps:  {1}%|#  | {1}0/100 [00:10<01:00, 2.0s/it, lr=1e-5, step_loss={2}]",
        "step",
        10,
    ),
    "epoch and batch in brackets": ("[1, {1}00] loss: {2}", "step", 100),
    "a batch of WeNet": ("DEBUG TRAIN Batch 0/{1}00 loss {2:.6f} loss_att 1.0 lr 0.001 rank 0", "step", 100),
    "a loss of the batch": ("Epoch 1/5:  {1}%|#  | {1}0/100 [00:10<00:00, 9.5img/s, loss (batch)={2}]", "step", 10),
    "a number before brackets": ("{1} [D loss: {2}, acc.: 50.00%]", "step", 1),
    "a dictionary on several lines": (
        "Step {1}00 per-step time 0.5s\n 'Loss/cls_loss': 0.1,\n 'Loss/total_loss': {2},",
        "step",
        100,
    ),
    "an iteration that is an epoch": ("iteration:1 step:{1}/652, NER loss:{2:9.6f}", "step", 1),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_home_made_lines_are_read_as_a_person_reads_them(tmp_path, name):
    line, unit, factor = WRITTEN[name]
    (table,) = read_text(tmp_path, [line.format("-" * 20, i, FALLING[i]) for i in range(1, 9)])
    assert (table.unit, table.step.tolist()) == (unit, [factor * i for i in range(1, 9)])
    assert losses(table) == pytest.approx(FALLING[1:9])
    assert not table.evals


def test_groups_below_an_average_are_neither_records_nor_leak_out_of_the_validation(tmp_path):
    groups = [
        f"  bird_complete95 = {k}, forest2water2 = 0  [n = 3{k}]:\tloss = {k + 1}.5  exp loss = 0.5  prob = 0.25   acc = 0.9"
        for k in range(3)
    ]
    lines = []
    for i in range(12):
        lines += [f"Epoch [{i}]:", "Training:", f"Average incurred loss: {FALLING[i]}", *groups, ""]
        lines += ["Validation:", "Average incurred loss: 9.0", *groups, "Current lr: 0.001"]
    (table,) = read_text(tmp_path, lines)
    assert (table.unit, losses(table)) == ("epoch", FALLING[:12])
    assert table.evals["validation_incurred loss"].value.tolist() == [9.0] * 12


def test_objects_of_a_graph_are_no_records(tmp_path):
    graph = "dict_items([('rewards', <tf.Tensor 'rewards:0' shape=(?, 1) dtype=float32>), ('batch_size', 64)])"
    (table,) = read_text(tmp_path, [graph, *(f"mean reward: {v}" for v in FALLING)])
    assert table.series("reward").value.tolist() == FALLING


def test_a_run_begins_wherever_the_first_line_comes_again(tmp_path):
    def run(hour):
        body = [f"2024-01-01 0{hour}:{i // 60:02}:{i % 60:02} | INFO | loss: {v}" for i, v in enumerate(FALLING)]
        return [f"2024-01-01 0{hour}:00:00 | INFO | main:1{hour} - run run run", *body]

    tables = read_text(tmp_path, [*run(1), *run(2), *run(3)])
    assert [losses(table) for table in tables] == [FALLING] * 3
    assert not any(diagnose(table).verdicts for table in tables)


def test_few_rewards_without_a_step_may_be_those_of_several_policies(tmp_path):
    rewards = [-5.0, -1.0] * 12 + [-40.0, -39.0] * 10
    (table,) = read_text(tmp_path, [f"policy {'ab'[i % 2]}: avg_reward: {r}" for i, r in enumerate(rewards)])
    assert diagnose(table).verdicts == []
    assert np.array_equal(table.series("reward").value, rewards)


@pytest.mark.parametrize("name", ["score", "Average Score"])
def test_the_score_of_an_episode_is_its_reward_and_its_length_no_step(tmp_path, name):
    (table,) = read_text(tmp_path, [f"{'Episode'} {i}\t{name}: {v}" for i, v in enumerate(FALLING)])
    assert table.series("reward").value.tolist() == FALLING
    rows = [f"{i},{v},{70 + 13 * (i % 3)}" for i, v in enumerate(FALLING)]
    (table,) = read_text(tmp_path, [f"Episode,{name},Steps", *rows], "train_log.csv")
    assert table.step.tolist() == list(range(60))


def test_columns_that_pandas_writes_as_objects_are_lists(tmp_path):
    columns = {
        name: {str(i): v + shift for i, v in enumerate(FALLING)} for name, shift in (("loss", 0), ("val_loss", 1))
    }
    (table,) = read_text(tmp_path, [json.dumps(columns)], "history.json")
    assert losses(table) == FALLING
    assert len(table.evals["val_loss"].value) == 60
