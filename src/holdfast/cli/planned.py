"""What `holdfast plan` answers with: the advice first, a picture, the cadences around it, what it rests on."""

from __future__ import annotations

from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from holdfast.cli.chart import Chart
from holdfast.core.checkpoints import cadence
from holdfast.core.checkpoints.cadence import Advice, Costs
from holdfast.core.checkpoints.measured import MeasuredCosts

SCHEMA = "holdfast.plan/1"
_COLOURS = {"goodput": "cyan", "now": "magenta", "best": "green"}
_HEIGHT, _WIDEST = 9, 100
_SCALES = (0.25, 0.5, 1.0, 2.0, 4.0)
_FLAT = 0.001
"""goodput that is not worth a change: a tenth of a percent of the time"""


class Known(NamedTuple):
    """A number, and where it comes from."""

    value: float
    source: str


class Inputs(NamedTuple):
    """Everything the advice rests on."""

    save_cost: Known
    write_time: Known
    step_time: Known
    mtbf: Known
    restart: Known
    certify_after: Known
    every: int | None
    nodes: int | None
    rate: tuple[float, float] | None
    """MTBF, shortest and longest, by the 90% interval of a measured rate"""

    @property
    def costs(self) -> Costs:
        return Costs(
            self.save_cost.value, self.restart.value, self.mtbf.value, self.step_time.value,
            self.write_time.value, int(self.certify_after.value),
        )  # fmt: skip


def _advice(advice: Advice) -> str:
    best, now = advice.best, advice.now
    interval = f"{best.steps:,} steps ({spoken(best.seconds)})"
    if now is not None and now.steps >= advice.least_steps and best.goodput - now.goodput < _FLAT:
        return (
            f"Leave [checkpoint] every_steps = {now.steps}: {now.goodput:.2%} of the time is useful; "
            f"the best, a save every {interval}, would make it {best.goodput:.2%}."
        )
    useful = f"leaves {best.goodput:.2%} of the time useful"
    text = f"Write [checkpoint] every_steps = {best.steps}: a save every {interval} {useful}"
    if now is None:
        return f"{text}."
    if now.steps < advice.least_steps:
        return f"{text}; every {now.steps:,} steps, as it is, saves wait for each other."
    return f"{text}; every {now.steps:,} steps, as it is, {now.goodput:.2%}."


def tell(console: Console, inputs: Inputs, advice: Advice, limits: list[str], *, ranks: bool) -> None:
    """Advice, picture, cadences, what it rests on, what to mind."""
    console.print(Text(_advice(advice), style="bold"))
    console.print()
    console.print(_picture(inputs.costs, advice, min(console.width, _WIDEST)))
    for table in (_cadences(advice), _rests_on(inputs), _scales(inputs, ranks)):
        if table is not None:
            console.print()
            console.print(table)
    console.print()
    for line in (*_remarks(inputs, advice), *limits):
        console.print(Text(line), soft_wrap=True)


