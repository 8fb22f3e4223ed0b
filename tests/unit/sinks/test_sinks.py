"""What each sink writes is read by the reader of its own library: steps after a rollback, incidents, and a restart."""

from __future__ import annotations

import json
import re
import struct
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from holdfast.core.base.config import MetricsSection
from holdfast.core.record.sink_thread import Sink, SinkRun, SinkThread, size_of
from holdfast.sinks import alerts, make_sinks
from holdfast.sinks.alerts import AlertSink
from holdfast.sinks.console import ConsoleSink
from holdfast.sinks.prometheus import PrometheusSink

IDENTITY = "0123456789abcdef" * 2


def row(step: int, loss: float, status: str = "committed") -> dict[str, Any]:
    phases = {"data": 0.01, "forward": 0.02}
    return {
        "step": step, "loss": loss, "lr": 0.1, "status": status, "time": 1e9 + step, "step_seconds": 0.05,
        "tokens_per_second": 1e4, "phases": phases, "flags": 0,
    }  # fmt: skip


def story() -> list[tuple[str, dict[str, Any]]]:
    """Steps 1 to 10, an incident at 10, back to 6, and on to 12."""
    before = [("row", row(step, 1.0)) for step in range(1, 11)]
    incident = [
        ("event", {"event": "incident_opened", "time": 1e9, "incident": 1, "kind": "loss_spike", "step": 10}),
        ("event", {"event": "action", "time": 1e9, "action": "rollback", "step": 10, "from_step": 10, "to_step": 6}),
    ]
    return [*before, *incident, *(("row", row(step, 2.0)) for step in range(7, 13))]


def play(sink: Sink, folder: Path, items: list[tuple[str, dict[str, Any]]], *, is_restart: bool = False) -> SinkThread:
    thread = SinkThread(sink)
    for kind, item in items:
        (thread.put_row if kind == "row" else thread.put_event)(item)
    earlier = size_of(folder / "metrics.jsonl") if is_restart else 0
    with open(folder / "metrics.jsonl", "a") as file:
        file.writelines(json.dumps(item) + "\n" for kind, item in items if kind == "row")
    thread.start(SinkRun(IDENTITY, folder, is_restart, lambda: 12, earlier))
    worker = thread._thread
    thread.close()
    worker.join(120)  # on a busy machine a library may take longer to close than a run waits for it
    assert thread.dropped == 0
    return thread


def make(name: Any) -> Sink:
    return make_sinks(MetricsSection(sinks=(name,)))[0]


