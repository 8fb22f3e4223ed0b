"""The two JSON files that describe a checkpoint: manifest.json, written once, and health.json, replaced on changes.

Each has a checksum of itself, which reveals a flipped bit or an edit. The manifest has a checksum for every other file,
and the health file has the checksum of its manifest.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

import msgspec

from holdfast.core.base.errors import RunDirError
from holdfast.core.base.masking import mask
from holdfast.core.base.types import Health
from holdfast.core.checkpoints.lineage import Lineage

FORMAT = 1
MANIFEST = "manifest.json"
HEALTH = "health.json"
_MAX_TIME = 1e12
"""seconds since 1970"""
_NAME = re.compile(r"step_\d{8,18}(\.b\d{1,9})?")
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,100}")


class FileSum(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The length of a file and its checksum: `crc32:<8 hex>` for large files, `sha256:<64 hex>` for small ones."""

    bytes: int
    sum: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was saved and when, the run and branch it belongs to, and the checksums of its files."""

    format: int = FORMAT
    run: str
    """the identity of the run, as in its run.json"""
    step: int
    lineage: Lineage
    """the state was saved on its last branch"""
    reason: str
    """scheduled, start, end, stop, or the reason of a request"""
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
    """The current health of a checkpoint."""

    format: int = FORMAT
    health: Health
    why: str = ""
    handover: bool = False
    """saved at an orderly stop: the next process resumes from it"""
    manifest: str
    """the checksum of its manifest"""
    time: float


def name_of(step: int, branch: int) -> str:
    """Return the folder name of a checkpoint: step_00001000, or step_00001000.b2 on branch 2."""
    return f"step_{step:08d}" + (f".b{branch}" if branch else "")


def is_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None


def is_file_name(text: str) -> bool:
    """Return whether a manifest may list this name: no folder, no hidden file, no parent."""
    return _FILE.fullmatch(text) is not None and text not in (MANIFEST, HEALTH)


def seal(record: Manifest | HealthRecord) -> tuple[bytes, str]:
    """Return the content of the file and the checksum in it. NaN and Infinity are written as such; secrets are masked."""
    # With keys as text before they are sorted, as they are read back.
    body = json.loads(mask(json.dumps(msgspec.to_builtins(record, str_keys=True))))
    digest = _digest(body)
    return _encode({**body, "sha256": digest}), digest


def unseal_manifest(content: bytes) -> tuple[Manifest, str]:
    """Return the manifest and its checksum. Raise RunDirError, without the path, if `seal` did not write it so."""
    body, digest = _parse(content, MANIFEST)
    manifest = _convert(body, Manifest, MANIFEST)
    bad_name = next((n for n in manifest.files if not is_file_name(n)), None)
    if bad_name is not None:
        raise RunDirError(f"{MANIFEST} lists a file outside its folder, or a hidden one: {bad_name[:80]!r}")
    if not _is_possible(manifest.lineage, manifest.step):
        raise RunDirError(f"{MANIFEST} has an impossible lineage: {str(manifest.lineage)[:200]}")
    return manifest, digest


def _is_possible(lineage: Lineage, step: int) -> bool:
    """Return whether a lineage has rising branches and ends at or before `step`. `Lineage` has checked the rest."""
    branches = [fork.branch for fork in lineage.forks]
    return branches[0] >= 0 and branches == sorted(branches) and lineage.forks[-1].step <= step


def unseal_health(content: bytes) -> HealthRecord:
    record: HealthRecord = _convert(_parse(content, HEALTH)[0], HealthRecord, HEALTH)
    return record


def _convert(body: dict[str, Any], record_type: Any, name: str) -> Any:
    try:
        record = msgspec.convert(body, record_type)
    except (msgspec.ValidationError, ValueError) as error:  # ValueError: text that is not Unicode
        raise RunDirError(f"{name} was not written by Holdfast: {error}") from None
    if record.format != FORMAT:
        raise RunDirError(f"{name} is of format {record.format}; this version reads format {FORMAT}")
    if not abs(record.time) < _MAX_TIME:  # also if it is NaN
        raise RunDirError(f"{name} has an impossible time: {record.time}")
    return record


def _parse(content: bytes, name: str) -> tuple[dict[str, Any], str]:
    try:
        body = json.loads(content)
        if not isinstance(body, dict):
            raise ValueError
        digest = body.pop("sha256", None)
        matches = isinstance(digest, str) and digest == _digest(body)
        is_exact = matches and content == _encode({**body, "sha256": digest})
    except (ValueError, RecursionError):
        raise RunDirError(f"{name} is not a JSON object: it is damaged") from None
    if not matches:
        raise RunDirError(f"{name} does not match its own checksum: it was edited or is damaged")
    if not is_exact:  # 1E-05 for 1e-05: one flipped bit, but the same number
        raise RunDirError(f"{name} is not written as Holdfast writes it: it was edited or is damaged")
    return body, digest


def _encode(body: dict[str, Any]) -> bytes:
    return json.dumps(body, indent=1).encode() + b"\n"


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