def _picture(costs: Costs, advice: Advice, width: int) -> Text:
    """Goodput in percent against the steps between saves, to four times the best."""
    best, most = advice.best, 4 * advice.best.steps
    chart = Chart(most, _COLOURS, most=100.0)
    floor = min(cadence.option(n, costs).goodput for n in (max(advice.least_steps, best.steps // 4), most))
    every = max(1, most // (2 * width))
    for n in range(max(1, advice.least_steps), most + 1, every):
        if (value := cadence.option(n, costs).goodput) >= floor:
            chart.add("goodput", n, 100 * value)
    if advice.now is not None and advice.now.steps <= most and advice.now.goodput >= floor:
        chart.add("now", advice.now.steps, 100 * advice.now.goodput)
    chart.add("best", best.steps, 100 * best.goodput)
    picture = chart.render(width, _HEIGHT)
    picture.append("  % of the time that is useful, over the steps between saves", style="dim")
    return picture


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, show_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _cadences(advice: Advice) -> Table:
    table = _table("cadences", "every_steps", "interval", "goodput", "lost a failure", "saves an hour", "")
    rows = {option.steps: option for option in (*advice.around, *([advice.now] if advice.now else []))}
    for steps, option in sorted(rows.items()):
        marks = [
            word for word, one in (("best", advice.best), ("now", advice.now)) if one is not None and one.steps == steps
        ]
        table.add_row(
            f"{steps}", spoken(option.seconds), f"{option.goodput:.2%}", spoken(option.lost_per_failure),
            f"{option.saves_per_hour:.3g}", ", ".join(marks),
        )  # fmt: skip
    return table


def _rests_on(inputs: Inputs) -> Table:
    table = _table("what it rests on", "what", "value", "from")
    for name in ("step_time", "save_cost", "write_time", "restart", "mtbf"):
        known: Known = getattr(inputs, name)
        table.add_row(name.replace("_", " "), spoken(known.value), known.source)
    table.add_row("certified after", f"{inputs.certify_after.value:.0f} steps", inputs.certify_after.source)
    return table


def _scales(inputs: Inputs, ranks: bool) -> Table | None:
    """The same job on more and fewer nodes: failures come in proportion, the costs stay."""
    if inputs.nodes is None:
        return None
    table = _table(
        "at other scales, all else as it is", "ranks" if ranks else "nodes", "mtbf", "every_steps", "goodput"
    )
    for count in sorted({max(1, round(inputs.nodes * scale)) for scale in _SCALES}):
        costs = inputs.costs._replace(mtbf=inputs.mtbf.value * inputs.nodes / count)
        best = cadence.advise(costs).best
        table.add_row(f"{count:,}", spoken(costs.mtbf), f"{best.steps}", f"{best.goodput:.2%}")
    return table


def _remarks(inputs: Inputs, advice: Advice) -> list[str]:
    low, high = _flat_range(inputs.costs, advice)
    lines = [f"by formula: Young {spoken(advice.young)}, Daly {spoken(advice.daly)}, exact {spoken(advice.exact)}"]
    if advice.best.goodput > 10 * _FLAT:
        lines.append(f"{low:,} to {high:,} steps cost at most {_FLAT:.1%} of the time more than the best")
    if advice.best.steps == advice.least_steps and advice.exact < advice.best.seconds:
        why = "one is written" if inputs.write_time.value > 0 else "one step takes"
        lines.append(f"saves are kept no closer than {why}: {advice.least_steps:,} steps")
    if inputs.rate is not None:
        ends = [cadence.advise(inputs.costs._replace(mtbf=m)).best.steps for m in inputs.rate]
        lines.append(
            f"the failure rate is uncertain: by the 90% interval the mtbf lies between {spoken(inputs.rate[0])} and "
            f"{spoken(inputs.rate[1])}, and the best cadence between {ends[0]:,} and {ends[1]:,} steps"
        )
    if advice.best.goodput < 0.5:
        lines.append("less than half of the time is useful at best: shorten restarts and saves, or mend what fails")
    return lines


def _flat_range(costs: Costs, advice: Advice) -> tuple[int, int]:
    """The cadences that come as good as to the same as the best, by halving on each side of it."""
    best, enough = advice.best, advice.best.goodput - _FLAT

    def edge(inside: int, outside: int) -> int:
        while abs(outside - inside) > 1:
            middle = (inside + outside) // 2
            inside, outside = (middle, outside) if _is_enough(middle) else (inside, middle)
        return inside

    def _is_enough(steps: int) -> bool:
        return cadence.option(steps, costs).goodput >= enough

    high = 2 * best.steps
    while _is_enough(high) and high < 10**15:
        high *= 2
    return edge(best.steps, advice.least_steps - 1), edge(best.steps, high)


def spoken(seconds: float) -> str:
    """In the unit a person would use."""
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.3g} s" if seconds >= 1 or seconds == 0 else f"{seconds * 1e3:.3g} ms"


def answer(inputs: Inputs, advice: Advice, found: MeasuredCosts | None, limits: list[str]) -> dict[str, Any]:
    low, high = _flat_range(inputs.costs, advice)
    return {
        "schema": SCHEMA,
        "advice": _advice(advice),
        "every_steps": advice.best.steps,
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
        "mtbf_90": None if inputs.rate is None else list(inputs.rate),
        "measured": None if found is None else {**found._asdict(), "limits": limits},
    }
