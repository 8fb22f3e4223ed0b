"""The server of `holdfast ui` answers for the runs below its folder, to the right host, with the token, and only reads."""

from __future__ import annotations

import http.client
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.base.errors import ConfigError
from holdfast.reports.recorded_run import open_run
from holdfast.reports.report_page import build_verdict
from holdfast.reports.run_list import RunList
from holdfast.reports.serve import RunServer
from shown_run import append, make_run, metrics_row, spike_events

EVIL = "</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("served")
    outside = make_run(tmp_path_factory.mktemp("outside") / "secret")
    runs = place / "runs"
    make_run(runs / "a")
    make_run(runs / "deep" / "b", evil=EVIL)
    make_run(runs / "live", ended=False, spike=None)
    (runs / "link").symlink_to(outside, target_is_directory=True)
    (runs / "linked").mkdir()
    (runs / "linked" / "journal.jsonl").symlink_to(outside / "journal.jsonl")
    make_run(place / "beside")
    return runs


@pytest.fixture(scope="module")
def server(folder) -> Iterator[RunServer]:
    yield from started(RunServer(folder, "127.0.0.1", 0))


@pytest.fixture
def guarded(folder) -> Iterator[RunServer]:
    yield from started(RunServer(folder, "127.0.0.1", 0, needs_token=True))


def started(server: RunServer) -> Iterator[RunServer]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join(10)


def ask(server: RunServer, path: str, method: str = "GET", **headers: str) -> tuple[int, Any, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=30)
    try:
        connection.putrequest(method, path, skip_host="Host" in headers)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read().decode()
    finally:
        connection.close()


def test_runs_are_listed_with_status_loss_and_incidents_and_links_are_not_followed(server):
    status, _, text = ask(server, "/api/runs")
    runs = {run["name"]: run for run in json.loads(text)["runs"]}
    assert status == 200
    assert sorted(runs) == ["a", "deep/b", "live"]
    assert (runs["a"]["status"], runs["a"]["incidents"], runs["a"]["step"]) == ("recovered", 1, 200)
    assert (runs["live"]["status"], runs["deep/b"]["status"]) == ("training", "failed")
    assert runs["a"]["loss"] == pytest.approx(1.02)
    assert 0.4 < runs["a"]["goodput"] < 0.5
    assert max(high for low_high in runs["a"]["spark"] if low_high for high in low_high) == 40.0


def test_goodput_in_the_list_is_that_of_the_run_though_its_journal_has_been_silent_for_long(tmp_path):
    run = make_run(tmp_path / "run", spike=None, ended=False)
    journal = (run / "journal.jsonl").read_text().splitlines()
    (run / "journal.jsonl").write_text(journal[0] + "\n")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    slow = [{**row, "phases": {"data": 0.2}} for row in rows]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in slow))
    (listed,) = RunList(tmp_path).list_runs()
    assert listed.goodput == pytest.approx(open_run(run).goodput.share, abs=0.02)
    assert 0.1 < listed.goodput < 0.3


@pytest.mark.parametrize("page", ["/", "/run?name=deep/b", "/compare?a=a&b=live"])
def test_every_page_has_a_strict_policy_and_no_text_of_a_run_as_markup(server, page):
    status, headers, text = ask(server, page)
    assert status == 200
    allowed = headers["Content-Security-Policy"]
    assert "default-src 'none'" in allowed and "frame-ancestors 'none'" in allowed and "unsafe" not in allowed
    assert headers["X-Content-Type-Options"] == "nosniff" and headers["Cache-Control"] == "no-store"
    assert "<img" not in text
    assert "Access-Control-Allow-Origin" not in headers


@pytest.mark.parametrize(
    "path",
    [
        "/api/run?name=../beside", "/api/run?name=..%2fbeside", "/api/run?name=%2e%2e%2fbeside",
        "/api/run?name=a/../../beside",
        "/api/run?name=/etc", "/api/run?name=link", "/api/run?name=linked", "/api/run?name=..", "/api/run?name=", "/api/run",
        "/api/run?name=a%00", "/run?name=../beside", "/compare?a=a&b=../beside", "/compare?a=a", "/../beside/run.json",
        "/%2e%2e/beside/run.json", "/..%2f..%2fetc/passwd", "/a/run.json", "//etc/passwd", "/api/run?name=..%252fbeside",
        "/api/run?name=....//beside", "/api/run?name=..%5cbeside",
    ],
)  # fmt: skip
def test_nothing_outside_the_folder_is_reached(server, path):
    status, _, text = ask(server, path)
    assert status == 404
    assert "1234" not in text and "root:" not in text


@pytest.mark.parametrize("host", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "localhost.evil:{port}",
                                  "user@127.0.0.1:{port}", "[::1", "", "10.0.0.1:{port}"])  # fmt: skip
def test_wrong_host_header_is_refused(server, host):
    status, _, text = ask(server, "/api/runs", Host=host.format(port=server.server_address[1]))
    assert status in (400, 421) and "recovered" not in text


