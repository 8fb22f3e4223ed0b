"""Decides from the reports of all ranks who hangs, where and since when. It reads values alone, so it works offline too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from holdfast.core.base.errors import HoldfastError
from holdfast.core.hang import desync, flight_records, stacks
from holdfast.core.hang.stacks import Stack

HangKind = Literal["stopped", "absent", "stuck", "desync", "network", "silent", "device", "debugger", "busy"]


_ORDER = {"data": 0, "forward": 1, "backward": 2, "collective": 3, "optimizer": 4}
"""the phases of a step; the others come after it"""
_SICK_DEVICE = "a kernel that never ends, or a sick GPU (`holdfast doctor`, dmesg for Xid)"
_OF_A_RANK = ("absent", "stuck")
"""verdicts that blame ranks, and no collective between them"""


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was found out about a child of a rank, such as a worker of its loader."""

    pid: int
    state: str = ""
    stacks: str = ""


class RankReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the sidecar of a node found out about one rank."""

    rank: int
    host: str = ""
    pid: int = 0
    step: int = -1
    phase: str = ""
    seconds: float = 0.0
    """how long it has been in this phase"""
    timeout: float | None = None
    """after how long it counts as stuck in it; None: not known"""
    state: str = ""
    """as /proc has it: R, S, D, T for stopped, t for traced, gone"""
    tracer: int = 0
    """the process that debugs it"""
    thread: int = 0
    stacks: str = ""
    why_no_stacks: str = ""
    workers: list[WorkerReport] = []
    flight_record: dict[str, Any] | None = None
    is_device_stuck: bool = False
    """True: its device did not reach a marker behind the work that was queued"""
    answered: bool = True
    """False: it was asked for its flight record and did not answer, though it is not stopped"""

    @property
    def is_overdue(self) -> bool:
        return self.timeout is not None and self.seconds > self.timeout


class HangVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """Who hangs, where and since when."""

    kind: HangKind
    summary: str
    culprits: list[int] = []
    phase: str = ""
    line: str = ""
    step: int = -1
    seconds: float = 0.0
    collective: str = ""
    evidence: list[str] = []
    is_certain: bool = True

    @property
    def is_hang(self) -> bool:
        return self.kind not in ("debugger", "busy")


def judge(reports: Sequence[RankReport], world: int | None = None) -> HangVerdict:
    """Return the verdict over the reports of all ranks. `world`: how many ranks there are; the others are silent."""
    by_rank = {report.rank: report for report in reports}
    frames = {rank: _training_stack(report) for rank, report in by_rank.items()}
    if (verdict := _debugged(by_rank, frames)) is not None:
        return verdict
    if (verdict := _stopped(by_rank)) is not None:
        return _with_context(verdict, by_rank, frames)
    records = _records(by_rank)
    # A rank that is late in one group because it waits in another is not the cause.
    waiting = {rank for rank, groups in records.items() if _is_waiting(groups)}
    mismatches = [
        each._replace(ranks=free)
        if each.kind == "never_came" and (free := tuple(rank for rank in each.ranks if rank not in waiting))
        else each
        for each in desync.compare(records)
    ]
    mismatches.sort(key=lambda each: (each.kind == "never_came", not waiting.isdisjoint(each.ranks)))
    silent = sorted(set(range(world or 0)) - set(by_rank))
    if mismatches and mismatches[0].kind == "never_came" and waiting.issuperset(mismatches[0].ranks):
        late = {rank: by_rank[rank] for each in mismatches for rank in each.ranks}
        is_circle = len(late) > 1 and all(not report.pid or report.is_overdue for report in late.values())
        if silent:  # they may wait for a rank that sent nothing
            mismatches = []
        elif is_circle and _undelivered(mismatches[0], records) is None:
            mismatches.insert(0, desync.break_circle(records, mismatches))
    if mismatches and mismatches[0].kind != "never_came":
        first = mismatches[0]
        culprits, kind, collective = list(first.ranks), "desync", first.expected.describe()
        summary, certain = first.describe(), first.is_certain
    elif mismatches and (undelivered := _undelivered(mismatches[0], records)) is not None:
        culprits, kind, collective, certain = list(mismatches[0].ranks), "network", undelivered.describe(), True
        summary = (
            f"{_ranks(culprits)} waits in {undelivered.describe()}, which other ranks have completed: no rank is missing, "
            "so the network between them does not deliver"
        )
    elif mismatches:
        first = mismatches[0]
        culprits, kind, collective, certain = list(first.ranks), "absent", first.expected.describe(), first.is_certain
        summary = first.describe()
    elif silent:
        culprits, kind, collective, certain = silent, "silent", _waiting_in(by_rank), True
        why = (
            "sent no report: its node or its network is gone, or its run directory is not this one"
            if any(report.pid for report in reports)
            else "sent no report that can be read: its process ended before it wrote one, or it is elsewhere"
        )
        summary = f"{_ranks(silent)} {why}"
    elif (begun := desync.not_begun(records)) is not None:
        call, culprits = begun[0], list(begun[1])
        kind, collective, certain = "device", call.describe(), True
        summary = (
            f"{_ranks(culprits)} has queued {call.describe()}, but its device has not begun it, and those of the others "
            f"have: {_SICK_DEVICE}"
        )
    else:
        culprits, kind, collective, certain, summary = _by_heartbeat(by_rank, frames)
    verdict = HangVerdict(
        kind=kind,  # type: ignore[arg-type]
        summary=summary,
        culprits=culprits,
        collective=collective,
        evidence=[each.describe() for each in mismatches[1:4]],
        is_certain=certain,
    )
    verdict = _blame_device(_excuse(_pass_on(verdict, frames), by_rank, frames), by_rank)
    return _with_context(verdict, by_rank, frames)


def _pass_on(verdict: HangVerdict, frames: Mapping[int, Stack | None]) -> HangVerdict:
    """Leave out ranks that wait in torch.distributed themselves, by their stacks: gloo records no send and no receive."""
    if verdict.kind != "absent":
        return verdict
    calls = {rank: "" if (stack := frames[rank]) is None else stack.communication for rank in verdict.culprits}
    if not (waiting := [rank for rank in verdict.culprits if calls[rank]]):
        return verdict
    if free := [rank for rank in verdict.culprits if not calls[rank]]:
        text = (
            f"{_ranks(free)} did not come to where the other ranks are; {_ranks(waiting)} waits in {calls[waiting[0]]}"
        )
        return msgspec.structs.replace(verdict, culprits=free, summary=text)
    text = f"{verdict.summary}; it waits in {calls[waiting[0]]} itself, and the records do not show for whom"
    return msgspec.structs.replace(verdict, summary=text, is_certain=False)


def _blame_device(verdict: HangVerdict, reports: Mapping[int, RankReport]) -> HangVerdict:
    """Return "device" if the ranks that do not get on wait for their own devices."""
    stuck = [rank for rank in verdict.culprits if reports[rank].is_device_stuck] if verdict.kind in _OF_A_RANK else []
    if not stuck:
        return verdict
    text = (
        f"the device of {_ranks(stuck)} does not finish the work that was queued, and the host waits for it: "
        f"{_SICK_DEVICE}; the line is where the host waits, and the kernel was launched before it"
    )
    return msgspec.structs.replace(verdict, kind="device", summary=text, culprits=stuck)


def _undelivered(
    late: desync.Mismatch, records: Mapping[int, Mapping[str, flight_records.GroupRecord]]
) -> flight_records.Collective | None:
    """Return the call that a rank which seems late waits in, if ranks that are further have completed it."""
    record = records[late.ranks[0]].get(late.group)
    if record is None or not record.calls or record.calls[-1].is_complete:
        return None
    own = record.calls[-1]
    others = [groups[late.group].calls for groups in records.values() if late.group in groups]
    is_passed = any(call.seq == own.seq and call.is_complete for calls in others for call in calls)
    return own if is_passed else None


def judge_death(dead: int, reports: Sequence[RankReport]) -> HangVerdict | None:
    """Return a verdict if a rank's process died because another rank called something else, as gloo ends it.

    reports: of the ranks that are left. None if their records explain nothing.
    """
    by_rank = {report.rank: report for report in reports}
    records = _records(by_rank)
    mismatches = [each for each in desync.compare(records) if each.kind != "never_came"] or desync.unusual_calls(
        records
    )
    if not mismatches:
        return None
    first = mismatches[0]
    verdict = HangVerdict(
        kind="desync",
        summary=f"the process of rank {dead} died in a collective: {first.describe()}",
        culprits=list(first.ranks),
        collective=first.expected.describe(),
        is_certain=first.is_certain,
    )
    return _with_context(verdict, by_rank, {rank: _training_stack(report) for rank, report in by_rank.items()})


def _debugged(reports: Mapping[int, RankReport], frames: Mapping[int, Stack | None]) -> HangVerdict | None:
    for rank, report in sorted(reports.items()):
        stack = frames[rank]
        if report.tracer or report.state == "t" or (stack is not None and stack.is_in_debugger):
            by = f"process {report.tracer}" if report.tracer else "a debugger in the process"
            text = f"rank {rank} is being debugged by {by}: it is not taken for stuck, and nothing is ended"
            return HangVerdict(kind="debugger", summary=text, culprits=[rank], phase=report.phase, step=report.step)
    return None


def _stopped(reports: Mapping[int, RankReport]) -> HangVerdict | None:
    stopped = [rank for rank, report in sorted(reports.items()) if report.state == "T"]
    gone = [rank for rank, report in sorted(reports.items()) if report.state == "gone"]
    if stopped:
        text = f"{_ranks(stopped)} was stopped by a signal (SIGSTOP, or Ctrl-Z): `kill -CONT PID` continues it"
        return HangVerdict(kind="stopped", summary=text, culprits=stopped, collective=_waiting_in(reports))
    if gone and len(gone) < len(reports):
        text = f"the process of {_ranks(gone)} has ended"
        return HangVerdict(kind="absent", summary=text, culprits=gone, collective=_waiting_in(reports))
    return None


def _by_heartbeat(
    reports: Mapping[int, RankReport], frames: Mapping[int, Stack | None]
) -> tuple[list[int], HangKind, str, bool, str]:
    """Compare phases and stacks: no flight recorder tells the ranks apart."""
    collective = _waiting_in(reports)
    if len(reports) == 1:
        (rank,) = reports
        if collective:
            return (
                [rank],
                "stuck",
                collective,
                False,
                f"rank {rank} waits in {collective}; there is no record of another rank",
            )
        return [rank], "stuck", "", True, f"rank {rank} does not get on"
    places = {rank: (report.step, report.phase) for rank, report in reports.items()}
    counts = Counter(places.values())
    waiting = {rank for rank, groups in _records(reports).items() if _is_waiting(groups)}
    waiting |= {rank for rank, report in reports.items() if report.phase == "collective"}
    waiting |= {rank for rank, stack in frames.items() if stack is not None and stack.communication}
    if waiting and len(waiting) < len(reports):
        culprits, certain = sorted(set(reports) - waiting), True
    elif len(counts) == 1:
        (step, phase) = next(iter(counts))
        where = (
            f"in the same place, {phase} of step {step}" if phase else "on record, and none is apart from the others"
        )
        text = f"all {len(reports)} ranks are {where}"
        if collective:
            text += f", and wait in {collective}: no rank is missing, so the network between them does not deliver"
        return sorted(reports), "network" if collective else "stuck", collective, bool(collective), text
    else:
        (usual, most), (_, second) = counts.most_common(2)
        if most == second:  # no majority: the ranks that are furthest behind
            behind = min(places.values(), key=lambda place: (place[0], _ORDER.get(place[1], len(_ORDER))))
            culprits, certain = sorted(rank for rank, place in places.items() if place == behind), False
        else:
            culprits, certain = sorted(rank for rank, place in places.items() if place != usual), True
    text = f"{_ranks(culprits)} did not come to where the other ranks are"
    return culprits, "absent", collective, certain, text


def _excuse(verdict: HangVerdict, reports: Mapping[int, RankReport], frames: Mapping[int, Stack | None]) -> HangVerdict:
    """Return "busy" if none of the ranks that the others wait for has itself been in its phase for too long."""
    if verdict.kind in ("desync", "network", "silent"):
        return verdict
    busy = []
    for rank in verdict.culprits:
        report, stack = reports[rank], frames[rank]
        if stack is not None and stack.is_compiling:
            busy.append(f"rank {rank} compiles")
        elif not report.is_overdue and report.pid:  # files from elsewhere tell no timeout
            busy.append(f"rank {rank} is in {report.phase} since {report.seconds:.0f} s, which is not too long for it")
    if not busy or len(busy) < len(verdict.culprits):
        return verdict
    return msgspec.structs.replace(verdict, kind="busy", summary=f"the others wait: {'; '.join(busy[:4])}")


def _with_context(
    verdict: HangVerdict, reports: Mapping[int, RankReport], frames: Mapping[int, Stack | None]
) -> HangVerdict:
    """Add phase, step, time and line of the first culprit, and where every rank is."""
    first = next((reports[rank] for rank in verdict.culprits if rank in reports), None)
    evidence = [*verdict.evidence]
    for rank, report in sorted(reports.items())[:16]:
        evidence.append(f"rank {rank}: {_where(report, frames[rank])}")
        if not report.answered:
            evidence.append(f"rank {rank}: it did not answer: C code may hold the GIL{_other_threads(report)}")
        for worker in report.workers:
            if line := _worker_line(worker):
                evidence.append(f"rank {rank}: its child, process {worker.pid}, is at {line}")
    if first is None:
        return msgspec.structs.replace(verdict, evidence=evidence)
    line = _line(first, frames[first.rank])
    return msgspec.structs.replace(
        verdict,
        phase=phase_of(first, frames[first.rank]),
        step=first.step,
        seconds=first.seconds,
        line=line,
        evidence=evidence,
    )


def phase_of(report: RankReport, stack: Stack | None) -> str:
    """Return the phase. A loop of its own calls backward and the compiler without the guard, so the stack decides that."""
    if report.phase == "forward" and stack is not None:
        return "compile" if stack.is_compiling else "backward" if stack.is_in_backward else "forward"
    return report.phase


def _line(report: RankReport, stack: Stack | None) -> str:
    """Return the line of the user's code that a rank is at; that of a loader worker if the rank waits for one."""
    if stack is None:
        return ""
    if report.phase == "data" and stack.waits_for_loader:
        for worker in report.workers:
            if line := _worker_line(worker):
                return f"{line} (loader worker, process {worker.pid})"
            if worker.state == "T":
                return f"no line: its loader worker, process {worker.pid}, was stopped by a signal (kill -CONT continues it)"
    frame = stack.user_frame()
    return "" if frame is None else frame.describe()


