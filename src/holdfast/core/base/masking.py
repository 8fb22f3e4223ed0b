"""Masks keys, tokens and passwords in what is recorded. A run directory is passed around and readable by others.

Three rules find them: the name of an option, key or environment variable; the shape of a value; and a value that the
first two found, wherever it appears again, such as in the text of an error.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

MASK = "***"

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_ALWAYS = re.compile(
    r"secret|passw|passphrase|credential|bearer|webhook|api_?key|access_?key|private_?key|auth_?token|access_?token"
)
"""names whose value is masked whatever it is"""
_OFTEN = re.compile(r"(^|_)(key|token|auth|pwd)(_|$)|(key|token)$")
"""names that settings have too (eos_token_id, key_dim): masked unless the value is a number or a word in brackets"""
_ABOUT_A_SECRET = re.compile(
    r"_(file|path|dir|folder|name|id|ids|type|mode|env|length|len|dim|size|heads|bias|norm|index|sock)$"
)
"""ends of names whose value describes a secret, or a setting"""
_CHECKSUM_NAME = re.compile(
    r"(^|_)(rev|revision|commit|sha\d*|hash|checksum|digest|fingerprint|version|ref|branch|tag|id)(_|$)"
)
_HARMLESS = re.compile(
    r"[-+]?\d{1,8}(\.\d*)?([eE][-+]?\d+)?|\.\d+|(?i:true|false|none|null|yes|no|on|off|auto)|[<\[{].*|"
)
_ASSIGNMENT = re.compile(r"([-+~]*[A-Za-z][\w./-]*)=(.*)", re.DOTALL)

_SHAPES = re.compile(
    r"""\b(?:
        hf_[A-Za-z0-9]{20,} | api_org_[A-Za-z0-9]{20,}                                      # Hugging Face
      | sk-(?:ant|proj|svcacct|admin|or)-[\w-]{16,} | sk-[A-Za-z0-9]{20,} | [srp]k_(?:live|test)_[A-Za-z0-9]{10,}
      | gh[pousr]_[A-Za-z0-9]{20,} | github_pat_\w{20,} | glpat-[\w-]{16,}                  # GitHub, GitLab
      | (?:AKIA|ASIA)[0-9A-Z]{16} | AIza[\w-]{30,} | ya29\.[\w-]{20,}                       # AWS, Google
      | xox[a-z]-[\w-]{10,} | npm_[A-Za-z0-9]{30,} | pypi-[\w-]{30,} | dop_v1_[0-9a-f]{30,}
      | local-[0-9a-f]{40}                                                                  # W&B on an own server
    )
    | (?<![\w-])eyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?                                      # JWT
    | (?<=[Bb]earer\ )[\w.~+/=-]{16,}
    | -----BEGIN\ [A-Z ]{0,30}PRIVATE\ KEY-----[^"]*
    | (?<=://)[^\s/:@"\\]{0,200}:[^\s/@"\\]{1,500}(?=@)                                     # user:password@
    | (?<=://)[^\s/:@"\\]{16,500}(?=@)                                                      # token@
    | (?i:(?<=[?&])(?P<query>[\w.-]{0,40}(?:token|key|secret|sig|signature|password|auth|credential)=)[^\s&#"'\\]+)
    """,
    re.VERBOSE,
)
_SHAPE_PARTS = (
    "hf_", "api_org_", "sk-", "k_live_", "k_test_", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-", "AKIA",
    "ASIA", "AIza", "ya29.", "xox", "npm_", "pypi-", "dop_v1_", "local-", "eyJ", "earer ", "-----BEGIN", "://", "=",
)  # fmt: skip
"""a text without any of these holds no value of a known shape; looking for them is fifty times faster than the pattern"""
_WANDB_KEY = re.compile(r"[0-9a-f]{40}")
_LONG = re.compile(r"[A-Za-z0-9+/]{30,}={0,2}|[A-Za-z0-9_+=-]{20,}")
_MIN_RANDOM = 20
_MIN_CHANGES = 0.4
"""share of places where a key changes between upper case, lower case and digit; it is 0.6 for random letters and digits"""

_found: set[str] = set()
"""values that were masked in this process by the name they were given under"""


def mask_argv(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the command line without its secrets, and the names of the options that were masked."""
    masked: list[str] = []
    names: list[str] = []
    option = ""
    for place, word in enumerate(words):
        assignment = _ASSIGNMENT.fullmatch(word)
        if assignment is not None:
            name, prefix, value = assignment[1], f"{assignment[1]}=", assignment[2]
        else:
            name, prefix, value = option, "", word
        shown = value if assignment is None and word.startswith("-") else mask_value(value, name, hex_keys=True)
        if shown != value:
            names.append(name or f"argv[{place}]")
        masked.append(prefix + shown)
        option = word if assignment is None and word.startswith("-") else ""
    return masked, names


def mask_fields(value: Any, name: str = "") -> tuple[Any, list[str]]:
    """Return plain data without its secrets, and the names of the fields that were masked."""
    if isinstance(value, str):
        masked = mask_value(value, name.rpartition(".")[2])
        return masked, [] if masked == value else [name]
    names: list[str] = []
    if isinstance(value, dict):
        result: Any = {}
        for key, item in value.items():
            result[key], more = mask_fields(item, f"{name}.{key}" if name else str(key))
            names += more
        return result, names
    if isinstance(value, list):
        pairs = [mask_fields(item, name) for item in value]
        return [item for item, _ in pairs], list(itertools.chain.from_iterable(more for _, more in pairs))
    return value, names


def mask_value(value: str, name: str = "", *, hex_keys: bool = False) -> str:
    """Return a value without its secrets; all of it is one if its name says so. `hex_keys`: 40 hex digits are one too."""
    words = "_".join(_WORDS.findall(name)).lower()
    is_secret = _is_secret(words, value)
    if not is_secret and hex_keys:
        is_secret = _WANDB_KEY.fullmatch(value) is not None and not _CHECKSUM_NAME.search(words)
    if is_secret:
        _remember(value)
        return MASK
    for found in _SHAPES.finditer(value):
        _remember(re.split("[:=]", found[0])[-1])
    return _LONG.sub(_mask_random, mask(value))


def mask(text: str) -> str:
    """Return text, or JSON, without values of known shapes, and without values that were masked before."""
    for value in sorted(_found, key=len, reverse=True):
        text = text.replace(value, MASK)
    if not any(part in text for part in _SHAPE_PARTS):
        return text
    return _SHAPES.sub(lambda found: f"{found['query'] or ''}{MASK}", text)


def remember_environment(variables: Mapping[str, str]) -> None:
    """Mask the values of environment variables that hold secrets, wherever they appear from now on."""
    for name, value in variables.items():
        if _is_secret("_".join(_WORDS.findall(name)).lower(), value) and not value.startswith("/"):
            _remember(value)


def _is_secret(words: str, value: str) -> bool:
    if not words or not value or _ABOUT_A_SECRET.search(words):
        return False
    return bool(_ALWAYS.search(words) or (_OFTEN.search(words) and not _HARMLESS.fullmatch(value)))


def _remember(value: str) -> None:
    """Keep a value to mask later texts, unless it could be an ordinary word or number."""
    kinds = {_kind(c) for c in value}
    if len(value) >= 8 and len(kinds) >= 2:
        _found.update((value, json.dumps(value)[1:-1]))


def _mask_random(found: re.Match[str]) -> str:
    """Mask a text with a part that is as irregular as a random key. Names, paths and hex digits are not."""
    text = found[0]
    parts = [text, *re.split(r"[_+=/-]+", text)] if "/" in text else re.split(r"[_+=-]+", text)
    if any(_changes(part) >= _MIN_CHANGES for part in parts if len(part) >= _MIN_RANDOM):
        _remember(text)
        return MASK
    return text


def _changes(text: str) -> float:
    kinds = [_kind(c) for c in text]
    if not {"digit", "upper", "lower"} <= set(kinds):
        return 0.0
    return sum(a != b for a, b in itertools.pairwise(kinds) if a and b) / len(kinds)


def _kind(character: str) -> str:
    is_lower = character.islower()
    return "digit" if character.isdigit() else "upper" if character.isupper() else "lower" if is_lower else ""
