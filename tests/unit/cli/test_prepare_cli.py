"""`holdfast prepare`: text and JSON lines into a token file; what it refuses, and that it then leaves nothing."""

from __future__ import annotations

import json
import resource
import sys
import types

import pytest

from holdfast.reference.tokens import open_tokens


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("Once upon a time")
    (tmp_path / "b.txt").write_text("there was\n")
    return tmp_path


def refused(answer, folder) -> str:
    """One message and status 78; no token file, and nothing half-written."""
    assert answer.status == 78, answer.err
    assert answer.out == ""
    assert answer.err.startswith("error: ") and "Traceback" not in answer.err
    assert [p.name for p in folder.rglob("*") if p.name.startswith(".") or p.suffix == ".tokens"] == []
    return answer.err


def content(path) -> bytes:
    return bytes(open_tokens(path).data)


# ---- token files


def test_text_files_become_their_bytes_each_with_an_end(holdfast, folder):
    answer = holdfast("prepare", "a.txt", "b.txt", "-o", "out.tokens")
    assert (answer.status, answer.err) == (0, "")
    assert answer.out == "out.tokens: 28 tokens, vocabulary 256\n"
    assert content("out.tokens") == b"Once upon a time\0there was\n\0"


def test_json_answer_says_what_was_made(holdfast, folder):
    answer = holdfast("prepare", "a.txt", "-o", "out.tokens", "--json")
    assert answer.status == 0
    assert answer.json == {
        "ok": True,
        "output": "out.tokens",
        "tokens": 17,
        "vocab_size": 256,
        "skipped_lines": 0,
    }


def test_lines_of_json_become_documents_and_bad_ones_are_counted(holdfast, folder):
    lines = [
        '{"text": "first"}',
        "",
        '{"text": "grün"}',
        "not json",
        '{"other": "no text"}',
        '{"text": 5}',
        "[1, 2]",
        '"text"',
        '{"text": null}',
        '{"text": "\\ud800"}',  # half of a character
        "[" * 100_000,
        '{"text": "last"}',
    ]
    (folder / "a.jsonl").write_text("\n".join(lines))
    answer = holdfast("prepare", "a.jsonl", "-o", "out.tokens")
    assert answer.status == 0
    assert "8 lines had no text under 'text'" in answer.err
    assert content("out.tokens") == "first\0grün\0last\0".encode()
    assert holdfast("prepare", "a.jsonl", "-o", "out.tokens", "--json").json["skipped_lines"] == 8


def test_field_of_the_text_can_be_named(holdfast, folder):
    (folder / "a.ndjson").write_text('{"content": "x", "text": "y"}\n')
    assert holdfast("prepare", "a.ndjson", "-o", "out.tokens", "--field", "content").status == 0
    assert content("out.tokens") == b"x\0"


def test_token_file_is_replaced_whole(holdfast, folder):
    holdfast("prepare", "a.txt", "-o", "out.tokens")
    holdfast("prepare", "b.txt", "-o", "out.tokens")
    assert content("out.tokens") == b"there was\n\0"
    assert sorted(p.name for p in folder.iterdir()) == ["a.txt", "b.txt", "out.tokens"]


def test_output_is_made_for_the_trainer(holdfast, folder):
    (folder / "long.txt").write_text("All work and no play. " * 50)
    holdfast("prepare", "long.txt", "-o", "long.tokens")
    words = ("--model.layers=1", "--model.width=8", "--model.heads=1", "--model.context=8", "--train.batch_size=2")
    (folder / "c.toml").write_text("[[dataset.sources]]\npath = 'long.tokens'\n[train]\nthreads = 1\ndevice = 'cpu'\n")
    answer = holdfast("train", "c.toml", *words, "--train.steps=3", "--scheduler.warmup_steps=1", "--json")
    assert (answer.status, answer.json["steps"]) == (0, 3)


# ---- a tokenizer of the user's


class Words:
    """Replaces tokenizers.Tokenizer: a number for every word."""

    names = ("once", "upon", "a", "time", "<|endoftext|>")

    @classmethod
    def from_file(cls, path):
        with open(path) as file:
            json.load(file)
        return cls()

    def get_vocab_size(self):
        return 300

    def token_to_id(self, token):
        return self.names.index(token) if token in self.names else None

    def encode(self, text):
        return types.SimpleNamespace(ids=[self.names.index(word) for word in text.lower().split()])


