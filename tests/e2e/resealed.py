"""Checkpoints with other contents and every checksum made to fit, so that they pass `holdfast checkpoints verify`."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from holdfast.core.checkpoints.manifest import HealthRecord, Manifest, seal, unseal_health, unseal_manifest
from holdfast.core.checkpoints.verify import checksum_file

BIN, INDEX = "rank_00000.bin", "rank_00000.json"
Change = Callable[[Any], None]


def rewritten(folder: Path, **changes: Any) -> None:
    """Write the manifest with other fields, its own checksum and the health record made to fit."""
    manifest, _ = unseal_manifest((folder / "manifest.json").read_bytes())
    body = {name: getattr(manifest, name) for name in manifest.__struct_fields__} | changes
    content, digest = seal(Manifest(**body))
    (folder / "manifest.json").write_bytes(content)
    record = unseal_health((folder / "health.json").read_bytes())
    record = HealthRecord(health=record.health, why="edited", manifest=digest, time=record.time)
    (folder / "health.json").write_bytes(seal(record)[0])


def resealed(folder: Path, *, parts: Change | None = None, index: Change | None = None, sparse: bool = False) -> None:
    """Change the parts or the index of rank 0, in place, and make every checksum fit.

    sparse: the tensors' file is too long to be read, so that its checksum is not computed.
    """
    content = json.loads((folder / INDEX).read_text())
    if parts is not None:
        saved = json.loads(content["parts"])
        parts(saved)
        content["parts"] = json.dumps(saved)
    if index is not None:
        index(content)
    content["parts_sum"] = zlib.crc32(content["parts"].encode())
    (folder / INDEX).write_text(json.dumps(content))
    files = dict(unseal_manifest((folder / "manifest.json").read_bytes())[0].files)
    files[INDEX] = checksum_file(folder / INDEX, "sha256")
    if not sparse:
        files[BIN] = checksum_file(folder / BIN)
    else:
        files[BIN] = type(files[BIN])((folder / BIN).stat().st_size, files[BIN].sum)
    rewritten(folder, files=files)
