"""The page of a million steps stays small and quick, and the list of many runs reads only parts of their files."""

from __future__ import annotations

import json
import os
import re

import pytest
from benchmarks.reports import make_run, measure_report
from test_series import unpack

from holdfast.reports.run_list import RunList


@pytest.mark.slow
def test_page_of_a_million_steps_is_small_and_quick_and_keeps_its_spike(tmp_path):
    make_run(tmp_path / "run", 1_000_000)
    measured = measure_report(tmp_path / "run")
    assert measured["own_seconds"] < 30.0 and measured["megabytes"] < 12.0
    data = json.loads(re.search(r'id="data">(.*?)</script>', (tmp_path / "report.html").read_text())[1])
    steps, values = unpack(data["plots"][0]["curves"][0])
    assert len(steps) == 1_000_000
    assert values.max() == 9.75 and steps[values.argmax()] == 666_666


def test_list_reads_a_small_part_of_a_long_file(tmp_path, monkeypatch):
    make_run(tmp_path / "run", 50_000)
    size, read, pread = (tmp_path / "run" / "metrics.jsonl").stat().st_size, [], os.pread

    def counted(descriptor, length, offset):
        read.append(length)
        return pread(descriptor, length, offset)

    monkeypatch.setattr(os, "pread", counted)
    (listed,) = RunList(tmp_path).list_runs()
    assert (listed.step, listed.status) == (50_000, "clean")
    assert listed.spark[0][1] > 6.0 and 0.9 < listed.goodput <= 1.0
    assert 0 < sum(read) < size / 50
