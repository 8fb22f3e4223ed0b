"""Damages copies of run directories at random, and runs every command and a resume on each.

    python tests/fuzz_rundir.py --first 0 --count 10000 --json report.json

Checked each time: no hang, no memory beyond what an honest run takes, nothing outside the directory changed, no error but
Holdfast's own, a known exit status, and output without control characters. A failure is listed with its seed; `--first SEED
--count 1 --keep` shows it again.

The program imports everything once, has no threads, and forks one process for each damaged directory.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import functools
import gc
import hashlib
import importlib
import io
import json
import logging
import os
import random
import re
import resource
import select
import shutil
import signal
import stat
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._dynamo  # optimizers import it when they are first made
from torch.utils.data import DataLoader, TensorDataset

import holdfast
import holdfast.compose
from fuzz_mutations import Damage
from holdfast.cli import main as cli
from holdfast.core.base.errors import HoldfastError

SECONDS = 6.0
"""what a command or a resume may take: 5 s more than on an honest run"""
MEGABYTES = 500
"""memory that a command or a resume may take"""
_RESERVE = 1500 << 20
"""address space beyond which an allocation fails, so that a failure of a test does not end the machine"""
_STATUSES = (0, 1, 3, 70, 75, 78)
_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ufffe\uffff\ud800-\udfff]"
)
_HOME = str(Path(holdfast.__file__).parent) + "/"
_STEPS = 18


# ---- honest runs


class Die:
    """Kills the process right after a rollback."""

    def on_recovery(self, outcome: Any) -> None:
        if outcome.status == "rolled_back":
            os.kill(os.getpid(), signal.SIGKILL)


def train(run_dir: Path, *, steps: int = _STEPS, bad: tuple[int, ...] = (), hooks: Any = (), **recover: Any) -> None:
    """Train a tiny model; the batches `bad` hold NaN."""
    torch.manual_seed(0)
    model: torch.nn.Module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if torch.distributed.is_initialized():
        model = torch.nn.parallel.DistributedDataParallel(model)
    x = torch.randn(96, 4, generator=torch.Generator().manual_seed(1))
    for batch in bad:
        x[4 * batch] = float("nan")
    guard = holdfast.Guard(
        model,
        optimizer,
        scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60),
        clip_grad_norm=1.0,
        run_dir=run_dir,
        hooks=list(hooks),
        config={
            "snapshot": {"every_steps": 3, "certify_after": 2},
            "checkpoint": {"every_steps": 3, "certify_after": 2, "keep_last": 2},
            "recover": {"max_consecutive": 1, "rollback_margin": 2, "nan_action": "skip", **recover},
            "detect": {"warmup_steps": 6},
        },
    )
    with guard:
        for step in guard.steps(DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4), max_steps=steps):
            with step:
                for inputs, targets in step.microbatches():
                    step.backward(torch.nn.functional.mse_loss(model(inputs), targets))


def _two_ranks(run_dir: Path) -> None:
    rendezvous = run_dir.with_name("rendezvous")

    def rank_main(rank: int) -> None:
        torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
        train(run_dir)
        torch.distributed.destroy_process_group()

    other = _fork(lambda: rank_main(1))
    rank_main(0)
    os.waitpid(other, 0)


HONEST: dict[str, Callable[[Path], None]] = {
    "finished": lambda path: train(path, bad=(4, 9, 10)),
    "killed": lambda path: train(path, bad=(9, 10), hooks=[Die()]),
    "stopped": lambda path: train(path, bad=(9,), ladder=["stop"]),
    "calm": lambda path: train(path),
    "ranks": _two_ranks,
}


def make_honest_runs(folder: Path) -> None:
    for name, make in HONEST.items():
        os.waitpid(_fork(lambda make=make, name=name: make(folder / name)), 0)
        assert list((folder / name / "checkpoints").glob("step_*")), f"the honest run {name} has no checkpoint"
        for path in folder.glob("**/.lock"):
            path.chmod(0o600)


def warm_up(folder: Path, honest: Path) -> None:
    """Import what any command or a resume imports, and build the command line once: each child would do it again."""
    cli.typer.main.get_command = functools.cache(cli.typer.main.get_command)
    here, there = os.pipe()
    child = os.fork()
    if child == 0:
        run = make_world(folder, honest, "finished", random.Random(0))
        for words in commands(run, random.Random(0)):
            assert run_command(words, run) is None, words
        os.write(there, " ".join(sys.modules).encode())
        os._exit(0)
    os.close(there)
    with os.fdopen(here) as names:
        for name in names.read().split():
            with contextlib.suppress(ImportError, RuntimeError):
                importlib.import_module(name)
    assert os.waitpid(child, 0)[1] == 0, "a command fails on an honest run"
    run_command(("diagnose", str(honest / "finished")), honest)  # builds what is kept; starts no thread
    gc.collect()
    gc.freeze()


def _fork(function: Callable[[], None]) -> int:
    if pid := os.fork():
        return pid
    with contextlib.suppress(HoldfastError):
        function()
    os._exit(0)


# ---- what is around a run directory


def make_world(folder: Path, honest: Path, name: str, dice: random.Random) -> Path:
    """Make a folder with a run, an honest run beside it, and files and checkpoints of others. Return the run's path."""
    runs, outside = folder / "runs", folder / "outside"
    run = runs / dice.choice(("a", "a", "a", "\x1b[2Jrun", "b\u202e$(id)"))
    shutil.copytree(honest / name, run, symlinks=True)
    shutil.copytree(honest / "calm", runs / "other", symlinks=True)
    elsewhere = outside / "elsewhere"
    others = next(kind for kind in HONEST if kind != name)  # its checkpoints are never this run's
    shutil.copytree(honest / others / "checkpoints", elsewhere)
    step = next(iter(sorted(elsewhere.iterdir())))
    for decoy in (".tmp-step_00000006", ".gone-step_00000003", "0001", "step_00000001"):
        shutil.copytree(step, elsewhere / decoy)
    for place in (runs, outside):
        shutil.copytree(step, place / ".tmp-step_00000006")
        (place / ".journal.jsonl.0123abcd.aside").write_text("of someone else")
        os.utime(place / ".journal.jsonl.0123abcd.aside", (0, 0))
    for file in ("journal.jsonl", "metrics.jsonl", "run.json"):
        shutil.copy(honest / "calm" / file, outside / file)
    (outside / "secret.txt").write_text("alias ls='ls --color'\n")
    (outside / ".lock").write_text('{"pid": 1}')
    return run


