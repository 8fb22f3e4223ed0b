"""Text from a stranger, in any field, file name or argument, cannot control the terminal that shows it."""

from __future__ import annotations

import io
import json
import logging
import shutil
import time
import unicodedata
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import saved_runs
from rich.text import Text

import holdfast as package
from holdfast.core.base.clean import clean, clean_lines
from holdfast.core.checkpoints.manifest import HealthRecord, seal, unseal_health, unseal_manifest
from holdfast.core.record.tally import IncidentSummary, Summary
from holdfast.reports.console import CleanConsole

FORGED = "FORGED: all is well"
# Clipboard (OSC 52), clear screen, C1, right-to-left, isolates, no width, line ends of all kinds, markup.
NAME = f"\x1b]52;c;ZXZpbA==\x07\x1b[2J\x9b31m\u202e\u2066\u061c\u200b\ufeff\u00ad\r\n{FORGED}\x7f\x85\u2028[red]x"
EVIL = NAME + "\x00\ud800"
READ_BY_CODE = {"event", "status", "name", "health", "kind", "action", "state", "manifest", "sum", "lineage", "policy"}
"""fields with fixed words: with other words in them the record is not understood, and shows less"""


def hostile(value: Any, evil: str, spare: set[str]) -> Any:
    """The value with hostile text in every string and key, but for the values of the `spare` fields."""
    if isinstance(value, str):
        return value + evil
    if isinstance(value, list):
        return [hostile(item, evil, spare) for item in value]
    if isinstance(value, dict):
        changed = {key: item if key in spare else hostile(item, evil, spare) for key, item in value.items()}
        if "policy" in changed and spare:
            changed["policy"] = {**value["policy"], "latched": evil}
        return {**changed, evil: evil}
    return value


def spoil(run: Path, evil: str, spare: set[str]) -> None:
    """Put hostile text into every file of a run directory, with checksums that fit."""
    for path in (run / "journal.jsonl", run / "metrics.jsonl"):
        lines = [json.dumps(hostile(json.loads(line), evil, spare)) for line in path.read_text().splitlines()]
        path.write_text("\n".join([*lines, evil.replace("\ud800", "")]) + "\n")
    for path in (run / "run.json", *run.glob("incidents/*/*.json")):
        path.write_text(json.dumps(hostile(json.loads(path.read_text()), evil, spare)))
    for folder in run.glob("checkpoints/*"):
        manifest, _ = unseal_manifest((folder / "manifest.json").read_bytes())
        versions, about = hostile(manifest.versions, evil, spare), hostile(manifest.about, evil, spare)
        known = {field: getattr(manifest, field) for field in manifest.__struct_fields__}
        changed = {**known, "run": manifest.run + evil, "reason": evil, "versions": versions, "about": about}
        content, digest = seal(type(manifest)(**changed))
        (folder / "manifest.json").write_bytes(content)
        record = unseal_health((folder / "health.json").read_bytes())
        record = HealthRecord(
            health=record.health, why=evil, handover=record.handover, manifest=digest, time=record.time
        )
        (folder / "health.json").write_bytes(seal(record)[0])
    (run / "checkpoints" / f".tmp-{NAME}").mkdir()


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    saved_runs.forked(folder / "run")
    return folder / "run"


@pytest.fixture(
    params=[
        "free fields",
        pytest.param("free fields, valid Unicode", marks=pytest.mark.slow),
        pytest.param("all fields", marks=pytest.mark.slow),
    ]
)
def run(request, trained, tmp_path) -> Path:
    """A run directory with a hostile name and hostile content."""
    path = tmp_path / f"run{NAME}"
    shutil.copytree(trained, path)
    spoil(path, NAME if "valid" in request.param else EVIL, set() if request.param == "all fields" else READ_BY_CODE)
    return path


