"""`holdfast ui`: shows the runs of a folder in a browser, live."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.output import Json, echo, emit
from holdfast.core.base.errors import ConfigError


def ui(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder of run directories, or one of them.")],
    host: Annotated[str, typer.Option("--host", metavar="ADDRESS", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0 chooses a free one.")] = 8642,
    needs_token: Annotated[bool, typer.Option("--token", help="Ask for a token on loopback too.")] = False,
    as_json: Json = False,
) -> None:
    """Follow all runs of a folder in a browser.

    A list with status, goodput and course; the page of a run gains points and incidents while it trains; two runs compare.
    It only reads, answers for runs below DIR alone, and follows no link out of it. Ctrl-C ends it.
    On loopback every user of this machine can open it, unless --token is given. On any other address it needs the token
    that is part of the printed address; the connection is not encrypted. From another machine, rather use
    ssh -L 8642:localhost:8642 HOST.

    \b
    Examples:
      holdfast ui runs
      holdfast ui runs --port 0 --json
      holdfast ui runs --token
    """
    from holdfast.reports.serve import RunServer

    if not folder.is_dir():
        problem = "is a file" if folder.exists() else "no such folder"
        raise ConfigError([f"{folder}: {problem}; name a folder that holds run directories"], "ui")
    with RunServer(folder, host, port, needs_token=needs_token) as server:
        if not server.is_loopback:
            echo(
                f"holdfast: warning: {host} can be reached from other machines, and nothing is encrypted: anyone with the "
                "address below reads these runs. Use 127.0.0.1 and ssh -L instead, if you can",
                err=True,
            )
        if as_json:
            emit({"ok": True, "url": server.url, "token": server.token})
        else:
            echo(f"holdfast: {server.url}  (Ctrl-C ends it)")
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever(poll_interval=0.2)
