"""The written policy: what is accepted, what is refused, and that nothing wrong goes unsaid."""

from __future__ import annotations

import datetime
import tomllib
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.base import config
from holdfast.core.base.config import (
    RENAMED_KEYS,
    SECTIONS,
    Config,
    load,
    override,
    parse,
    read_toml,
    template,
    with_current_keys,
)
from holdfast.core.base.errors import ConfigError, HoldfastWarning
from marks import examples

KEYS = [(section, key) for section, kind in SECTIONS.items() for key in kind.__struct_fields__]


def errors_of(data: Any) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        parse(data, "test")
    return raised.value.errors


def parsed(data: Any) -> tuple[Config | None, list[str]]:
    """The config, or the errors; any other exception fails the test."""
    try:
        return parse(data, "test"), []
    except ConfigError as error:
        return None, error.errors


def only_error(data: Any) -> str:
    (error,) = errors_of(data)
    return error


# ---- the template


def test_template_is_toml_that_reads_back_as_the_defaults(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text(template(), encoding="utf-8")
    assert load(path) == Config()


def test_template_holds_every_key_of_every_section():
    written = tomllib.loads(template())
    assert [(section, key) for section, body in written.items() for key in body] == KEYS


def test_every_key_of_the_template_has_a_comment_that_says_something():
    assignments = [line for line in template().splitlines() if line and line[0] not in "#["]
    assert len(assignments) == len(KEYS)
    for line in assignments:
        value, _, comment = line.partition("  # ")
        assert tomllib.loads(value), line
        assert len(comment.split()) >= 2, line


def test_every_section_of_the_template_is_introduced():
    lines = template().splitlines()
    for section in SECTIONS:
        above = lines[lines.index(f"[{section}]") - 1]
        assert len(above.removeprefix("# ")) > 5, section


@pytest.mark.parametrize(("section", "key"), KEYS)
def test_default_written_out_is_the_default(section, key):
    value = tomllib.loads(template())[section][key]
    assert parse({section: {key: value}}, "test") == Config()


# ---- detectors


PRESETS = [
    "default",
    *(f"{rule}{end}" for rule in ("curry-train", "three-sigma", "monotone-200") for end in ("", "-as-written")),
]


@pytest.mark.parametrize("preset", PRESETS)
def test_preset_of_the_rule_on_the_loss_is_read_by_its_name(preset):
    assert parse({"detect": {"preset": preset}}, "test").detect.preset == preset
    assert load(override({}, [f"detect.preset={preset}"])).detect.preset == preset


def test_unknown_preset_lists_the_presets():
    error = only_error({"detect": {"preset": "four-sigma"}})
    assert all(repr(preset) in error for preset in PRESETS)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("divergence", False),
        ("update_spike", False),
        ("advisory", False),
        ("loss_z_rollback", 5.5),
        ("loss_rise", 0.1),
        ("loss_rise_rollback", 0.0),
        ("loss_rise_initial", 0.01),
        ("grad_ratio", 3.0),
        ("update_z", 5.0),
        ("update_ratio", 2.5),
        ("divergence_z", 9.0),
        ("divergence_rise", 0.0),
        ("overflow_streak", 8),
        ("plateau_steps", 500),
        ("weight_norm_ratio", 1.5),
    ],
)
def test_key_of_a_detector_is_read_and_stands_in_the_template(key, value):
    assert getattr(parse({"detect": {key: value}}, "test").detect, key) == value
    assert tomllib.loads(template())["detect"][key] == getattr(Config().detect, key)
    assert getattr(Config().detect, key) != value


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("update_z", 0),
        ("divergence_rise", -0.1),
        ("plateau_steps", 0),
        ("weight_norm_ratio", -2),
        ("advisory", "yes"),
        ("preset", 3),
    ],
)
def test_key_of_a_detector_out_of_its_range_is_refused(key, value):
    assert only_error({"detect": {key: value}}).startswith(f"[detect] {key} = {value!r}: ")


# ---- where a policy comes from


def test_none_means_the_defaults():
    assert load(None) == Config()


def test_config_is_passed_through_as_it_is():
    given_config = Config(recover=config.RecoverSection(mode="observe"))
    assert load(given_config) is given_config