def assert_shown_safely(text: str, what: object = "") -> None:
    hidden = {hex(ord(c)) for c in text if c != "\n" and unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")}
    assert not hidden, f"{what}: {sorted(hidden)} in {text!r}"
    assert not any(line.startswith("FORGED") for line in text.split("\n")), f"{what}: a forged line in {text!r}"


def assert_answers_safely(holdfast: Callable[..., Any], *words: object) -> None:
    answer = holdfast(*words)
    assert_shown_safely(answer.out, words)
    assert_shown_safely(answer.err, words)
    assert "Traceback" not in answer.err
    if "--json" in words:
        assert isinstance(json.loads(answer.out), dict)


def commands(run: Path, other: Path) -> Iterator[tuple[object, ...]]:
    costs = ("--save-cost", "1s", "--step-time", "1s", "--restart", "1m", "--mtbf", "9h")
    yield from (("diagnose", run), ("diagnose", run, "--all"), ("diagnose", run, "--postmortem"))
    yield from (("diagnose", run / "journal.jsonl"), ("diff", run, other), ("plan", run), ("plan", run, *costs))
    yield from (("report", run, "--format", "md"), ("report", run, "--format", "terminal"))
    for command in ("ls", "resume-path", "verify"):
        yield ("checkpoints", command, run)
    yield from (("checkpoints", "resume-path", other, "--load-path", run), ("checkpoints", "verify", run, "--all"))
    yield from (("checkpoints", "prune", run, "--dry-run"), ("checkpoints", "prune", run, "--keep-last", 1, "--yes"))
    yield from (("checkpoints", "verify", run, "--mark"), ("ack", run, "--note", NAME), ("doctor", "--excluded", run))


@pytest.mark.slow
@pytest.mark.parametrize("as_json", [False, True])
def test_no_command_on_a_hostile_run_directory_controls_the_terminal(holdfast, run, trained, tmp_path, as_json):
    for words in commands(run, trained):
        assert_answers_safely(holdfast, *words, *(["--json"] if as_json else []))


def test_json_has_the_true_values(holdfast, run):
    answer = holdfast("checkpoints", "ls", run, "--json")
    assert answer.json["path"] == str(run)
    assert answer.json["checkpoints"][0]["reason"] in (EVIL, NAME)


def test_post_mortem_file_of_a_hostile_run_directory_is_safe(holdfast, run, tmp_path):
    assert_answers_safely(holdfast, "diagnose", run, "--postmortem", "-o", tmp_path / "a.md")
    if (tmp_path / "a.md").exists():  # with hostile text in the fixed words too, there may be no curve to explain
        assert_shown_safely((tmp_path / "a.md").read_text(), "markdown")


@pytest.mark.parametrize("start", ["stopped by policy", "acknowledged", "by load_path"])
def test_resume_on_a_hostile_run_directory_logs_and_raises_safely(holdfast, run, tmp_path, start):
    if start == "acknowledged":
        holdfast("ack", run, "--note", NAME)
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logger = logging.getLogger("holdfast")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.DEBUG)
    home, options = (tmp_path / "new", {"load_path": str(run)}) if start == "by load_path" else (run, {})
    try:
        with warnings.catch_warnings(record=True) as warned:
            try:
                saved_runs.train(home, 42, **options)
            except package.HoldfastError as error:
                stream.write(str(error))
        stream.writelines(str(warning.message) for warning in warned)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert stream.getvalue()
    assert_shown_safely(stream.getvalue(), "logs")


