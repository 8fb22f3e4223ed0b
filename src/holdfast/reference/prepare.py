"""Makes a token file from text or JSON lines, as bytes or with a tokenizer.json."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.core.base.errors import DataError, MissingDependency
from holdfast.reference.tokens import TokenWriter

_BYTES_END = 0


def prepare(
    inputs: list[Path], output: Path, tokenizer: str, field: str, on_progress: Callable[[int, int], None]
) -> dict[str, Any]:
    """Write one token file from all inputs, in order, and return a report with the number of unusable JSON lines.

    Raises DataError if an input or the output cannot be used, and MissingDependency without the tokenizers package.
    """
    for path in inputs:
        if not path.is_file():
            problem = "is a folder" if path.is_dir() else "no such file"
            raise DataError(f"{path}: {problem}; name text files, or .jsonl files with the text under {field!r}")
    _check_output(output, inputs)
    encode, vocab_size, end = _load_tokenizer(tokenizer)
    try:
        writer = TokenWriter(output, vocab_size, tokenizer)
        try:
            skipped = _write(writer, inputs, encode, end, field, on_progress)
            writer.close()
        except BaseException:
            writer.abandon()
            raise
    except OSError as error:
        # An OSError from opening a file names it; one from a write has no name.
        problem = error.filename if error.filename in map(str, inputs) else f"{output} cannot be written"
        raise DataError(f"{problem}: {error.strerror}; no token file was made") from None
    return {"output": str(output), "tokens": writer.count, "vocab_size": vocab_size, "skipped_lines": skipped}


def _write(
    writer: TokenWriter,
    inputs: list[Path],
    encode: Callable[[bytes], Any],
    end: int,
    field: str,
    on_progress: Callable[[int, int], None],
) -> int:
    """Write every document followed by `end`; return the number of unusable lines."""
    skipped = done = 0
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
        reason = f": all {skipped} lines lack text under {field!r}; name its field with --field" if skipped else ""
        raise DataError(f"the inputs hold no text{reason}")
    return skipped


def _check_output(output: Path, inputs: list[Path]) -> None:
    """Raise DataError, before any work, if the output cannot be written or would replace an input."""
    if output.is_dir():
        raise DataError(f"{output}: is a folder; name a file in it, such as {output / 'data.tokens'}")
    if not output.parent.is_dir():
        raise DataError(f"{output}: the folder {output.parent} does not exist; make it first")
    if output.exists() and any(output.samefile(path) for path in inputs):
        raise DataError(f"{output}: is one of the inputs and would be replaced; choose another name for the token file")


def _documents(path: Path, field: str) -> Iterator[tuple[int, bytes | None]]:
    """Yield (bytes read, document): one per JSON line, None if the line is unusable, or one for a whole text file."""
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
            except (ValueError, KeyError, TypeError, RecursionError):
                yield len(line), None


def _load_tokenizer(name: str) -> tuple[Callable[[bytes], Any], int, int]:
    """Return the encode function, the vocabulary size and the end-of-text token."""
    if name == "bytes":
        return lambda text: np.frombuffer(text, dtype=np.uint8), 256, _BYTES_END
    if not Path(name).is_file():
        raise DataError(f"--tokenizer {name}: no such file; name a tokenizer.json, or 'bytes'")
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
