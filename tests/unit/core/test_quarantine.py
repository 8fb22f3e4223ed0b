"""Quarantine: what is excluded, compared with a plain set of positions; and that it survives."""

from __future__ import annotations

import json
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.base.errors import RunDirError
from holdfast.core.base.types import Span
from holdfast.core.record.quarantine import Quarantine
from marks import examples

spans = st.builds(Span, st.integers(0, 2), st.integers(0, 40), st.integers(0, 40))


def positions(of: list[Span]) -> set[tuple[int, int]]:
    return {(span.epoch, i) for span in of for i in range(span.start, span.stop)}


# ---- spans, against a set


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(st.lists(spans, max_size=4), max_size=6), st.lists(spans, max_size=10))
def test_spans_exclude_what_a_set_of_positions_would(calls, questions):
    quarantine, model = Quarantine(), set()
    for call in calls:
        quarantine.add_spans(call, "test")
        model |= positions(call)
        kept = quarantine.spans()
        assert positions(kept) == model
        assert kept == sorted(kept)
        for span, following in pairwise(kept):
            assert span.start < span.stop
            assert (span.epoch, span.stop) < (following.epoch, following.start), "neighbours are joined"
    for question in questions:
        if question.start < question.stop:
            assert quarantine.covers(*question) == (positions([question]) <= model)


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(spans, max_size=8), st.lists(st.integers(0, 30), max_size=8))
def test_what_was_written_is_what_is_read(some_spans, ids):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "quarantine.json"
        first = Quarantine(path)
        for span in some_spans:
            first.add_spans([span], "spike", step=span.start)
        first.add_samples(ids, "bad row", step=3)
        second = Quarantine(path)
        assert (second.spans(), second.samples, second.entries) == (first.spans(), first.samples, first.entries)
        assert second.samples == set(ids)


def test_order_of_additions_does_not_matter():
    one, other = Quarantine(), Quarantine()
    parts = [Span(0, 0, 3), Span(0, 6, 9), Span(0, 2, 7), Span(1, 0, 1)]
    for span in parts:
        one.add_spans([span], "test")
    other.add_spans(reversed(parts), "test")
    assert one.spans() == other.spans() == [Span(0, 0, 9), Span(1, 0, 1)]


def test_spans_of_different_epochs_are_kept_apart():
    quarantine = Quarantine()
    quarantine.add_spans([Span(0, 0, 5)], "test")
    assert not quarantine.covers(1, 0, 5)


def test_nothing_new_is_no_entry(tmp_path):
    path = tmp_path / "quarantine.json"
    quarantine = Quarantine(path)
    quarantine.add_spans([Span(0, 5, 5), Span(0, 7, 3)], "empty")
    assert quarantine.add_samples([], "empty") == []
    assert quarantine.entries == []
    assert not path.exists()
    quarantine.add_spans([Span(0, 0, 9)], "first")
    quarantine.add_spans([Span(0, 2, 4)], "inside it")
    assert [entry["reason"] for entry in quarantine.entries] == ["first"]


def test_entry_says_why_and_what_else_it_was_told(tmp_path):
    path = tmp_path / "quarantine.json"
    Quarantine(path).add_spans([Span(0, 1, 2)], "loss_spike", incident=4)
    assert json.loads(path.read_text())["entries"] == [{"spans": [[0, 1, 2]], "reason": "loss_spike", "incident": 4}]


def test_entries_handed_out_cannot_change_what_is_held():
    quarantine = Quarantine()
    quarantine.add_spans([Span(0, 1, 2)], "test")
    quarantine.entries.clear()
    assert len(quarantine.entries) == 1


# ---- samples


def test_samples_are_added_once_and_only_the_new_ones_are_returned():
    quarantine = Quarantine()
    assert quarantine.add_samples([3, 5, 3], "bad row") == [3, 5]
    assert quarantine.add_samples([5, 7], "bad row") == [7]
    assert quarantine.add_samples([7], "bad row") == []
    assert quarantine.samples == {3, 5, 7}
    assert [entry["samples"] for entry in quarantine.entries] == [[3, 5], [7]]


