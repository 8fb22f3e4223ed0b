"""DeviceMemoryMonitor works in any loop: with the names of KempnerForge, and on the CPU with less to say."""

from __future__ import annotations

import gc
import logging

import torch

from holdfast.core.base.types import Kind
from holdfast.resilience import DeviceMemoryMonitor
from holdfast.resilience.growing_containers import count_items, find_growing

MB = 1 << 20


def test_report_has_the_published_names(tmp_path):
    monitor = DeviceMemoryMonitor(0, snapshot_step=1, snapshot_dir=str(tmp_path / "snapshots"))
    stats = monitor.report(1)
    assert {"allocated_gb", "peak_gb", "reserved_gb", "total_gb", "mem_utilization", "host_gb"} <= set(stats)
    if not torch.cuda.is_available():
        assert stats["allocated_gb"] == stats["mem_utilization"] == 0.0
        assert monitor.capture_snapshot(1) is None and monitor.growing_sites() == []
        assert not (tmp_path / "snapshots").exists()
    monitor.close()


def test_list_of_losses_is_found_and_named(caplog):
    monitor, losses = DeviceMemoryMonitor("cpu"), []
    weight = torch.zeros(1, requires_grad=True)
    with caplog.at_level(logging.WARNING, "holdfast"):
        for step in range(1, 700):
            losses.append((weight * torch.ones(256 * 1024)).sum())
            monitor.report(step)
            if monitor.findings:
                break
    (finding,) = monitor.findings
    assert finding.kind == Kind.HOST_GROWTH
    assert any("keeps its graph" in text for text in finding.evidence["growing_containers"])
    assert "holdfast: step" in caplog.text and "it grows here: a list with" in caplog.text


def test_error_of_memory_is_explained_and_others_are_not():
    monitor = DeviceMemoryMonitor("cpu")
    monitor.report(1)
    text = (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8.00 GiB of which 1.00 GiB is "
        "free. Of "
        "the allocated memory 4.00 GiB is allocated by PyTorch, and 2.90 GiB is reserved by PyTorch but unallocated."
    )
    finding = monitor.explain(torch.OutOfMemoryError(text))
    assert finding is not None and finding.kind == Kind.FRAGMENTATION and "expandable_segments" in finding.message
    assert monitor.explain(ValueError("no")) is None
    assert [each.kind for each in monitor.findings] == [Kind.FRAGMENTATION]


def test_containers_that_grow_are_found_and_others_are_not():
    level, growing, table = list(range(500)), [], {}
    gc.collect()
    before = count_items()
    for step in range(300):
        growing.append(torch.zeros(1))
        table[step] = [step]
    found = find_growing(before, 300)
    assert {("list", 300, "a tensor"), ("dict", 300, "of type list")} <= {(c.kind, c.grown, c.holds) for c in found}
    assert not any(c.items == len(level) for c in found)