def snapshot(folder: Path, without: Path, *, contents: bool = False) -> dict[str, tuple[Any, ...]]:
    """Return type, mode, size and times of everything in a folder but for one in it; with `contents`, also its content.

    A content does not change without the time of the change.
    """
    found: dict[str, tuple[Any, ...]] = {}
    left = [str(folder)]
    while left:
        path = left.pop()
        if path == str(without):
            continue
        status = os.lstat(path)
        content = b""
        if stat.S_ISDIR(status.st_mode):
            left += [entry.path for entry in os.scandir(path)]
        elif contents:
            is_link = stat.S_ISLNK(status.st_mode)
            content = os.fsencode(os.readlink(path)) if is_link else hashlib.sha256(Path(path).read_bytes()).digest()
        times = status.st_mtime_ns, status.st_ctime_ns
        found[path[len(str(folder)) :]] = (status.st_mode, status.st_nlink, status.st_size, times, content)
    return found


# ---- commands


def commands(run: Path, dice: random.Random) -> list[tuple[str, ...]]:
    """Return every command, the ones that only read first; "resume" is a Guard."""
    other, where = str(run.parent / "other"), str(run)
    steps = sorted(str(p) for p in (run / "checkpoints").glob("*")) or [where]
    files = [str(p) for p in sorted(run.iterdir())] or [where]
    reading = [
        ("checkpoints", "ls", where),
        ("checkpoints", "resume-path", where),
        ("checkpoints", "resume-path", where, "--no-verify"),
        ("checkpoints", "verify", where, "--all"),
        ("checkpoints", "verify", dice.choice(steps)),
        ("checkpoints", "prune", where, "--dry-run"),
        ("plan", where),
        ("diagnose", where),
        ("diagnose", where, "--all", "--postmortem"),
        ("diagnose", dice.choice(files)),
        ("report", where, "--format", dice.choice(["md", "terminal"])),
        ("diff", where, other),
        ("diff", other, where),
        ("check", dice.choice([f for f in files if not stat.S_ISFIFO(os.lstat(f).st_mode)] or [where])),
    ]
    writing = [
        ("checkpoints", "verify", where, "--all", "--mark"),
        ("checkpoints", "prune", where, "--yes", "--keep-last", "1"),
        ("ack", where, "--note", "fuzz"),
        ("resume",),
        ("resume",),
    ]
    dice.shuffle(reading)
    dice.shuffle(writing)
    json_too = [(*c, "--json") if c != ("resume",) and dice.random() < 0.5 else c for c in (*reading, *writing)]
    return [tuple(c) for c in json_too]


