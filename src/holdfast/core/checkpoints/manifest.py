"""The two JSON files that say what a checkpoint is: manifest.json, written once, and health.json, replaced as it changes.

Each carries a checksum of itself, so that a bit flipped in it, or an edit, is seen; the manifest carries one for every
other file, and the health names the manifest it belongs to.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from typing import Any

import msgspec

from holdfast.core.base.errors import RunDirError
from holdfast.core.base.types import Health
from holdfast.core.checkpoints.lineage import Lineage

FORMAT = 1
MANIFEST = "manifest.json"
HEALTH = "health.json"
_NAME = re.compile(r"step_\d{8,18}(\.b\d{1,9})?")
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,100}")


class FileSum(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long a file is, and its checksum: `crc32:<8 hex>` of what is large, `sha256:<64 hex>` of what is small."""

    bytes: int
    sum: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was saved, when, where it belongs, and what its files must be."""

    format: int = FORMAT
    run: str
    """the identity of the run, as in its run.json"""
    step: int
    lineage: Lineage
    """its last branch is the one the state was saved on"""
    reason: str
    """scheduled, start, end, stop, or what was asked for"""
    world_size: int = 1
    time: float
    versions: dict[str, str] = {}
    about: dict[str, Any] = {}
    """fingerprints of code, configuration and data, for the comparison at resume"""
    files: dict[str, FileSum] = {}

    @property
    def branch(self) -> int:
        return self.lineage.branch

    @property
    def name(self) -> str:
        return name_of(self.step, self.branch)


class HealthRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is thought of a checkpoint now."""

    format: int = FORMAT
    health: Health
    why: str = ""
    handover: bool = False
    """saved at an orderly stop: the next life goes on from here"""
    manifest: str
    """the checksum of the manifest that this belongs to"""
    time: float


def name_of(step: int, branch: int) -> str:
    """A checkpoint's folder: step_00001000, and step_00001000.b2 where a later branch came to the same step."""
    return f"step_{step:08d}" + (f".b{branch}" if branch else "")


def is_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None


def is_file_name(text: str) -> bool:
    """Whether a manifest may name it: one plain name, no folder, nothing hidden, nothing above."""
    return _FILE.fullmatch(text) is not None and text not in (MANIFEST, HEALTH)


def seal(record: Manifest | HealthRecord) -> tuple[bytes, str]:
    """The file's content, and the checksum in it. NaN and Infinity are written as such."""
    body = msgspec.to_builtins(record, str_keys=True)  # as it reads back: 10 is sorted before 9 once it is text
    digest = _digest(body)
    return _written({**body, "sha256": digest}), digest


def unseal_manifest(content: bytes) -> tuple[Manifest, str]:
    """The manifest and its checksum; RunDirError, without the path, for anything but what `seal` wrote."""
    body, digest = _open(content, MANIFEST)
    manifest = _convert(body, Manifest, MANIFEST)
    strange = next((n for n in manifest.files if not is_file_name(n)), None)
    if strange is not None:
        raise RunDirError(f"{MANIFEST} names a file outside its folder, or a hidden one: {strange[:80]!r}")
    if not _is_course(manifest.lineage, manifest.step):
        raise RunDirError(f"{MANIFEST} has a lineage that no run can have come through: {str(manifest.lineage)[:200]}")
    return manifest, digest


def _is_course(lineage: Lineage, step: int) -> bool:
    """Whether it begins at step 0, goes from branch to later branch and never back in steps, and ends by `step`."""
    forks = lineage.forks
    return (
        bool(forks)
        and forks[0].step == 0
        and forks[0].branch >= 0
        and all(a.branch < b.branch and a.step <= b.step for a, b in itertools.pairwise(forks))
        and forks[-1].step <= step
    )


def unseal_health(content: bytes) -> HealthRecord:
    record: HealthRecord = _convert(_open(content, HEALTH)[0], HealthRecord, HEALTH)
    return record


def _convert(body: dict[str, Any], kind: Any, name: str) -> Any:
    try:
        record = msgspec.convert(body, kind)
    except (msgspec.ValidationError, ValueError) as error:  # ValueError: text that is no Unicode
        raise RunDirError(f"{name} is not one of ours: {error}") from None
    if record.format != FORMAT:
        raise RunDirError(f"{name} is of format {record.format}; this version reads format {FORMAT}")
    return record


def _open(content: bytes, name: str) -> tuple[dict[str, Any], str]:
    try:
        body = json.loads(content)
        if not isinstance(body, dict):
            raise ValueError
        said = body.pop("sha256", None)
        right = isinstance(said, str) and said == _digest(body)
        exact = right and content == _written({**body, "sha256": said})
    except (ValueError, RecursionError):
        raise RunDirError(f"{name} is not a JSON object: it is damaged") from None
    if not right:
        raise RunDirError(f"{name} does not match its own checksum: it was edited or is damaged")
    if not exact:  # 1E-05 for 1e-05: one bit, and the same number
        raise RunDirError(f"{name} is not written as Holdfast writes it: it was edited or is damaged")
    return body, said


def _written(body: dict[str, Any]) -> bytes:
    return json.dumps(body, indent=1).encode() + b"\n"


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
