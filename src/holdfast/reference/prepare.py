"""From text or JSON lines to a token file: bytes, or a tokenizer the user has."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.core.base.errors import DataError, MissingDependency
from holdfast.reference.tokens import Writer

_BYTES_END = 0


def prepare(
    inputs: list[Path], output: Path, tokenizer: str, field: str, on_progress: Callable[[int, int], None]
) -> dict[str, Any]:
    """Write one token file from all inputs, in order. Lines of JSON that cannot be used are counted, not hidden."""
    for path in inputs:
        if not path.is_file():
            raise DataError(f"{path}: no such file; name text files, or .jsonl files with the text under {field!r}")
    _check_output(output, inputs)
    encode, vocab_size, end = _tokenizer(tokenizer)
    try:
        writer = Writer(output, vocab_size, tokenizer)
        try:
            skipped = _write(writer, inputs, encode, end, field, on_progress)
            writer.close()
        except BaseException:
            writer.abandon()
            raise
    except OSError as error:
        # Without a name it came from a write: opening a file names it.
        place = error.filename if error.filename in map(str, inputs) else f"{output} cannot be written"
        raise DataError(f"{place}: {error.strerror}; no token file was made") from None
    return {"output": str(output), "tokens": writer.count, "vocab_size": vocab_size, "skipped_lines": skipped}


def _write(
    writer: Writer,
    inputs: list[Path],
    encode: Callable[[bytes], Any],
    end: int,
    field: str,
    on_progress: Callable[[int, int], None],
) -> int:
    """Every document, with `end` after it; how many lines could not be used."""
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
        left_out = f": all {skipped} lines lack text under {field!r}; name its field with --field" if skipped else ""
        raise DataError(f"the inputs hold no text{left_out}")
    return skipped


def _check_output(output: Path, inputs: list[Path]) -> None:
    """Before any work: a place that cannot take the file, or one where it would replace what it is made from."""
    if output.is_dir():
        raise DataError(f"{output}: is a folder; name a file in it, such as {output / 'data.tokens'}")
    if not output.parent.is_dir():
        raise DataError(f"{output}: the folder {output.parent} does not exist; make it first")
    if output.exists() and any(output.samefile(path) for path in inputs):
        raise DataError(
            f"{output}: is one of the inputs, and would be replaced; choose another name for the token file"
        )


def _documents(path: Path, field: str) -> Iterator[tuple[int, bytes | None]]:
    """Documents with the bytes each took: each line of JSON lines (None: not usable), or a whole text file."""
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


def _tokenizer(name: str) -> tuple[Callable[[bytes], Any], int, int]:
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
