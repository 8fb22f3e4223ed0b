"""From text or JSON lines to a token file: bytes, or a tokenizer the user has."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.core.errors import DataError, MissingDependency
from holdfast.reference.tokens import Writer

_CHUNK = 1 << 20
_BYTES_END = 0


def prepare(
    inputs: list[Path], output: Path, tokenizer: str, field: str, on_progress: Callable[[int, int], None]
) -> dict[str, Any]:
    """Write one token file from all inputs, in order. Lines of JSON that cannot be used are counted, not hidden."""
    for path in inputs:
        if not path.is_file():
            raise DataError(f"{path}: no such file; name text files, or .jsonl files with the text under {field!r}")
    if not output.parent.is_dir():
        raise DataError(f"{output}: the folder {output.parent} does not exist; make it first")
    encode, vocab_size, end = _tokenizer(tokenizer)
    writer = Writer(output, vocab_size, tokenizer)
    skipped = done = 0
    try:
        for path in inputs:
            for size, text in _documents(path, field):
                done += size
                if text is None:
                    skipped += 1
                    continue
                writer.write(encode(text))
                writer.write([end])
                on_progress(done, writer.count)
        if writer.count == 0:
            raise DataError("the inputs hold no text")
        writer.close()
    except BaseException:
        writer.abandon()
        raise
    return {"output": str(output), "tokens": writer.count, "vocab_size": vocab_size, "skipped_lines": skipped}


def _documents(path: Path, field: str) -> Iterator[tuple[int, bytes | None]]:
    """Documents with the bytes each took: every usable line of JSON lines, or a whole text file in pieces."""
    if path.suffix not in (".jsonl", ".ndjson"):
        with path.open("rb") as file:
            content = file.read()
        if content:
            yield len(content), content
        return
    with path.open("rb") as file:
        for line in file:
            if not line.strip():
                continue
            try:
                text = json.loads(line)[field]
                yield len(line), text.encode() if isinstance(text, str) else None
            except (ValueError, KeyError, TypeError):
                yield len(line), None


def _tokenizer(name: str) -> tuple[Callable[[bytes], Any], int, int]:
    if name == "bytes":
        return lambda text: np.frombuffer(text, dtype=np.uint8), 256, _BYTES_END
    try:
        from tokenizers import Tokenizer  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise MissingDependency(
            f"--tokenizer {name}: reading it needs the tokenizers package; install it with: pip install tokenizers"
        ) from None
    try:
        loaded = Tokenizer.from_file(name)
    except Exception as error:
        raise DataError(f"--tokenizer {name}: cannot be read as a tokenizer.json: {error}") from None
    size = loaded.get_vocab_size()
    end = next((i for t in ("<|endoftext|>", "</s>", "<eos>") if (i := loaded.token_to_id(t)) is not None), size)
    return lambda text: loaded.encode(text.decode(errors="replace")).ids, max(size, end + 1), end
