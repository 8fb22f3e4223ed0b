"""The trainer's configuration: shipped files load, and all problems of a file are reported at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.core.base import config as policy
from holdfast.core.base.errors import ConfigError
from holdfast.reference.config import TRAINER_SECTIONS, TrainConfig, has_trainer_sections, load, parse

CONFIGS = sorted((Path(__file__).parents[3] / "configs").glob("*.toml"))


def errors(data) -> list[str]:
    with pytest.raises(ConfigError) as found:
        parse(data, "mine.toml")
    assert found.value.source == "mine.toml"
    return found.value.errors


def only_error(data) -> str:
    (error,) = errors(data)
    return error


# ---- valid files


def test_configurations_are_shipped():
    assert [path.stem for path in CONFIGS] == ["1.4b", "160m", "tiny"]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configuration_loads_and_changes_something(path):
    config = load(path, [])
    assert config != TrainConfig()
    assert config.train.run_dir == f"runs/{path.stem}"
    assert has_trainer_sections(policy.read_toml(path))


def test_empty_file_gives_all_defaults():
    assert parse({}, "mine.toml") == TrainConfig()


def test_trainer_sections_are_these():
    assert {"model", "dataset", "train", "optimizer", "scheduler", "eval", "distributed"} == TRAINER_SECTIONS


def test_file_with_a_trainer_section_is_a_trainer_file():
    assert has_trainer_sections({"train": {}, "recover": {}})
    assert not has_trainer_sections({"recover": {}, "detect": {}})
    assert not has_trainer_sections({})


def test_policy_sections_may_be_in_a_trainer_file():
    config = parse({"train": {"steps": 100}, "recover": {"mode": "observe"}, "detect": {"loss_z": 9}}, "mine.toml")
    assert config.recover.mode == "observe"
    assert config.detect.loss_z == 9
    assert config.train.steps == 100
    assert policy.load(config) is config


def test_policy_template_is_a_valid_trainer_file(tmp_path):
    (tmp_path / "a.toml").write_text(policy.template() + "\n[train]\nsteps = 77\n")
    assert load(tmp_path / "a.toml", []) == parse({"train": {"steps": 77}}, "mine.toml")


def test_sources_and_stages_are_read(tmp_path):
    (tmp_path / "a.toml").write_text("""
