"""Checkpoints edited by an expert, and states that must not become one."""

from __future__ import annotations

import pytest
import torch
from ended import Dead, check_passed_over, often, with_idle
from resealed import rewritten
from resumed import assert_continued, config_of, copied, entries_of, idle, live
from test_resume_damage import BIN, INDEX, flipped

from holdfast.core.base.types import Health
from holdfast.core.checkpoints.manifest import (
    FileSum,
    HealthRecord,
    name_of,
    seal,
    unseal_health,
    unseal_manifest,
)
from holdfast.core.checkpoints.verify import checksum_file


@pytest.fixture(scope="module")
def dead(tmp_path_factory) -> Dead:
    return Dead(tmp_path_factory.mktemp("dead"), with_idle)


# ---- the small files, rewritten by an expert


def told(folder, health) -> None:
    record = unseal_health((folder / "health.json").read_bytes())
    record = HealthRecord(health=health, why="edited", manifest=record.manifest, time=record.time)
    (folder / "health.json").write_bytes(seal(record)[0])


def files_of(folder) -> dict[str, FileSum]:
    return unseal_manifest((folder / "manifest.json").read_bytes())[0].files


@pytest.mark.parametrize("name", ["../../x", "/etc/hostname", "..", ".hidden", "a/b"])
def test_a_manifest_that_names_a_file_elsewhere(name, dead, tmp_path, caplog):
    path = copied(dead.path, tmp_path / "run")
    (path / "x").write_bytes(b"x")
    folder = path / "checkpoints" / dead.good[0]
    rewritten(folder, files={**files_of(folder), name: checksum_file(path / "x")})
    check_passed_over(path, dead.good[0], "outside its folder", dead, caplog)


def test_a_manifest_without_one_of_its_files(dead, tmp_path, caplog):
    path = copied(dead.path, tmp_path / "run")
    folder = path / "checkpoints" / dead.good[0]
    rewritten(folder, files={INDEX: files_of(folder)[INDEX]})
    check_passed_over(path, dead.good[0], BIN, dead, caplog)


@pytest.mark.parametrize("changes", [{"step": 12}, {"step": 3}, {"run": "0" * 32}])
def test_a_manifest_of_another_step_or_run(changes, dead, tmp_path):
    path = copied(dead.path, tmp_path / "run")
    rewritten(path / "checkpoints" / dead.good[0], **changes)
    life = live(often(with_idle), path)
    assert life.began == 6
    assert any(p["name"] == dead.good[0] for p in life.resumed()["passed_over"])
    assert_continued(life, dead.whole)


@pytest.mark.parametrize("file", [BIN, INDEX])
def test_bits_flipped_and_the_manifest_made_to_fit(file, dead, tmp_path):
    """A tensor's own checksum is beside it, and an index has one too: the manifest's is not the last word."""
    path = copied(dead.path, tmp_path / "run")
    folder = path / "checkpoints" / dead.good[0]
    flipped(0.5)(folder / file, None)
    kind = files_of(folder)[file].sum.partition(":")[0]
    rewritten(folder, files={**files_of(folder), file: checksum_file(folder / file, kind)})
    life = live(often(with_idle), path)
    assert life.began == 6
    assert_continued(life, dead.whole)


def test_a_candidate_called_good_without_its_checksum_is_not_believed(dead, tmp_path, caplog):
    path = copied(dead.path, tmp_path / "run")
    health = path / "checkpoints" / dead.good[0] / "health.json"
    told(health.parent, Health.CANDIDATE)
    health.write_text(health.read_text().replace('"candidate"', '"good"'))
    check_passed_over(path, dead.good[0], "health.json", dead, caplog)


def test_a_candidate_called_good_by_somebody_who_can_is_taken(dead, tmp_path):
    """As `holdfast` itself would mark it: there is no key. It verifies, so the run is the same."""
    path = copied(dead.path, tmp_path / "run")
    folder = path / "checkpoints" / dead.good[0]
    told(folder, Health.CANDIDATE)
    assert live(often(with_idle), copied(path, tmp_path / "other")).began == 6
    told(folder, Health.GOOD)
    life = live(often(with_idle), path)
    assert life.began == 9
    assert_continued(life, dead.whole)


def test_damage_found_by_a_rollback_is_passed_over_too(tmp_path):
    """Nothing in memory: the run goes back to the disk while it runs, and finds the newest damaged."""
    config = config_of(checkpoint={"keep_last": 9, "certify_after": 1})
    config["snapshot"]["enabled"] = False
    r = often(with_idle, config=config, epochs=4)

    def strike(guard, parts, step):
        idle(guard)
        if step.number == 11 and not struck:
            struck.append(name_of(6, 0))
            flipped(0.5)(path / "checkpoints" / struck[0] / BIN, None)
            parts.model.first.weight.data[0, 0] = float("nan")

    struck, path = [], tmp_path / "run"
    life = live(r, path, before=strike)
    back = next(e for e in life.journal() if e.get("action") == "rollback")
    assert [p["name"] for p in back["passed_over"]] == struck
    assert back["restored_from"] == name_of(3, 0) and back["to_step"] == 3
    assert_continued(life, live(r, tmp_path / "whole"), seen=False)


# ---- state that must not be saved


def in_a_parameter(parts):
    parts.model.idle.data[1] = float("nan")


def in_the_optimizer(parts):
    bad = torch.full((3,), float("inf"))
    parts.optimizers[0].state[parts.model.idle] = {"step": torch.tensor(1.0), "exp_avg": bad, "exp_avg_sq": bad.clone()}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("memory", [True, False])
@pytest.mark.parametrize(("break_it", "tensor"), [(in_a_parameter, "idle"), (in_the_optimizer, "exp_avg")])
def test_a_save_of_non_finite_state_that_no_loss_shows(break_it, tensor, memory, tmp_path):
    config = config_of(checkpoint={"keep_last": 9, "certify_after": 1})
    config["snapshot"]["enabled"] = memory
    r = often(with_idle, config=config)

    def strike(guard, parts, step):
        idle(guard)
        if step.number == 8 and not struck:
            struck.append(step.number)
            break_it(parts)

    struck: list[int] = []
    life = live(r, tmp_path / "run", before=strike)
    events = life.journal()
    refused = [e for e in events if e["event"] == "checkpoint" and e["status"] == "refused"]
    assert [e["step"] for e in refused] == [9] and tensor in refused[0]["why"]
    assert [e["kind"] for e in events if e["event"] == "finding"] == ["nonfinite_state"]
    assert life.actions() == ["rollback"]
    assert_continued(life, live(r, tmp_path / "whole"), seen=False)


def test_what_is_not_finite_is_not_handed_over_at_the_end(tmp_path):
    r = often(with_idle)

    def strike(guard, parts, step):
        idle(guard)
        if step.number == 14:
            in_a_parameter(parts)

    live(r, tmp_path / "run", between=strike)
    entries = entries_of(tmp_path / "run")
    assert name_of(15, 0) not in entries
    life = live(r, tmp_path / "run")
    assert life.began == 12
    assert_continued(life, live(r, tmp_path / "whole"))