@pytest.mark.parametrize(
    ("some_spans", "ids", "words"),
    [
        ([Span(0, 0, 16)], [], "left out of this epoch"),
        ([Span(0, 4, 8), Span(0, 8, 12)], [3], "left out of this epoch"),
        ([Span(0, 0, 16)], [5, 7], "left out for good"),
        ([], [5], "left out for good"),
        ([Span(0, 0, 16), Span(1, 0, 16)], [], "partly left out"),
        ([], [3, 5], "partly left out"),
        ([Span(1, 0, 16)], [3], "not left out"),
        ([], [], "not left out"),
    ],
)
def test_whether_data_is_left_out_in_words(some_spans, ids, words):
    quarantine = Quarantine()
    quarantine.add_spans([Span(0, 0, 16)], "spike")
    quarantine.add_samples([5, 7], "NaN")
    assert quarantine.describe(some_spans, ids).startswith(words)


def test_keep_leaves_out_excluded_ids_and_keeps_the_order():
    quarantine = Quarantine()
    quarantine.add_samples([3, 5], "bad row")
    assert quarantine.keep([9, 5, 1, 3, 9]) == [9, 1, 9]


def test_keep_returns_the_very_list_where_nothing_is_left_out():
    quarantine = Quarantine()
    ids = [1, 2]
    assert quarantine.keep(ids) is ids
    quarantine.add_samples([3], "bad row")
    assert quarantine.keep(ids) is ids


