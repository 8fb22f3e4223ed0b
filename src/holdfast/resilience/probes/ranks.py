"""Probes over all ranks of a job: wrong contributions, bandwidth of collectives, clocks, and what each rank found."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import msgspec

from holdfast.core.base.probe_result import ProbeResult, ProbeStatus
from holdfast.resilience.probes.probe import Answer, Probe, ProbeSettings, failed, make, not_checked, ok

JOIN_SECONDS = 600.0
"""ranks that examine the host for others arrive later"""
_COLLECTIVE_SECONDS = 60.0
_LENGTH, _ROUNDS = 1 << 16, 5
_SKEW_SECONDS, _WRONG_CLOCK_SECONDS = 1.0, 300.0
_HEALTHY = (ProbeStatus.OK, ProbeStatus.NOT_CHECKED)


def contribution(rank: int, length: int = _LENGTH) -> Any:
    """Return the known values of a rank: whole numbers so small that the sum over 2,000 ranks is exact in fp32."""
    import torch

    return ((torch.arange(length) * 31 + rank * 977) % 8191).float()


def find_wrong_ranks(seen: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Return the ranks that sent wrong values, and those that received some which others received right.

    seen: for each observing rank, the number of wrong values in the row of each rank.
    """
    size = len(seen)
    senders = [source for source in range(size) if 2 * sum(seen[o][source] > 0 for o in range(size)) > size]
    receivers = [o for o in range(size) if any(n and source not in senders for source, n in enumerate(seen[o]))]
    return senders, receivers


def check_contributions(row: Any, hosts: Sequence[dict[str, str]], name: str, group: Any = None) -> list[ProbeResult]:
    """Exchange the rows of all ranks and their sum, and name each rank whose values are wrong. Equal on every rank."""
    import torch
    import torch.distributed as dist

    from holdfast.distributed.world import World

    size = dist.get_world_size()
    rows = [torch.empty_like(row) for _ in range(size)]
    dist.all_gather(rows, row, group=group)
    total = row.clone()
    dist.all_reduce(total, group=group)
    expected = [contribution(rank, len(row)) for rank in range(size)]
    wrong = [int((rows[rank].cpu() != expected[rank]).sum()) for rank in range(size)]
    in_sum = int((total.cpu() != torch.stack(expected).sum(0)).sum())
    answers = World.current().all_gather_object([wrong, in_sum])
    senders, receivers = find_wrong_ranks([seen for seen, _ in answers])
    results = []
    for rank in dict.fromkeys([*senders, *receivers]):
        what = "contributes" if rank in senders else "receives"
        count = max(seen[rank] for seen, _ in answers) if rank in senders else max(answers[rank][0])
        text = f"rank {rank} {what} {count:,} wrong values of {len(row):,}"
        found = failed(name, text, "leave its device out and have it tested", device=hosts[rank]["device"])
        results.append(msgspec.structs.replace(found, rank=rank, host=hosts[rank]["host"]))
    summed = [rank for rank, (_, count) in enumerate(answers) if count]
    if summed and not results:
        results = [
            failed(name, f"every row arrives right, but ranks {summed[:16]} get a wrong sum", "test their devices")
        ]
    return results or [ok(name, f"{size} ranks exchange {len(row):,} known values, and every row and sum is right")]


