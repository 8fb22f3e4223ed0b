"""What a question is: a function of the log, an episode and thresholds that answers yes, no, or "cannot be told"."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from holdfast.diagnosis.model.episode import Episode
from holdfast.diagnosis.model.table import Table

Value = Literal["yes", "no", "unknown"]


class Answer(msgspec.Struct, frozen=True):
    """An answer with the numbers it rests on, and both in a sentence."""

    value: Value
    sentence: str
    numbers: dict[str, Any] = {}


class Thresholds(dict[str, float]):
    """The thresholds of one question, and the names a log may use for what it asks about."""

    def __init__(self, values: Mapping[str, float], columns: list[str] | None = None) -> None:
        super().__init__(values)
        self.columns = columns or []


Question = Callable[[Table, Episode | None, Thresholds], Answer]


class Registered(msgspec.Struct, frozen=True):
    """A question's function, and the thresholds it reads."""

    ask: Question
    thresholds: frozenset[str]


REGISTRY: dict[str, Registered] = {}


def question(*thresholds: str) -> Callable[[Question], Question]:
    """Register a function under its own name; `thresholds` are the names that tree.toml must give values for."""

    def register(function: Question) -> Question:
        REGISTRY[function.__name__] = Registered(function, frozenset(thresholds))
        return function

    return register


def yes(sentence: str, **numbers: Any) -> Answer:
    return Answer("yes", sentence, numbers)


def no(sentence: str, **numbers: Any) -> Answer:
    return Answer("no", sentence, numbers)


def unknown(sentence: str, **numbers: Any) -> Answer:
    return Answer("unknown", sentence, numbers)


def decide(truth: bool, if_yes: str, if_no: str, **numbers: Any) -> Answer:
    return yes(if_yes, **numbers) if truth else no(if_no, **numbers)


def number(value: float) -> str:
    """A number as a person would write it."""
    if value != value or value in (float("inf"), float("-inf")):
        return str(value).replace("nan", "NaN").replace("inf", "Inf")
    if value == int(value) and abs(value) < 1e7:
        return str(int(value))
    size = abs(value)
    return f"{value:.3g}" if size < 1e-3 or size >= 1e5 else f"{value:.4g}"