class Index:
    """Equal to an int and hashed by identity, as a tensor is."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value

    __int__ = __index__


@pytest.mark.parametrize("kind", [int, numpy.int64, numpy.uint8, Index])
def test_id_is_recognised_whatever_integer_it_comes_as(kind):
    quarantine = Quarantine()
    quarantine.add_samples([kind(3)], "bad row")
    ids = [kind(2), kind(3), kind(4)]
    assert quarantine.keep(ids) == [ids[0], ids[2]]


def test_ids_that_are_no_integers_pass():
    quarantine = Quarantine()
    quarantine.add_samples([3], "bad row")
    assert quarantine.keep(["3", ("a", 3), 3]) == ["3", ("a", 3)]


# ---- files


def test_exclusion_that_cannot_be_written_is_not_made_and_can_be_tried_again(tmp_path):
    folder = tmp_path / "run"
    path = folder / "quarantine.json"
    quarantine = Quarantine(path)
    for _ in range(2):
        with pytest.raises(RunDirError):
            quarantine.add_spans([Span(0, 0, 5)], "spike")
        with pytest.raises(RunDirError):
            quarantine.add_samples([3], "bad row")
        assert (quarantine.spans(), quarantine.samples, quarantine.entries) == ([], frozenset(), [])
    folder.mkdir()
    quarantine.add_spans([Span(0, 0, 5)], "spike")
    quarantine.add_samples([3], "bad row")
    assert Quarantine(path).spans() == [Span(0, 0, 5)]
    assert Quarantine(path).samples == {3}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"{}",
        b'{"entries": 3}',
        b'{"entries": ["x"]}',
        b'{"entries": [{"spans": [[1, 2]]}]}',
        b'{"entries": [{"spans": [["a", "b", "c"]]}]}',
        b'{"entries": [{"samples": [null]}]}',
        b'{"entries": [{"samples": [Infinity]}]}',
        b"\xff\xfe\xfd",
        b"[" * 100_000,
    ],
    ids=lambda content: repr(content[:40]),
)
def test_damaged_file_is_refused_by_name_and_kept(tmp_path, content):
    path = tmp_path / "quarantine.json"
    path.write_bytes(content)
    with pytest.raises(RunDirError, match=f"{path} is damaged"):
        Quarantine(path)
    assert path.read_bytes() == content


def test_folder_in_the_place_of_the_file_is_refused(tmp_path):
    with pytest.raises(RunDirError, match="is damaged"):
        Quarantine(tmp_path)


@settings(max_examples=examples(100), deadline=None)
@given(st.data())
def test_file_cut_anywhere_is_refused_and_never_half_read(data):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "quarantine.json"
        Quarantine(path).add_spans([Span(0, 1, 2), Span(3, 4, 50)], "spike")
        whole = path.read_bytes()
        path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 2))])
        with pytest.raises(RunDirError, match="is damaged"):
            Quarantine(path)


def test_without_a_file_it_works_all_the_same(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    quarantine = Quarantine()
    quarantine.add_spans([Span(0, 0, 5)], "spike")
    assert quarantine.covers(0, 1, 3)
    assert list(tmp_path.iterdir()) == []


def test_about_may_hold_what_json_takes(tmp_path):
    path = tmp_path / "quarantine.json"
    about: dict[str, Any] = {"step": 3, "kinds": ["a"], "loss": float("inf")}
    Quarantine(path).add_samples([1], "bad row", **about)
    assert Quarantine(path).entries == [{"samples": [1], "reason": "bad row", **about}]


# ---- data that is put back


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.lists(spans, max_size=3)), max_size=8))
def test_release_puts_back_what_a_set_of_positions_would(calls):
    with tempfile.TemporaryDirectory() as folder:
        quarantine, model = Quarantine(Path(folder) / "quarantine.json"), set()
        for is_out, some in calls:
            proper = [span for span in some if span.start < span.stop]
            if is_out:
                quarantine.add_spans(proper, "spike")
                model |= positions(proper)
            else:
                quarantine.release(proper)
                model -= positions(proper)
            assert positions(quarantine.spans()) == model
        assert Quarantine(Path(folder) / "quarantine.json").spans() == quarantine.spans()


def test_release_of_nothing_is_no_entry():
    quarantine = Quarantine()
    quarantine.release([])
    assert quarantine.entries == []


def test_what_an_incident_left_out_is_known_until_it_is_put_back():
    quarantine = Quarantine()
    quarantine.add_spans([Span(0, 0, 4)], "spike", incident=1)
    quarantine.add_spans([Span(0, 4, 8), Span(0, 8, 12)], "spike", incident=2)
    assert quarantine.left_out_by(2) == [Span(0, 4, 8), Span(0, 8, 12)]
    quarantine.release([Span(0, 4, 8)])
    assert quarantine.left_out_by(2) == [Span(0, 8, 12)]
    assert quarantine.left_out_by(1) == [Span(0, 0, 4)]
    quarantine.add_spans([Span(0, 4, 8)], "again", incident=2)
    assert quarantine.left_out_by(2) == [Span(0, 8, 12), Span(0, 4, 8)]


batches = st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True)


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["quarantine", "skip", "released"]), batches), max_size=10), st.data())
def test_journal_completes_a_file_of_any_age_to_what_its_last_event_about_each_batch_says(history, data):
    """The file may be lost, or of any moment: a process died between the journal and the file."""
    events, left_out = [], set()
    for name, numbers in history:
        ranges = [[0, 4 * n, 4 * n + 4] for n in numbers]
        if name == "skip":
            events.append({"event": "action", "action": "skip", "data": ranges, "reason": "spike"})
        else:
            events.append({"event": name, "spans": ranges, "reason": "spike"})
        left_out = left_out - set(numbers) if name == "released" else left_out | set(numbers)
    wanted = positions([Span(0, 4 * n, 4 * n + 4) for n in left_out])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "quarantine.json"
        old = Quarantine(path)
        for name, numbers in history[: data.draw(st.integers(0, len(history)))]:
            some = [Span(0, 4 * n, 4 * n + 4) for n in numbers]
            if name == "released":
                old.release(some)
            else:
                old.add_spans(some, "spike")
        quarantine = Quarantine(path)
        quarantine.complete(events)
        assert positions(quarantine.spans()) == wanted
        assert positions(Quarantine(path).spans()) == wanted
        entries = quarantine.entries
        quarantine.complete(events)
        assert quarantine.entries == entries, "once it is complete, nothing is added"