def test_tensorboard_reads_steps_attempts_and_incidents(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def curve(name: str) -> list[tuple[int, float]]:
        reader = EventAccumulator(str(tmp_path / "tensorboard" / name), size_guidance={"scalars": 0})
        reader.Reload()
        assert ("time/data_sec" in reader.Tags()["scalars"]) == (name == "steps")
        texts = [each.tensor_proto.string_val[0].decode() for each in reader.Tensors("holdfast/incidents")]
        assert "step 10: rolled back from step 10 to 6" in texts
        return [(point.step, point.value) for point in reader.Scalars("train/loss")]

    play(make("tensorboard"), tmp_path, story())
    assert curve("steps") == [(n, 1.0) for n in range(1, 7)] + [(n, 2.0) for n in range(7, 13)]
    assert curve("attempts") == [(n, 1.0) for n in range(1, 11)] + [(n, 2.0) for n in range(11, 17)]
    # A restart from step 9 goes on in a second file.
    restart = [("event", {"event": "resumed", "time": 2e9, "step": 9}), *(("row", row(n, 3.0)) for n in range(10, 15))]
    play(make("tensorboard"), tmp_path, restart, is_restart=True)
    assert curve("steps")[6:] == [(7, 2.0), (8, 2.0), (9, 2.0)] + [(n, 3.0) for n in range(10, 15)]
    assert curve("attempts")[-6:] == [(16, 2.0)] + [(n, 3.0) for n in range(17, 22)]  # none twice


def test_an_incident_is_marked_at_its_own_step(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    cause = {"event": "cause", "time": 1e9, "incident": 1, "cause": "data", "step": 5}  # known eight steps later
    play(make("tensorboard"), tmp_path, [*story(), ("event", cause)])
    reader = EventAccumulator(str(tmp_path / "tensorboard" / "steps"))
    reader.Reload()
    marks = {each.tensor_proto.string_val[0].decode(): each.step for each in reader.Tensors("holdfast/incidents")}
    assert marks["step 5: cause of incident 1: data"] == 5 and marks["step 10: rolled back from step 10 to 6"] == 6


def log_records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a .wandb file: a header of 7 bytes, then the log format of LevelDB."""
    assert data[:4] == b":W&B"
    at, parts = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or its last part
            yield parts
            parts = b""


@pytest.mark.slow
def test_wandb_has_the_steps_as_axis_and_the_identity_of_the_run(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is not installed")
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    play(make("wandb"), tmp_path, story())
    (path,) = tmp_path.rglob("*.wandb")
    deadline, records = time.monotonic() + 60, []
    while not any(each.HasField("exit") for each in records) and time.monotonic() < deadline:
        time.sleep(0.01)  # W&B's own process may write the file after `finish` has returned
        records = [Record.FromString(data) for data in log_records(path.read_bytes())]
    assert next(each.run.run_id for each in records if each.HasField("run")) == IDENTITY
    axes = [each.metric for each in records if each.HasField("metric")]
    assert any(each.glob_name == "*" and each.step_metric == "train/step" for each in axes)
    history = [{i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in r.history.item} for r in records]
    steps = [each["train/step"] for each in history if "train/loss" in each]
    assert steps == [*range(1, 11), *range(7, 13)]
    texts = [each["holdfast/incident"] for each in history if "holdfast/incident" in each]
    assert texts == ["step 10: incident 1: loss_spike", "step 10: rolled back from step 10 to 6"]


@pytest.mark.slow
def test_mlflow_continues_its_run_after_a_restart(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlruns")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    run_dir = tmp_path / "runs" / "a"
    run_dir.mkdir(parents=True)
    play(make("mlflow"), run_dir, story())
    play(make("mlflow"), run_dir, [("row", row(13, 3.0))], is_restart=True)
    client = mlflow.MlflowClient()
    (experiment,) = [each for each in client.search_experiments() if each.name == "runs"]
    (run,) = client.search_runs([experiment.experiment_id])
    points = client.get_metric_history(run.info.run_id, "train/loss")
    assert sorted(point.step for point in points) == sorted([*range(1, 11), *range(7, 13), 13])
    assert run.data.tags["holdfast.run"] == IDENTITY
    assert any("rolled back from step 10 to 6" in text for text in run.data.tags.values())
    attempts = client.get_metric_history(run.info.run_id, "attempts/loss")
    assert sorted(point.step for point in attempts) == [*range(1, 18)]
    assert run.info.status == "FINISHED"
    end = ("event", {"event": "run_end", "time": 3e9, "step": 13, "stopped": "the policy"})
    play(make("mlflow"), run_dir, [end], is_restart=True)
    assert client.get_run(run.info.run_id).info.status == "FAILED"


def test_prometheus_text_is_read_by_its_parser(tmp_path):
    parser = pytest.importorskip("prometheus_client.parser", reason="prometheus_client is not installed")
    sink = PrometheusSink()
    play(sink, tmp_path, [*story(), ("row", row(13, float("nan")))])
    families = {f.name: f for f in parser.text_string_to_metric_families((tmp_path / "metrics.prom").read_text())}
    (sample,) = families["holdfast_step"].samples
    assert sample.value == 13.0 and sample.labels == {"run": IDENTITY}
    assert families["holdfast_rollbacks"].type == "counter" and families["holdfast_rollbacks"].samples[0].value == 1.0
    assert str(families["holdfast_train_loss"].samples[0].value) == "nan"


class Received(BaseHTTPRequestHandler):
    bodies: list[bytes]

    def do_POST(self) -> None:
        self.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *given: Any) -> None:
        pass


@pytest.fixture
def webhook():
    handler = type("Handler", (Received,), {"bodies": []})
    server = HTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/hook", handler.bodies
    server.shutdown()
    thread.join(10)
    server.server_close()


def test_prometheus_serves_the_newest_values(tmp_path):
    sink = PrometheusSink()
    sink.open(SinkRun(IDENTITY, tmp_path, False, lambda: None))
    sink.write_row(row(3, 0.5))
    sink.port = 0
    sink._serve()
    assert sink._server is not None
    with urllib.request.urlopen(f"http://127.0.0.1:{sink._server.server_port}/metrics", timeout=10) as answer:
        assert f'holdfast_train_loss{{run="{IDENTITY}"}} 0.5' in answer.read().decode()
    sink.close()


def test_a_port_that_another_run_has_costs_no_metrics_file_and_is_served_once_it_is_free(tmp_path, caplog):
    other = HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    sink = PrometheusSink(other.server_port)
    sink.open(SinkRun(IDENTITY, tmp_path, False, lambda: None))
    for step in (1, 2):
        sink.write_row(row(step, 0.5))
    assert "holdfast_train_loss" in (tmp_path / "metrics.prom").read_text()
    assert caplog.text.count("cannot be served") == 1 and str(other.server_port) in caplog.text
    other.server_close()
    sink._serves_at = 0.0
    sink.write_row(row(3, 0.25))
    with urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics", timeout=10) as answer:
        assert b"} 0.25" in answer.read()
    sink.close()


def test_hostile_and_long_texts_reach_chat_and_command_as_plain_text_of_bounded_length(tmp_path, webhook):
    address, bodies = webhook
    script = "import os, sys; open(sys.argv[1], 'a').write(os.environ['HOLDFAST_ALERT'] + chr(10))"
    sink = AlertSink(address, f"{sys.executable} -c {json.dumps(script)} {tmp_path}/out", 9)
    errors = [
        f"<!channel> <http://evil|here> & $(touch {tmp_path}/made) `touch {tmp_path}/made`; \x00\n\ud800",
        "x" * 5_000_000,
    ]
    play(sink, tmp_path, [("event", {"event": "failure", "step": 1, "error": error}) for error in errors])
    hostile, long = (json.loads(body)["text"] for body in bodies)
    assert "&lt;!channel&gt; &lt;http://evil|here&gt; &amp; $(touch" in hostile and "<" not in hostile
    assert len(long) < 1200 and "5,000,016 characters" in long
    lines = (tmp_path / "out").read_text().splitlines()
    assert len(lines) == 2 and "<!channel>" in lines[0] and not (tmp_path / "made").exists()


@pytest.mark.parametrize("program", ["import sys; sys.exit(3)", "import time; time.sleep(60)"])
def test_a_command_that_fails_or_hangs_is_reported_without_what_it_was_given(tmp_path, caplog, monkeypatch, program):
    monkeypatch.setattr(alerts, "_COMMAND_SECONDS", 0.5)
    thread = SinkThread(AlertSink("", f"{sys.executable} -c '{program}' --token S3CRET", 9))
    thread.put_event({"event": "restart"})
    thread.start(SinkRun(IDENTITY, tmp_path, False, lambda: None))
    thread.close()
    assert "alert_command" in caplog.text and "S3CRET" not in caplog.text


def test_alerts_are_posted_and_limited(tmp_path, webhook, monkeypatch):
    address, bodies = webhook
    monkeypatch.setenv("ALERTS", address)
    now = [0.0]
    sink = AlertSink("$ALERTS", "", 3, now=lambda: now[0])
    failures = [("event", {"event": "failure", "step": n, "error": "boom\x1b[2J"}) for n in range(10)]
    play(sink, tmp_path, [*story(), ("event", {"event": "note", "message": "quiet"}), *failures])
    texts = [json.loads(body)["text"] for body in bodies]
    assert len(texts) == 3 and "incident 1: loss_spike" in texts[0] and "rolled back" in texts[1]
    assert "\x1b" not in texts[2]
    now[0] = 4000.0
    play(sink, tmp_path, [("event", {"event": "restart"})])
    assert "restarted (and 9 earlier alerts" in json.loads(bodies[-1])["text"]


def test_a_run_that_fails_again_and_again_keeps_the_limit_and_reports_its_end(tmp_path, webhook):
    address, bodies = webhook
    end = ("event", {"event": "run_end", "step": 9, "stopped": "nonfinite_state"})
    opened = [("event", {"event": "incident_opened", "step": n, "incident": n, "kind": "nan"}) for n in range(5)]
    for attempt in range(4):
        play(AlertSink(address, "", 4), tmp_path, [*opened, end], is_restart=attempt > 0)
    texts = [json.loads(body)["text"] for body in bodies]
    assert len(texts) == 4 and "ended: nonfinite_state (and 2 earlier" in texts[3]


def test_the_last_events_are_tried_once_more_after_a_failure(tmp_path):
    class Flaky:
        name = "flaky"
        seen: ClassVar[list[int]] = []

        def open(self, run: SinkRun) -> None: ...
        def write_row(self, row: dict[str, Any]) -> None: ...
        def close(self) -> None: ...

        def write_event(self, event: dict[str, Any]) -> None:
            if event["step"] == 0:
                raise OSError("for a moment")
            self.seen.append(event["step"])

    thread = SinkThread(Flaky())
    for step in range(3):
        thread.put_event({"step": step})
    thread.start(SinkRun(IDENTITY, tmp_path, False, lambda: None))
    thread.close()
    assert Flaky.seen == [1, 2]


def test_a_command_gets_the_alert(tmp_path):
    script = "import os, sys; open(sys.argv[1], 'a').write(os.environ['HOLDFAST_ALERT'] + sys.stdin.read())"
    sink = AlertSink("", f"{sys.executable} -c {json.dumps(script)} {tmp_path}/out", 5)
    play(sink, tmp_path, story())
    text = (tmp_path / "out").read_text()
    assert text.count("holdfast:") == 4 and '"kind": "loss_spike"' in text


@pytest.mark.parametrize(
    "address",
    [
        "http://127.0.0.1:9/closed",
        "file:///etc/passwd",
        "$NOT_SET",
        "http://a:s3cret@127.0.0.1/",
        "http://x/T0/ S3CRET",
    ],
)
def test_an_alert_that_cannot_be_sent_is_reported_once_without_its_address(tmp_path, caplog, address):
    thread = SinkThread(AlertSink(address, "", 100), retry_seconds=0.0)
    for _ in range(3):
        thread.put_event({"event": "restart"})
    thread.start(SinkRun(IDENTITY, tmp_path, False, lambda: None))
    thread.close()
    assert caplog.text.count("sink alerts failed") == 1 and address not in caplog.text
    assert "s3cret" not in caplog.text.lower()


def test_the_console_prints_lines_with_rate_and_time_left(tmp_path, capsys):
    play(ConsoleSink(every=5), tmp_path, story())
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("step 1/12  loss 1.0000") and "ms/step" in lines[0] and "ETA 0:01" in lines[0]
    assert [re.match(r"step (\d+)/", line).group(1) for line in lines if "/12" in line] == ["1", "5", "10", "10"]
    assert "step 10: rolled back from step 10 to 6" in lines


def test_the_rows_before_an_incident_reach_a_sink_before_it(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    import holdfast
    from holdfast import sinks

    class Recorder:
        name = "console"
        seen: ClassVar[list[Any]] = []

        def open(self, run: SinkRun) -> None: ...
        def close(self) -> None: ...

        def write_row(self, row: dict[str, Any]) -> None:
            self.seen.append(row["step"])

        def write_event(self, event: dict[str, Any]) -> None:
            self.seen.append(event["event"])

    monkeypatch.setattr(sinks, "_make", lambda *given: Recorder())
    model, data = torch.nn.Linear(2, 1), torch.ones(8, 2)
    data[5] = torch.nan
    config = {"metrics": {"sinks": ["console"], "flush_seconds": 60.0}}
    guard = holdfast.Guard(model, torch.optim.SGD(model.parameters(), 0.01), run_dir=tmp_path, config=config)
    guard.fit(
        lambda model, batch: model(batch[0]).pow(2).mean(), torch.utils.data.DataLoader(data[:, None], 1), max_steps=7
    )
    assert Recorder.seen.index(5) < Recorder.seen.index("incident_opened")
