"""`holdfast plan` from options, from a run directory and from both; missing values are errors, never tracebacks."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.cli import main
from holdfast.cli.output import format_duration
from holdfast.cli.plan_report import SCHEMA
from holdfast.core.checkpoints import measured
from holdfast.core.checkpoints.measured import measure
from holdfast.core.record.journal import dumps
from holdfast.core.record.rundir import to_json

ALL = ("--save-cost", 12, "--step-time", 0.8, "--mtbf", "36h", "--restart", "5m")
CONFIG = {"checkpoint": {"every_steps": 500, "certify_after": 20}}


def saved(time, step, stall=2.0):
    return {
        "event": "checkpoint", "status": "saved", "time": time, "step": step, "name": f"step_{step:08d}",
        "bytes": 1000, "stall_seconds": stall, "write_seconds": 9.0, "reason": "scheduled",
    }  # fmt: skip


def process_events(begin, hours, restart=True, ends=None, gap=None):
    """Journal events of one process: it begins, resumes, saves every half hour, and ends or just stops."""
    events = [{"event": "restart" if restart else "run_begin", "time": begin, "environment": {"config": CONFIG}}]
    if restart:
        events.append({"event": "resumed", "time": begin + 60.0, "step": 10, "checkpoint": "step_x", "seconds": 40.0})
    events += [saved(begin + 1800.0 * n, n) for n in range(1, int(2 * hours) + 1)]
    if ends is not None:
        events.append({"event": "run_end", "time": begin + 3600.0 * hours, "error": ends or None})
    return events


def write_run(folder, events, *, seconds=(0.5,) * 100, config=CONFIG, world_size=8):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(to_json({"config": config, "world_size": world_size}))
    (folder / "journal.jsonl").write_bytes(b"".join(dumps({"n": n, **e}) for n, e in enumerate(events)))
    rows = [{"step": n, "loss": 1.0, "seconds": s, "status": "committed"} for n, s in enumerate(seconds)]
    (folder / "metrics.jsonl").write_bytes(b"".join(map(dumps, rows)))
    return folder


@pytest.fixture
def run(tmp_path):
    """Ten hours, two failures of three restarts; each time it took 100 s from the last line to the resumption."""
    events = [
        *process_events(0.0, 4, restart=False),
        *process_events(14400.0 + 40, 2),
        *process_events(14440.0 + 7200 + 40, 3, ends=""),  # an orderly end, and a night without it
        *process_events(10**6, 1),
    ]
    return write_run(tmp_path / "run", events)


# ---- from options


def test_advice_comes_first_and_names_the_key_to_write(holdfast):
    answer = holdfast("plan", *ALL)
    assert (answer.status, answer.err) == (0, "")
    text = " ".join(answer.out.split())
    assert text.startswith("Set [checkpoint] every_steps = 2195 and every_minutes = 0: a save every 2,195 steps")
    assert "(29.3 min) leaves 98.41%" in text
    for words in ("cadences", "inputs", "lost per failure", "by formula: Young 29.4 min, Daly 29.3 min"):
        assert words in answer.out
    assert "at other scales" not in answer.out


def test_there_is_a_picture_and_it_is_no_wider_than_the_terminal(holdfast, monkeypatch):
    for columns in (40, 80, 200):
        monkeypatch.setenv("COLUMNS", str(columns))
        out = holdfast("plan", *ALL).out
        assert re.search("[\u2801-\u28ff]", out)
        assert max(len(line) for line in out.splitlines() if re.search("[\u2801-\u28ff]", line)) <= max(40, columns)


def test_json_has_the_whole_answer(holdfast):
    answer = holdfast("plan", *ALL, "--every", 1000, "--json").json
    assert answer["schema"] == SCHEMA
    assert answer["every_steps"] == answer["best"]["steps"] == 2195
    assert answer["now"]["steps"] == 1000
    assert answer["now"]["goodput"] < answer["best"]["goodput"]
    assert answer["inputs"]["mtbf"] == {"value": 36 * 3600.0, "source": "--mtbf"}
    assert answer["as_good"]["least_steps"] < 2195 < answer["as_good"]["most_steps"]
    assert len(answer["cadences"]) == 7
    assert answer["measured"] is None


def test_cadence_that_is_good_enough_is_kept(holdfast):
    out = holdfast("plan", *ALL, "--every", 2000).out
    assert out.startswith("Keep [checkpoint] every_steps = 2000 and every_minutes = 0:")
    out = holdfast("plan", "--save-cost", "1", "--step-time", "1s", "--mtbf", "36h", "--restart", 0, "--every", 500).out
    assert out.startswith("Keep [checkpoint] every_steps = 500:"), "it comes before the ten minutes"


def test_cadence_shorter_than_a_write_is_reported(holdfast):
    out = " ".join(holdfast("plan", *ALL, "--write-time", "10m", "--every", 100).out.split())
    assert "now, every 100 steps, saves wait for each other" in out
    out = holdfast("plan", *ALL, "--write-time", "2h").out
    assert out.startswith("Set [checkpoint] every_steps = 9000 and every_minutes = 0:")
    assert "saves are kept at least as far apart as a save is written: 9,000 steps" in out


@pytest.mark.parametrize(
    ("words", "seconds"),
    [
        (("--mtbf", "90"), 90), (("--mtbf", "90s"), 90), (("--mtbf", "12m"), 720), (("--mtbf", "1.5h"), 5400),
        (("--mtbf", "90d"), 7776000), (("--mtbf", "500 ms"), 0.5), (("--failures-per-day", "2"), 43200),
        (("--nodes", "128", "--node-mtbf", "90d"), 60750),
    ],
)  # fmt: skip
def test_failure_rate_has_several_options(holdfast, words, seconds):
    answer = holdfast("plan", "--save-cost", 1, "--step-time", "1s", "--restart", 0, *words, "--json").json
    assert answer["inputs"]["mtbf"]["value"] == pytest.approx(seconds)


def test_more_nodes_fail_more_often(holdfast):
    out = holdfast("plan", *ALL, "--nodes", 100).out
    rows = re.findall(r"^(\d+) +[\d.]+ \w+ +(\d+) +([\d.]+)% *$", out.partition("at other scales")[2], re.MULTILINE)
    assert [int(nodes) for nodes, _, _ in rows] == [25, 50, 100, 200, 400]
    shares = [float(share) for _, _, share in rows]
    assert shares == sorted(shares, reverse=True)


# ---- from a run


def test_run_is_measured(run):
    found = measure(str(run))
    assert found.step_time == 0.5
    assert (found.stall, found.write, found.bytes, found.saves) == (2.0, 9.0, 1000.0, 20)
    assert (found.failures, found.running) == (2, 36000.0)
    assert found.restart == 100.0
    assert (found.every, found.certify_steps, found.world_size) == (500, 20, 8)
    assert found.limits == []


def test_run_alone_is_enough_and_its_uncertainty_is_reported(holdfast, run):
    answer = holdfast("plan", run)
    assert (answer.status, answer.err) == (0, "")
    assert "2 failures in 10.0 h" in answer.out
    assert "median of 20 saves" in answer.out
    # 36000 s over the exact 90% interval of two events, 0.3554 to 6.2958
    assert "the 90% interval of the mtbf is 95.3 min to 28.1 h" in answer.out
    answer = holdfast("plan", run, "--json").json
    assert answer["mtbf_90"] == pytest.approx([36000 / 6.2958, 36000 / 0.3554], rel=1e-3)
    assert answer["inputs"]["certify_after"]["value"] == 20


def test_option_replaces_the_measured_value(holdfast, run):
    answer = holdfast(
        "plan", run, "--mtbf", "2d", "--step-time", "4s", "--every", 7, "--certify-after", 0, "--json"
    ).json
    assert answer["inputs"]["mtbf"] == {"value": 172800.0, "source": "--mtbf"}
    assert answer["inputs"]["step_time"]["value"] == 4
    assert answer["inputs"]["save_cost"]["value"] == 2
    assert answer["inputs"]["certify_after"]["value"] == 0
    assert answer["now"]["steps"] == 7
    assert answer["mtbf_90"] is None


def test_world_scales_the_measured_rate(holdfast, run):
    answer = holdfast("plan", run, "--world", 64, "--json").json
    assert answer["inputs"]["mtbf"]["value"] == 18000 / 8
    assert "ranks" in holdfast("plan", run, "--world", 64).out


def test_restart_may_change_the_cadence(tmp_path):
    later = {"checkpoint": {"every_steps": 99}}
    events = [
        *process_events(0.0, 1, restart=False),
        {"event": "restart", "time": 5000.0, "environment": {"config": later}},
    ]
    assert measure(str(write_run(tmp_path / "run", events))).every == 99


@pytest.mark.parametrize(
    ("settings", "now", "advice"),
    [
        (
            {"every_steps": 500, "every_minutes": 10.0},
            500,
            "every_minutes = 0",
        ),  # 0.5 s a step: 1200 steps in 10 minutes
        ({"every_steps": 5000, "every_minutes": 10.0}, 1200, "every_minutes = 0"),
        ({"every_steps": 0, "every_minutes": 10.0}, 1200, "every_minutes = 0"),
        ({"every_steps": 5000, "every_minutes": 0.0}, 5000, "every_steps = "),
    ],
)
def test_cadence_by_time_is_the_current_one_if_it_comes_first(tmp_path, holdfast, settings, now, advice):
    events = [{"event": "run_begin", "time": 0.0, "environment": {"config": {"checkpoint": settings}}}]
    folder = write_run(tmp_path / "run", [*events, saved(1800.0, 1, stall=20.0)], config={"checkpoint": settings})
    answer = holdfast("plan", folder, "--mtbf", "5d", "--json").json
    assert answer["now"]["steps"] == now
    assert advice in answer["advice"] and ("every_minutes" in answer["advice"]) == (advice == "every_minutes = 0")
    assert answer["every_minutes"] == 0


def test_cadence_by_time_that_is_good_enough_is_kept(tmp_path, holdfast):
    settings = {"every_steps": 5000, "every_minutes": 10.0}
    events = [{"event": "run_begin", "time": 0.0, "environment": {"config": {"checkpoint": settings}}}]
    folder = write_run(tmp_path / "run", [*events, saved(1800.0, 1)], config={"checkpoint": settings})
    answer = holdfast("plan", folder, "--mtbf", "36h").out
    assert answer.startswith("Keep [checkpoint] every_minutes = 10:")


def test_run_that_saves_only_when_asked_has_no_cadence(tmp_path):
    folder = write_run(
        tmp_path / "run", process_events(0.0, 1, restart=False), config={"checkpoint": {"every_steps": 0}}
    )
    (folder / "journal.jsonl").write_bytes(b"")
    assert measure(str(folder)).every is None


@pytest.mark.parametrize(
    ("error", "failures"),
    [
        ("", 0),
        ("KeyboardInterrupt: ", 0),
        ("SystemExit: 75", 0),
        ("PolicyStop: x", 0),
        ("RuntimeError: NCCL", 1),
        (None, 1),
    ],
)
def test_only_an_unrequested_end_is_a_failure(tmp_path, error, failures):
    folder = write_run(
        tmp_path / "run", [*process_events(0.0, 1, restart=False, ends=error), *process_events(4000.0, 1)]
    )
    assert measure(str(folder)).failures == failures


def test_process_that_never_resumed_is_a_failure_but_no_measured_restart(tmp_path):
    """It died before it had restored anything: how long a restart takes is not known from it."""
    died = {"event": "restart", "time": 4000.0, "environment": {"config": CONFIG}}
    found = measure(str(write_run(tmp_path / "run", [*process_events(0.0, 1, restart=False), died])))
    assert (found.failures, found.restart) == (1, None)
    found = measure(
        str(write_run(tmp_path / "again", [*process_events(0.0, 1, restart=False), died, *process_events(4500.0, 1)]))
    )
    assert (found.failures, found.restart) == (2, 560.0), "from the last line of the process that died to the resume"


def test_run_without_failures_reports_a_bound_and_asks_for_the_mtbf(holdfast, tmp_path):
    folder = write_run(tmp_path / "run", process_events(0.0, 10, restart=False))
    answer = holdfast("plan", folder)
    assert answer.status == 78
    assert (
        f"failure rate: no failure in 10.0 h of {folder}, so the MTBF is probably (95%) over 3.3 h; give --mtbf"
        in answer.err
    )


def test_run_that_never_restarted_is_planned_with_a_given_mtbf(holdfast, tmp_path):
    folder = write_run(tmp_path / "run", process_events(0.0, 10, restart=False))
    answer = holdfast("plan", folder, "--mtbf", "36h")
    assert (answer.status, answer.err) == (0, "")
    text = " ".join(answer.out.split())
    assert "restart 0 s not known: RUN has not restarted after a failure; assumed 0" in text
    assert "the goodput is an upper bound; give --restart TIME" in text
    without, with_restart = (
        holdfast("plan", folder, "--mtbf", "36h", *more, "--json").json for more in ([], ["--restart", "5m"])
    )
    assert without["every_steps"] == with_restart["every_steps"]
    assert without["best"]["goodput"] > with_restart["best"]["goodput"]
    assert "upper bound" not in holdfast("plan", folder, "--mtbf", "36h", "--restart", "5m").out


def test_long_metrics_are_read_from_their_end(tmp_path, monkeypatch):
    monkeypatch.setattr(measured, "_TAIL_BYTES", 1000)
    assert measure(str(write_run(tmp_path / "run", [], seconds=[9.0] * 100 + [0.25] * 40))).step_time == 0.25


# ---- wrong or missing values


def test_all_missing_values_are_listed_at_once(holdfast):
    answer = holdfast("plan")
    assert answer.status == 78
    for option in ("--save-cost", "--step-time", "--restart", "--mtbf", "--node-mtbf"):
        assert option in answer.err
    assert "4 errors" in answer.err


def test_missing_and_wrong_values_are_listed_together_once_each(holdfast):
    answer = holdfast("plan", "--save-cost", "soon", "--mtbf", "-3h", "--json")
    assert answer.status == 78
    assert [error.split()[0] for error in answer.json["errors"]] == ["--save-cost", "--mtbf", "step", "restart:"]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "value",
    ["", " ", "x", "-1", "0", "0s", "1w", "1e3", "nan", "inf", "5 5", "9" * 400, "1h30m", "٣s", "1,5", "\x1b[2J"],
)
@pytest.mark.parametrize("option", ["--mtbf", "--step-time", "--node-mtbf"])
def test_invalid_time_is_a_one_line_error(holdfast, option, value):
    words = [w for pair in zip(ALL[::2], ALL[1::2], strict=True) if pair[0] not in (option, "--mtbf") for w in pair]
    if option == "--step-time":
        words += ["--mtbf", "36h"]
    answer = holdfast("plan", *words, "--nodes", 2, f"{option}={value}")
    assert answer.status == 78
    assert answer.err.startswith("error: plan: 1 error\n")
    assert "Traceback" not in answer.err and "\x1b" not in answer.err


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "1e300"])
def test_invalid_rate_is_an_error(holdfast, value):
    answer = holdfast("plan", *ALL[:4], "--restart", 1, f"--failures-per-day={value}")
    assert (answer.status, "1 error" in answer.err) == (78, True)


@pytest.mark.parametrize("option", ["--nodes", "--world", "--every", "--certify-after"])
@pytest.mark.parametrize("value", ["-1", "x", "1.5"])
def test_invalid_count_is_a_usage_error(holdfast, option, value):
    assert holdfast("plan", *ALL, f"{option}={value}").status == 2


def test_two_failure_rates_are_refused(holdfast):
    answer = holdfast("plan", *ALL, "--nodes", 8, "--node-mtbf", "90d")
    assert answer.status == 78
    assert "--mtbf and --node-mtbf all set the failure rate: give only one" in answer.err


def test_node_mtbf_needs_the_number_of_nodes(holdfast):
    answer = holdfast("plan", "--node-mtbf", "90d", *ALL[:4], "--restart", 1)
    assert (answer.status, "--nodes" in answer.err) == (78, True)


def test_world_without_a_measured_rate_is_refused(holdfast, run):
    assert "leave it out" in holdfast("plan", *ALL, "--world", 8).err
    assert "leave it out" in holdfast("plan", run, "--mtbf", "1h", "--world", 8).err
    (run / "run.json").unlink()
    assert "not on record" in holdfast("plan", run, "--world", 8).err


def test_path_that_is_not_a_run_is_an_error(holdfast, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    for place in ("none", "empty", "file"):
        answer = holdfast("plan", tmp_path / place)
        assert answer.status == 1
        assert answer.err.startswith("error: ") and "Traceback" not in answer.err


def test_run_with_empty_files_lists_all_missing_values(holdfast, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("journal.jsonl", "metrics.jsonl", "run.json"):
        (folder / name).write_bytes(b"")
    answer = holdfast("plan", folder)
    assert (answer.status, "3 errors" in answer.err) == (78, True)
    done = holdfast("plan", folder, *ALL)
    assert done.status == 0
    assert "run.json is not a JSON object" in done.out


def test_run_without_metrics_asks_for_the_step_time(holdfast, run):
    (run / "metrics.jsonl").unlink()
    answer = holdfast("plan", run)
    assert answer.status == 78
    assert f"step time: not on record in {run}; give --step-time TIME" in answer.err
    assert "metrics.jsonl cannot be read" in holdfast("plan", run, "--step-time", 1).out


NONSENSE = [None, True, -5.0, 0, "x", [], {}, float("nan"), float("inf"), 1e308, 10**400]


@pytest.mark.slow
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_no_run_record_causes_a_traceback(tmp_path, capsys, data):
    """Events with fields of any kind, lines that are not events, a configuration of any shape."""
    value = st.sampled_from(NONSENSE)
    kinds = ["checkpoint", "restart", "resumed", "run_begin", "run_end", "note"]
    event = st.fixed_dictionaries(
        {"event": st.sampled_from(kinds), "time": value | st.floats(0, 1e9), "status": st.just("saved")},
        optional={"stall_seconds": value, "write_seconds": value, "bytes": value, "error": value, "environment": value},
    )
    lines = data.draw(st.lists(event.map(lambda e: json.dumps(e)) | st.sampled_from(["[1]", "{", "null"]), max_size=12))
    row = st.fixed_dictionaries({}, optional={"seconds": value, "status": value})
    folder = tmp_path / "run"
    folder.mkdir(exist_ok=True)
    (folder / "journal.jsonl").write_text("\n".join(lines))
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, data.draw(st.lists(row, max_size=5)))))
    sections = value | st.fixed_dictionaries({"checkpoint": value | st.fixed_dictionaries({"every_steps": value})})
    (folder / "run.json").write_text(json.dumps({"config": data.draw(sections), "world_size": data.draw(value)}))
    options = data.draw(st.sampled_from([[], list(ALL), list(ALL[:4]), ["--world", "4"], ["--json"]]))
    with pytest.raises(SystemExit) as ended:
        main.run(["plan", str(folder), *map(str, options)])
    assert ended.value.code in (0, 78)
    capsys.readouterr()


@pytest.mark.slow
@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.floats(1e-6, 1e11) | st.sampled_from([1e-6, 1e11]), min_size=5, max_size=5), st.integers(1, 10**9))
def test_no_costs_cause_a_traceback(capsys, times, nodes):
    words = ["--save-cost", "--step-time", "--node-mtbf", "--restart", "--write-time"]
    options = [w for name, t in zip(words, times, strict=True) for w in (name, f"{t:.9f}")]
    for more in ([], ["--json"]):
        with pytest.raises(SystemExit) as ended:
            main.run(["plan", *options, "--nodes", str(nodes), "--every", "10", *more])
        assert ended.value.code in (0, None)
    out = capsys.readouterr().out
    assert 0 <= json.loads(out[out.index("{\n") :])["best"]["goodput"] <= 1


def test_help_has_examples(holdfast):
    answer = holdfast("plan", "--help")
    assert answer.status == 0
    assert "holdfast plan runs/a\n" in answer.out and "--node-mtbf 90d" in answer.out


def test_example_in_the_docs_is_what_it_prints(holdfast, monkeypatch):
    page = (Path(__file__).parents[3] / "docs" / "plan.md").read_text()
    command, _, shown = page.partition("    $ holdfast ")[2].partition("\n")
    monkeypatch.setenv("COLUMNS", "80")
    printed = holdfast(*command.split()).out
    expected = "\n".join(f"    {line.rstrip()}".rstrip() for line in printed.splitlines())
    assert shown.startswith(expected + "\n")


def test_installed_program_answers(installed):
    assert installed("plan", *ALL, "--json").json["every_steps"] == 2195


def test_terminal_in_an_old_encoding_gets_question_marks_and_no_traceback(installed):
    answer = installed("plan", *ALL, env={"PYTHONIOENCODING": "ascii"})
    assert (answer.status, answer.err) == (0, "")
    assert "?" in answer.out


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0 s"),
        (2.5e-5, "0.025 ms"),
        (0.8, "800 ms"),
        (90, "90 s"),
        (130, "2.2 min"),
        (129600, "36.0 h"),
        (10**6, "11.6 d"),
    ],
)
def test_durations_use_a_readable_unit(seconds, words):
    assert format_duration(seconds) == words


# ---- the snapshots of a model


def test_snapshots_of_a_planned_model(holdfast):
    answer = holdfast("plan", "--params", "7b", "--ranks", 8, "--host-memory", "1tb")
    assert (answer.status, answer.err) == (0, "")
    assert answer.out.startswith("shares (DDP): 2 shares of 10.50 GB fit; a rollback in memory reaches 11 steps back")
    assert "sharded (FSDP): 2 copies of 10.50 GB fit; a rollback in memory reaches 11 steps back or more." in answer.out
    for words in (
        "7,000,000,000 parameters in float32",
        "2 optimizer states",
        "a quarter of that",
        "memory_gb = 115.5",
    ):
        assert words in answer.out


def test_snapshots_of_a_planned_model_as_json(holdfast):
    words = ("--params", "70B", "--dtype", "bf16", "--state-dtype", "fp32", "--ranks", 64, "--host-memory", "2tb")
    answer = holdfast("plan", *words, "--json").json
    assert answer["schema"] == "holdfast.plan.snapshots/1"
    assert answer["model"]["nbytes"] == 70 * 10**9 * (2 + 2 * 4)
    assert answer["model"]["ranks_per_host"] == 8
    replicated, sharded = answer["plans"]
    assert (replicated["state"], replicated["nbytes"]) == ("replicated", sharded["nbytes"])
    assert (replicated["whole_nbytes"], sharded["whole_nbytes"]) == (answer["model"]["nbytes"], sharded["nbytes"])
    assert "0 fit whole, so each rank keeps a share of 10.94 GB" in replicated["note"]
    assert sharded["allowed"] == 2 * 10**12 // 8 // 4
    assert (sharded["nbytes"], sharded["copies"], sharded["kept"], sharded["wanted"]) == (10937500000, 5, 5, 11)
    assert sharded["reach"][0] < sharded["reach"][1]


def test_one_rank_with_memory_for_all_has_nothing_to_note(holdfast):
    answer = holdfast("plan", "--params", "1.4e6", "--optimizer-states", 0, "--memory-gb", 1, "--json").json
    (plan,) = answer["plans"]
    assert (plan["nbytes"], plan["kept"], plan["note"]) == (5_600_000, 11, None)
    assert (
        "one rank: all 11 copies of 5.6 MB fit."
        in holdfast("plan", "--params", "1.4m", "--optimizer-states", 0, "--memory-gb", 1).out
    )


def test_everything_wrong_with_a_model_is_listed(holdfast):
    words = ("--params", "seven", "--dtype", "int4", "--ranks", 2, "--ranks-per-host", 4, "--memory-gb", -1)
    answer = holdfast("plan", *words, "--host-memory", "1zb", "--mtbf", "3h", "--save-cost", 3)
    assert answer.status == 78
    for text in (
        "--params counts snapshots, --save-cost, --mtbf plan saves: run the command twice",
        "--params 'seven': not a size from 1 to 1e18; write 7b, 350m or 1.4e9",
        "--host-memory '1zb': not a size from 1 to 1e18; write 512, 512gb or 2tb",
        "--memory-gb -1.0: must be a number above 0, such as 60",
        "--ranks-per-host 4: more than all ranks; give --ranks 4 or more",
        "--dtype 'int4': not a known dtype; write one of fp32, bf16, fp16, fp64, float32",
    ):
        assert text in answer.err
    missing = holdfast("plan", "--params", "7b")
    assert missing.status == 78
    assert "memory: give --host-memory SIZE, the free memory of a host, or --memory-gb NUMBER" in missing.err


@pytest.mark.parametrize("text", ["", "nan", "inf", "-1", "0", "1e400", "7 b b", "٣b", "\x1b[31m", "9" * 500])
def test_a_size_that_is_none_is_an_error(holdfast, text):
    answer = holdfast("plan", "--params", text, "--memory-gb", 1)
    assert answer.status == 78
    assert "--params" in answer.err and "\x1b" not in answer.err
