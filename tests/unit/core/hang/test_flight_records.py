"""Dumps are read as JSON or as pickles of plain values; nothing in a pickle is ever run."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from flight_dumps import dump, steps
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.base.errors import HoldfastError
from holdfast.core.hang.flight_records import decode, group_records


class Runs:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("encode", [lambda d: json.dumps(d).encode(), pickle.dumps, lambda d: pickle.dumps(d, 2)])
def test_json_and_pickles_of_any_protocol_give_the_same_calls(encode):
    record = group_records(decode(encode(dump(steps(2), backend="nccl"))))["0/default_pg"]
    assert (record.ranks, record.last, [call.op for call in record.calls[:2]]) == (
        (0, 1),
        6,
        ["all_reduce", "all_gather"],
    )
    assert [call.is_complete for call in record.calls[-2:]] == [True, False]


def test_the_dump_of_the_installed_torch_is_read():
    import torch

    dump_pickle = getattr(torch._C._distributed_c10d, "_dump_fr_trace", None)
    if dump_pickle is None:
        pytest.skip("this torch has no flight recorder")
    assert isinstance(decode(dump_pickle())["entries"], list)


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_a_pickle_that_would_run_code_is_refused_and_runs_nothing(tmp_path, protocol):
    target = tmp_path / "made"
    with pytest.raises(HoldfastError, match="no dump"):
        decode(pickle.dumps({"entries": [Runs(target)]}, protocol))
    assert not target.exists()


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_without_another_error(data):
    for text in (data, b"\x80\x02" + data):
        with pytest.raises(HoldfastError):
            decode(text)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)
KEYS = [
    "collective_seq_id",
    "profiling_name",
    "process_group",
    "input_sizes",
    "input_dtypes",
    "frames",
    "is_p2p",
    "state",
]


@given(st.lists(st.dictionaries(st.sampled_from(KEYS), JSON, max_size=8), max_size=5), JSON)
def test_entries_of_any_form_are_read_or_skipped(entries, config):
    group_records(decode(json.dumps({"entries": entries, "pg_config": config}).encode()))


@pytest.mark.parametrize(
    ("data", "reason"),
    [(b"not a dump", "neither JSON nor a pickle"), (b"\xff\xfe\x00", "neither"), (b'{"entries": [', "JSONDecodeError")],
)
def test_what_is_no_dump_is_described_and_a_cut_one_has_its_place(data, reason):
    with pytest.raises(HoldfastError, match=reason):
        decode(data)
