"""Logs in structured formats: CSV, JSON, TensorBoard, run directories."""

from __future__ import annotations

import json
import math
import struct

import numpy as np
import pytest

from holdfast.core.base.errors import LogRefused, MissingDependency
from holdfast.core.record.journal import Journal, dumps
from holdfast.diagnosis.importers import detect_format, read
from holdfast.diagnosis.importers.reading.tfrecord import masked_crc


def read_one(path, **options):
    (table,) = read(path, **options)
    return table


def values(table, name):
    return table.series(name).value.tolist()


def limit_codes(table):
    return {limit.code for limit in table.limits}


def write(tmp_path, text, name="log"):
    path = tmp_path / name
    path.write_text(text)
    return path


# ---- CSV


def test_measurements_csv_empty_cells_are_read_as_nan(tmp_path):
    head = "global_step,grad_norm,loss,lr,train/loss,validation/loss,score,total_duration\n"
    rows = [f"{i},1.5,{5 - i * 0.1:.2f},0.001,,,,\n" for i in range(30)]
    rows[10] = "10,,,,1.0,2.0,3.0,4.0\n"  # an evaluation
    rows[25] = "25,,4.5,0.001,,,,\n"  # the gradient norm alone was NaN
    rows[28] = rows[28].replace("28,1.5,2.20", "28,,")  # both were; the learning rate is still there
    rows[29] = "29,,,,,,,\n"  # nothing is left
    path = write(tmp_path, head + "".join(rows))
    assert detect_format(path) == "measurements_csv"
    table = read_one(path)
    assert table.step.tolist() == [i for i in range(30) if i != 10]
    assert np.isnan(values(table, "loss")).sum() == 2
    assert np.isnan(values(table, "grad_norm")).sum() == 3
    assert "nan_hidden" in limit_codes(table)
    assert table.evals["validation/loss"].value.tolist() == [2.0]
    assert table.evals["train/loss"].step.tolist() == [10.0]


def test_lightning_csv_empty_cells_are_not_nan(tmp_path):
    text = "epoch,step,train_loss_epoch,train_loss_step,val_loss\n"
    for i in range(40):
        text += f"{i // 10},{i},,{i}.5,\n\n"
        if i % 10 == 9:
            text += f"{i // 10},{i},{i}.25,,{i}.75\n"
    table = read_one(write(tmp_path, text))
    assert table.format == "lightning_csv"
    assert values(table, "loss") == [i + 0.5 for i in range(40)]
    assert "nan_hidden" not in limit_codes(table)
    assert table.evals["val_loss"].value.tolist() == [9.75, 19.75, 29.75, 39.75]
    assert table.evals["train_loss_epoch"].step.tolist() == [9, 19, 29, 39]


def test_lightning_csv_reads_written_nan(tmp_path):
    table = read_one(
        write(tmp_path, "epoch,loss,step\n" + "".join(f"0,{'nan' if i > 3 else 1.0},{i}\n" for i in range(8)))
    )
    assert np.isnan(values(table, "loss")).sum() == 4


def test_wandb_chart_export_gives_a_table_for_each_run(tmp_path):
    text = (
        '"Step","a - train/loss","a - train/loss__MIN","a - train/loss__MAX","b - train/loss","b - train/loss__MIN"\n'
    )
    text += "".join(f'"{i}","{i}.5","{i}.25","{i}.75","{"" if i % 2 else i}",""\n' for i in range(30))
    first, second = read(write(tmp_path, text))
    assert (first.facts["run"], second.facts["run"]) == ("a", "b")
    assert (len(first), len(second)) == (30, 15)
    assert values(first, "loss")[3] == 3.5
    assert "averaged" in limit_codes(first)


def test_wandb_list_of_runs_is_refused(tmp_path):
    text = '"Name","State","Notes","User","Tags","Created","loss"\n"x","finished","-","","","2026","1.03"\n'
    with pytest.raises(LogRefused, match="table of runs"):
        read(write(tmp_path, text))


def test_generic_csv_with_mapping_and_other_delimiters(tmp_path):
    text = "when;wobble;extra\n" + "".join(f"{i};{i}.5;x\n" for i in range(30))
    table = read_one(write(tmp_path, text), mapping={"loss": "wobble", "step": "when"})
    assert (values(table, "loss")[2], table.step[2]) == (2.5, 2)
    plain = read_one(
        write(tmp_path, "iteration\ttraining loss\tlearning_rate\n" + "".join(f"{i}\t{i}.5\t0.1\n" for i in range(30)))
    )
    assert (plain.format, values(plain, "loss")[2], values(plain, "lr")[0]) == ("generic_csv", 2.5, 0.1)


# ---- JSON


def state(history, **more):
    return json.dumps({"global_step": 100, "max_steps": 500, "log_history": history, **more})