class Failure(NamedTuple):
    """What was wrong with one command on one damaged directory."""

    seed: int
    command: str
    what: str
    """its kind and place: failures with the same are one"""
    damage: list[str]
    detail: str


class TooSlow(BaseException):
    """Raised in a command that takes too long."""


def _too_slow(number: int, frame: Any) -> None:
    raise TooSlow


def run_command(words: tuple[str, ...], run: Path) -> tuple[str, str] | None:
    """Run one command or a resume. Return what went wrong, with details, or None."""
    out, err = io.BytesIO(), io.BytesIO()
    streams = sys.stdout, sys.stderr
    # As Python opens them: what is not text cannot be printed to stdout.
    sys.stdout, sys.stderr = io.TextIOWrapper(out, "utf-8"), io.TextIOWrapper(err, "utf-8", "backslashreplace")
    handler = logging.StreamHandler(sys.stderr)
    logging.getLogger().addHandler(handler)
    before = _peak_megabytes(reset=True)
    problem, status = None, 0
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        if words == ("resume",):
            train(run, steps=_STEPS + 2)
        else:
            status = cli._run(list(words))
    except (HoldfastError, SystemExit) as error:
        problem = None if isinstance(error, HoldfastError) and words == ("resume",) else _describe(error)
        err.write(str(error).encode("utf-8", "backslashreplace"))
    except BaseException as error:
        problem = _describe(error)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        with contextlib.suppress(UnicodeError):
            sys.stdout.flush()
        sys.stderr.flush()
        logging.getLogger().removeHandler(handler)
        shown = out.getvalue().decode(errors="replace"), err.getvalue().decode(errors="replace")
        sys.stdout, sys.stderr = streams
    taken = _peak_megabytes() - before
    if problem is not None:
        return problem
    if taken > MEGABYTES:
        return f"memory in {words[0]}", f"{taken:.0f} MB"
    if status not in _STATUSES:
        return f"exit status {status}", shown[1][-1500:]
    if "Traceback (most recent call last)" in shown[1]:
        return f"a traceback on stderr: {shown[1].strip().splitlines()[-1][:80]}", shown[1][-3000:]
    for name, text in zip(("stdout", "stderr"), shown, strict=True):
        is_data = name == "stdout" and "resume-path" in words  # a path for a script, as it is
        if not is_data and (found := _CONTROL.search(text)):
            return f"control character {found[0]!r} on {name}", repr(
                text[max(0, found.start() - 200) : found.end() + 100]
            )
    if "--json" in words:
        try:
            json.loads(shown[0])
        except ValueError as error:
            return "stdout is not JSON", f"{error}: {shown[0][:300]!r} {shown[1][-300:]!r}"
    return None