def test_mapping_and_file_say_the_same(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text("[detect]\nloss_z = 12\n")
    assert load({"detect": {"loss_z": 12}}) == load(path) == load(str(path))
    assert load(path).detect.loss_z == 12.0


def test_anything_else_is_refused_by_its_type():
    with pytest.raises(ConfigError, match="not int"):
        load(3)  # type: ignore[arg-type]


def test_config_cannot_be_changed_once_made():
    with pytest.raises(AttributeError):
        Config().detect.loss_z = 3.0  # type: ignore[misc]


def test_missing_file_names_the_command_that_writes_one(tmp_path):
    with pytest.raises(ConfigError, match="holdfast init"):
        read_toml(tmp_path / "none.toml")


def test_folder_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="is a folder"):
        read_toml(tmp_path)


def test_path_under_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be read"):
        read_toml(tmp_path / "file" / "a.toml")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"[a]\nb = \xff\n", "UTF-8"),
        (b"[a\n", "line 1"),
        (b"a = " + b"[" * 100_000, "TOML"),
        (b"a = " + b"9" * 5000, "TOML"),
        (b"#" * 2**21, "longer than"),
    ],
    ids=["bytes", "syntax", "depth", "digits", "length"],
)
def test_file_that_is_no_toml_is_refused_with_the_reason(tmp_path, content, says):
    path = tmp_path / "a.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=says) as raised:
        load(path)
    assert str(path) in str(raised.value)


# ---- keys of earlier versions

OLD_KEYS = [(section, old, new) for section, keys in RENAMED_KEYS.items() for old, new in keys.items()]


@pytest.mark.parametrize(("section", "old", "new"), OLD_KEYS)
def test_old_key_is_read_with_a_warning_that_names_the_new_one(section, old, new):
    default = getattr(getattr(Config(), section), new)
    other = not default if isinstance(default, bool) else default + 3
    with pytest.warns(HoldfastWarning, match=rf"\[{section}\] {old} is now called {new}"):
        read = parse({section: {old: other}}, "test")
    assert read == parse({section: {new: other}}, "test") != Config()


@pytest.mark.parametrize(("section", "old", "new"), OLD_KEYS)
def test_old_and_new_key_at_once_are_refused(section, old, new):
    default = getattr(getattr(Config(), section), new)
    assert only_error({section: {old: default, new: default}}) == (
        f"[{section}] {old} is the old name of {new}, and both are given; remove {old}"
    )


@pytest.mark.parametrize(
    ("in_file", "typed"),
    [("patience_seconds", "rank_timeout_seconds"), ("rank_timeout_seconds", "rank_timeout_seconds")],
)
def test_override_wins_over_either_name_of_its_key_in_the_file(in_file, typed):
    data = override({"checkpoint": {in_file: 30.0}}, [f"checkpoint.{typed}=45.0"])
    assert parse(data, "test").checkpoint.rank_timeout_seconds == 45.0


def test_recorded_configuration_of_an_earlier_version_gets_the_keys_of_this_one():
    recorded = {"checkpoint": {"keep_powers": True, "keep_last": 2}, "model": {"width": 8}, "odd": 3}
    assert with_current_keys(recorded) == {
        "checkpoint": {"keep_powers_of_two": True, "keep_last": 2},
        "model": {"width": 8},
        "odd": 3,
    }


# ---- single errors, and the cure each names


def test_unknown_key_names_the_nearest():
    assert "did you mean 'loss_z'?" in only_error({"detect": {"los_z": 3}})


def test_unknown_key_like_no_other_lists_the_known():
    assert "enabled, flush_seconds" in only_error({"metrics": {"qqqqqq": 3}})


def test_unknown_section_names_the_nearest():
    assert "did you mean 'recover'?" in only_error({"recovery": {}})


def test_wrong_choice_names_the_choices_in_a_list_too():
    assert "choose one of 'auto', 'on', 'off'; the default" in only_error({"metrics": {"profile": "never"}})
    error = only_error({"metrics": {"sinks": ["console", "tensorbord"]}})
    assert "choose one of 'console', 'tensorboard'," in error and "for each item; the default is ()" in error


def test_key_outside_its_section_is_told_where_it_belongs():
    assert only_error({"loss_z": 3}) == "loss_z: belongs under [detect]"


def test_misspelt_key_outside_its_section_is_told_both():
    assert "'probation_steps' under [recover]" in only_error({"probation_step": 3})


def test_section_written_as_a_value_shows_how_to_write_it():
    assert "write [detect]" in only_error({"detect": 3})


