"""Questions about memory, speed and ranks (sections 6 to 8)."""

from __future__ import annotations

import numpy as np

from holdfast.core.base.types import Kind
from holdfast.core.detectors.out_of_memory import explain
from holdfast.diagnosis.find import hang, memory, throughput
from holdfast.diagnosis.model import window
from holdfast.diagnosis.model.answers import Answer, Thresholds, decide, fmt, no, question, unknown, yes
from holdfast.diagnosis.model.episode import MACHINE_KINDS, Episode
from holdfast.diagnosis.model.table import Event, Table


@question()
def is_machine_incident(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    if episode is None:
        return unknown("applies to an incident only")
    return decide(
        episode.kind in MACHINE_KINDS,
        f"the incident is about the machine: {MACHINE_KINDS.get(episode.kind, '')}",
        "the incident is in the curve",
        kind=episode.kind,
    )


def _reported(events: list[Event], if_no: str) -> Answer:
    return yes(f"the log says: {events[0].text[:160]}") if events else no(if_no)


@question()
def out_of_memory(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    events = memory.oom_events(table)
    inside = window.events_during(episode, events, slack=table.step_interval())
    if not inside and episode is not None and episode.kind == "oom":
        inside = events[:1]
    return _reported(inside, "the log reports no failed allocation")


@question("share", "records", "z")
def allocated_rises(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    name = next((n for n in memory.ALLOCATED if table.has(n)), None)
    if name is None:
        return unknown("the log has no allocated memory")
    trend = memory.measure_trend(window.finite(table, name), t)
    if trend is None:
        return unknown(f"the log has too few values of {name}")
    text = f"{name} goes from {fmt(trend.was)} to {fmt(trend.now)} GB ({100 * trend.share:+.1f}%, z = {trend.z:.1f})"
    return decide(trend.rises, f"{text} and keeps rising", f"{text}: no steady rise", was=trend.was, now=trend.now)


@question("share", "records", "z")
def reserved_grows_apart(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    trend = memory.measure_reserved_gap(table, t)
    if trend is None:
        return unknown("the log does not have both allocated and reserved memory")
    text = f"reserved minus allocated goes from {fmt(trend.was)} to {fmt(trend.now)} GB (z = {trend.z:.1f})"
    return decide(trend.rises, f"{text} and keeps growing", f"{text}: no steady growth", was=trend.was, now=trend.now)


@question()
def fits_in_pieces(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    """Ask the text of the failed allocation: asked, free, reserved but unallocated."""
    for failed in memory.failed_allocations(table):
        verdict = explain(failed)
        if verdict.kind in (Kind.FRAGMENTATION, Kind.MEMORY_CAPACITY) and failed.where == "device":
            return decide(verdict.kind == Kind.FRAGMENTATION, verdict.text, verdict.text)
    return unknown("the log has no sizes of the failed allocation")


@question()
def host_out_of_memory(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    failures = memory.failed_allocations(table)
    on_host = [failed for failed in failures if failed.where != "device"]
    return yes(explain(on_host[0]).text) if on_host else no("the log reports no failure on the host")


@question()
def hang_reported(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    is_hang = episode is not None and episode.kind == "hang"
    return _reported(hang.hang_events(table) if is_hang else [], "the log reports no hang")


@question()
def ranks_disagree(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    """Ask whether a liveness check returned the wrong sum: all ranks run, and one took another branch."""
    events = [event for event in hang.hang_events(table) if hang.PARTIAL.search(event.text)]
    return _reported(events, "the log has no failed liveness check")


@question()
def collective_timed_out(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    events = [event for event in hang.hang_events(table) if hang.COLLECTIVE.search(event.text)]
    return _reported(events, "the log names no collective")


@question("ratio", "records", "stays")
def steps_slower(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    times = throughput.step_times(table)
    if times is None:
        return unknown("the log has neither step times nor throughput")
    if episode is None or episode.kind != "throughput_drop":
        return no("steps do not become slower and stay slow")
    was, now = episode.evidence["before"], episode.evidence["after"]
    return yes(
        f"{times.name} goes from {fmt(was)} to {fmt(now)}: {fmt(episode.evidence['ratio'])} times slower, "
        f"for {episode.last + 1 - episode.first} records",
        before=was,
        after=now,
    )


@question("share")
def data_wait_grew(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    """Ask how much of the lost time is spent waiting for data."""
    name = window.find_column(table, t.columns)
    if episode is None or name is None or not table.has("seconds"):
        return unknown("the log has no time spent waiting for data")
    added = {}
    for column in (name, "seconds"):
        was, now = window.before(table, episode, column, 200), window.finite_during(table, episode, column)
        if not len(was) or not len(now):
            return unknown("the log has no time spent waiting for data there")
        added[column] = float(np.median(now) - np.median(was))
    share = added[name] / added["seconds"] if added["seconds"] > 0 else 0.0
    return decide(
        share > t["share"],
        f"{100 * share:.0f}% of the added time is waiting for data ({name})",
        f"waiting for data explains {100 * share:.0f}% of the added time",
        share=share,
    )


@question("ratio", "records")
def one_rank_slow(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    ranks = throughput.rank_columns(table)
    if len(ranks) < 2:
        named = [event.text for event in table.events if event.text.startswith(f"finding: {Kind.STRAGGLER}: ")]
        return yes(named[-1]) if named else unknown("the log has no step times of single ranks")
    slow = throughput.find_slow_rank(table, t)
    if slow is None:
        return no(f"all {len(ranks)} ranks take about the same time")
    return yes(
        f"rank {slow.rank} takes {fmt(slow.ratio)} times as long as the others", rank=slow.rank, ratio=slow.ratio
    )


@question("sigmas", "records", "share")
def steps_straggle(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    """Ask whether single steps take far longer than the rest, repeatedly."""
    times = throughput.step_times(table)
    if times is None or len(times.values) < t["records"]:
        return unknown("the log has too few step times")
    values = times.values[np.isfinite(times.values)]
    middle = float(np.median(values))
    sigma = max(1.4826 * float(np.median(np.abs(values - middle))), 0.01 * middle)
    slow = values > middle + t["sigmas"] * sigma
    count, share = int(slow.sum()), float(slow.mean())
    return decide(
        share > t["share"],
        f"{count} of {len(values)} steps take more than {fmt(t['sigmas'])} sigma longer "
        f"(median {fmt(middle)}, up to {fmt(float(values.max()))} s)",
        f"{count} of {len(values)} steps are that slow",
        share=share,
    )


@question("share", "records")
def waits_for_data(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    name = window.find_column(table, t.columns)
    if name is None or not table.has("seconds"):
        return unknown("the log has no time spent waiting for data")
    waits, seconds = window.finite(table, name), window.finite(table, "seconds")
    if min(len(waits), len(seconds)) < t["records"]:
        return unknown("the log has too few waiting times")
    share = float(np.median(waits)) / max(float(np.median(seconds)), 1e-30)
    text = f"{100 * share:.0f}% of a step is waiting for data ({name})"
    return decide(share > t["share"], text, text, share=share)


@question("cpu", "gpu")
def cpu_busy_gpu_idle(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    _, cpu = window.finite_column(table, [name for name in t.columns if "cpu" in name])
    _, gpu = window.finite_column(table, [name for name in t.columns if "gpu" in name])
    if not len(cpu) or not len(gpu):
        return unknown("the log has no CPU and GPU load")
    high, low = float(np.median(cpu)), float(np.median(gpu))
    text = f"CPU at {fmt(high)}%, GPU at {fmt(low)}%"
    return decide(high > t["cpu"] and low < t["gpu"], text, text, cpu=high, gpu=low)
