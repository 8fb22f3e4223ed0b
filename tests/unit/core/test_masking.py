"""Keys, tokens and passwords are masked by name, by shape and when they come again; ordinary settings stay readable."""

from __future__ import annotations

import json
import time

import pytest

from holdfast.core.base import masking
from holdfast.core.base.masking import MASK, mask, mask_argv, mask_fields, mask_value, remember_environment
from holdfast.core.checkpoints.lineage import Lineage
from holdfast.core.checkpoints.manifest import Manifest, seal, unseal_manifest
from holdfast.core.record.facts import check_facts
from holdfast.core.record.journal import dumps
from holdfast.core.record.rundir import to_json

HF = "hf_" + "aB3dE5gH7jK9mN1pQ3sT5vW7yZ9bC2"
JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U"


@pytest.fixture(autouse=True)
def nothing_found_before(monkeypatch):
    monkeypatch.setattr(masking, "_found", set())


@pytest.mark.parametrize(
    ("words", "secret"),
    [
        (["--wandb-key=abc"], "abc"),
        (["--wandb-key", "abc"], "abc"),
        (["--HF_TOKEN=x1y2"], "x1y2"),
        (["--password", "123456"], "123456"),
        (["--db.passwd=pw"], "pw"),
        (["+logger.wandb.api_key=q"], "q"),
        (["--clientSecret", "zz"], "zz"),
        (["--auth", "me:you"], "me:you"),
        (["--aws_credentials=c"], "=c"),
        (["--hftoken=foo"], "foo"),
        (["x", HF], HF),
        (["--note=uses " + HF + "."], HF),
        (["sk-proj-abc_DEF-0123456789abcdef"], "0123456789abcdef"),
        (["sk-" + "a1" * 20], "a1a1"),
        (["ghp_" + "a" * 36], "aaa"),
        (["github_pat_" + "1a" * 20], "1a1a"),
        (["AKIAIOSFODNN7EXAMPLE"], "IOSFODNN"),
        (["xoxb-123456789012-abcdef"], "1234"),
        (["0123456789abcdef0123456789abcdef01234567"], "012345"),
        ([JWT], "eyJ"),
        (["Authorization: Bearer abcdefghijklmnop1234"], "abcdef"),
        (["https://user:pw@host/x"], "pw"),
        (["https://tokentokentoken1234@host/x.git"], "tokentoken"),
        (["https://host/x?a=1&token=abc"], "abc"),
        (["s3://b/x?X-Amz-Signature=abc"], "abc"),
        (["kX9vB2mQ7/tR4pL8wZ1cN5/yH3gJ6fD0sA+eU2iO"], "kX9v"),
        (["--x=aB3dE5gH7jK9mN1pQ3sT5vW7"], "aB3d"),
    ],
)
def test_secret_on_the_command_line_is_masked_and_named(words, secret):
    masked, names = mask_argv(["train.py", *words])
    assert secret not in json.dumps(masked) and MASK in json.dumps(masked)
    assert len(names) == 1 and secret not in names[0]
    assert masked[0] == "train.py" and len(masked) == len(words) + 1


@pytest.mark.parametrize(
    "words",
    [
        ["--lr=3e-4", "--key-dim", "64", "--num-key-value-heads=8", "--eos_token_id=128009", "--max-tokens=4096"],
        ["--pad-token", "<pad>", "--tokenizer=meta-llama/Llama-3.1-8B-Instruct", "--use-auth", "--token"],
        ["/data/runs/2024-05-17_LLaMA3-8B_lr3e-4_bs512_warmup2000/checkpoints/step_00001000"],
        ["--revision=9571e7c28582d38e0f9fbd0c8038c7c8a43a2c57", "--data-hash", "d41d8cd98f00b204e9800998ecf8427e"],
        ["--sha256=e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"],
        ["--model=BertForSequenceClassification2023", "runs/exp-17_AdamW_lr1e-4_wd0.1_beta2-0.95_Seed42"],
        ["--name=sk-learn-model-v2-something-long", "550e8400-e29b-41d4-a716-446655440000"],
        ["git@github.com:a/b.git", "ssh://git@github.com/a/b", "https://host/x?page=2", "s3://bucket/Prefix2024/Train"],
        ["--api-key-env=WANDB_API_KEY", "--password-file=/run/pw", "--layers=Conv2D_64x3x3_BN_ReLU_MaxPool2D_128x3x3"],
    ],
)
def test_ordinary_command_line_stays_as_it_is(words):
    assert mask_argv(words) == (words, [])


def test_fields_are_masked_by_name_and_by_shape():
    value = {"train": {"seed": 3, "wandb_key": "abc", "path": "/x"}, "words": ["a", HF], "eos_token_id": 2}
    masked, names = mask_fields(value, "config")
    assert masked == {"train": {"seed": 3, "wandb_key": MASK, "path": "/x"}, "words": ["a", MASK], "eos_token_id": 2}
    assert names == ["config.train.wandb_key", "config.words"]


def test_masked_value_is_masked_wherever_it_comes_again():
    mask_argv(["--wandb-key", 'S3cret"value', "https://user:Passw0rd9@host"])
    text = 'login failed for S3cret"value and Passw0rd9'
    assert mask(text) == f"login failed for {MASK} and {MASK}"
    assert json.loads(dumps({"event": "error", "why": text}))["why"] == mask(text)
    assert json.loads(to_json({"why": text}))["why"] == mask(text)


def test_value_of_an_environment_variable_with_a_telling_name_is_masked_in_texts():
    remember_environment({"WANDB_API_KEY": "abc-123-def", "HOME": "/home/me-123", "SSH_AUTH_SOCK": "/tmp/ssh-1/agent"})
    assert mask("no access with abc-123-def in /home/me-123, /tmp/ssh-1/agent") == (
        f"no access with {MASK} in /home/me-123, /tmp/ssh-1/agent"
    )


def test_ordinary_word_as_a_password_leaves_the_journal_readable():
    assert mask_argv(["--password=checkpoint"])[0] == [f"--password={MASK}"]
    assert mask('{"event":"checkpoint"}') == '{"event":"checkpoint"}'


def test_manifest_is_masked_under_its_checksum():
    manifest = Manifest(run="r", step=0, lineage=Lineage(), reason=f"before {HF}", time=0.0)
    content, _ = seal(manifest)
    assert HF.encode() not in content
    assert unseal_manifest(content)[0].reason == f"before {MASK}"


def test_facts_are_masked():
    assert check_facts({"hub_token": "abc", "vocab_size": 50257}, None) == {"hub_token": MASK, "vocab_size": 50257}


def test_masking_takes_time_in_proportion_to_the_text():
    began = time.process_time()
    for part in ("eyJ-", "a", "A1b", "://", "https://a", "?key", "sk-", "Bearer ", "-----BEGIN ", "token=", "a.b"):
        mask_value(part * (50_000 // len(part)))
    assert time.process_time() - began < 5


def test_address_of_a_webhook_is_masked():
    fields, _ = mask_fields({"metrics": {"alert_webhook": "https://hooks.slack.com/services/T00/B00/XXXX"}})
    assert fields == {"metrics": {"alert_webhook": MASK}}
