"""Folders with files of several formats."""

from __future__ import annotations

import pytest

from holdfast.core.base.errors import LogRefused
from holdfast.diagnosis.importers import read


def test_event_file_without_scalars_does_not_hide_the_log_next_to_it(tmp_path):
    (tmp_path / "events.out.tfevents.1.host").write_bytes(b"")
    (tmp_path / "train.log").write_text("".join(f"iter {i}: loss {3 - i / 100:.4f}, time 5.00ms\n" for i in range(50)))
    (table,) = read(tmp_path)
    assert (table.format, len(table)) == ("nanogpt", 50)


def test_folder_with_only_empty_event_files_is_refused(tmp_path):
    (tmp_path / "events.out.tfevents.1.host").write_bytes(b"")
    with pytest.raises(LogRefused, match="without a scalar"):
        read(tmp_path)