def _describe(error: BaseException) -> tuple[str, str]:
    """Return the kind of an error with its last line in Holdfast, and the traceback."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(_HOME)]
    place = f"{frames[-1].filename[len(_HOME) :]}:{frames[-1].name}" if frames else "?"
    return f"{type(error).__name__} in {place}", "".join(traceback.format_exception(error))[-4000:]


def _peak_megabytes(*, reset: bool = False) -> float:
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    text = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+)", text)[1]) / 1024  # type: ignore[index]


# ---- one seed


def child_main(seed: int, folder: Path, honest: Path, keep: bool) -> Iterator[Failure]:
    """Damage one directory, run every command on it, and yield what failed."""
    size = int(re.search(r"VmSize:\s+(\d+)", Path("/proc/self/status").read_text())[1]) << 10  # type: ignore[index]
    resource.setrlimit(resource.RLIMIT_AS, (size + _RESERVE, size + _RESERVE))
    dice = random.Random(seed)
    run = make_world(folder, honest, dice.choice(list(HONEST)), dice)
    damage = Damage(run, folder / "outside", dice)
    damage.inflict()
    before, contents = snapshot(folder, run), snapshot(folder, run, contents=True)
    signal.signal(signal.SIGALRM, _too_slow)
    for words in commands(run, dice):
        shown = " ".join(w for w in words if not w.startswith("/"))
        if keep:
            print("running", shown, file=sys.__stderr__, flush=True)
        wrong = run_command(words, run)
        if wrong is not None:
            yield Failure(seed, shown, wrong[0], damage.done, wrong[1])
        yield from _compare(before, before := snapshot(folder, run), seed, shown, damage)
    yield from _compare(contents, snapshot(folder, run, contents=True), seed, "all commands", damage)


def _compare(before: Any, after: Any, seed: int, command: str, damage: Damage) -> Iterator[Failure]:
    names = sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
    if names:
        yield Failure(seed, command, f"changed outside: {names[0]}", damage.done, ", ".join(names[:20]))


def run_seed(seed: int, base: Path, honest: Path, keep: bool = False) -> list[Failure]:
    """Run one seed in a process of its own, which is killed if it does not end."""
    folder = base / f"seed-{seed}"
    here, there = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(here)
        try:
            faulthandler.enable()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            folder.mkdir()
            os.chdir(folder)
            for failure in child_main(seed, folder, honest, keep):
                os.write(there, json.dumps(failure).encode() + b"\n")
            os.write(there, b"done\n")
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
        finally:
            os._exit(0)
    os.close(there)
    deadline, said = time.monotonic() + 20 * SECONDS, b""
    while select.select([here], [], [], max(0.0, deadline - time.monotonic()))[0]:
        if not (piece := os.read(here, 65536)):
            break
        said += piece
    else:
        os.kill(child, signal.SIGABRT)
        time.sleep(1)
        os.kill(child, signal.SIGKILL)
    os.close(here)
    _, status = os.waitpid(child, 0)
    failures = [Failure(*json.loads(line)) for line in said.splitlines() if line.startswith(b"[")]
    if not said.endswith(b"done\n"):
        failures.append(Failure(seed, "?", f"the process ended with status {status}", [], ""))
    if not keep:
        remove(folder)
    return failures


def remove(folder: Path) -> None:
    """Remove a folder, whatever the modes in it are."""
    shutil.rmtree(folder, ignore_errors=True)


def fuzz(first: int, count: int, base: Path, honest: Path, keep: bool = False) -> tuple[list[Failure], float]:
    """Run seeds `first` to `first + count`. Return the failures, and the seconds of the slowest seed."""
    failures, slowest, began = [], 0.0, time.monotonic()
    for seed in range(first, first + count):
        at = time.monotonic()
        found = run_seed(seed, base, honest, keep)
        if any("TooSlow" in f.what or "status" in f.what for f in found) and not keep:  # on a busy machine, once more
            found = run_seed(seed, base, honest, keep)
        slowest = max(slowest, time.monotonic() - at)
        for failure in found:
            if failure.what not in {f.what for f in failures}:
                print(ascii(f"seed {seed}: {failure.what}: {failure.command}, after {failure.damage}"), flush=True)
            failures.append(failure)
        if (seed + 1 - first) % 250 == 0:
            kinds = len({f.what for f in failures})
            seconds = time.monotonic() - began
            print(f"{seed + 1 - first} seeds in {seconds:.0f} s, {len(failures)} failures of {kinds} kinds", flush=True)
    return failures, slowest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--keep", action="store_true", help="leave the directories where they are")
    parser.add_argument("--json", type=Path, help="write all failures to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("holdfast").propagate = True
    logging.getLogger().addHandler(logging.NullHandler())
    warnings.simplefilter("ignore")
    memory = Path("/dev/shm")
    base = Path(tempfile.mkdtemp(prefix="holdfast-fuzz-", dir=memory if memory.is_dir() else None))
    honest = base / "honest"
    honest.mkdir()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))
    try:
        make_honest_runs(honest)
        warm_up(base / "warm", honest)
        failures, slowest = fuzz(options.first, options.count, base, honest, options.keep)
    finally:
        if not options.keep:
            remove(base)
    if options.json is not None:
        options.json.write_text(json.dumps([f._asdict() for f in failures], indent=1))
    kinds: dict[str, list[Failure]] = {}
    for failure in failures:
        kinds.setdefault(failure.what, []).append(failure)
    for what, of_kind in sorted(kinds.items(), key=lambda item: -len(item[1])):
        first = of_kind[0]
        print(ascii(f"{len(of_kind):5} {what}: seed {first.seed}, {first.command}, after {first.damage}"))
    print(f"{options.count} damaged run directories, {len(failures)} failures; the slowest took {slowest:.1f} s")
    if options.keep:
        print(base)
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
