"""Token files round-trip, and an incomplete file is refused; the embedded data set."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.base.errors import DataError
from holdfast.reference.tokens import Tokens, TokenWriter, dtype_for, load_embedded, open_tokens
from marks import examples

SIZES = {"uint8": 256, "uint16": 50_304, "uint32": 200_000}


def write(path, tokens, vocab_size=256):
    writer = TokenWriter(path, vocab_size, "bytes")
    writer.write(tokens)
    writer.close()
    return path


@pytest.mark.parametrize(("dtype", "vocab_size"), SIZES.items())
def test_token_file_round_trip(tmp_path, dtype, vocab_size):
    tokens = np.random.default_rng(0).integers(0, vocab_size, 10_001)
    tokens[[0, -1]] = (vocab_size - 1, 0)  # the ends of the range
    writer = TokenWriter(tmp_path / "a.tokens", vocab_size, "mine")
    writer.write(tokens[:4000])
    writer.write(tokens[4000:].tolist())
    writer.write([])
    writer.close()
    read = open_tokens(tmp_path / "a.tokens")
    assert read.data.dtype == dtype
    assert np.array_equal(read.data, tokens)
    assert (len(read), read.vocab_size, read.tokenizer, read.name) == (10_001, vocab_size, "mine", "a.tokens")


def test_smallest_dtype_that_holds_the_vocabulary_is_used():
    assert [dtype_for(n) for n in (1, 256, 257, 65_536, 65_537)] == ["uint8", "uint8", "uint16", "uint16", "uint32"]


def test_file_is_mapped_and_not_read(tmp_path):
    assert isinstance(open_tokens(write(tmp_path / "a", range(200))).data, np.memmap)


def test_file_appears_only_when_it_is_whole(tmp_path):
    writer = TokenWriter(tmp_path / "a", 256, "bytes")
    writer.write(range(100))
    assert not (tmp_path / "a").exists()
    writer.close()
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_abandoned_writer_leaves_nothing(tmp_path):
    writer = TokenWriter(tmp_path / "a", 256, "bytes")
    writer.write(range(100))
    writer.abandon()
    assert list(tmp_path.iterdir()) == []


def test_abandoned_writer_leaves_the_file_that_was_there(tmp_path):
    write(tmp_path / "a", [1, 2, 3])
    writer = TokenWriter(tmp_path / "a", 256, "bytes")
    writer.write(range(100))
    writer.abandon()
    assert open_tokens(tmp_path / "a").data.tolist() == [1, 2, 3]
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("token", [300, -1])
@pytest.mark.parametrize("as_array", [False, True])
def test_token_outside_the_vocabulary_is_refused(tmp_path, token, as_array):
    writer = TokenWriter(tmp_path / "a", 300, "bytes")
    with pytest.raises(DataError, match="vocabulary of 300"):
        writer.write(np.array([5, token]) if as_array else [5, token])
    writer.abandon()


# ---- files that cannot be used


@pytest.fixture
def whole(tmp_path):
    return write(tmp_path / "a.tokens", range(200))


def refused(path) -> str:
    with pytest.raises(DataError) as error:
        open_tokens(path)
    assert str(path) in str(error.value)
    return str(error.value)


def test_missing_file_names_the_command_that_makes_one(tmp_path):
    message = refused(tmp_path / "none.tokens")
    assert "no such token file" in message and "holdfast prepare" in message


def test_empty_file_names_the_command_that_makes_it_again(tmp_path):
    (tmp_path / "a").touch()
    message = refused(tmp_path / "a")
    assert "is empty" in message and "holdfast prepare" in message


@pytest.mark.parametrize("lost", [1, 100, 200, 4000])
def test_truncated_file_is_detected_for_any_length(whole, lost):
    whole.write_bytes(whole.read_bytes()[:-lost])
    message = refused(whole)
    assert "truncated" in message and "200 tokens" in message and "holdfast prepare" in message


def test_file_with_something_after_its_tokens_is_too_long(whole):
    whole.write_bytes(whole.read_bytes() + b"x")
    message = refused(whole)
    assert "too long" in message and "holdfast prepare" in message


def test_file_that_holds_no_tokens_is_refused(tmp_path):
    write(tmp_path / "a", [])
    assert "holds no tokens" in refused(tmp_path / "a")


def test_folder_is_refused(tmp_path):
    assert "cannot be read" in refused(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"Once upon a time\n" * 1000,
        b"\x00" * 5000,
        b"\xff\xfe\x00",
        b"[1, 2, 3]\n",
        b"null\n",
        b"[" * 5000,  # deeper than the JSON reader goes
        b'{"format": "holdfast-tokens"}\n',
        b'{"format": "somebody else", "count": 1, "dtype": "uint8", "vocab_size": 256, "tokenizer": "x"}\n',
        b'{"format": "holdfast-tokens", "count": 1, "dtype": "float64", "vocab_size": 256, "tokenizer": "x"}\n',
        b'{"format": "holdfast-tokens", "count": Infinity, "dtype": "uint8", "vocab_size": 256, "tokenizer": "x"}\n',
    ],
)
def test_foreign_file_is_not_a_token_file(tmp_path, content):
    (tmp_path / "a").write_bytes(content)
    message = refused(tmp_path / "a")
    assert "is not a token file" in message and "holdfast prepare" in message


@settings(max_examples=examples(100), derandomize=True, deadline=None)
@given(st.binary(max_size=200), st.booleans())
def test_any_invalid_content_is_a_data_error(tmp_path_factory, content, in_the_header):
    path = tmp_path_factory.mktemp("fuzz") / "a"
    header = {"format": "holdfast-tokens", "dtype": "uint8", "count": 3, "vocab_size": 256, "tokenizer": "x"}
    path.write_bytes(json.dumps(header).encode()[: len(content)] + content if in_the_header else content)
    refused(path)


# ---- fingerprints


def test_fingerprint_depends_on_content_not_dtype():
    tokens = np.arange(5000) % 200
    first = Tokens("a", tokens.astype(np.uint8), 256, "bytes").fingerprint()
    assert Tokens("b", tokens.astype(np.uint16), 256, "bytes").fingerprint() == first
    assert Tokens("a", tokens[:-1].astype(np.uint8), 256, "bytes").fingerprint() != first
    assert Tokens("a", tokens[::-1].astype(np.uint8), 256, "bytes").fingerprint() != first


# ---- the embedded data set


def test_embedded_data_set_is_more_than_a_megabyte_of_python_source():
    tokens = load_embedded()
    assert len(tokens) > 1_000_000
    assert tokens.vocab_size == 256
    assert b"import " in bytes(tokens.data[:100_000])
    assert not np.array_equal(tokens.data[: len(tokens) // 2], tokens.data[len(tokens) // 2 :][: len(tokens) // 2])


def test_embedded_data_set_is_the_same_in_every_process():
    source = "from holdfast.reference.tokens import load_embedded; print(load_embedded().fingerprint(), hash('x'))"
    done = [
        subprocess.run(
            [sys.executable, "-c", source],
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        for seed in ("1", "2")
    ]
    first, second = (d.stdout.split() for d in done)
    assert first[0] == second[0] == load_embedded().fingerprint()
    assert first[1] != second[1]


def test_missing_standard_library_names_the_cure(tmp_path, monkeypatch):
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(DataError, match=r"\[\[dataset.sources\]\]"):
        load_embedded()


def test_a_planted_temporary_name_is_not_written_through(tmp_path):
    (tmp_path / "victim").write_bytes(b"theirs")
    (tmp_path / f".a.tokens.{os.getpid()}").symlink_to(tmp_path / "victim")
    before = os.umask(0)
    try:
        write(tmp_path / "a.tokens", [1, 2, 3])
    finally:
        os.umask(before)
    assert (tmp_path / "victim").read_bytes() == b"theirs"
    assert (tmp_path / "a.tokens").stat().st_mode & 0o777 == 0o644
