"""A report as a PNG picture, drawn by matplotlib if it is installed."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.core.base import durable
from holdfast.core.base.clean import clean
from holdfast.core.base.errors import MissingDependency, RunDirError
from holdfast.diagnosis.model.table import Series
from holdfast.reports.plots import thin
from holdfast.reports.recorded_run import RecordedRun
from holdfast.reports.report_page import ReportPage

_SIGNALS = (("loss", "loss"), ("grad_norm", "gradient norm"), ("lr", "learning rate"))
_MAX_POINTS, _LOG_RATIO = 20_000, 30.0


def draw_picture(run: RecordedRun, page: ReportPage, output: Path) -> None:
    """Write loss, gradient norm and LR with the incidents. Raises MissingDependency without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependency(
            f"--format png needs matplotlib, which cannot be imported ({error}); install it with: pip install matplotlib"
        ) from None
    signals = [(name, label) for name, label in _SIGNALS if run.table.has(name)]
    figure = Figure(figsize=(11, 1.2 + 2.4 * max(1, len(signals))), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    title = clean(f"{page.title}: {page.verdict.label}: {page.verdict.text}")
    figure.suptitle(title[:140], fontsize=11, parse_math=False)
    for row, (name, label) in enumerate(signals, 1):
        axes = figure.add_subplot(len(signals), 1, row)
        _draw(axes, run.table.series(name), run.undone.get(name))
        axes.set_ylabel(label)
        for incident in page.incidents:
            axes.axvspan(incident.onset, max(incident.last, incident.onset + 1), color="#d55e00", alpha=0.15, lw=0)
        axes.set_xlabel("step" if row == len(signals) else "")
    content = io.BytesIO()
    figure.savefig(content, format="png", metadata={"Software": None})
    try:
        durable.replace_file(output, content.getvalue())
    except OSError as error:
        raise RunDirError(f"{output} cannot be written: {error.strerror}") from None


def _draw(axes: Any, series: Series, undone: Series | None) -> None:
    """Draw a curve with its undone attempts. Of a long one, the extremes of every few points are drawn."""
    if len(series.step) > _MAX_POINTS:
        series = thin(series, _MAX_POINTS)
    axes.plot(series.step, series.value, color="#0072b2", lw=0.9)
    if undone is not None and len(undone.step):
        axes.plot(undone.step, undone.value, "x", color="#d55e00", ms=3, label="undone attempts")
        axes.legend(loc="upper right", fontsize=8)
    finite = series.value[np.isfinite(series.value)]
    if len(finite) and finite.min() > 0 and finite.max() > _LOG_RATIO * finite.min():
        axes.set_yscale("log")
    axes.grid(alpha=0.25)