@pytest.mark.parametrize("host", ["127.0.0.1:{port}", "localhost:{port}", "LOCALHOST:{port}", "[::1]:{port}"])
def test_right_host_header_is_answered(server, host):
    assert ask(server, "/", Host=host.format(port=server.server_address[1]))[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_server_only_reads(server, method):
    assert ask(server, "/api/run?name=a", method)[0] == 405


def test_head_has_no_body(server):
    status, headers, text = ask(server, "/", "HEAD")
    assert (status, text) == (200, "") and int(headers["Content-Length"]) > 1000


@pytest.mark.parametrize(
    "query", ["metrics=x", "metrics=-1", "metrics=1&journal=1e9", f"metrics={10**40}", "metrics=&journal="]
)
def test_offsets_that_are_no_numbers_are_refused_or_ignored(server, query):
    status, _, text = ask(server, f"/api/run?name=a&{query}")
    assert status == 400 or "page" in json.loads(text)


def test_token_is_needed_on_every_path_and_moves_into_a_cookie(guarded):
    for path in ("/", "/api/runs", "/run?name=a", "/api/run?name=a", "/compare?a=a&b=live", "/none"):
        assert ask(guarded, path)[0] == 403
        assert ask(guarded, path, Cookie="holdfast_token=wrong")[0] == 403
    assert ask(guarded, "/?token=wrong")[0] == 403
    assert ask(guarded, "/?token=%ff")[0] == 403
    status, headers, _ = ask(guarded, f"/?token={guarded.token}")
    assert (status, headers["Location"]) == (303, "/")
    cookie = headers["Set-Cookie"]
    assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
    assert ask(guarded, "/api/runs", Cookie=cookie.split(";")[0])[0] == 200
    assert guarded.url.endswith(f"/?token={guarded.token}")
    assert not ask(guarded, f"//evil.example/?token={guarded.token}")[1]["Location"].startswith("//")


def test_address_off_loopback_always_needs_a_token(folder):
    with RunServer(folder, "0.0.0.0", 0) as server:
        assert server.token and not server.is_loopback


def test_taken_port_is_one_error(server, folder):
    with pytest.raises(ConfigError, match="choose another"):
        RunServer(folder, "127.0.0.1", server.server_address[1])


def test_news_are_the_new_rows_and_the_story_once_the_journal_grows(server, folder):
    run = folder / "live"
    whole = json.loads(ask(server, "/api/run?name=live")[2])
    state = whole["state"]
    assert whole["page"]["verdict"]["status"] == "training" and whole["page"]["incidents"] == []
    news = json.loads(ask(server, f"/api/run?name=live&metrics={state['metrics']}&journal={state['journal']}")[2])
    assert news == {"rows": [], "state": state}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(
            json.dumps(metrics_row(201, float("nan"))) + "\n" + '{"step": 202, "lo'
        )  # a line that is being written
    append(run / "journal.jsonl", *({**event, "time": 1.0, "n": 50} for event in spike_events(201, 2)))
    news = json.loads(ask(server, f"/api/run?name=live&metrics={state['metrics']}&journal={state['journal']}")[2])
    ((row),) = news["rows"]
    assert (row["step"], row["kept"], row["values"]["loss"], row["values"]["lr"]) == (201, True, "NaN", 1e-3)
    assert [story["title"] for story in news["story"]["incidents"]] == ["2. loss spike at step 201"]
    assert news["state"]["metrics"] > state["metrics"]
    os.truncate(run / "metrics.jsonl", 100)
    again = json.loads(ask(server, f"/api/run?name=live&metrics={news['state']['metrics']}&journal=0")[2])
    assert again["page"] is True


def test_run_that_cannot_be_read_is_an_error_of_its_own_and_the_others_are_listed(server, folder):
    (folder / "broken").mkdir()
    (folder / "broken" / "metrics.jsonl").write_bytes(b"\x00\xff{" * 50)
    try:
        assert ask(server, "/api/run?name=broken")[0] == 422
        assert "broken" in ask(server, "/api/runs")[2]
    finally:
        (folder / "broken" / "metrics.jsonl").unlink()


def test_unchanged_runs_are_not_read_again(folder, monkeypatch):
    runs = RunList(folder)
    first = {run.name: run.step for run in runs.list_runs()}
    monkeypatch.setattr("holdfast.reports.run_list._read", lambda *_: pytest.fail("read again"))
    assert {run.name: run.step for run in runs.list_runs()} == first


def test_a_short_run_is_read_whole_and_one_without_a_journal_is_not_called_free_of_incidents(tmp_path):
    for name, losses in (("short", [3.0, 2.0, 1.0]), ("spike", [1.0] * 30 + [900.0])):
        (tmp_path / name).mkdir()
        lines = (json.dumps({"step": n, "loss": loss, "status": "committed"}) for n, loss in enumerate(losses, 1))
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        os.utime(tmp_path / name / "metrics.jsonl", (1e9, 1e9))
    short, spike = RunList(tmp_path).list_runs()
    assert [tuple(each) for each in short.spark if each] == [(3.0, 3.0), (2.0, 2.0), (1.0, 1.0)]
    assert max(each[1] for each in spike.spark if each) == 900.0
    assert (spike.status, spike.label) == ("unjudged", "Not diagnosed yet")
    assert build_verdict(open_run(tmp_path / "spike"), is_live=True).status == "unjudged"
    os.utime(tmp_path / "spike" / "metrics.jsonl")
    assert RunList(tmp_path).list_runs()[1].status == "training"
