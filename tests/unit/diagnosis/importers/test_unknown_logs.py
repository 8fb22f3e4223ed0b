"""Logs of home-made loops: the loss, the evaluations and the runs are those that a person sees."""

from __future__ import annotations

import numpy as np
import pytest
from home_made import losses, read_text


def test_a_part_that_says_it_is_all_of_the_loss_is_the_loss(tmp_path):
    lines = [f"Step: {i}, det loss: 0.6, bbox loss: 0.04, all_loss: {1 - i / 100}" for i in range(30)]
    (table,) = read_text(tmp_path, lines)
    assert losses(table) == pytest.approx([1 - i / 100 for i in range(30)])


@pytest.mark.parametrize(
    "held_out", ["test epoch:{0} || Loss:9.0", 'json_stats: {{"_type": "val_epoch", "epoch": "{0}/9", "loss": 9.0}}']
)
def test_an_evaluation_that_is_named_with_its_epoch_is_no_record(tmp_path, held_out):
    train = 'json_stats: {{"_type": "train_epoch", "epoch": "{0}/9", "loss": {1}}}'
    lines = [line.format(i, 2 - i / 10) for i in range(1, 9) for line in (train, held_out)]
    (table,) = read_text(tmp_path, lines)
    assert losses(table) == pytest.approx([2 - i / 10 for i in range(1, 9)])
    assert [series.value.tolist() for series in table.evals.values()] == [[9.0] * 8]


def test_named_values_in_braces_behind_the_word_losses_are_losses(tmp_path):
    lines = [f"Losses {{'tagger': {10 - i}.5, 'parser': 1.0}}" for i in range(8)]
    (table,) = read_text(tmp_path, lines)
    assert losses(table) == [11.5 - i for i in range(8)]
    assert table.facts["parts_of_loss"] == ["tagger_loss", "parser_loss"]


def test_a_layer_called_final_is_not_the_result_of_a_run(tmp_path):
    lines = [f"layer {name}, epoch {i}, cost {5 - i}" for name in ("1", "final") for i in range(4)]
    assert [losses(table) for table in read_text(tmp_path, lines)] == [[5.0, 4.0, 3.0, 2.0]] * 2


def test_runs_without_a_step_are_told_apart_by_their_epochs(tmp_path):
    lines = []
    for run in (1, 2):
        for epoch in range(4):
            lines += [f"Epoch {epoch}", *(f"Loss:  {run * 10 - epoch - i / 10}" for i in range(6))]
    tables = read_text(tmp_path, lines)
    assert [len(table) for table in tables] == [24, 24]
    assert [table.step.tolist() for table in tables] == [list(range(24))] * 2
    assert [losses(table)[0] for table in tables] == [10.0, 20.0]


def test_evaluations_stay_with_their_run_if_another_has_none(tmp_path):
    lines = [f"epoch: {i}/9, train_loss: {3 - i / 5}, test_loss: {4 - i / 5}" for i in range(1, 10)]
    (table,) = read_text(tmp_path, [*lines, "epoch: 1/9, train_loss: 7.5, train_acc: 0.1"])
    assert len(table) == 9
    assert len(table.evals["test_loss"].step) == 9


def test_many_lines_without_a_step_between_regular_records_leave_them_their_step(tmp_path):
    lines = []
    for i in range(20):
        lines += [f"Epoch: [0][{10 * i}/250] Loss {5 - i / 10}", *(f"part_{k} loss 0.{i % 7}" for k in range(6))]
    (table,) = read_text(tmp_path, lines)
    assert table.unit == "step"
    assert table.step.tolist() == [10.0 * i for i in range(20)]


def test_columns_beside_the_same_with_v_are_evaluations(tmp_path):
    lines = [f"Epoch {i}: v_loss {4.0 + i}  loss {3.0 - i}  v_kl 5.0  kl 4.0  v_rec 2.0  rec 1.0" for i in range(3)]
    (table,) = read_text(tmp_path, lines)
    assert losses(table) == [3.0, 2.0, 1.0]
    assert table.evals["val_loss"].value.tolist() == [4.0, 5.0, 6.0]


def test_monitor_csv_has_the_reward_of_each_episode(tmp_path):
    rows = [f"{i}.5,{10 + i},{i / 10}" for i in range(30)]
    (table,) = read_text(
        tmp_path, ['#{"t_start": 1561465272.1, "env_id": "CartPole-v1"}', "r,l,t", *rows], "monitor.csv"
    )
    assert table.series("reward").value.tolist() == [i + 0.5 for i in range(30)]


def test_records_without_a_step_that_are_each_evaluated_are_epochs(tmp_path):
    rows = [f"{i},{2 - i / 10},{3 - i / 10}" for i in range(9)]
    (table,) = read_text(tmp_path, [",loss,val_loss", *rows], "history.csv")
    assert table.unit == "epoch"
    (text,) = read_text(tmp_path, ["Layer (type)  Output Shape", "dense (Dense)  (None, 5)", ",loss,val_loss", *rows])
    assert text.unit == "epoch"


def test_the_evaluation_section_of_a_box_is_no_reward_of_the_training(tmp_path):
    lines = []
    for i in range(1, 7):
        train = ["| train/ | |", f"|    loss | {9 - i} |"]
        lines += [
            "-" * 20,
            "| rollout/ | |",
            f"|    ep_rew_mean | {i} |",
            "| time/ | |",
            f"|    total_timesteps | {i}00 |",
        ]
        lines += [*train, "-" * 20, "-" * 20, "| eval/ | |", "|    mean_reward | 99 |"]
        lines += ["| time/ | |", f"|    total_timesteps | {i}50 |", *train, "-" * 20]
    (table,) = read_text(tmp_path, lines)
    assert table.series("reward").value.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert table.evals["eval/mean_reward"].value.tolist() == [99.0] * 6
    assert np.array_equal(table.series("loss").step, np.sort([[i * 100, i * 100 + 50] for i in range(1, 7)], axis=None))