def _worker_line(worker: WorkerReport) -> str:
    """Return the line of the user's code that a child is at; "" if it waits for work, or that is not known."""
    found = stacks.training_stack(stacks.parse(worker.stacks))
    inside = None if found is None else found.inside_worker()
    frame = None if inside is None or not inside.has_user_code else inside.user_frame()
    return "" if frame is None else frame.describe()


def _where(report: RankReport, stack: Stack | None) -> str:
    line = _line(report, stack) or report.why_no_stacks or "its stack is not known"
    since = f" since {report.seconds:.1f} s" if report.phase else ""
    host = f", process {report.pid} on {report.host}" if report.pid else ""
    return f"{phase_of(report, stack) or 'phase not known'} of step {report.step}{since}, at {line}{host}"


def _other_threads(report: RankReport) -> str:
    """Return where the other threads are that run the user's code: one of them may hold the GIL."""
    threads = [stack for stack in stacks.parse(report.stacks) if stack.thread != report.thread and stack.has_user_code]
    lines = [frame.describe() for stack in threads[:4] if (frame := stack.user_frame()) is not None]
    return f"; other threads are at {', '.join(lines)}" if lines else ""


def _waiting_in(reports: Mapping[int, RankReport]) -> str:
    """Return the newest collective that some rank has not completed; "" if that is not known."""
    for groups in _records(reports).values():
        for record in groups.values():
            if (call := record.waits_in) is not None:
                return call.describe()
    return "the agreement on a step" if any(r.phase == "collective" for r in reports.values()) else ""


