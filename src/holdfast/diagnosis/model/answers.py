"""The contract of a question: a function of log, episode and thresholds that answers yes, no or unknown."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from holdfast.diagnosis.model.episode import Episode
from holdfast.diagnosis.model.table import Table

Value = Literal["yes", "no", "unknown"]


class Answer(msgspec.Struct, frozen=True):
    """Holds an answer, the numbers behind it, and a sentence with both."""

    value: Value
    sentence: str
    numbers: dict[str, Any] = {}


class Thresholds(dict[str, float]):
    """Holds the thresholds of one question, and the column names that a log may use for its subject."""

    def __init__(self, values: Mapping[str, float], columns: list[str] | None = None) -> None:
        super().__init__(values)
        self.columns = columns or []


Question = Callable[[Table, Episode | None, Thresholds], Answer]


class RegisteredQuestion(msgspec.Struct, frozen=True):
    """Holds the function of a question and the names of the thresholds it reads."""

    ask: Question
    thresholds: frozenset[str]


REGISTRY: dict[str, RegisteredQuestion] = {}


def question(*thresholds: str) -> Callable[[Question], Question]:
    """Register a function as a question. tree.toml must give a value for each name in `thresholds`."""

    def register(function: Question) -> Question:
        REGISTRY[function.__name__] = RegisteredQuestion(function, frozenset(thresholds))
        return function

    return register


def yes(sentence: str, **numbers: Any) -> Answer:
    return Answer("yes", sentence, numbers)


def no(sentence: str, **numbers: Any) -> Answer:
    return Answer("no", sentence, numbers)


def unknown(sentence: str, **numbers: Any) -> Answer:
    return Answer("unknown", sentence, numbers)


def decide(is_true: bool, if_yes: str, if_no: str, **numbers: Any) -> Answer:
    return yes(if_yes, **numbers) if is_true else no(if_no, **numbers)


def fmt(value: float) -> str:
    """Format a number for people."""
    if not math.isfinite(value):
        return str(value).replace("nan", "NaN").replace("inf", "Inf")
    if value == int(value) and abs(value) < 1e7:
        return str(int(value))
    return f"{value:.3g}" if abs(value) < 1e-3 or abs(value) >= 1e5 else f"{value:.4g}"


def fmt_steps(start: float, end: float, unit: str = "step") -> str:
    """Return `step 5`, or `epochs 3 to 8`."""
    return f"{unit} {fmt(start)}" if math.isclose(start, end) else f"{unit}s {fmt(start)} to {fmt(end)}"