[[dataset.sources]]
path = "a.tokens"
weight = 0.8
[[dataset.sources]]
path = "b.tokens"
[[dataset.stages]]
from_step = 200
weights = [0, 1]
""")
    dataset = load(tmp_path / "a.toml", []).dataset
    assert [(s.path, s.weight) for s in dataset.sources] == [("a.tokens", 0.8), ("b.tokens", 1.0)]
    assert [(s.from_step, s.weights) for s in dataset.stages] == [(200, (0.0, 1.0))]


# ---- overrides


def test_override_wins_over_the_file_and_leaves_the_rest():
    tiny = next(path for path in CONFIGS if path.stem == "tiny")
    changed = load(
        tiny, ["--train.steps=1000", "--optimizer.lr=1e-3", "--scheduler.kind=wsd", "--recover.mode=observe"]
    )
    assert (changed.train.steps, changed.optimizer.lr, changed.scheduler.kind) == (1000, 1e-3, "wsd")
    assert changed.recover.mode == "observe"
    assert changed.model == load(tiny, []).model


def test_override_can_name_sources():
    tiny = next(path for path in CONFIGS if path.stem == "tiny")
    changed = load(tiny, ['--dataset.sources=[{path="a.tokens", weight=2}]'])
    assert [(s.path, s.weight) for s in changed.dataset.sources] == [("a.tokens", 2.0)]


def test_wrong_overrides_are_errors_of_the_file():
    with pytest.raises(ConfigError) as found:
        load(CONFIGS[0], ["--model.widht=3", "--train.steps=many"])
    assert len(found.value.errors) == 2


def test_missing_file_error_names_a_shipped_one(tmp_path):
    with pytest.raises(ConfigError, match="configs/tiny.toml"):
        load(tmp_path / "none.toml", [])


# ---- invalid files


def test_all_problems_are_reported_at_once():
    found = errors(
        {
            "model": {"widht": 64, "layers": 0, "width": 100, "heads": 3},
            "train": {"precision": "fp8", "steps": 10},
            "scheduler": {"warmup_steps": 10},
            "optimizer": {"lr": -1.0, "beta1": 1.0},
            "dataset": {"sources": [{"path": "a", "wieght": 1}, {"weight": 0.5}], "stages": [{"from_step": 0}]},
            "recover": {"mode": "hope"},
            "trian": {"steps": 1},
        }
    )
    expected = (
        "[model] widht", "[model] layers", "[model] width = 100", "[train] precision", "[scheduler] warmup_steps",
        "[optimizer] lr", "[optimizer] beta1", "[[dataset.sources]] number 1", "[[dataset.sources]] number 2",
        "[[dataset.stages]] number 1", "[recover] mode", "[trian]",
    )  # fmt: skip
    for beginning in expected:
        assert sum(error.startswith(beginning) for error in found) == 1, beginning
    assert len(found) == len(expected)


@pytest.mark.parametrize("section", sorted(TRAINER_SECTIONS))
def test_unknown_key_in_every_section_lists_or_suggests_the_known(section):
    error = only_error({section: {"nonsense_key": 1}})
    assert error.startswith(f"[{section}] nonsense_key: unknown key; ")
    assert "did you mean" in error or "known are" in error


def test_unknown_section_suggests_the_nearest():
    assert "'optimizer'" in only_error({"optimiser": {"lr": 1e-3}})


def test_key_outside_its_section_error_names_the_section():
    assert only_error({"batch_size": 8}) == "batch_size: belongs under [train]"


def test_unknown_key_of_a_source_is_named_with_its_place_and_the_nearest():
    error = only_error({"dataset": {"sources": [{"path": "a"}, {"path": "b", "wieght": 2}]}})
    assert error == "[[dataset.sources]] number 2: wieght: unknown key; did you mean 'weight'?"


def test_every_unknown_key_of_every_source_is_reported():
    found = errors({"dataset": {"sources": [{"path": "a", "zzz": 1, "file": 2}, {"path": "b", "qqq": 2}]}})
    assert len(found) == 3
    assert found[0] == "[[dataset.sources]] number 1: zzz: unknown key; known are path, weight"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ({"weight": 1.0}, "missing required field path"),
        ({"path": "a", "weight": 0}, "weight: expected float > 0"),
        ({"path": "a", "weight": "much"}, "weight: expected float"),
        ({"path": 3}, "path: expected str, got int"),
        ("a.tokens", "expected object, got str"),
    ],
)
def test_invalid_source_error_gives_the_reason(source, expected):
    error = only_error({"dataset": {"sources": [{"path": "a"}, source]}})
    assert error.startswith("[[dataset.sources]] number 2: ")
    assert expected in error


def test_sources_as_a_word_are_refused():
    assert only_error({"dataset": {"sources": "a.tokens"}}).startswith("[dataset] sources = 'a.tokens'")


def test_invalid_source_causes_no_error_about_stages():
    data = {"sources": [{"path": "a"}, {"path": 3}], "stages": [{"from_step": 5, "weights": [1, 2]}]}
    assert "number 2: path" in only_error({"dataset": data, "model": {"vocab_size": 100}})


@pytest.mark.parametrize("weights", [[float("inf"), 1.0], [1e308, 1e308]])
def test_weights_without_a_finite_sum_are_refused(weights):
    sources = [{"path": "a", "weight": w} for w in weights]
    assert "finite" in only_error({"dataset": {"sources": sources}})
    stages = [{"from_step": 3, "weights": weights}]
    assert "finite" in only_error({"dataset": {"sources": [{"path": "a"}, {"path": "b"}], "stages": stages}})


def test_non_numeric_weight_is_refused():
    assert errors({"dataset": {"sources": [{"path": "a", "weight": float("nan")}]}})
    assert errors({"dataset": {"stages": [{"from_step": 3, "weights": [float("nan")]}]}})


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"model": {"width": 100, "heads": 8}}, "multiple of 2 x heads = 16"),
        ({"model": {"width": 4, "heads": 4}}, "even number of channels"),
        ({"model": {"vocab_size": 100}}, "the embedded data set is bytes"),
        ({"model": {"context": 0}}, "[model] context = 0"),
        ({"train": {"batch_size": 0}}, "[train] batch_size = 0"),
        ({"train": {"steps": 40}}, "warmup_steps = 40 leaves nothing of 40 steps"),
        ({"dataset": {"stages": [{"from_step": 3, "weights": [1, 1]}]}}, "2 weights for 1 sources"),
        ({"dataset": {"stages": [{"from_step": 3, "weights": [0]}]}}, "above 0"),
        (
            {"dataset": {"stages": [{"from_step": 9, "weights": [1]}, {"from_step": 9, "weights": [2]}]}},
            "each from_step must be greater than the one before",
        ),
        ({"train": {"precision": "fp16", "device": "cpu", "compile": True}}, "needs a GPU"),
        ({"distributed": {"shard": 0}}, "[distributed] shard = 0"),
        ({"distributed": {"tensor": 3}, "model": {"hidden": 300}}, "tensor = 3 does not divide [model] heads = 4"),
        ({"distributed": {"tensor": 4}, "model": {"hidden": 42}}, "tensor = 4 does not divide [model] hidden = 42"),
        ({"distributed": {"shard": 5}}, "over [distributed] shard = 5: make it a multiple of 5"),
        ({"distributed": {"data": 3, "shard": 2}}, "over [distributed] data = 3 x shard = 2: make it a multiple of 6"),
        ({"dataset": {"eval_share": 0}}, "[dataset] eval_share = 0"),
        ({"optimizer": {"lr": float("nan")}}, "finite"),
    ],
)
def test_impossible_shape_is_one_error_with_its_numbers(data, expected):
    assert expected in only_error(data)


def test_key_that_is_wrong_by_itself_makes_no_second_error():
    assert "width = 'wide'" in only_error({"model": {"width": "wide", "heads": 7}})


def test_reading_a_configuration_needs_no_torch():
    source = "import sys; import holdfast.reference.config; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n", done.stderr
