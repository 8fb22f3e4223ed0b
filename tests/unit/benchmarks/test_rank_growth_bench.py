"""The benchmark of ranks: its fits, its made-up rows, what it takes for a failure, and a tiny run of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmarks.ranks import growth, scaling_model, simulated_ranks
from benchmarks.ranks.simulated_ranks import SimulatedRanks


def blocks(shape: str, cores: int = 2, sizes: tuple[int, ...] = (1, 2, 3, 4, 6, 8)) -> dict[int, list[float]]:
    """Times that are 0.1 and 0.3 a pass, a block of each five a little off."""
    passes = scaling_model.SHAPES[shape].measured
    return {n: [(0.1 + 0.3 * passes(n, cores)) * off for off in (0.98, 0.99, 1.0, 1.01, 1.02)] for n in sizes}


@pytest.mark.parametrize("shape", scaling_model.SHAPES)
def test_the_shape_that_made_the_times_is_found_and_its_line_with_it(shape):
    found = scaling_model.fit_shapes(blocks(shape), [1024], 2)
    assert found["best"] == shape
    best = found["shapes"][shape]
    assert best["base"] == pytest.approx(0.1) and best["slope"] == pytest.approx(0.3)
    assert best["error"] == pytest.approx(0.0, abs=1e-9)
    assert max(map(abs, best["residuals"].values())) < 1e-9
    assert all(one["error"] > 0.05 for name, one in found["shapes"].items() if name != shape)


@pytest.mark.parametrize(("shape", "passes"), [("ring", 1023), ("tree", 10), ("ring on shared cores", 1023)])
def test_larger_sizes_are_said_for_a_core_a_rank_with_an_interval(shape, passes):
    said = scaling_model.fit_shapes(blocks(shape), [1024], 2)["shapes"][shape]["beyond"][1024]
    assert said["value"] == pytest.approx(0.1 + 0.3 * passes)
    low, high = said["interval"]
    assert 0.97 * said["value"] < low < said["value"] < high < 1.03 * said["value"]


def test_noise_of_one_size_shows_in_the_interval():
    calm = blocks("ring")
    wild = {**calm, 8: [t * off for t, off in zip(calm[8], (0.5, 0.7, 1.0, 1.4, 2.0), strict=True)]}
    widths = []
    for one in (calm, wild):
        low, high = scaling_model.fit_shapes(one, [64], 2)["shapes"]["ring"]["beyond"][64]["interval"]
        widths.append(high - low)
    assert widths[1] > 2 * widths[0]


@pytest.mark.parametrize("sizes", [(1, 2, 3), (2, 8), (1, 2, 3, 4), (5, 6, 7, 8)])
def test_sizes_that_cannot_spare_one_are_refused(sizes, capsys):
    with pytest.raises(ValueError, match="one number of ranks left out"):
        scaling_model.fit_shapes({n: [float(n)] for n in sizes}, [16], 2)
    with pytest.raises(SystemExit) as raised:
        growth.main(["--sizes", *map(str, sizes)])
    assert raised.value.code == 2 and "one number of ranks left out" in capsys.readouterr().err


@pytest.mark.parametrize("sizes", [(2, 3, 5), (2, 4, 8), (1, 2, 4, 6)])
def test_any_of_sizes_that_are_enough_can_be_left_out(sizes):
    found = scaling_model.fit_shapes(blocks("tree", sizes=sizes), [16], 2)
    assert found["shapes"]["tree"]["error"] == pytest.approx(0.0, abs=1e-9)


def test_times_of_one_size_have_no_line():
    with pytest.raises(ValueError, match="differ"):
        scaling_model.fit([3, 3], [1.0, 2.0])


def test_made_up_ranks_go_through_the_real_decision_and_all_steps_stand():
    found = simulated_ranks.host_work([2, 40], rounds=1, steps=3)
    assert found["problems"] == []
    for one in found["sizes"].values():
        assert 0 < one["read_rows"]["median"] < one["step"]["median"]
        assert 0 < one["agree"]["median"] < one["step"]["median"]
    assert found["sizes"][2]["more"]["median"] == 0


def test_a_row_that_is_gathered_twice_is_found(monkeypatch):
    once = SimulatedRanks.all_gather_rows
    monkeypatch.setattr(SimulatedRanks, "all_gather_rows", lambda self, row: (once(self, row), once(self, row))[1])
    (problem,) = simulated_ranks.host_work([2], rounds=1, steps=2)["problems"]
    assert problem == "2 simulated ranks: 8 rows gathered in 4 steps"


def told(size: int, **changed: Any) -> dict[str, Any]:
    right = {"steps": 20, "committed": 20, "rows": 20 if size > 1 else 0, "equal": True}
    return {"host": {"problems": []}, "measured": {size: {"ranks": [right] * (size - 1) + [{**right, **changed}]}}}


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"committed": 19}, "19 of 20 steps committed"),
        ({"rows": 21}, "21 rows gathered in 20 steps"),
        ({"equal": False}, "the losses of the guarded loop differ"),
    ],
)
def test_what_is_wrong_on_one_rank_is_said_of_it(changed, said, size):
    assert growth.failures(told(size)) == []
    (found,) = growth.failures(told(size, **changed))
    assert found.startswith(f"{size} ranks, rank {size - 1}: ") and said in found


def test_one_rank_that_gathers_from_nobody_is_not_fitted():
    times = blocks("ring")
    assert scaling_model.fit_shapes({**times, 1: [50.0]}, [16], 2) == scaling_model.fit_shapes(times, [16], 2)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_tiny_run_measures_models_and_is_right(tmp_path, capsys):
    words = "--sizes 2 3 5 --beyond 16 64 --passes 1 --rounds 1 --steps 2 --gathers 2 --width 8 --batch 2 --json"
    assert growth.main([*words.split(), str(tmp_path / "ranks.json")]) == 0
    shown = capsys.readouterr().out
    assert "MODELLED" in shown and "| back to back | tree |" in shown
    found = json.loads((tmp_path / "ranks.json").read_text())
    assert [len(one["ranks"]) for one in found["measured"].values()] == [2, 3, 5]
    assert [one["ranks"][0]["rows"] for one in found["measured"].values()] == [4, 4, 4]
    assert min(found["measured"]["2"]["ranks"][1]["bytes"]) == found["row_bytes"] == 192
    assert set(found["models"]["processor time a rank"]["shapes"]) == {"ring", "tree"}
    assert set(found["host"]["sizes"]) == {"2", "16", "64"}
