"""Files that are not logs are refused with a reason; no input hangs the reader, is executed, or raises another error."""

from __future__ import annotations

import contextlib
import gzip
import importlib.util
import os
import sys
import time
import zlib
from pathlib import Path

import pytest

from holdfast.core.base.errors import LogRefused
from holdfast.diagnosis import importers
from holdfast.diagnosis.importers import FORMATS, detect_format, read
from holdfast.diagnosis.importers.reading import log_source
from holdfast.diagnosis.importers.reading.events import find_events
from marks import slow


def write(tmp_path, data, name="x.log"):
    path = tmp_path / name
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (b"\n \n\n", "blanks"),
        (bytes(range(256)) + b"\0" * 9000, "not text"),
        (b"hello\nworld\n" * 9, "no step, loss or other metric"),
        (b'{"a": {"b": [1, 2]}}'[:-1], "JSON"),
        (b"[" * 100_000, "JSON"),
        (gzip.compress(b"loss" * 5000, mtime=0)[:30], "cannot|blanks"),
        (b'Traceback (most recent call last):\n  File "x"\nValueError: no luck\n', "ValueError: no luck"),
    ],
)
def test_file_that_is_no_log_is_refused_with_the_reason(tmp_path, data, reason):
    path = write(tmp_path, data)
    with pytest.raises(LogRefused, match=reason) as caught:
        read(path)
    assert caught.value.path == str(path)
    with pytest.raises(LogRefused):
        detect_format(path)


def test_devices_pipes_missing_and_unreadable_files_are_refused(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "empty").mkdir()
    for path in ("/dev/zero", "/dev/null", pipe, tmp_path / "nowhere", tmp_path / "empty", "a\0b", "x" * 5000):
        with pytest.raises(LogRefused):
            read(path)
    if os.geteuid() != 0:
        hidden = write(tmp_path, b"step 1 loss 2\n", "hidden")
        hidden.chmod(0)
        with pytest.raises(LogRefused, match="cannot be read"):
            read(hidden)


def test_unknown_format_is_refused_with_the_list_of_formats(tmp_path):
    with pytest.raises(LogRefused, match="megatron"):
        read(write(tmp_path, b"step 1 loss 2\n"), format="nonsense")
    assert all(FORMATS.values())


def test_folder_of_text_logs_gives_a_table_for_each_log(tmp_path):
    write(tmp_path, b"".join(b"step:%d/99 train_loss:%d.5 train_time:1ms\n" % (i, i) for i in range(30)), "a.log")
    write(tmp_path, b"nothing here\n", "b.log")
    (table,) = read(tmp_path)
    assert len(table) == 30


def test_folder_with_too_many_logs_reports_how_many_were_read(tmp_path):
    text = "".join(f"global_step={i} loss={i}.5\n" for i in range(30)).encode()
    for number in range(importers.MAX_FILES_READ + 3):
        write(tmp_path, text, f"{number:03}.log")
    tables = read(tmp_path)
    assert len(tables) == importers.MAX_FILES_READ
    (text,) = [limit.text for limit in tables[-1].limits if limit.code == "files_left"]
    assert f"of the {importers.MAX_FILES_READ + 3} files" in text


def test_console_dictionaries_are_not_evaluated(tmp_path):
    path = write(tmp_path, b"{'loss': __import__('os').abort(), 'epoch': 1}\n" + b"{'loss': 1.5, 'epoch': 1.0}\n" * 3)
    (table,) = read(path)
    assert table.columns["loss"].tolist() == [1.5] * 3


def test_line_of_many_megabytes_is_cut_and_adds_a_limit(tmp_path):
    good = b"".join(b"step:%d/99 train_loss:%d.5 train_time:1ms\n" % (i, i) for i in range(30))
    (table,) = read(write(tmp_path, good + b"x" * (9 << 20) + b"\n" + good.replace(b"step:", b"step:1")))
    assert "lines_cut" in {limit.code for limit in table.limits}
    assert len(table) == 60


