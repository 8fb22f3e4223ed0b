"""The server of `holdfast ui`: reads one folder, changes nothing, and answers only for the runs that it found there.

A request names a run; it is looked up in the list of found runs, so no path of a request ever reaches the file system.
The name of the host is checked, so that no web site can read through the browser by a name that it points here.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import json
import secrets
import socket
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from holdfast.core.base.clean import clean
from holdfast.core.base.errors import ConfigError, HoldfastError
from holdfast.core.base.version import __version__
from holdfast.diagnosis import rundiff
from holdfast.reports.diff_page import build_diff_page
from holdfast.reports.live_run import LiveRun
from holdfast.reports.page import encode, policy, render_page
from holdfast.reports.run_list import RunList

POLL_MILLISECONDS = 1000
_MAX_LIVE, _TIMEOUT = 8, 30.0
_COOKIE = "holdfast_token"


class RefusedRequest(Exception):
    """A request that gets an error status and a reason."""

    def __init__(self, status: HTTPStatus, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class RunServer(ThreadingHTTPServer):
    """Serves the runs of a folder. Off loopback, or with `needs_token`, every request needs the token."""

    daemon_threads = True

    def __init__(self, folder: Path, host: str, port: int, *, needs_token: bool = False) -> None:
        self.host = host
        self.is_loopback = _is_loopback(host)
        self.token = secrets.token_urlsafe(24) if needs_token or not self.is_loopback else None
        self.runs = RunList(folder)
        self._live: dict[str, LiveRun] = {}
        self._lock = threading.Lock()
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            raise ConfigError(
                [f"--host {host} --port {port}: {why}; choose another, or --port 0 for a free one"], "ui"
            ) from None

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        query = "" if self.token is None else f"?token={self.token}"
        return f"http://{host}:{self.server_address[1]}/{query}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: a browser that goes away is no error."""

    def answer(self, path: str, query: dict[str, str]) -> tuple[str, str]:
        """Return the content type and the content for a path."""
        route: Callable[[dict[str, str]], str] | None = {
            "/": self._list_page, "/run": self._run_page, "/compare": self._compare_page, "/api/runs": self._runs,
            "/api/run": self._run,
        }.get(path)  # fmt: skip
        if route is None:
            raise RefusedRequest(HTTPStatus.NOT_FOUND, "no such page")
        with self._lock:  # one at a time: a long run takes memory
            content = route(query)
        return "application/json" if path.startswith("/api/") else "text/html; charset=utf-8", content

    def _path(self, name: str | None) -> Path:
        path = self.runs.paths().get(name or "")
        if path is None:
            raise RefusedRequest(HTTPStatus.NOT_FOUND, "no such run")
        return path

    def _list_page(self, query: dict[str, str]) -> str:
        content = {"kind": "list", "folder": str(self.runs.folder), "poll": POLL_MILLISECONDS, "version": __version__}
        return render_page(content, title="Runs", is_live=True)

    def _run_page(self, query: dict[str, str]) -> str:
        name = query.get("name", "")
        self._path(name)
        content = {"kind": "live", "name": name, "poll": POLL_MILLISECONDS}
        return render_page(content, title=name, is_live=True)

    def _compare_page(self, query: dict[str, str]) -> str:
        paths = [self._path(query.get(key)) for key in ("a", "b")]
        a, b = (rundiff.load(path) for path in paths)
        page = build_diff_page(rundiff.compare(a, b), a, b)
        return render_page({**_fields(page), "back": True}, title=page.title, is_live=True)

    def _runs(self, query: dict[str, str]) -> str:
        return encode({"runs": self.runs.list_runs()})

    def _run(self, query: dict[str, str]) -> str:
        name = query.get("name", "")
        path = self._path(name)
        live = self._live.pop(name, None) or LiveRun(path)
        self._live[name] = live
        while len(self._live) > _MAX_LIVE:
            self._live.pop(next(iter(self._live)))
        if "metrics" not in query:
            return encode(live.whole())
        try:
            offsets = int(query["metrics"]), int(query.get("journal", "0"))
        except ValueError:
            raise RefusedRequest(HTTPStatus.BAD_REQUEST, "metrics and journal are numbers of bytes") from None
        if not all(0 <= offset < 2**53 for offset in offsets):
            raise RefusedRequest(HTTPStatus.BAD_REQUEST, "metrics and journal are numbers of bytes")
        return encode(live.news(*offsets))