def test_wrong_choice_lists_the_choices():
    assert "'heal', 'observe'" in only_error({"recover": {"mode": "heel"}})


def test_wrong_rung_lists_the_rungs():
    assert "'replay', 'skip', 'rollback', 'stop'" in only_error({"recover": {"ladder": ["skip", "jump"]}})


def test_error_carries_the_value_and_the_default():
    assert only_error({"detect": {"warmup_steps": 0}}) == (
        "[detect] warmup_steps = 0: expected int >= 1; the default is 40"
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_number_that_is_not_finite_is_refused(value):
    assert "finite" in only_error({"detect": {"loss_z": value}})


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("detect", "warmup_steps", True),
        ("detect", "warmup_steps", 1.5),
        ("detect", "warmup_steps", "50"),
        ("detect", "nonfinite", 1),
        ("detect", "nonfinite", "true"),
        ("detect", "loss_z", 0),
        ("recover", "lr_factor", 1.01),
        ("recover", "lr_factor", 0),
        ("recover", "rollback_to", "first_good"),
        ("recover", "rollback_to", 0),
        ("recover", "ladder", "stop"),
        ("snapshot", "memory_gb", -1),
        ("snapshot", "every_steps", 10**13),
        ("snapshot", "every_steps", datetime.date(2020, 1, 1)),
    ],
)
def test_value_of_the_wrong_type_or_range_is_refused(section, key, value):
    assert only_error({section: {key: value}}).startswith(f"[{section}] {key} = {value!r}: ")


@pytest.mark.parametrize(
    ("ladder", "says"),
    [([], "at least one"), (["skip", "skip"], "twice")],
)
def test_ladder_that_cannot_be_climbed_is_refused(ladder, says):
    assert says in only_error({"recover": {"ladder": ladder}})


@pytest.mark.parametrize("ladder", [["stop"], ["skip", "stop"], ["stop", "skip"], ["rollback", "replay"]])
def test_ladder_with_rungs_left_out_in_any_order_is_accepted(ladder):
    assert parse({"recover": {"ladder": ladder}}, "test").recover.ladder == tuple(ladder)


def test_ring_shorter_than_its_spacing_is_refused():
    error = only_error({"snapshot": {"every_steps": 50, "reach_steps": 20}})
    assert "reach_steps = 20" in error
    assert "every_steps = 50" in error


def test_rollback_threshold_above_the_skip_threshold_is_refused():
    assert "loss_z_rollback = 9.0" in only_error({"detect": {"loss_z_rollback": 9}})


def test_wrong_value_does_not_bring_forth_errors_of_its_default():
    assert only_error({"detect": {"loss_z": "20", "loss_z_rollback": 9}}).startswith("[detect] loss_z = '20'")
    assert only_error({"snapshot": {"reach_steps": -1, "every_steps": 5000}}).startswith("[snapshot] reach_steps")


def test_wrong_value_does_not_hide_errors_between_other_keys():
    errors = errors_of({"detect": {"loss_z": "20"}, "snapshot": {"every_steps": 50, "reach_steps": 20}})
    assert len(errors) == 2


def test_message_counts_the_errors_and_lists_each():
    with pytest.raises(ConfigError) as raised:
        parse({"a": {}, "b": {}}, "policy.toml")
    text = str(raised.value)
    assert text.startswith("policy.toml: 2 errors\n")
    assert all(f"\n  - {error}" in text for error in raised.value.errors)


# ---- properties

junk_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(b"x"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=3,
)
junk_keys = st.text(max_size=12) | st.integers() | st.none()
real_keys = st.sampled_from([key for _, key in KEYS])
bodies = st.dictionaries(junk_keys | real_keys, junk_values, max_size=5)
junk = st.dictionaries(junk_keys | st.sampled_from(list(SECTIONS)), bodies | junk_values, max_size=5)


@settings(max_examples=examples(150), deadline=None)
@given(junk)
def test_junk_never_crashes_and_every_unknown_name_is_reported(data):
    unknown_sections = [name for name in data if name not in SECTIONS]
    unknown_keys = [
        (name, key)
        for name, body in data.items()
        if name in SECTIONS and isinstance(body, dict)
        for key in body
        if key not in SECTIONS[name].__struct_fields__
    ]
    policy, errors = parsed(data)
    assert (policy is None) == bool(errors)
    for name, key in unknown_keys:
        assert any(e.startswith(f"[{name}] {key}: unknown key") for e in errors)
    for name in unknown_sections:
        assert any(e.startswith((f"[{name}]: ", f"{name}: ")) for e in errors)