def test_records_that_span_two_chunks_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(log_source, "CHUNK_BYTES", 97)
    data = b"".join(b"[batch=%d/99]:\n\t Train loss/train/total: %d.5\n\t Train lr: 0.1\n" % (i, i) for i in range(50))
    (table,) = read(write(tmp_path, data))
    assert table.columns["loss"].tolist() == [i + 0.5 for i in range(50)]
    assert table.columns["lr"].tolist() == [0.1] * 50


@pytest.mark.parametrize(
    "filler", ["\r", " ", "\t", "\n", "|", "9", "a", ".", "Train ", ":::MLL ", "{'a': ", "eval_loss ", "| a: "]
)
def test_long_repetitions_do_not_slow_down_the_patterns(tmp_path, filler):
    heads = [
        "[batch=1/9]:\n\t Train loss/train/total: 4.9",
        " iteration 1/ 9 | lm loss: 2.0E+00 |",
        ":::MLL 1 eval_loss",
        " validation loss at iteration 3 ",
        "step 1 loss 2.5 ",
        "{'loss': 1.5, 'a",
        "| epoch 001: 1 / 9 loss=1.5, num_updates=1 ",
    ]
    long = filler * (200_000 // len(filler))
    good = "".join(f"global_step={i} loss={i}.5\n" for i in range(30))
    (table,) = read(write(tmp_path, (good + long + "\n" + good).encode(), "good"))
    assert len(table) == 60
    began = time.process_time()
    text = "\n".join(part for head in heads for part in (head + long[:30_000], head + long, long[:30_000] + head))
    with contextlib.suppress(LogRefused):  # only the time counts
        read(write(tmp_path, text.encode()))
    assert time.process_time() - began < 30


@pytest.mark.parametrize("unit", [b"\0" * 100, b"x" * 100, b"global_step=1 loss=2.5\n"])
def test_small_gzip_file_that_holds_gigabytes_is_read_up_to_a_limit(tmp_path, unit, monkeypatch):
    monkeypatch.setattr(log_source, "FREE_BYTES", 1 << 20)
    monkeypatch.setattr(log_source, "CHUNK_BYTES", 1 << 20)
    packed = zlib.compressobj(1, wbits=31)
    with (tmp_path / "x.gz").open("wb") as file:
        block = unit * ((1 << 20) // len(unit))
        for _ in range(40):
            file.write(packed.compress(block))
        file.write(packed.flush())
    began = time.process_time()
    try:
        (table,) = read(tmp_path / "x.gz")
        reason = " ".join(limit.text for limit in table.limits)
    except LogRefused as error:
        reason = error.reason
    assert time.process_time() - began < 2
    if b"x" not in unit:  # refused by the first megabytes already
        assert "100 times its packed size" in reason and "gunzip" in reason


def test_many_short_and_blank_lines_are_read_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(log_source, "MAX_LINES_PER_CHUNK", 7)
    good = b"".join(b"global_step=%d loss=%d.5\n" % (i, i) for i in range(30))
    path = write(tmp_path, good + b"z\n" * 999 + b"\r\n" * 99_999 + good.replace(b"step=", b"step=1"))
    chunks = list(log_source.LogSource(path).chunks())
    assert max(chunk.count(b"\n") for chunk in chunks) <= 7 and len(chunks) < 400
    assert b"\n".join(chunks).count(b"z") == 999
    (table,) = read(path)
    assert len(table) == 60


def test_gzipped_log_is_read_whole(tmp_path):
    lines = b"".join(b"global_step=%d loss=%d.5\n" % (i, i * 7919 % 1000) for i in range(20_000))
    (table,) = read(write(tmp_path, gzip.compress(lines), "x.gz"))
    assert len(table) == 20_000 and not any("packed size" in limit.text for limit in table.limits)


@pytest.mark.parametrize(
    "word", ["grad", "watchdog ", "overflow", "nccl timeout", "loss ", "! ", "9", "rank9", "timeout", "a."]
)
@pytest.mark.parametrize("keyword", ["nan", "killed", "overflow", "timed out", "Traceback (most recent call last)"])
def test_line_of_repeated_words_is_classified_within_milliseconds(word, keyword):
    long = (word * 2000)[:1950].encode()
    lines = [long + b" " + keyword.encode(), keyword.encode() + b" " + long] * 2
    took = []
    for _ in range(3):
        began = time.process_time()
        find_events(lines)
        took.append(time.process_time() - began)
    assert min(took) / len(lines) < 0.003


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536, reducing to 32768", "overflow"),
        ("Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 128.0", "overflow"),
        ("| WARNING: overflow detected, setting loss scale to: 64.0", "overflow"),
        ("0: Skipped batch, new scale: 512.0", "skipped"),
        ("torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 7.71 GiB.", "oom"),
        ("[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5)", "hang"),
        ("[E ProcessGroupNCCL.cpp:587] WorkNCCL(OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600345 milliseconds "
         "before timing out: collective operation timeout", "hang"),
        ("[rank1]: NCCL timeout in call to allreduce", "hang"),
        ("ProcessGroupNCCL heartbeat timed out: TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC exceeded", "hang"),
        ("slurmstepd: error: *** JOB 1 CANCELLED AT 2024-01-01 DUE TO TIME LIMIT ***", "killed"),
        ("Main process received SIGTERM, exiting", "killed"),
        ("Killed", "killed"),
        ("KeyboardInterrupt", "killed"),
        ("Resuming training from checkpoint /x/step_100", "restart"),
        ("> loading checkpoint from /x at iteration 10", "restart"),
        ("saving checkpoint to out", "checkpoint"),
        ("Loss is nan, stopping training", "nan"),
    ],
)  # fmt: skip
def test_event_text_gives_the_kind_of_event(line, kind):
    events, _ = find_events([b"quiet", line.encode(), b"quiet"])
    assert [(event.line, event.kind) for event in events] == [(1, kind)]


