"""Sums over the state: every bit counts, a write that leaves a trace is no corruption, one that leaves none is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from holdfast.core.base import config
from holdfast.core.decide.corruption import DIFFERS, SAME, UNSEEN, ReplicaClass
from holdfast.runtime.integrity.state_checks import StateChecks
from holdfast.runtime.integrity.state_checksums import checksum_state, name_weights
from holdfast.runtime.ports.ranks import SingleRank
from holdfast.runtime.ports.replicas import SingleProcessReplicas
from holdfast.runtime.state.optimizers import Optimizers
from holdfast.runtime.state.run_state import RunState
from holdfast.runtime.state.schedule import Schedulers
from holdfast.runtime.tensors.inspect import bit_checksum
from two_ranks import TwoRanks

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.complex64, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64,
]  # fmt: skip


class Everywhere:
    def classes(self, tensors):
        return [ReplicaClass(tuple(tensors), ((0, 1),))]


class Named:
    """Two classes, by the first letter."""

    def classes(self, tensors):
        return [
            ReplicaClass(tuple(n for n in tensors if n[0] == letter), groups)
            for letter, groups in (("a", ((0, 1),)), ("b", ((0,), (1,))))
        ]


def bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return raw.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)


def pair(tensors: dict[str, Tensor], replicas=None, **settings: int | bool) -> StateChecks:
    section = config.IntegritySection(**{"replicas_every": 1, "between_updates_every": 0, **settings})
    return StateChecks(lambda: tensors, section, replicas or Everywhere(), TwoRanks())


def row(checks: StateChecks, number: int = 1) -> list[int]:
    found = checks.before_update(number)
    assert found is not None and found.dtype is torch.int64 and found.dim() == 1
    return found.tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_single_bit_changes_the_row(dtype):
    for shape in ((), (1,), (3,), (2, 5)):
        tensors = {"model.w": bits(shape, dtype), "model.other": torch.ones(3)}
        checks, raw = pair(tensors), tensors["model.w"].view(-1).view(torch.uint8)
        healthy = row(checks)
        seen = set()
        for byte in range(raw.numel()):
            for bit in range(8):
                raw[byte] ^= 1 << bit
                assert row(checks) != healthy, (shape, byte, bit)
                seen.add(tuple(row(checks)))
                raw[byte] ^= 1 << bit
        assert row(checks) == healthy and len(seen) > 1


def test_flipped_boolean_and_transposed_or_shifted_memory_are_seen():
    memory = torch.arange(40, dtype=torch.float32)
    tensors = {"flag": torch.tensor([True, False]), "t": torch.randn(4, 6).T, "odd": memory[1:6]}
    checks = pair(tensors)
    healthy = row(checks)
    tensors["flag"][1] = True
    assert row(checks) != healthy
    tensors["flag"][1] = False
    tensors["t"][5, 3] += 1e-6
    assert row(checks) != healthy
    tensors["odd"][4] += 1
    memory[7] = 3.0  # next to it, and not of it
    assert row(checks) == row(checks) != healthy


def test_swapped_renamed_missing_and_added_tensors_change_the_row():
    one, two, nothing = bits((6,), torch.float32, 1), bits((6,), torch.float32, 2), torch.zeros(6)
    base = {"a": one, "b": two, "c": nothing}
    rows = [
        row(pair(tensors))[0]
        for tensors in (
            base,
            {"a": two, "b": one, "c": nothing},
            {"a": nothing, "b": two, "c": one},
            {"a": one, "b": two, "z": nothing},
            {"a": one, "b": two},
            {**base, "d": nothing},
        )
    ]
    assert len(set(rows)) == len(rows)


def test_sums_are_the_fingerprints_wherever_the_memory_lies():
    """Two ranks may have the same values at other offsets."""
    for dtype in DTYPES:
        memory = bits((67,), dtype)
        views = {
            "whole": memory[:64],
            "odd": memory[1:65],
            "short": memory[:3],
            "none": memory[:0],
            "t": memory[:60].view(6, 10).T,
        }
        sums = checksum_state({**views, **{f"{n}.copy": v.clone() for n, v in views.items()}})
        found = dict(zip(sums.names, sums.values.tolist(), strict=True))
        for name, view in views.items():
            assert found[name] == found[f"{name}.copy"] == int(bit_checksum(view)), (dtype, name)


def test_weighing_loses_no_bit():
    """An even factor would drop the highest ones."""
    assert all(name_weights([f"model.{n}" for n in range(200)], torch.device("cpu"))[1] % 2 == 1)


def test_order_of_names_makes_no_difference():
    one, two = bits((6,), torch.float32, 1), bits((6,), torch.float32, 2)
    assert row(pair({"a": one, "b": two})) == row(pair({"b": two, "a": one}))


def test_empty_shards_and_no_tensors_have_sums():
    assert len(row(pair({"a": torch.empty(0, 4), "b": torch.empty(0, dtype=torch.bfloat16)}))) == 1
    assert row(pair({})) == [0]
    assert row(pair({}, between_updates_every=1)) == [0, UNSEEN]


def test_classes_are_summed_apart():
    tensors = {"a.1": torch.ones(3), "b.1": torch.ones(3), "a.2": torch.zeros(2)}
    checks = pair(tensors, Named())
    first = row(checks)
    tensors["b.1"][0] = 2
    second = row(checks)
    assert first[0] == second[0] and first[1] != second[1]
    checks.leave_out("replica", ["b.1"])
    third = row(checks)
    tensors["b.1"][0] = 3
    assert row(checks) == third


def test_classes_that_another_rank_does_not_have_are_not_compared():
    class Unlike(TwoRanks):
        def all_gather_object(self, value: Any) -> list[Any]:
            return [value, value[:1]]

    tensors = {"a": torch.ones(3), "b": torch.ones(3)}
    checks = StateChecks(
        lambda: tensors, config.IntegritySection(replicas_every=1, between_updates_every=0), Named(), Unlike()
    )
    assert len(row(checks)) == 1 and checks.unmatched == ["b"]


def test_parameters_alone_where_the_optimizer_is_not_to_be_looked_at():
    tensors = {"model.w": torch.ones(2), "optimizer.0.0.step": torch.ones(())}
    alone, both = pair(tensors, include_optimizer=False), pair(tensors)
    before = row(alone), row(both)
    tensors["optimizer.0.0.step"] += 1
    assert row(alone) == before[0] and row(both) != before[1]


def test_every_so_many_steps_and_in_the_first_two_of_a_life():
    checks = pair({"w": torch.ones(2)}, replicas_every=10, between_updates_every=15)
    checks.before_update(7)
    due = {n: checks.due(n) for n in range(7, 61)}
    assert [n for n, d in due.items() if d.replicas] == [7, 8, 10, 20, 30, 40, 50, 60]
    assert [n for n, d in due.items() if d.window] == [7, 8, 15, 30, 45, 60]
    assert [n for n in due if any(checks.due(n))] == [7, 8, 10, 15, 20, 30, 40, 45, 50, 60]
    assert checks.before_update(9) is None
    assert [len(row(checks, n)) for n in (10, 15, 30)] == [1, 1, 2]
    never = pair({"w": torch.ones(2)}, replicas_every=0, between_updates_every=0)
    assert not any(any(never.due(n)) for n in range(100)) and never.before_update(1) is None


def test_another_attempt_of_a_step_with_a_check_is_checked_too():
    """The pipeline asks only from `next_check` on."""
    checks = pair({"w": torch.ones(2)}, replicas_every=10, between_updates_every=15)
    attempts = [7, 7, 7, 8, 8, 9, 9, 10, 10, 11, *range(12, 31), 30, 31]
    checked = [n for n in attempts if n >= checks.next_check and checks.before_update(n) is not None]
    assert checked == [7, 7, 7, 8, 8, 10, 10, 15, 20, 30, 30]
    assert checks.next_check == 40
    never = pair({"w": torch.ones(2)}, replicas_every=0, between_updates_every=0)
    assert never.before_update(1) is None and never.next_check > 10**9


# ---- the window, on one process and a real model


class Trained:
    """A model under AdamW with a check before every update."""

    def __init__(self, every: int = 1, **adam: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, **adam)
        state = RunState([("", self.model)], Optimizers([self.optimizer]), Schedulers([], []), None)
        self.checks = StateChecks(
            state.update_tensors,
            config.IntegritySection(between_updates_every=every),
            SingleProcessReplicas(),
            SingleRank(),
        )
        self.number = 0

    def step(self) -> list[int] | None:
        self.number += 1
        self.model(torch.randn(3, 4)).square().mean().backward()
        found = self.checks.before_update(self.number)
        said = None if found is None else found.tolist()
        if said is not None:
            self.wrong = self.checks.judge(self.number, [said])
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.checks.after_update(self.number)
        return said

    def steps(self, count: int) -> list[Any]:
        return [self.step() for _ in range(count)]


@pytest.mark.parametrize("adam", [{"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
def test_healthy_updates_are_no_corruption(adam):
    run = Trained(**adam)
    assert run.steps(6) == [[UNSEEN]] + [[SAME]] * 5
    assert Trained(every=4, **adam).steps(9) == [[UNSEEN], [SAME], None, [SAME], None, None, None, [SAME], None]


def test_write_in_place_is_the_programs_own():
    run = Trained()
    run.steps(3)
    with torch.no_grad():
        run.model[0].weight.clamp_(-0.01, 0.01)
        run.optimizer.state[run.model[2].bias]["exp_avg"].zero_()
    run.optimizer.state[run.model[2].weight]["exp_avg_sq"] = torch.ones(2, 6)
    run.model[0].bias.data = torch.full((6,), 0.5)  # other memory: no count of writes moves
    assert run.step() == [SAME] and run.wrong == []


@pytest.mark.parametrize("where", ["parameter", "exp_avg", "exp_avg_sq", "step"])
def test_flipped_bit_between_two_updates_is_found_and_named(where):
    run = Trained()
    run.steps(3)
    weight = run.model[0].weight
    tensor = weight if where == "parameter" else run.optimizer.state[weight][where]
    tensor.detach().numpy().reshape(-1).view("uint8")[1] ^= 4  # as hardware would: without a trace
    assert run.step() == [DIFFERS]
    (wrong,) = run.wrong
    assert (wrong.kind, wrong.step, wrong.ranks) == ("window", 4, (0,))
    account = run.checks.account(4)
    name = "model.0.weight" if where == "parameter" else f"optimizer.0.0.{where}"
    assert account["changed"] == [name] and account["fresh"]["window"] == []
    assert run.step() == [SAME]


def test_write_through_data_looks_like_corruption_until_it_is_left_out():
    run = Trained()
    for _ in range(2):
        run.step()
        run.model[2].bias.data.add_(1.0)
    assert run.step() == [DIFFERS]
    account = run.checks.account(3)
    assert account["changed"] == ["model.2.bias"] == account["fresh"]["window"]  # it never passed
    run.checks.leave_out("window", account["changed"])
    run.model[2].bias.data.add_(1.0)
    assert run.step() == [SAME]
    run.model[2].weight.data.add_(1.0)
    assert run.step() == [DIFFERS] and run.checks.account(5)["fresh"]["window"] == []


def test_forgotten_window_has_nothing_to_compare_with():
    run = Trained()
    run.steps(3)
    run.model[0].weight.data.zero_()
    run.checks.forget()
    assert run.step() == [UNSEEN]
    assert run.step() == [SAME]


def test_last_good_moves_with_checks_that_passed_and_back_with_the_run():
    checks = pair({"w": torch.ones(2)}, replicas_every=10)
    assert checks.last_good == 0
    for number in (1, 2, 10, 20):
        said = row(checks, number)
        assert checks.judge(number, [said, said]) == []
    assert checks.last_good == 19
    said = row(checks, 30)
    assert checks.judge(30, [said, [said[0] ^ 1]])[0].ranks == (0, 1)
    assert checks.last_good == 19
    checks.rolled_back_to(12)
    assert checks.last_good == 12


def test_sums_are_those_of_the_check_although_an_update_has_followed():
    run = Trained()
    run.steps(2)
    before = run.checks.tensor_checksums(2)
    run.step()
    assert run.checks.tensor_checksums(2) == before != run.checks.tensor_checksums(3)
    assert set(before) == set(run.checks.tensor_checksums(99)) and run.checks.tensor_checksums(99) != before


def test_looking_changes_nothing():
    """Neither tensors nor random streams."""
    looked, plain = Trained(), Trained(every=0)
    for run in (looked, plain):
        torch.manual_seed(1)
        run.steps(5)
    for one, other in zip(looked.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(one, other)
        assert torch.equal(looked.optimizer.state[one]["exp_avg"], plain.optimizer.state[other]["exp_avg"])
