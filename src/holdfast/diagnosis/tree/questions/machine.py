"""Memory, speed and ranks: what the machine does while the loss looks fine."""

from __future__ import annotations

import numpy as np

from holdfast.diagnosis.find import hang, memory, throughput
from holdfast.diagnosis.model.answers import Answer, Thresholds, decide, no, number, question, unknown, yes
from holdfast.diagnosis.model.episode import Episode
from holdfast.diagnosis.model.table import Table
from holdfast.diagnosis.tree import window
from holdfast.diagnosis.tree.kinds import OF_THE_MACHINE


@question()
def of_the_machine(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    if episode is None:
        return unknown("asked of an incident only")
    return decide(
        episode.kind in OF_THE_MACHINE,
        f"the incident is {OF_THE_MACHINE.get(episode.kind, '')}",
        "the incident is in the curve",
        kind=episode.kind,
    )


@question()
def out_of_memory(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    said = window.events_in(table, episode, memory.reports(table), slack=table.step_interval())
    if not said and episode is not None and episode.kind == "oom":
        said = memory.reports(table)[:1]
    return decide(
        bool(said), f"the log says: {said[0].text[:160]}" if said else "", "the log tells of no failed allocation"
    )


@question("share", "records", "z")
def allocated_rises(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    name = next((n for n in memory.ALLOCATED if table.has(n)), None)
    if name is None:
        return unknown("allocated memory is not on record")
    found = memory.climb(window.finite(table, name), t)
    if found is None:
        return unknown(f"too few values of {name} are on record")
    text = (
        f"{name} goes from {number(found.was)} to {number(found.now)} GB ({100 * found.share:+.1f}%, z = {found.z:.1f})"
    )
    return decide(found.rises, f"{text} and keeps rising", f"{text}: no steady rise", was=found.was, now=found.now)


@question("share", "records", "z")
def reserved_grows_apart(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    found = memory.gap(table, t)
    if found is None:
        return unknown("allocated and reserved memory are not both on record")
    text = f"reserved minus allocated goes from {number(found.was)} to {number(found.now)} GB (z = {found.z:.1f})"
    return decide(found.rises, f"{text} and keeps growing", f"{text}: no steady growth", was=found.was, now=found.now)


@question()
def collective_timed_out(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    said = [event for event in hang.reports(table) if hang.COLLECTIVE.search(event.text)]
    return decide(
        bool(said), f"the log says: {said[0].text[:160]}" if said else "", "no collective is named in the log"
    )


@question()
def ranks_disagree(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    """A liveness check that came back with the wrong sum: the ranks live, and one took another branch."""
    said = [event for event in hang.reports(table) if hang.PARTIAL.search(event.text)]
    return decide(
        bool(said), f"the log says: {said[0].text[:160]}" if said else "", "no failed liveness check is in the log"
    )


@question()
def hang_reported(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    said = hang.reports(table)
    hung = episode is not None and episode.kind == "hang"
    return decide(
        bool(said) and hung, f"the log says: {said[0].text[:160]}" if said else "", "the log tells of no hang"
    )


@question("ratio", "records", "stays")
def steps_slower(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    times = throughput.step_seconds(table)
    if times is None:
        return unknown("neither step times nor throughput are on record")
    if episode is None or episode.kind != "throughput_drop":
        return no("steps do not become slower for good")
    was, now = episode.evidence["before"], episode.evidence["after"]
    return yes(
        f"{times.name} goes from {number(was)} to {number(now)}: {number(episode.evidence['ratio'])} times slower, "
        f"for {episode.last + 1 - episode.first} records",
        before=was,
        after=now,
    )


@question("share")
def data_wait_grew(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    """How much of the lost time went into waiting for data."""
    name = window.column(table, t.columns)
    if episode is None or name is None or not table.has("seconds"):
        return unknown("the time spent waiting for data is not on record")
    waits = window.before(table, episode, name, 200), window.finite(table, name, episode.first, episode.last + 1)
    steps = (
        window.before(table, episode, "seconds", 200),
        window.finite(table, "seconds", episode.first, episode.last + 1),
    )
    if not all(len(v) for v in (*waits, *steps)):
        return unknown("the time spent waiting for data is not on record there")
    wait = float(np.median(waits[1]) - np.median(waits[0]))
    lost = float(np.median(steps[1]) - np.median(steps[0]))
    share = wait / lost if lost > 0 else 0.0
    return decide(
        share > t["share"],
        f"{100 * share:.0f}% of the added time is waiting for data ({name})",
        f"waiting for data explains {100 * share:.0f}% of the added time",
        share=share,
    )


@question("ratio", "records")
def one_rank_slow(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    ranks = throughput.rank_seconds(table)
    if len(ranks) < 2:
        return unknown("step times of single ranks are not on record")
    slow = throughput.slow_rank(table, t)
    if slow is None:
        return no(f"all {len(ranks)} ranks take about the same time")
    return yes(
        f"rank {slow.rank} takes {number(slow.ratio)} times as long as the others", rank=slow.rank, ratio=slow.ratio
    )


@question("sigmas", "records", "share")
def steps_straggle(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    """Single steps that take far longer than the rest, over and over."""
    times = throughput.step_seconds(table)
    if times is None or len(times.values) < t["records"]:
        return unknown("too few step times are on record")
    values = times.values[np.isfinite(times.values)]
    middle = float(np.median(values))
    sigma = max(1.4826 * float(np.median(np.abs(values - middle))), 0.01 * middle)
    far = values > middle + t["sigmas"] * sigma
    share = float(far.mean())
    return decide(
        share > t["share"],
        f"{int(far.sum())} of {len(values)} steps take more than {number(t['sigmas'])} sigma longer "
        f"(median {number(middle)}, up to {number(float(values.max()))} s)",
        f"{int(far.sum())} of {len(values)} steps are that slow",
        share=share,
    )


@question("share", "records")
def waits_for_data(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    name = window.column(table, t.columns)
    if name is None or not table.has("seconds"):
        return unknown("the time spent waiting for data is not on record")
    wait, step = window.finite(table, name), window.finite(table, "seconds")
    if min(len(wait), len(step)) < t["records"]:
        return unknown("too few waiting times are on record")
    share = float(np.median(wait)) / max(float(np.median(step)), 1e-30)
    return decide(
        share > t["share"],
        f"{100 * share:.0f}% of a step is waiting for data ({name})",
        f"{100 * share:.0f}% of a step is waiting",
        share=share,
    )


@question("cpu", "gpu")
def cpu_busy_gpu_idle(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    cpu = window.column(table, [name for name in t.columns if "cpu" in name])
    gpu = window.column(table, [name for name in t.columns if "gpu" in name])
    if cpu is None or gpu is None:
        return unknown("the load of CPU and GPU is not on record")
    loads = [window.finite(table, name) for name in (cpu, gpu)]
    if not all(len(values) for values in loads):
        return unknown("the load of CPU and GPU is not on record")
    high, low = (float(np.median(values)) for values in loads)
    text = f"CPU at {number(high)}%, GPU at {number(low)}%"
    return decide(high > t["cpu"] and low < t["gpu"], text, text, cpu=high, gpu=low)