def _records(reports: Mapping[int, RankReport]) -> dict[int, dict[str, flight_records.GroupRecord]]:
    found: dict[int, dict[str, flight_records.GroupRecord]] = {}
    for rank, report in reports.items():
        if report.flight_record is not None and isinstance(report.flight_record.get("entries"), list):
            found[rank] = flight_records.group_records(report.flight_record)
    return found


def _is_waiting(groups: Mapping[str, flight_records.GroupRecord]) -> bool:
    return any(record.waits_in is not None for record in groups.values())


def _training_stack(report: RankReport) -> Stack | None:
    return stacks.training_stack(stacks.parse(report.stacks), report.thread)


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def render(verdict: HangVerdict) -> str:
    """Return the verdict as text for a person."""
    lines = [verdict.summary]
    if verdict.phase:
        at = f" at {verdict.line}" if verdict.line else ""
        lines.append(f"where: {verdict.phase} of step {verdict.step}, since {verdict.seconds:.1f} s{at}")
    if verdict.collective:
        lines.append(f"the others wait in: {verdict.collective}")
    return "\n".join([*lines, *(f"  {text}" for text in verdict.evidence)])


def to_report(content: Any) -> RankReport:
    """Return the report of a rank from what a file holds. HoldfastError if it is none."""
    try:
        return msgspec.convert(content, RankReport)
    except msgspec.ValidationError as error:
        raise HoldfastError(f"it is no report of a rank: {error}") from None