def test_text_in_a_cell_is_not_nan(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text("step,loss,lr\n" + "".join(f"{i},{'n/a' if i % 5 == 0 else 3 - i / 100},0.1\n" for i in range(50)))
    table = read_one(path)
    assert len(values(table, "loss")) == 40 and np.isfinite(values(table, "loss")).all()
    assert "nan_hidden" not in limit_codes(table)


def test_decimal_commas_are_points(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text(
        "epoch;loss;val_loss\n" + "".join(f"{i};{3 - i / 8:.3f};4.5\n".replace(".", ",") for i in range(20))
    )
    table = read_one(path)
    assert values(table, "loss") == [3 - i / 8 for i in range(20)]
    assert set(table.evals["val_loss"].value) == {4.5}
    assert "decimal_commas" in limit_codes(table)


def test_commas_between_thousands_cells_and_milliseconds_stay(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text("step,loss\n" + "".join(f"{i},{1000 - i}\n" for i in range(20)))
    assert values(read_one(path), "loss") == [1000 - i for i in range(20)]
    path.write_text("".join(f"2026-01-02 10:11:12,345 step {1000 + i:,} loss: {9 - i} seen 12,345\n" for i in range(8)))
    table = read_one(path)
    assert table.step.tolist() == [1000 + i for i in range(8)] and values(table, "loss") == [9 - i for i in range(8)]


def test_trainer_state_with_nan_evaluations_and_summary(tmp_path):
    history = [
        {"step": i * 10, "loss": math.nan if i == 7 else 5.0 - i, "grad_norm": 1.5, "learning_rate": 1e-4}
        for i in range(1, 11)
    ]
    history.insert(5, {"step": 50, "eval_loss": 2.5, "eval_runtime": 1.0})
    history.append({"step": 100, "train_loss": 3.0, "train_runtime": 9.0})
    table = read_one(write(tmp_path, state(history)))
    assert table.step.tolist() == [i * 10 for i in range(1, 11)]
    assert math.isnan(values(table, "loss")[6])
    assert table.evals["eval_loss"].value.tolist() == [2.5]
    assert table.facts["train_loss"] == 3.0
    assert table.facts["max_steps"] == 500
    assert "averaged" in limit_codes(table)


def test_checkpoints_are_merged_into_one_run(tmp_path):
    history = [{"step": i, "loss": 5.0 - i * 0.1} for i in range(1, 41)]
    for reached in (10, 20, 40):
        folder = tmp_path / f"checkpoint-{reached}"
        folder.mkdir()
        (folder / "trainer_state.json").write_text(state(history[:reached], global_step=reached))
    assert detect_format(tmp_path) == "hf_trainer_state"
    table = read_one(tmp_path)
    assert table.step.tolist() == list(range(1, 41))
    assert table.facts["checkpoints"] == 3


def test_trainer_state_that_is_empty_or_incomplete_is_refused(tmp_path):
    with pytest.raises(LogRefused, match="no record"):
        read(write(tmp_path, state([])))
    with pytest.raises(LogRefused):
        read(write(tmp_path, state([{"step": 1, "loss": 2.0}] * 30)[:-40]))


def test_llamafactory_log_is_read_and_one_with_progress_only_is_refused(tmp_path):
    rows = "".join(
        json.dumps({"current_steps": i * 5, "total_steps": 99, "loss": 2.0 + i, "lr": 1e-4}) + "\n"
        for i in range(1, 31)
    )
    table = read_one(write(tmp_path, rows + '{"current_steps": 999, "lo'))
    assert (table.format, table.step[0], values(table, "lr")[0]) == ("llamafactory", 5, 1e-4)
    assert "truncated" in limit_codes(table)
    with pytest.raises(LogRefused, match="no loss"):
        read(write(tmp_path, '{"current_steps": 5, "total_steps": 99, "percentage": 5.0}\n' * 3))


def test_wandb_history_and_generic_json_lines(tmp_path):
    rows = "".join(
        f'{{"_step": {i}, "_runtime": 1.0, "train/loss": {"NaN" if i == 5 else i + 0.5}, "train/grad_norm": "Infinity"}}\n'
        for i in range(30)
    )
    table = read_one(write(tmp_path, rows))
    assert table.format == "wandb_history"
    assert math.isnan(values(table, "loss")[5])
    assert math.isinf(values(table, "grad_norm")[0])
    assert not any(name.startswith("_") for name in table.columns)
    rows = "".join(
        json.dumps({"step": i, "train": {"loss": i + 0.5, "lr": 0.1}, "val_loss": 9.0}) + "\n" for i in range(30)
    )
    table = read_one(write(tmp_path, rows + "not json\n"))
    assert (table.format, values(table, "loss")[3], table.dropped) == ("generic_jsonl", 3.5, 1)
    assert len(table.evals["val_loss"].value) == 30


def test_parquet_names_the_package_it_needs(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"PAR1" + b"\0" * 50)
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        with pytest.raises(MissingDependency, match="pip install pyarrow"):
            read(path)
    else:
        with pytest.raises(LogRefused):
            read(path)


# ---- TensorBoard


def varint(n):
    out = b""
    while n > 0x7F:
        out, n = out + bytes([n & 0x7F | 0x80]), n >> 7
    return out + bytes([n])


def message(number, data):
    return varint(number << 3 | 2) + varint(len(data)) + data


def framed(data):
    head = struct.pack("<Q", len(data))
    return head + struct.pack("<I", masked_crc(head)) + data + struct.pack("<I", masked_crc(data))


def scalar(step, tag, payload):
    return framed(b"\x10" + varint(step) + message(5, message(1, message(1, tag.encode()) + payload)))


def simple(value):
    return b"\x15" + struct.pack("<f", value)


def tensor(dtype, number, data):
    return message(8, b"\x08" + varint(dtype) + message(number, data))


START = framed(b"\x09" + struct.pack("<d", 1.0) + message(3, b"brain.Event:2"))


def test_masked_crc_matches_tensorflow():
    assert masked_crc(b"123456789") == (((0xE3069283 >> 15) | (0xE3069283 << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def test_tensorboard_scalars_of_every_dtype(tmp_path):
    data = START
    payloads = [
        simple(2.5),
        tensor(1, 4, struct.pack("<f", 2.5)),
        tensor(2, 4, struct.pack("<d", 2.5)),
        tensor(19, 4, np.float16(2.5).tobytes()),
        tensor(1, 5, struct.pack("<f", 2.5)),
        tensor(2, 6, struct.pack("<d", 2.5)),
        tensor(14, 4, struct.pack("<f", 2.5)[2:]),
    ]
    for step, payload in enumerate(payloads * 4):
        data += scalar(step, "loss", payload) + scalar(step, "grad_norm", simple(math.nan))
        if step % 5 == 0:
            data += scalar(step, "train/loss", simple(9.0)) + scalar(step, "validation/loss", simple(8.0))
    path = tmp_path / "neutral_name"
    path.write_bytes(data)
    assert detect_format(path) == "tensorboard"
    table = read_one(path)
    assert values(table, "loss") == [2.5] * 28
    assert np.isnan(values(table, "grad_norm")).all()
    assert table.evals["validation/loss"].value.tolist() == [8.0] * 6
    assert 9.0 not in values(table, "loss")


def test_truncated_event_file_keeps_its_complete_records(tmp_path):
    data = START + b"".join(scalar(i, "loss", simple(i)) for i in range(30))
    path = tmp_path / "x"
    path.write_bytes(data[:-5])
    table = read_one(path)
    assert len(table) == 29
    assert "truncated" in limit_codes(table)


def test_event_files_of_a_folder_are_one_run_and_restarts_add_a_limit(tmp_path):
    for name, steps in (
        ("run/events.out.tfevents.1.a", range(30)),
        ("run/events.out.tfevents.2.a", range(20, 50)),
        ("b/x.tfevents.3", range(25)),
    ):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(START + b"".join(scalar(i, "loss", simple(i)) + scalar(i, "lr", simple(0.5)) for i in steps))
    tables = {table.path.rsplit("/", 1)[1]: table for table in read(tmp_path)}
    assert tables["run"].step.tolist() == [*range(30), *range(20, 50)]
    assert "steps_backwards" in limit_codes(tables["run"])
    assert values(tables["run"], "lr") == [0.5] * 60
    assert len(tables["b"]) == 25


def test_event_file_without_scalars_is_refused(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(START)
    with pytest.raises(LogRefused, match="no scalars"):
        read(path)


# ---- run directories


def make_run_directory(tmp_path):
    rows = [
        {"step": i, "attempt": 1, "loss": 5.0 - i * 0.1, "grad_norm": 1.0, "samples": 32, "status": "committed"}
        for i in range(20)
    ]
    rows.append({"step": 20, "attempt": 1, "loss": math.nan, "grad_norm": math.inf, "status": "skipped"})
    rows += [{"step": i, "attempt": 2, "loss": 100.0 + i, "status": "committed"} for i in range(15, 25)]
    rows += [{"step": i, "attempt": 1, "loss": 1.0 + i, "lr": math.nan, "status": "committed"} for i in range(25, 40)]
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(dumps(row) for row in rows) + b'{"step": 40, "lo')
    journal = Journal(tmp_path / "journal.jsonl", fsync=False)
    journal.write("run_begin")
    journal.write("finding", step=20, kind="nonfinite", message="loss is NaN")
    journal.write("restart")
    journal.write("shift", step=30, reason="batch size doubled")
    journal.close()
    (tmp_path / "run.json").write_text(json.dumps({"torch": "2.13", "config": {"a": 1}}))
    return tmp_path


def test_run_directory_shows_the_last_committed_attempt_of_each_step(tmp_path):
    table = read_one(make_run_directory(tmp_path))
    assert table.format == "rundir"
    assert table.step.tolist() == list(range(40))
    assert values(table, "loss")[:15] == [5.0 - i * 0.1 for i in range(15)]
    assert values(table, "loss")[15:25] == [100.0 + i for i in range(15, 25)]
    assert np.isnan(values(table, "lr")).all() and len(values(table, "lr")) == 15
    assert values(table, "batch_size") == [32.0] * 15
    assert {"rolled_back", "not_committed", "lines_lost"} <= limit_codes(table)
    assert sorted(table.evals["undone_loss"].step.tolist()) == [15, 16, 17, 18, 19, 20]
    assert {"skipped", "finding", "restart", "shift", "begin"} <= {event.kind for event in table.events}
    assert "NaN" in next(event.text for event in table.events if event.kind == "skipped")
    assert table.facts["torch"] == "2.13"


def test_run_directory_is_read_through_its_metrics_file(tmp_path):
    assert read_one(make_run_directory(tmp_path) / "metrics.jsonl").format == "rundir"


def test_run_directory_without_metrics_still_has_events(tmp_path):
    (make_run_directory(tmp_path) / "metrics.jsonl").unlink()
    table = read_one(tmp_path)
    assert len(table) == 0
    assert table.events


def test_the_hole_of_a_sparse_file_is_not_read(tmp_path):
    rows = [f'{{"step": {i}, "loss": {5 - i * 0.1}}}\n' for i in range(30)]
    path = write(tmp_path, "".join(rows[:20]), "log.jsonl")
    with path.open("ab") as file:
        file.truncate(10**10)
        file.seek(0, 2)
        file.write("\n".join(["", *rows[20:]]).encode())
    assert read_one(path).step.tolist() == list(range(30))


def test_a_row_nested_too_deep_is_a_lost_line(tmp_path):
    path = make_run_directory(tmp_path) / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + b'\n{"step": 41, "loss": ' + b"[" * 5000 + b"]" * 5000 + b"}\n")
    table = read_one(tmp_path)
    assert table.step.tolist() == list(range(40)) and table.dropped == 2


@pytest.mark.parametrize("blank", ["", " ", "  "])
def test_run_directory_reads_nan_and_infinity_with_any_spacing(tmp_path, blank):
    words = {3: "NaN", 4: "Infinity", 5: "-Infinity"}
    rows = [f'{{"step":{blank}{i},{blank}"loss":{blank}{words.get(i, "2.5")},"status":"committed"}}' for i in range(30)]
    table = read_one(write(tmp_path, "\n".join(rows) + "\n", "metrics.jsonl"))
    assert table.format == "rundir"
    loss = values(table, "loss")
    assert len(loss) == 30 and table.dropped == 0
    assert math.isnan(loss[3]) and loss[4:6] == [math.inf, -math.inf]


@pytest.mark.parametrize("step", [2**53 + 2, 10**30, 10**400, -(10**400)])
def test_run_directory_drops_a_step_too_large_for_a_float_and_adds_a_limit(tmp_path, step):
    rows = [f'{{"step":{i},"loss":2.5,"status":"committed"}}' for i in range(30)]
    rows.insert(7, f'{{"step":{step},"loss":9.5,"status":"committed"}}')
    table = read_one(write(tmp_path, "\n".join(rows) + "\n", "metrics.jsonl"))
    assert table.step.tolist() == list(range(30))
    assert table.dropped == 1 and "lines_lost" in limit_codes(table)


def test_a_list_of_one_number_is_that_number(tmp_path):
    rows = [{"learn": [3 - i / 10], "iteration": i, "test": [4 - i / 10]} for i in range(20)]
    table = read_one(write(tmp_path, json.dumps({"meta": {"iteration_count": 20}, "iterations": rows})))
    assert values(table, "loss") == [3 - i / 10 for i in range(20)]
    assert table.evals["test"].value.tolist() == [4 - i / 10 for i in range(20)]


def test_an_error_of_the_training_data_is_the_loss_of_a_table_without_one(tmp_path):
    rows = "".join(f"{i},{3 - i / 10},{4 - i / 10}\n" for i in range(20))
    table = read_one(write(tmp_path, "epoch,train_rmse,test_rmse\n" + rows))
    assert values(table, "loss") == [3 - i / 10 for i in range(20)]
    assert table.evals["test_rmse"].value.tolist() == [4 - i / 10 for i in range(20)]