@settings(max_examples=examples(150), deadline=None)
@given(st.sets(st.sampled_from(KEYS), max_size=6), st.sets(st.sampled_from(["zz1", "zz2", "zz3"])), st.data())
def test_every_error_is_reported_once_and_none_beside(wrong, unknown, data):
    section = data.draw(st.sampled_from(list(SECTIONS)))
    policy: dict[str, dict[str, Any]] = {}
    for name, key in wrong:
        policy.setdefault(name, {})[key] = {"never": "valid"}
    for key in unknown:
        policy.setdefault(section, {})[key] = 1
    starts = [f"[{name}] {key} = " for name, key in wrong] + [f"[{section}] {key}: unknown" for key in unknown]
    if not starts:
        assert parse(policy, "test") == Config()
        return
    errors = errors_of(policy)
    assert len(errors) == len(starts)
    for start in starts:
        assert sum(error.startswith(start) for error in errors) == 1


@settings(max_examples=examples(100), deadline=None)
@given(
    loss_z=st.floats(6.0, 1e6),
    every=st.integers(1, 1000),
    batches=st.integers(0, 10**12),
    mode=st.sampled_from(["heal", "observe"]),
    back=st.just("last_good") | st.integers(1, 10**12),
)
def test_valid_policy_survives_being_written_and_read(loss_z, every, batches, mode, back):
    policy = parse(
        {
            "detect": {"loss_z": loss_z},
            "snapshot": {"every_steps": every},
            "recover": {"skip_batches": batches, "mode": mode, "rollback_to": back},
        },
        "test",
    )
    assert policy.detect.loss_z == loss_z
    assert policy.recover.rollback_to == back
    assert parse(msgspec.to_builtins(policy), "test") == policy


# ---- overrides


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("recover.mode=observe", "observe"),
        ("--recover.mode=observe", "observe"),
        ("recover.mode='observe'", "observe"),
        ("recover.mode = observe", "observe"),
        ("recover.mode=3", 3),
        ("recover.mode=0.5", 0.5),
        ("recover.mode=true", True),
        ("recover.mode=['skip', 'stop']", ["skip", "stop"]),
        ("recover.mode=", ""),
        ("recover.mode=a=b", "a=b"),
        ("recover.mode=" + "[" * 100_000, "[" * 100_000),
    ],
    ids=lambda value: str(value)[:30],
)
def test_override_is_read_as_toml_and_a_bare_word_as_a_string(text, value):
    assert override({}, [text]) == {"recover": {"mode": value}}


def test_override_replaces_its_key_and_leaves_the_others():
    data = {"recover": {"mode": "heal", "skip_batches": 7}, "detect": {"loss_z": 9.0}}
    assert override(data, ["recover.mode=observe"]) == {
        "recover": {"mode": "observe", "skip_batches": 7},
        "detect": {"loss_z": 9.0},
    }


def test_every_malformed_override_is_reported_at_once():
    with pytest.raises(ConfigError) as raised:
        override({}, ["mode", "recover.mode=heal", "recover=1", ".mode=1", "recover.=1", "=1"])
    assert len(raised.value.errors) == 5
    assert all("section.key=value" in error for error in raised.value.errors)


def test_override_under_a_section_that_is_a_value_leaves_the_error_to_parse():
    assert "write [detect]" in only_error(override({"detect": 3}, ["detect.loss_z=9"]))


@settings(max_examples=examples(150), deadline=None)
@given(st.sampled_from(KEYS), st.text(max_size=20))
def test_override_with_any_text_is_a_config_or_a_config_error(where, text):
    section, key = where
    policy, errors = parsed(override({}, [f"--{section}.{key}={text}"]))
    assert policy is not None or any(f"[{section}]" in e and key in e for e in errors)


def test_signal_that_profiles_must_be_free_and_have_what_profiles():
    both = {"metrics": {"profile_signal": "SIGHUP"}, "shutdown": {"signals": ["SIGTERM", "SIGHUP"]}}
    assert "is in [shutdown] signals too" in only_error(both)
    assert "needs enabled = true" in only_error({"metrics": {"profile_signal": "SIGHUP", "slowdown": False}})
