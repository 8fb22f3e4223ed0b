"""Fingerprints: a short text that is equal for equal content, on any machine and in any process.

Nothing is unpickled, and only the accessors named here are called, so that the fingerprint of a foreign file is safe.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.core.base.errors import ConfigError
from holdfast.core.base.plain import text

_UNSTABLE = ("padding", "truncation")
"""settings that encoding a batch changes in a tokenizer, and that do not change the vocabulary"""


def fingerprint(thing: Any) -> str:
    """Return `sha256:` and 64 hex digits for the content of `thing`.

    A path (str or PathLike): the bytes of the file, or the names and bytes of all files in the folder; for a text itself,
    pass bytes. A tokenizer (tokenizers, transformers, sentencepiece, tiktoken): its rules and vocabulary, or only the
    vocabulary if it provides no more. Plain data (dicts, lists, numbers): JSON with sorted keys. Arrays: dtype, shape,
    bytes. Raises ConfigError for anything else.
    """
    digest = hashlib.sha256()
    if isinstance(thing, str | os.PathLike):
        _add_path(digest, Path(thing))
    elif isinstance(thing, bytes | bytearray):
        digest.update(b"bytes\n")
        digest.update(thing)
    elif (rules := _tokenizer(thing)) is not None:
        digest.update(b"tokenizer\n")
        digest.update(rules)
    elif isinstance(thing, dict | list | tuple | set | frozenset | int | float | None):
        digest.update(b"data\n")
        digest.update(_canonical(thing))
    else:
        _add_buffer(digest, thing)
    return f"sha256:{digest.hexdigest()}"


def _refuse(thing: Any, why: str) -> ConfigError:
    return ConfigError([f"{text(thing)[:80]}: {why}"], "fingerprint()")


def _add_path(digest: Any, path: Path) -> None:
    try:
        if path.is_dir():
            digest.update(b"folder\n")
            for file in sorted(p for p in path.rglob("*") if p.is_file()):
                digest.update(json.dumps(file.relative_to(path).as_posix()).encode() + b"\n")
                digest.update(_file(file))
        else:
            digest.update(b"file\n")
            digest.update(_file(path))
    except FileNotFoundError:
        raise _refuse(str(path), "no such file or folder; for a text itself pass bytes: text.encode()") from None
    except OSError as error:
        raise _refuse(str(path), f"cannot be read: {error.strerror}") from None


def _file(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _tokenizer(thing: Any) -> bytes | None:
    """Return the rules and vocabulary of a tokenizer as bytes; None if `thing` is not a tokenizer."""
    inner = getattr(thing, "backend_tokenizer", thing)  # transformers' fast tokenizers wrap one
    if callable(to_str := getattr(inner, "to_str", None)) and callable(getattr(inner, "get_vocab", None)):
        rules = json.loads(to_str())
        return _canonical({name: value for name, value in rules.items() if name not in _UNSTABLE})
    if callable(vocabulary := getattr(thing, "get_vocab", None)):
        tokens = vocabulary()
        return _canonical(dict(tokens) if isinstance(tokens, Mapping) else tokens)
    if callable(proto := getattr(thing, "serialized_model_proto", None)):
        return bytes(proto())
    if callable(values := getattr(thing, "token_byte_values", None)):
        ranks = [bytes(value).hex() for value in values()]
        return _canonical([ranks, getattr(thing, "name", None), sorted(getattr(thing, "special_tokens_set", ()))])
    return None


def _canonical(thing: Any) -> bytes:
    try:
        return json.dumps(thing, sort_keys=True, separators=(",", ":"), default=_unordered).encode()
    except RecursionError:
        raise _refuse("a structure", "it contains itself, or is too deep; pass plain data") from None
    except (TypeError, ValueError) as error:
        raise _refuse(
            thing, f"is not plain data ({error}); pass dicts with text keys, lists, text and numbers"
        ) from None


def _unordered(value: Any) -> Any:
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    if isinstance(value, bytes | bytearray):
        return {"bytes": value.hex()}
    if callable(item := getattr(value, "item", None)):
        return item()
    raise TypeError(f"a {type(value).__name__} in it")


def _add_buffer(digest: Any, thing: Any) -> None:
    try:
        view = memoryview(thing)
    except (TypeError, ValueError, BufferError):
        raise _refuse(
            thing,
            f"a {type(thing).__name__} has no content that can be read without running it; pass a path, bytes, plain data, "
            "an array (tensor.numpy()) or a tokenizer with get_vocab()",
        ) from None
    digest.update(f"array {view.format} {view.shape}\n".encode())
    digest.update(view.tobytes())
