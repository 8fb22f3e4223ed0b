"""Random damage to a run directory: what a stranger, a disk or an unpacked archive could put there.

Every function changes files below `run` only. Links may point into `outside`, which holds files of others.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
import socket
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

TEXTS = (
    "",
    "\x1b[2J\x1b[31mred",
    "\x1b]52;c;aGVsbG8=\x07",
    "\x9b2J\x85 C1",
    "\u202egnp.exe\u2066",
    "line\nholdfast: a forged line\r\x00",
    "\ud800 half a character",
    "$(touch /tmp/holdfast-fuzz-ran)`id`",
    "../../outside/secret.txt",
    "/dev/zero",
    "x" * 100_000,
    "9" * 5000,
    "nan",
    "step_00000003",
    "[red]markup[/red] {0} %s",
)
NUMBERS = (0, -1, 1, 2**31, 2**63, -(2**63) - 1, 10**30, 1e308, -1e308, 5e-324, 0.5, 3, 7, 10**400)
LITERALS = ("NaN", "Infinity", "-Infinity", "null", "true", "[]", "{}", '""', "1e999", "-0", "123456789" * 1000)
NAMES = (
    "step_00000001",
    "step_00000099.b7",
    "step_99999999999999999",
    ".tmp-step_00000007",
    ".gone-step_00000003",
    ".journal.jsonl.0123abcd.aside",
    "\x1b[2Jname",
    "\u202ename",
    "name\nwith a line",
    "-rf",
    "$(touch run)",
    "n" * 200,
    b"not \xff utf-8",
    "rank_00001.bin",
    "metrics.jsonl",
    "notes.csv",
)

_HUGE = 100 << 20
"""a longer file is neither copied nor sealed: a command takes as long as for an honest checkpoint of that size"""


class Damage:
    """Changes a run directory at random, and lists what it did."""

    def __init__(self, run: Path, outside: Path, dice: random.Random) -> None:
        self._run, self._outside, self._dice = run, outside, dice
        self.done: list[str] = []

    def inflict(self) -> None:
        for _ in range(self._dice.choice((1, 1, 1, 2, 3))):
            kinds: list[tuple[int, Callable[[], None]]] = [
                (10, self._change_type),
                (10, self._change_bytes),
                (22, self._change_json_value),
                (16, self._change_state),
                (8, self._change_json_text),
                (5, self._change_size),
                (5, self._add_entry),
                (4, self._move),
                (2, self._change_mode_or_time),
                (2, self._add_many),
            ]
            weights, functions = zip(*kinds, strict=True)
            with contextlib.suppress(OSError, ValueError, LookupError, TypeError, RecursionError, MemoryError):
                # An earlier change may have left nothing to do this to.
                self._dice.choices(functions, weights)[0]()

    # ---- choices

    def _files(self) -> list[Path]:
        found = [p for p in sorted(self._run.rglob("*")) if p.is_file() and not p.is_symlink()]
        return found or [self._run / "journal.jsonl"]

    def _file(self, *endings: str) -> Path:
        """Return a file; those of the run itself are as likely as all files of the checkpoints."""
        files = [f for f in self._files() if not endings or f.name.endswith(endings)]
        files = [f for f in files if not _is_huge(f)]
        top = [f for f in files if f.parent == self._run]
        if not files:
            raise ValueError("no such file")
        return self._dice.choice(top if top and self._dice.random() < 0.5 else files)

    def _any(self) -> Path:
        if self._dice.random() < 0.5:
            return self._file()
        return self._dice.choice(sorted(self._run.rglob("*")) or [self._run / "x"])

    def _text(self) -> str:
        return self._dice.choice(TEXTS)

    def _value(self) -> Any:
        dice = self._dice
        return dice.choice(
            (
                None,
                True,
                dice.choice(NUMBERS),
                dice.choice(NUMBERS),
                float("nan"),
                float("inf"),
                self._text(),
                self._text(),
                [],
                {},
                [self._text()],
                {self._text(): self._text()},
                [[1, 2], [3]],
                [0] * 1000,
                {"event": "rollback", "step": "x"},
            )
        )

    def _note(self, what: str, path: Path) -> None:
        self.done.append(f"{what} {str(path)[len(str(self._run)) :]!r}"[:300])

    # ---- types of files

    def _change_type(self) -> None:
        path, dice = self._any(), self._dice
        what = dice.choice(("link", "link", "link", "fifo", "folder", "file", "device", "socket", "nothing", "copies"))
        saved = path.read_bytes() if path.is_file() and not path.is_symlink() and not _is_huge(path) else b""
        self._remove(path)
        if what == "link":
            target = self._target()
            os.symlink(target, path)
            what = f"link to {target}:"
        elif what == "fifo":
            os.mkfifo(path)
        elif what == "folder":
            path.mkdir()
            if dice.random() < 0.5:
                (path / "inside").write_bytes(saved)
        elif what == "file":
            path.write_bytes(dice.choice((b"", b"\n", b"\0" * 100, saved)))
        elif what == "device":
            self._device(path)
        elif what == "socket":
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as bound:
                bound.bind(str(path))  # fails if the path is too long
        elif what == "copies":
            shutil.copytree(self._outside / "elsewhere", path, symlinks=True)
        self._note(what, path)

    def _target(self) -> str:
        outside, dice = self._outside, self._dice
        inside = str(self._any())
        return dice.choice(
            (
                *(str(p) for p in sorted(outside.rglob("*")) if dice.random() < 0.3),
                str(outside / "elsewhere"),
                str(outside / "secret.txt"),
                str(outside / "journal.jsonl"),
                "../../outside/elsewhere",
                "/dev/zero",
                "/dev/null",
                "/dev/stdin",
                "/proc/self/mem",
                "/nowhere/at/all",
                "loop",
                ".",
                "..",
                inside,
            )
        )

    def _device(self, path: Path) -> None:
        try:
            os.mknod(path, 0o020666, os.makedev(1, self._dice.choice((3, 5, 9))))
        except PermissionError:
            os.symlink("/dev/zero", path)

    def _remove(self, path: Path) -> None:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif os.path.lexists(path):
            path.unlink()

    # ---- bytes

    def _change_bytes(self) -> None:
        path, dice = self._file(), self._dice
        data = bytearray(path.read_bytes())
        what = dice.choice(("flip", "flip", "cut", "cut", "append", "erase", "insert", "shuffle"))
        at = dice.randrange(len(data) + 1)
        if what == "flip":
            for _ in range(dice.choice((1, 1, 4, 64))):
                if data:
                    data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        elif what == "cut":
            del data[at:]
        elif what == "append":
            data += dice.choice((b"\0" * 4096, b"\n\n\n", b"{", dice.randbytes(100), b"\xff\xfe", data[:500]))
        elif what == "erase":
            data[at : at + 300] = b"\0" * len(data[at : at + 300])
        elif what == "insert":
            data[at:at] = dice.choice((b"\n", b"\r\n", b"\0", dice.randbytes(20), b'"', b"}\n{"))
        else:
            lines = bytes(data).split(b"\n")
            dice.shuffle(lines)
            data = bytearray(b"\n".join(lines))
        path.write_bytes(data)
        self._note(f"{what} at {at}", path)
        self._seal_sometimes(path)

    # ---- JSON

    def _change_json_value(self) -> None:
        path = self._file(".json", ".jsonl")
        lines = path.read_text(errors="surrogatepass").split("\n") if path.suffix == ".jsonl" else [path.read_text()]
        full = [n for n, line in enumerate(lines) if line.strip()]
        number = self._dice.choice(full)
        body = json.loads(lines[number])
        what = self._change_somewhere(body)
        lines[number] = json.dumps(body)
        path.write_text("\n".join(lines), errors="surrogatepass")
        self._note(f"{what} of line {number}", path)
        self._seal_sometimes(path)

    def _change_state(self) -> None:
        """Change the state in a checkpoint, and make all checksums right again: only its own checks can refuse it."""
        indexes = [f for f in self._files() if f.name.startswith("rank_") and f.suffix == ".json" and not _is_huge(f)]
        path = self._dice.choice(indexes)
        index = json.loads(path.read_text())
        if self._dice.random() < 0.7:
            parts = json.loads(index["parts"])
            what = "parts: " + self._change_somewhere(parts)
            index["parts"] = json.dumps(parts)
        else:
            what = self._change_somewhere(index)
        if isinstance(index, dict) and isinstance(index.get("parts"), str):
            index["parts_sum"] = zlib.crc32(index["parts"].encode("utf-8", "surrogatepass"))
        path.write_text(json.dumps(index))
        seal(path.parent)
        self._note(f"{what}, sealed, of", path)

    def _change_somewhere(self, body: Any) -> str:
        """Change one value, key or entry, at any depth."""
        dice, at, place = self._dice, body, ""
        while True:
            if not isinstance(at, dict | list) or not at:
                return "nothing"
            key = dice.choice(list(at) if isinstance(at, dict) else range(len(at)))
            place += f".{key}"[:40]
            if isinstance(at[key], dict | list) and at[key] and dice.random() < 0.85:
                at = at[key]
                continue
            break
        what = dice.choice(("value", "value", "value", "value", "delete", "rename", "copy", "number"))
        if what == "value":
            at[key] = self._value()
        elif what == "number":
            old = at[key] if isinstance(at[key], int | float) else 1
            at[key] = dice.choice((old + 1, -old, old * 1000, float(old), str(old), dice.choice(NUMBERS)))
        elif what == "delete":
            del at[key]
        elif isinstance(at, list):
            at.append(at[key])
        else:
            at[self._text() or "more"] = at[key]
            if what == "rename":
                del at[key]
        return f"{what} {place}"

    def _change_json_text(self) -> None:
        """What a JSON writer does not write: depth, duplicate keys, numbers of many digits, other encodings."""
        path, dice = self._file(".json", ".jsonl"), self._dice
        text = path.read_text(errors="replace")
        what = dice.choice(("deep", "deep value", "duplicate", "literal", "utf-16", "bom", "comma", "long line"))
        colon = dice.choice([n for n, c in enumerate(text) if c == ":"] or [0])
        end = next((n for n in range(colon, len(text)) if text[n] in ",}\n"), len(text))
        if what == "deep":
            text = dice.choice(("[", '{"a":')) * 100_000 + dice.choice(("", "]" * 100_000))
        elif what == "deep value":
            text = f"{text[: colon + 1]}{'[' * 5000}{']' * 5000}{text[end:]}"
        elif what == "duplicate":
            start = text.rfind('"', 0, max(0, colon - 1))
            text = f"{text[:end]},{text[start:colon]}:{json.dumps(self._value())}{text[end:]}"
        elif what == "literal":
            text = f"{text[: colon + 1]}{dice.choice(LITERALS)}{text[end:]}"
        elif what == "comma":
            text = f"{text[:end]},,{text[end:]}"
        elif what == "long line":
            text += '{"event": "note", "message": "' + "y" * dice.choice((10**5, 10**7)) + '"}\n'
        encoding = {"utf-16": "utf-16", "bom": "utf-8-sig"}.get(what, "utf-8")
        path.write_bytes(text.encode(encoding, "replace"))
        self._note(what, path)
        self._seal_sometimes(path)

    # ---- sizes, names and the rest

    def _change_size(self) -> None:
        path = self._file()
        size = self._dice.choice((0, 1, 10**6, 3 * 10**8, 5 * 10**9, 4 * 10**11))
        os.truncate(path, size)
        self._note(f"{size} bytes, sparse,", path)
        if size < 10**6:
            self._seal_sometimes(path)

    def _add_entry(self) -> None:
        dice = self._dice
        name = dice.choice(NAMES)
        folders = [self._run, self._run / "checkpoints", self._run / "incidents", self._any().parent]
        folder = dice.choice([f for f in folders if f.is_dir()])
        path = Path(os.fsdecode(os.path.join(os.fsencode(folder), os.fsencode(name))))
        if os.path.lexists(path):
            self._remove(path)
        what = dice.choice(("copy", "copy", "folder", "link", "file", "fifo"))
        if what == "copy":
            steps = sorted((self._run / "checkpoints").glob("step_*"))
            source = dice.choice(steps) if steps and dice.random() < 0.7 else self._file()
            if any(map(_is_huge, source.iterdir() if source.is_dir() else [source])):
                return
            if source.is_dir():
                shutil.copytree(source, path, symlinks=True)
            else:
                shutil.copy(source, path, follow_symlinks=False)
        elif what == "folder":
            path.mkdir()
        elif what == "link":
            os.symlink(self._target(), path)
        elif what == "fifo":
            os.mkfifo(path)
        else:
            path.write_bytes(dice.randbytes(50))
        self._note(f"added {what}", path)

    def _move(self) -> None:
        """Exchange two files, or give a file or folder another name."""
        first, second = self._any(), self._any()
        aside = self._run / "aside"
        if self._dice.random() < 0.5:
            os.rename(first, aside)
            os.rename(second, first)
            os.rename(aside, second)
        else:
            name = os.fsencode(self._dice.choice(NAMES))
            second = Path(os.fsdecode(os.path.join(os.fsencode(first.parent), name)))
            os.rename(first, second)
        self._note(f"moved to {second.name!r}", first)

    def _change_mode_or_time(self) -> None:
        path, dice = self._any(), self._dice
        if dice.random() < 0.5:
            mode = dice.choice((0o000, 0o777, 0o666, 0o4755, 0o200))
            os.chmod(path, mode, follow_symlinks=True) if not path.is_symlink() else None
            self._note(f"mode {mode:o}", path)
        else:
            when = dice.choice((0, -(10**9), 2**33, 10**10))
            os.utime(path, (when, when), follow_symlinks=False)
            self._note(f"time {when}", path)

    def _add_many(self) -> None:
        dice = self._dice
        what = dice.choice(("folders", "incidents", "events", "deep folder"))
        if what == "folders":
            for n in range(400):
                (self._run / "checkpoints" / f"step_{10**7 + n:08d}").mkdir(parents=True)
        elif what == "incidents":
            for n in range(400):
                (self._run / "incidents" / f"{n + 100:04d}").mkdir(parents=True)
        elif what == "events" and not _is_huge(self._run / "journal.jsonl"):
            lines = (self._run / "journal.jsonl").read_bytes().splitlines(keepends=True)
            (self._run / "journal.jsonl").write_bytes(b"".join(dice.choices(lines, k=5000)))
        else:
            path = dice.choice((self._run, self._run / "checkpoints" / ".tmp-step_00000005"))
            for _ in range(200):
                path = path / "d"
            path.mkdir(parents=True)
        self._note(f"many {what}", self._run)

    def _seal_sometimes(self, path: Path) -> None:
        if self._dice.random() < 0.7 and path.parent.name.startswith("step_"):
            with contextlib.suppress(OSError, ValueError, TypeError, AttributeError, RecursionError):
                seal(path.parent)
                self.done[-1] += ", sealed"


def _is_huge(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > _HUGE


def seal(checkpoint: Path) -> None:
    """Make every checksum of a checkpoint right for what it holds now, as an attacker would."""
    paths = [checkpoint / "manifest.json", checkpoint / "health.json"]
    if any(_is_huge(path) or not path.is_file() for path in paths):
        return
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    health = json.loads((checkpoint / "health.json").read_text())
    for name, expected in manifest["files"].items():
        if not (path := checkpoint / name).is_file() or path.is_symlink() or _is_huge(path):
            continue
        content = path.read_bytes()
        is_crc = str(expected["sum"]).startswith("crc32")
        total = f"crc32:{zlib.crc32(content):08x}" if is_crc else f"sha256:{hashlib.sha256(content).hexdigest()}"
        expected |= {"bytes": len(content), "sum": total}
    health["manifest"] = _write_sealed(checkpoint / "manifest.json", manifest)
    _write_sealed(checkpoint / "health.json", health)


def _write_sealed(path: Path, body: dict[str, Any]) -> str:
    body.pop("sha256", None)
    digest = hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    path.write_bytes(json.dumps({**body, "sha256": digest}, indent=1).encode() + b"\n")
    return digest