class _Handler(BaseHTTPRequestHandler):
    server: RunServer
    timeout = _TIMEOUT
    server_version, sys_version = "holdfast", ""

    def do_GET(self) -> None:
        try:
            self._check_host()
            parts = urlsplit(self.path)
            query = {key: values[-1] for key, values in parse_qs(parts.query, max_num_fields=16).items()}
            if self._check_token(query):
                self._redirect(parts.path)
                return
            kind, content = self.server.answer(parts.path, query)
            self._send(HTTPStatus.OK, kind, content)
        except RefusedRequest as error:
            self._send(error.status, "text/plain; charset=utf-8", str(error))
        except HoldfastError as error:
            self._send(HTTPStatus.UNPROCESSABLE_ENTITY, "text/plain; charset=utf-8", clean(str(error)))
        except (ValueError, OSError) as error:
            with contextlib.suppress(OSError):
                self._send(HTTPStatus.BAD_REQUEST, "text/plain; charset=utf-8", clean(str(error)))

    do_HEAD = do_GET

    def _refuse_method(self) -> None:
        self._send(HTTPStatus.METHOD_NOT_ALLOWED, "text/plain; charset=utf-8", "this server only reads")

    do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = _refuse_method

    def _check_host(self) -> None:
        """Refuse a name that is not of this machine: a web site may have made it point here."""
        hosts = self.headers.get_all("Host") or []
        if len(hosts) != 1 or not _is_own_name(hosts[0], self.server):
            raise RefusedRequest(HTTPStatus.MISDIRECTED_REQUEST, "wrong Host header; use the address that was printed")

    def _check_token(self, query: dict[str, str]) -> bool:
        """Return whether a right token came with the address: it moves into a cookie, out of the history."""
        token = self.server.token
        if token is None:
            return False
        given = query.get("token")
        cookies = (part.strip().partition("=") for part in self.headers.get("Cookie", "").split(";"))
        kept = next((value for name, _, value in cookies if name == _COOKIE), "")
        if hmac.compare_digest((given or kept).encode(), token.encode()):
            return given is not None
        raise RefusedRequest(
            HTTPStatus.FORBIDDEN, "token missing or wrong; open the address that `holdfast ui` printed"
        )

    def _redirect(self, path: str) -> None:
        self.send_response(HTTPStatus.SEE_OTHER)
        self.send_header("Location", path if path.startswith("/") and not path.startswith("//") else "/")
        self.send_header("Set-Cookie", f"{_COOKIE}={self.server.token}; HttpOnly; SameSite=Strict; Path=/")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send(self, status: HTTPStatus, kind: str, content: str) -> None:
        data = content.encode("utf-8", "replace")
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Security-Policy", f"{policy(is_live=True)}; frame-ancestors 'none'")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: a page asks every second."""


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_own_name(header: str, server: RunServer) -> bool:
    """Return whether a Host header names this server: by address, as localhost, or as it was bound."""
    try:
        parts = urlsplit(f"//{header}")
        name, port = (parts.hostname or "").lower(), parts.port
    except ValueError:
        return False
    if (port or 80) != server.server_address[1] or parts.path or parts.username is not None:
        return False
    if server.is_loopback:
        return _is_loopback(name)
    names = {"localhost", server.host.lower(), socket.gethostname().lower(), socket.getfqdn().lower()}
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name in names
    return True


def _fields(page: Any) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(encode(page))
    return fields