@pytest.fixture
def tokenizers(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", types.SimpleNamespace(Tokenizer=Words))


def test_tokenizer_file_is_used_with_its_end_of_text(holdfast, folder, tokenizers):
    (folder / "tokenizer.json").write_text("{}")
    answer = holdfast("prepare", "a.txt", "-o", "out.tokens", "--tokenizer", "tokenizer.json", "--json")
    assert (answer.status, answer.json["vocab_size"]) == (0, 300)
    read = open_tokens("out.tokens")
    assert read.data.tolist() == [0, 1, 2, 3, 4]
    assert (read.data.dtype, read.tokenizer) == ("uint16", "tokenizer.json")


def test_file_that_is_no_tokenizer_is_refused(holdfast, folder, tokenizers):
    (folder / "tokenizer.json").write_text("not one")
    message = refused(holdfast("prepare", "a.txt", "-o", "out.tokens", "--tokenizer", "tokenizer.json"), folder)
    assert "tokenizer.json: cannot be read as a tokenizer.json" in message


def test_unknown_tokenizer_file_is_refused_with_what_to_name(holdfast, folder):
    message = refused(holdfast("prepare", "a.txt", "-o", "out.tokens", "--tokenizer", "gpt2.json"), folder)
    assert "--tokenizer gpt2.json: no such file" in message and "'bytes'" in message


def test_missing_package_names_the_command_that_installs_it(holdfast, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    (folder / "tokenizer.json").write_text("{}")
    answer = holdfast("prepare", "a.txt", "-o", "out.tokens", "--tokenizer", "tokenizer.json")
    assert answer.status == 1
    assert "pip install tokenizers" in answer.err


# ---- refusals


def test_missing_input_is_refused(holdfast, folder):
    message = refused(holdfast("prepare", "a.txt", "none.txt", "-o", "out.tokens"), folder)
    assert "none.txt: no such file" in message


def test_folder_as_input_is_refused(holdfast, folder):
    assert "is a folder" in refused(holdfast("prepare", folder, "-o", "out.tokens"), folder)


def test_empty_input_is_refused(holdfast, folder):
    (folder / "empty.txt").touch()
    assert "hold no text" in refused(holdfast("prepare", "empty.txt", "-o", "out.tokens"), folder)


def test_lines_that_are_all_unusable_are_refused_with_the_option_that_may_help(holdfast, folder):
    (folder / "a.jsonl").write_text('{"content": "x"}\n{"content": "y"}\n')
    message = refused(holdfast("prepare", "a.jsonl", "-o", "out.tokens"), folder)
    assert "all 2 lines lack text under 'text'" in message and "--field" in message


def test_missing_output_folder_is_named_and_not_made(holdfast, folder):
    message = refused(holdfast("prepare", "a.txt", "-o", "none/out.tokens"), folder)
    assert "the folder none does not exist" in message
    assert not (folder / "none").exists()


@pytest.mark.parametrize("output", [".", "data", "data/"])
def test_folder_as_output_is_refused_with_a_file_to_name(holdfast, folder, output):
    (folder / "data").mkdir()
    assert "is a folder; name a file in it" in refused(holdfast("prepare", "a.txt", "-o", output), folder)


@pytest.mark.parametrize("output", ["a.txt", "./a.txt", "link.txt"])
def test_input_is_never_replaced_by_the_output(holdfast, folder, output):
    (folder / "link.txt").symlink_to("a.txt")
    assert "is one of the inputs" in refused(holdfast("prepare", "b.txt", "a.txt", "-o", output), folder)
    assert (folder / "a.txt").read_text() == "Once upon a time"


def test_output_that_cannot_be_written_is_refused(holdfast, folder):
    assert "cannot be written" in refused(holdfast("prepare", "a.txt", "-o", "/proc/out.tokens"), folder)


def test_full_disk_leaves_no_file(installed, folder):
    (folder / "long.txt").write_bytes(b"x" * 50_000)

    def full() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    message = refused(installed("prepare", "long.txt", "-o", "out.tokens", preexec_fn=full), folder)
    assert "out.tokens cannot be written: File too large" in message


def test_refusal_is_json_when_asked_for(holdfast, folder):
    answer = holdfast("prepare", "none.txt", "-o", "out.tokens", "--json")
    assert answer.status == 78
    assert answer.json["ok"] is False
    assert "none.txt: no such file" in answer.json["errors"][0]


def test_missing_output_option_is_a_usage_error(holdfast, folder):
    answer = holdfast("prepare", "a.txt")
    assert answer.status == 2
    assert "--output" in answer.err