def check_bandwidth(device: str, nbytes: int, name: str, group: Any = None) -> ProbeResult:
    """Measure an all-reduce. The figure is reported and not judged: it depends on the network."""
    import torch
    import torch.distributed as dist

    size, block, best = dist.get_world_size(), torch.ones(nbytes // 4, device=device), float("inf")
    for _ in range(_ROUNDS):
        block.fill_(1.0)
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(block, group=group)
        if block.is_cuda:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    bus = 2 * (size - 1) / size * nbytes / best / 1e9
    text = f"all-reduce of {nbytes / 1e6:.0f} MB in {best * 1e3:.1f} ms: {bus:.2f} GB/s of bus bandwidth"
    return ok(name, text, {"bus": (bus, "GB/s"), "time": (best * 1e3, "ms"), "size": (nbytes / 1e6, "MB")})


def check_clocks() -> ProbeResult:
    """Compare the clocks of all ranks right after a barrier."""
    import torch.distributed as dist

    from holdfast.distributed.world import World

    times = []
    for _ in range(_ROUNDS):
        dist.barrier()
        times.append(time.time())
    rounds = list(zip(*World.current().all_gather_object(times), strict=True))
    offsets = [
        statistics.median(each[rank] - statistics.median(each) for each in rounds) for rank in range(len(rounds[0]))
    ]
    spread, rank = max(offsets) - min(offsets), max(range(len(offsets)), key=lambda r: abs(offsets[r]))
    text = f"the clocks of {len(offsets)} ranks are within {spread:.3f} s; rank {rank} is {offsets[rank]:+.3f} s off"
    numbers, cure = {"spread": (spread, "s")}, "synchronise the clocks of the hosts (chrony, NTP)"
    if spread <= _SKEW_SECONDS:
        return ok("ranks clock", text, numbers)
    is_wrong = spread > _WRONG_CLOCK_SECONDS
    return make("ranks clock", ProbeStatus.FAILED if is_wrong else ProbeStatus.WARNING, text, cure, numbers)


def check_ranks(settings: ProbeSettings) -> Answer:
    """Join all ranks over gloo, gather what each has found, and check contributions, bandwidth and clocks."""
    import torch.distributed as dist

    from holdfast.core.base.errors import HoldfastError
    from holdfast.distributed.world import World
    from holdfast.runtime.tensors.device_identity import describe_device

    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=JOIN_SECONDS))
        found = [each for each in settings.local_results if each.status not in _HEALTHY]
        mine = {**describe_device(), "results": msgspec.to_builtins(found)}
        members = World.current().all_gather_object(mine)
        results = [
            msgspec.structs.replace(each, rank=rank if each.rank is None else each.rank)
            for rank, member in enumerate(members)
            for each in msgspec.convert(member["results"], list[ProbeResult])
        ]
        results += check_contributions(contribution(settings.rank), members, "ranks answers")
        results.append(check_bandwidth("cpu", (32 if settings.effort == "full" else 4) << 20, "ranks bandwidth"))
        return [*results, check_clocks()]
    except (RuntimeError, ValueError, HoldfastError) as error:
        reason = (str(error).splitlines() or [""])[0][:300]
        return failed(
            "ranks", f"not all ranks answer: {reason}", "see the log of the missing rank; set GLOO_SOCKET_IFNAME"
        )


def check_gpu_ranks(settings: ProbeSettings) -> Answer:
    """Check contributions and bandwidth of the GPUs over NCCL, if every rank has one."""
    import torch
    import torch.distributed as dist

    from holdfast.distributed.world import World
    from holdfast.runtime.tensors.device_identity import describe_device

    if not dist.is_initialized():
        return not_checked("ranks gpu", "the ranks did not meet")
    index = int(os.environ.get("LOCAL_RANK", "0"))
    has_gpu = torch.cuda.is_available() and torch.cuda.device_count() > index
    if not all(World.current().all_gather_object(has_gpu)):
        return not_checked("ranks gpu", "not every rank has a GPU")
    torch.cuda.set_device(index)
    torch.zeros(1, device="cuda")  # describe_device names the GPU of a process that uses it
    members = World.current().all_gather_object(describe_device())
    group: Any = dist.new_group(backend="nccl", timeout=timedelta(seconds=_COLLECTIVE_SECONDS))
    row = contribution(settings.rank).cuda()
    results = check_contributions(row, members, "ranks gpu answers", group)
    nbytes = (512 if settings.effort == "full" else 64) << 20
    return [*results, check_bandwidth("cuda", nbytes, "ranks gpu bandwidth", group)]


PROBES = (Probe("ranks", JOIN_SECONDS + 120.0, check_ranks), Probe("ranks gpu", 180.0, check_gpu_ranks))