@pytest.mark.slow
@pytest.mark.parametrize("as_json", [False, True])
def test_wrong_input_is_answered_safely(holdfast, tmp_path, as_json):
    policy, log, text = (tmp_path / f"{kind}{NAME}" for kind in ("policy", "log", "text"))
    escaped = json.dumps(NAME)
    policy.write_text(
        f"[recover]\nmode = {escaped}\n{escaped} = {escaped}\n[{escaped}]\na = 1\n[checkpoint]\nload_path = 1\n"
    )
    set_path = tmp_path / "set.toml"
    set_path.write_text(f"[checkpoint]\nload_path = {escaped}\n")
    log.write_text(f"step,loss,{NAME!r}\n" + "".join(f"{i},{NAME},2\n" for i in range(9)), newline="")
    text.write_text("words")
    wrong: list[tuple[object, ...]] = [
        (NAME,), (f"--{NAME}",), ("checkpoints", NAME), ("diagnose", f"--{NAME}"),
        ("diagnose", NAME), ("diagnose", log), ("diagnose", log, "--map", f"loss={NAME}"), ("diagnose", log, "--map", NAME),
        ("diagnose", log, "--format", NAME), ("diagnose", log, "--fail-on", NAME), ("diagnose", log, "-o", NAME),
        ("diff", NAME, log), ("diff", log, log), ("plan", NAME), ("plan", "--mtbf", NAME), ("plan", "--nodes", NAME),
        ("ack", NAME), *(("checkpoints", c, NAME) for c in ("ls", "verify", "prune", "resume-path")),
        ("checkpoints", "resume-path", NAME, "--load-path", NAME), ("checkpoints", "prune", tmp_path, "--keep-last", NAME),
        ("check", policy), ("check", NAME), ("check", set_path), ("check", set_path, f"--recover.{NAME}={NAME}"),
        ("train", policy), ("train", NAME), ("train", set_path, f"--train.run_dir={escaped}", f"--{NAME}"),
        ("init", tmp_path / NAME), ("init", tmp_path / NAME), ("init", tmp_path / "none" / NAME),
        ("prepare", text, "-o", tmp_path / f"out{NAME}"), ("prepare", NAME, "-o", NAME),
        ("prepare", text, "-o", tmp_path / "x", "--tokenizer", NAME), ("demo", "--seed", NAME),
    ]  # fmt: skip
    for words in wrong:
        assert_answers_safely(holdfast, *words, *(["--json"] if as_json else []))


def test_trainer_shows_hostile_names_safely(holdfast, tmp_path):
    sizes = ("--model.layers=1", "--model.width=16", "--model.heads=1", "--train.steps=2", "--scheduler.warmup_steps=1")
    folder = json.dumps(str(tmp_path / NAME))
    assert_answers_safely(holdfast, "train", "configs/tiny.toml", *sizes, f"--train.run_dir={folder}")
    assert (tmp_path / NAME / "journal.jsonl").exists()


def test_summary_of_a_hostile_journal_is_safe():
    incident = IncidentSummary(number=1, kind=EVIL, step=1, onset=1, actions=[EVIL], cause="data", where=EVIL)
    assert_shown_safely(str(Summary(incidents=[incident], stopped=EVIL)))


def test_log_arguments_and_tracebacks_are_cleaned(caplog):
    log = logging.getLogger("holdfast")
    try:
        raise ValueError(EVIL)
    except ValueError as error:
        log.exception("holdfast: %s: %d of %.1f: %s", EVIL, 3, 0.5, error)
    (record,) = caplog.records
    assert_shown_safely(logging.Formatter().format(record))
    assert "3 of 0.5" in record.getMessage()


def test_console_cleans_text_reads_no_markup_and_keeps_its_own_colours():
    out = io.StringIO()
    console = CleanConsole(
        file=out, force_terminal=True, width=200, color_system="standard", markup=False, highlight=False, emoji=False
    )
    console.print(f"[bold]{NAME}", ":smile:", Text("red", style="red"))
    shown = out.getvalue()
    assert "[bold]" in shown and ":smile:" in shown and "\x1b[31mred\x1b[0m" in shown
    assert_shown_safely(shown.replace("\x1b[31m", "").replace("\x1b[0m", "").replace(FORGED, ""))


@pytest.mark.parametrize(
    "text",
    [
        "naïve café",
        "cafe\u0301",
        "数据/训练",
        "한국어",
        "עברית",
        "می\u200cخواهم",  # noqa: RUF001
        "👩\u200d🔬 ✓ ❤\ufe0f",
        "a\u00a0b",
        "∇²·½",
    ],
)
def test_ordinary_unicode_is_shown_as_it_is(text):
    assert clean(text) == text and clean_lines(text) == text


def test_clean_leaves_one_visible_line():
    assert clean("a\x1b[2Jb\r\nc\td\x00\u202e") == "ab c d??"
    assert clean("\ud800 pa\u200dss") == "? pa?ss"
    assert clean_lines(f"first\n  second\n{FORGED}") == f"first\n  second\n  {FORGED}"


def test_clean_takes_time_in_proportion_to_the_text():
    began = time.process_time()
    for text in ("\x1b[" * 200_000, "\x1b[" + "0" * 400_000, "\u200d" * 400_000, "\r\n\t" * 200_000):
        clean(text)
    assert time.process_time() - began < 1.0
