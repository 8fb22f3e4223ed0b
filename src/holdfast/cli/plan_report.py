"""The answer of `holdfast plan`: the advice first, then a chart, the cadences around it and the inputs."""

from __future__ import annotations

from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from holdfast.cli.chart import Chart
from holdfast.cli.output import format_duration, titled_table
from holdfast.core.checkpoints import cadence
from holdfast.core.checkpoints.cadence import Advice, Costs
from holdfast.core.checkpoints.measured import MeasuredCosts

SCHEMA = "holdfast.plan/1"
_COLOURS = {"goodput": "cyan", "now": "magenta", "best": "green"}
_HEIGHT, _MAX_WIDTH = 9, 100
_SCALES = (0.25, 0.5, 1.0, 2.0, 4.0)
_NEGLIGIBLE = 0.001
"""a difference in goodput that is not worth a change: a tenth of a percent of the time"""


class SourcedValue(NamedTuple):
    """A number and its source: an option, a measurement or a default."""

    value: float
    source: str


class PlanInputs(NamedTuple):
    """Holds everything that the advice is computed from."""

    save_cost: SourcedValue
    write_time: SourcedValue
    step_time: SourcedValue
    mtbf: SourcedValue
    restart: SourcedValue
    certify_after: SourcedValue
    every: int | None
    """the current cadence in steps, also if it is set in minutes"""
    every_minutes: float
    """[checkpoint] every_minutes in force; 0: saves are by steps alone"""
    nodes: int | None
    mtbf_90: tuple[float, float] | None
    """90% interval of a measured MTBF"""
    is_restart_known: bool

    @property
    def costs(self) -> Costs:
        return Costs(
            self.save_cost.value, self.restart.value, self.mtbf.value, self.step_time.value,
            self.write_time.value, int(self.certify_after.value),
        )  # fmt: skip


def _settings(steps: int, inputs: PlanInputs) -> str:
    """Return the keys for a save every `steps` steps: every_minutes alone, or every_steps, before which it must not come."""
    minutes, step_time = inputs.every_minutes, inputs.step_time.value
    if minutes and steps == inputs.every == max(1, round(60 * minutes / step_time)):
        return f"[checkpoint] every_minutes = {minutes:g}"
    is_too_late = 0 < 60 * minutes < steps * step_time
    return f"[checkpoint] every_steps = {steps}{' and every_minutes = 0' if is_too_late else ''}"


def _format_advice(inputs: PlanInputs, advice: Advice) -> str:
    best, now = advice.best, advice.now
    interval = f"{best.steps:,} steps ({format_duration(best.seconds)})"
    if now is not None and now.steps >= advice.least_steps and best.goodput - now.goodput < _NEGLIGIBLE:
        return (
            f"Keep {_settings(now.steps, inputs)}: {now.goodput:.2%} of the time is useful; "
            f"the best, a save every {interval}, would give {best.goodput:.2%}."
        )
    useful = f"leaves {best.goodput:.2%} of the time useful"
    text = f"Set {_settings(best.steps, inputs)}: a save every {interval} {useful}"
    if now is None:
        return f"{text}."
    if now.steps < advice.least_steps:
        return f"{text}; now, every {now.steps:,} steps, saves wait for each other."
    return f"{text}; now, every {now.steps:,} steps, it is {now.goodput:.2%}."


def print_report(out: Console, inputs: PlanInputs, advice: Advice, limits: list[str], *, ranks: bool) -> None:
    """Print advice, chart, cadences, inputs and remarks."""
    out.print(Text(_format_advice(inputs, advice), style="bold"))
    out.print()
    out.print(_chart(inputs.costs, advice, min(out.width, _MAX_WIDTH)))
    for table in (_cadences_table(advice), _inputs_table(inputs), _scales_table(inputs, ranks)):
        if table is not None:
            out.print()
            out.print(table)
    out.print()
    for line in (*_remarks(inputs, advice), *limits):
        out.print(Text(line), soft_wrap=True)


