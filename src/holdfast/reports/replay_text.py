"""Shows what a replay found: the path from the first module to the loss, the verdict, the evidence and the fix."""

from __future__ import annotations

from holdfast.core.origin.report import Comparison, ModuleRow, OriginReport, ReplayReport, TensorRange

_MAX_ROWS = 40


def describe_range(values: TensorRange) -> str:
    """Return shape, dtype and range of a tensor in one line."""
    bounds = "no finite value"
    if values.minimum is not None and values.maximum is not None:
        bounds = f"{values.minimum:.4g} .. {values.maximum:.4g}"
    bad = f", {values.nonfinite} not finite" if values.nonfinite else ""
    return f"{'x'.join(map(str, values.shape)) or 'scalar'} {values.dtype.removeprefix('torch.')}  {bounds}{bad}"


def render(report: ReplayReport, notes: list[str], sample_id: int | None = None) -> str:
    """Return the whole answer as text."""
    verdict, origin = report.verdict, report.origin
    lines = ["path, from the first module to the loss:", *_path(origin)]
    lines += ["", f"origin: {describe_origin(origin)}"]
    if origin.source:
        lines.append(f"  {origin.source.strip()}")
    lines += [f"  input {n}: {describe_range(each)}" for n, each in enumerate(origin.inputs)]
    lines += [f"  output {n}: {describe_range(each)}" for n, each in enumerate(origin.outputs)]
    if report.comparisons:
        lines += ["", "the same step:", *(f"  {_compare(each)}" for each in report.comparisons)]
    lines += ["", f"verdict: {verdict.cause} ({verdict.confidence:.2f}): {verdict.sentence}"]
    lines += [f"  for: {text}" for text in verdict.evidence_for]
    lines += [f"  against: {text}" for text in verdict.evidence_against]
    if report.minimised or report.sample is not None:
        lines.append(f"sample: {describe_sample(report, sample_id)}")
    lines.append(f"fix: {verdict.fix or 'none known'}")
    lines += [f"note: {note}" for note in notes]
    lines.append(f"{report.runs} runs of the step in {report.seconds:.1f} s")
    return "\n".join(lines)


def describe_origin(origin: OriginReport) -> str:
    """Return the place of an origin in one line."""
    if origin.phase == "none":
        return "no op was seen to make a value that is not finite"
    place = f" at {origin.file}:{origin.line}" if origin.file else ""
    where = f"{origin.op or origin.phase} in {origin.module or 'code outside every module'}, {origin.phase}{place}"
    rows = f"; rows {origin.bad_input_rows[:8]} of the input" if origin.bad_input_rows else ""
    state = f"; not finite before the step: {', '.join(origin.bad_state[:4])}" if origin.bad_state else ""
    return where + rows + state


def describe_sample(report: ReplayReport, sample_id: int | None) -> str:
    """Return which sample of the batch suffices."""
    text = report.minimised
    if report.sample is not None:
        part = f" of micro-batch {report.microbatch}" if report.microbatch else ""
        at = f", position {report.position}" if report.position is not None else ""
        text = f"row {report.sample}{part}{at}{f'; {text}' if text else ''}"
    return text if sample_id is None else f"{text} (sample {sample_id} of the dataset)"


def _path(origin: OriginReport) -> list[str]:
    rows = origin.path
    shown = rows if len(rows) <= _MAX_ROWS else [*rows[: _MAX_ROWS // 2], *rows[-_MAX_ROWS // 2 :]]
    width = max((len(row.module) for row in shown), default=0)
    lines = [_row(row, min(width, 48)) for row in shown]
    if len(rows) > len(shown):
        lines.insert(_MAX_ROWS // 2, f"  ... {len(rows) - len(shown)} more, all of them with --json")
    return lines or ["  no module was called"]


def _row(row: ModuleRow, width: int) -> str:
    gradient = "" if row.gradient is None else f"   gradient {describe_range(row.gradient)}"
    return f"  {row.module or '(model)':<{width}}  {describe_range(row.output)}{gradient}"


def _compare(each: Comparison) -> str:
    if not each.ran:
        return f"{each.name}: not run: {each.why_not}"
    loss = "" if each.loss is None else f", loss {each.loss:.6g}"
    return f"{each.name}: {'finite' if each.finite else 'not finite'}{loss}"