@pytest.mark.parametrize(
    "line",
    [
        "raise RuntimeError('CUDA out of memory')",
        '    print(f"saving checkpoint to {out}")',
        "adlr_autoresume ................................. False",
        "Loading checkpoint shards: 50%",
        "No modifications detected, skipping build step...",
        "step 7 loss nan",
        "node1:4945:4945 [0] NCCL INFO NCCL_IB_TIMEOUT set by environment to 20.",
        "NCCL_IB_TIMEOUT set by environment to 22.",
        "NCCL_IB_TIMEOUT=22",
        "export TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=600",
        "node1:77 [2] NCCL INFO Call to connect returned Connection timed out, retrying",
        "ProcessGroupNCCL initialization options: NCCL_DESYNC_DEBUG: 0, TIMEOUT(ms): 1800000",
        "the NCCL timeout was set to 30 minutes",
    ],
)
def test_text_that_only_resembles_an_event_gives_none(line):
    assert find_events([line.encode()]) == ([], 0)


def test_traceback_gives_its_last_line_once_for_all_ranks():
    lines = [b"Traceback (most recent call last):", b'  File "a.py", line 3', b"    x()", b"ValueError: no luck"]
    events, _ = find_events(lines + [b"[rank1]: " + line for line in lines])
    assert [(event.kind, event.text) for event in events] == [("error", "ValueError: no luck")]


def fuzz_module():
    path = Path(__file__).resolve().parents[4] / "benchmarks" / "diagnosis" / "fuzz.py"
    spec = importlib.util.spec_from_file_location("diagnosis_fuzz", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("count", [80, *slow(400)])
def test_damaged_logs_are_diagnosed_or_refused(count, tmp_path):
    fuzz = fuzz_module()
    outcomes = [fuzz.run_case(fuzz.make_case(number, 1), tmp_path / "case", number) for number in range(count)]
    assert outcomes.count("diagnosed") > count // 4
    assert outcomes.count("refused") > count // 8