def _chart(costs: Costs, advice: Advice, width: int) -> Text:
    """Draw the goodput in percent over the steps between saves, up to four times the best."""
    best, last = advice.best, 4 * advice.best.steps
    chart = Chart(last, _COLOURS, top=100.0)
    floor = min(cadence.option(n, costs).goodput for n in (max(advice.least_steps, best.steps // 4), last))
    for n in range(max(1, advice.least_steps), last + 1, max(1, last // (2 * width))):
        if (value := cadence.option(n, costs).goodput) >= floor:
            chart.add("goodput", n, 100 * value)
    if advice.now is not None and advice.now.steps <= last and advice.now.goodput >= floor:
        chart.add("now", advice.now.steps, 100 * advice.now.goodput)
    chart.add("best", best.steps, 100 * best.goodput)
    picture = chart.render(width, _HEIGHT)
    picture.append("  % of the time that is useful, over the steps between saves", style="dim")
    return picture


def _cadences_table(advice: Advice) -> Table:
    table = titled_table("cadences", "every_steps", "interval", "goodput", "lost per failure", "saves per hour", "")
    options = {option.steps: option for option in (*advice.around, *([advice.now] if advice.now else []))}
    marked = {"best": advice.best, "now": advice.now}
    for steps, option in sorted(options.items()):
        marks = [mark for mark, shown in marked.items() if shown is not None and shown.steps == steps]
        table.add_row(
            f"{steps}", format_duration(option.seconds), f"{option.goodput:.2%}",
            format_duration(option.lost_per_failure), f"{option.saves_per_hour:.3g}", ", ".join(marks),
        )  # fmt: skip
    return table


def _inputs_table(inputs: PlanInputs) -> Table:
    table = titled_table("inputs", "what", "value", "from")
    for name in ("step_time", "save_cost", "write_time", "restart", "mtbf"):
        given: SourcedValue = getattr(inputs, name)
        table.add_row(name.replace("_", " "), format_duration(given.value), given.source)
    table.add_row("certified after", f"{inputs.certify_after.value:.0f} steps", inputs.certify_after.source)
    return table


def _scales_table(inputs: PlanInputs, ranks: bool) -> Table | None:
    """Return the advice for more and fewer nodes: the failure rate scales with them, the costs stay."""
    if inputs.nodes is None:
        return None
    unit = "ranks" if ranks else "nodes"
    table = titled_table("at other scales, same costs", unit, "mtbf", "every_steps", "goodput")
    for count in sorted({max(1, round(inputs.nodes * scale)) for scale in _SCALES}):
        costs = inputs.costs._replace(mtbf=inputs.mtbf.value * inputs.nodes / count)
        best = cadence.advise(costs).best
        table.add_row(f"{count:,}", format_duration(costs.mtbf), f"{best.steps}", f"{best.goodput:.2%}")
    return table


def _remarks(inputs: PlanInputs, advice: Advice) -> list[str]:
    low, high = _negligible_range(inputs.costs, advice)
    formulas = {"Young": advice.young, "Daly": advice.daly, "exact": advice.exact}
    lines = [f"by formula: {', '.join(f'{name} {format_duration(value)}' for name, value in formulas.items())}"]
    if advice.best.goodput > 10 * _NEGLIGIBLE:
        lines.append(f"{low:,} to {high:,} steps cost at most {_NEGLIGIBLE:.1%} of the time more than the best")
    if advice.best.steps == advice.least_steps and advice.exact < advice.best.seconds:
        why = "a save is written" if inputs.write_time.value > 0 else "one step takes"
        lines.append(f"saves are kept at least as far apart as {why}: {advice.least_steps:,} steps")
    if not inputs.is_restart_known:
        lines.append(
            "the restart time is not known, so the goodput is an upper bound; give --restart TIME. The best cadence does "
            "not depend on it"
        )
    if inputs.mtbf_90 is not None:
        low_mtbf, high_mtbf = inputs.mtbf_90
        ends = [cadence.advise(inputs.costs._replace(mtbf=m)).best.steps for m in inputs.mtbf_90]
        lines.append(
            f"the failure rate is uncertain: the 90% interval of the mtbf is {format_duration(low_mtbf)} to "
            f"{format_duration(high_mtbf)}, which gives a best cadence of {ends[0]:,} to {ends[1]:,} steps"
        )
    if advice.best.goodput < 0.5:
        lines.append("less than half of the time is useful at best: shorten restarts and saves, or fix what fails")
    return lines


def _negligible_range(costs: Costs, advice: Advice) -> tuple[int, int]:
    """Return the cadences that are practically as good as the best, found by bisection on each side of it."""

    def is_good(steps: int) -> bool:
        return cadence.option(steps, costs).goodput >= advice.best.goodput - _NEGLIGIBLE

    def edge(inside: int, outside: int) -> int:
        while abs(outside - inside) > 1:
            middle = (inside + outside) // 2
            inside, outside = (middle, outside) if is_good(middle) else (inside, middle)
        return inside

    high = 2 * advice.best.steps
    while is_good(high) and high < 10**15:
        high *= 2
    return edge(advice.best.steps, advice.least_steps - 1), edge(advice.best.steps, high)


def to_json(inputs: PlanInputs, advice: Advice, measured: MeasuredCosts | None, limits: list[str]) -> dict[str, Any]:
    low, high = _negligible_range(inputs.costs, advice)
    return {
        "schema": SCHEMA,
        "advice": _format_advice(inputs, advice),
        "every_steps": advice.best.steps,
        "every_minutes": 0.0 if advice.best.seconds > 60 * inputs.every_minutes else inputs.every_minutes,
        "best": advice.best._asdict(),
        "now": None if advice.now is None else advice.now._asdict(),
        "as_good": {"least_steps": low, "most_steps": high},
        "least_steps": advice.least_steps,
        "seconds": {"young": advice.young, "daly": advice.daly, "exact": advice.exact},
        "cadences": [option._asdict() for option in advice.around],
        "inputs": {
            name: getattr(inputs, name)._asdict()
            for name in ("step_time", "save_cost", "write_time", "restart", "mtbf", "certify_after")
        },
        "mtbf_90": None if inputs.mtbf_90 is None else list(inputs.mtbf_90),
        "measured": None if measured is None else {**measured._asdict(), "limits": limits},
    }
