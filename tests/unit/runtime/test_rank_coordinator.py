"""What the ranks of a run exchange besides their rows: requests, decisions, evaluation results, loops, refusals.

Every rank is a thread; what they exchange goes through one table.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_ranks_agree import Fake, RankGuard, Replicated, Table
from torch import nn

from holdfast.core.base.config import Config, DetectSection, SnapshotSection
from holdfast.core.base.errors import PolicyStop, RanksDisagree, SetupError
from holdfast.core.base.types import CutLR, Plan, Rollback, Signal
from holdfast.runtime.agree.coordinator import RankCoordinator
from holdfast.runtime.ports.distributed_context import DistributedContext
from holdfast.runtime.ports.hooks import Hook, Hooks
from holdfast.runtime.ports.ranks import SingleRank
from holdfast.runtime.snapshots.manager import NonfiniteSnapshot


def on_ranks(size: int, program: Callable[[Fake], Any]) -> list[Any]:
    """Return what the program returns, or raises, on each rank."""
    table, results = Table(size), [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = program(Fake(table, rank))
        except BaseException as error:  # a stop is not an Exception
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    return results


def coordinated(size: int, program: Callable[[RankCoordinator, int], Any], configs: Any = None) -> list[Any]:
    def run(ranks: Fake) -> Any:
        config = Config() if configs is None else configs[ranks.rank]
        return program(RankCoordinator(ranks, config), ranks.rank)

    return on_ranks(size, run)


# ---- requests


def test_requests_of_any_rank_reach_all_ranks_alike_and_once():
    def program(coordinator: RankCoordinator, rank: int) -> Any:
        if rank == 0:
            coordinator.request("checkpoint", None)
        else:
            coordinator.request("stop", f"rank {rank} has seen enough")
            coordinator.request("shift", "a new stage")
            coordinator.request("note", "the loop steps a scheduler")
        if rank == 2:
            coordinator.request("quarantine", {"samples": [5, 6], "reason": "a person says so"})
            coordinator.request("shift", "another mixture")
        return coordinator.drain_requests(), coordinator.drain_requests()

    results = coordinated(3, program)
    first, second = results[0]
    assert results == [results[0]] * 3
    assert first.stop == (1, "rank 1 has seen enough"), "the lowest rank that asks is named"
    assert first.shifts == ["a new stage", "another mixture"]
    assert first.quarantines == [(2, [5, 6], "a person says so")]
    assert first.is_checkpoint_due
    assert first.notes == ["the loop steps a scheduler"], "of two ranks with the same note, one is enough"
    assert not any(second), "a request is carried out once"


def test_a_queued_request_is_announced_before_it_is_exchanged():
    def program(coordinator: RankCoordinator, rank: int) -> bool:
        if rank == 1:
            coordinator.request("stop", "enough")
        return coordinator.compare_loops({}, Hooks(()))[2]

    assert coordinated(2, program) == [True, True]
    assert coordinated(2, lambda coordinator, rank: coordinator.compare_loops({}, Hooks(()))[2]) == [False, False]


def test_a_broken_snapshot_of_one_rank_becomes_a_finding_on_all():
    def program(coordinator: RankCoordinator, rank: int) -> Any:
        if rank == 1:
            coordinator.request_alarm(NonfiniteSnapshot(4, "model.weight"))
        coordinator.drain_requests()
        had_alarms = coordinator.has_alarms
        signal = Signal(step=9, loss=1.0)
        found = coordinator.nonfinite_state(None, 8, "found now", signal)
        return had_alarms, found, coordinator.has_alarms, coordinator.nonfinite_state(None, 8, "found now", signal)

    results = coordinated(2, program)
    assert results[0] == results[1]
    had_alarms, (finding,), has_alarms, again = results[0]
    assert (had_alarms, has_alarms, again) == (True, False, [])
    assert (finding.onset, finding.evidence["ranks"], finding.evidence["tensor"]) == (4, [1], "model.weight")


def test_state_that_is_broken_now_on_one_rank_is_a_finding_on_all():
    def program(coordinator: RankCoordinator, rank: int) -> Any:
        return coordinator.nonfinite_state(
            "model.bias" if rank == 1 else None, 8, "found now", Signal(step=9, loss=1.0)
        )

    results = coordinated(2, program)
    assert results[0] == results[1]
    assert (results[0][0].onset, results[0][0].evidence["ranks"]) == (8, [1])
    assert results[0][0].message == "model.bias holds NaN or Inf on rank 1"


# ---- decisions


def test_the_plan_of_rank_0_is_the_plan_of_all():
    plans = [Plan(actions=(Rollback(3, 5), CutLR(0.5, 10)), reason="mine"), Plan(reason="not mine"), None]
    assert coordinated(3, lambda coordinator, rank: coordinator.share_plan(plans[rank])) == [plans[0]] * 3
    assert coordinated(3, lambda coordinator, rank: coordinator.share_plan(plans[2 - rank])) == [None] * 3


def test_the_first_rank_that_cannot_is_named_on_all():
    why = [None, "the loader cannot go back", "nor this one"]
    results = coordinated(3, lambda coordinator, rank: coordinator.first_reason(why[rank]))
    assert results == ["rank 1: the loader cannot go back"] * 3
    assert coordinated(2, lambda coordinator, rank: coordinator.first_reason(None)) == [None, None]


@pytest.mark.parametrize(
    ("metrics", "shared"),
    [((1.0, 2.0, 6.0), 3.0), ((0.1, 0.1, 0.1), 0.1), ((float("inf"), 1.0, 2.0), float("inf"))],
    ids=["different", "equal", "infinite"],
)
def test_an_evaluation_result_is_the_common_value_or_the_mean(metrics, shared):
    assert coordinated(3, lambda coordinator, rank: coordinator.share_metric(metrics[rank])) == [shared] * 3


def test_ranks_that_report_different_evaluations_move_their_schedulers_alike():
    metrics = [[1.0, 3.0], [3.0, 5.0]]  # means of 2 and 4: the second is worse, and the LR is halved

    def program(ranks: Fake) -> Any:
        seen: list[float] = []
        hook = type("Seen", (Hook,), {"on_eval_end": lambda self, metric: seen.append(metric)})()
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        context = DistributedContext(ranks, replicas=Replicated(ranks.size))
        guard = RankGuard(context, model, optimizer, scheduler=scheduler, scheduler_interval="eval", hooks=[hook])
        with guard:
            for by_rank in metrics:
                guard.report_eval(by_rank[ranks.rank])
        return seen, scheduler.best, optimizer.param_groups[0]["lr"]

    assert on_ranks(2, program) == [([2.0, 4.0], 2.0, 0.5)] * 2


# ---- what all do, or none


def test_if_one_rank_refuses_all_raise():
    def program(coordinator: RankCoordinator, rank: int) -> None:
        def action() -> None:
            if rank == 1:
                raise SetupError("no such folder")

        coordinator.run_on_all(action)

    errors = coordinated(3, program)
    assert [type(error) for error in errors] == [RanksDisagree, SetupError, RanksDisagree]
    assert [str(error) for error in errors] == ["rank 1: SetupError: no such folder", "no such folder", str(errors[0])]


def test_a_rank_that_policy_stopped_stops_all_with_the_same_exit_status(caplog):
    def program(coordinator: RankCoordinator, rank: int) -> None:
        def action() -> None:
            if rank == 1:
                raise PolicyStop("the run was stopped: review it", 70)

        coordinator.run_on_all(action)

    with caplog.at_level(logging.ERROR, "holdfast"):
        errors = coordinated(2, program)
    assert [type(error) for error in errors] == [PolicyStop, PolicyStop]
    assert [error.code for error in errors] == [70, 70]
    assert "rank 1: PolicyStop: the run was stopped" in caplog.text


def test_if_no_rank_refuses_the_action_has_run_on_each():
    done: list[int] = []
    assert coordinated(2, lambda coordinator, rank: coordinator.run_on_all(lambda: done.append(rank))) == [None, None]
    assert sorted(done) == [0, 1]


# ---- loops


def test_loops_that_differ_by_rank_are_named_with_their_values():
    def program(coordinator: RankCoordinator, rank: int) -> Any:
        return coordinator.compare_loops({"accumulate": 4, "max_steps": 10 + rank}, Hooks(()))

    assert coordinated(2, program) == [("max_steps is 10, 11 in the order of ranks", None, False)] * 2


def test_policies_may_differ_by_rank_in_memory_but_not_in_judgement():
    def program(coordinator: RankCoordinator, rank: int) -> str | None:
        return coordinator.compare_loops({"accumulate": 4}, Hooks(()))[0]

    memory = [Config(), Config(snapshot=SnapshotSection(memory_gb=2.0))]
    assert coordinated(2, program, memory) == [None, None]
    judgement = [Config(), Config(detect=DetectSection(loss_z=9.0))]
    results = coordinated(2, program, judgement)
    assert results[0] == results[1] and results[0].startswith("the policy's checksum is ")


class Ema(Hook):
    def on_step_end(self, outcome: Any) -> None: ...


class Planner(Hook):
    def on_instability(self, incident: Any) -> None: ...


def test_hooks_of_one_rank_make_all_ranks_exchange_alike():
    def program(coordinator: RankCoordinator, rank: int) -> Any:
        hooks = Hooks([[], [Ema(), Planner()]][rank])
        _, warning, _ = coordinator.compare_loops({}, hooks)
        _, again, _ = coordinator.compare_loops({}, hooks)
        return hooks.runs_between_steps, hooks.broadcasts_plans, warning is not None, again is not None

    results = coordinated(2, program)
    assert [result[:2] for result in results] == [(True, True)] * 2
    assert results[0][2:] == (True, False), "rank 0 warns once that the other rank's plan hook is ignored"


def test_one_process_exchanges_nothing():
    class Unreachable(SingleRank):
        def all_gather_object(self, value: Any) -> list[Any]:
            raise AssertionError("one process has no one to ask")

        broadcast_object = all_gather_object

    coordinator = RankCoordinator(Unreachable(), Config())
    plan, done = Plan(reason="mine"), []
    assert coordinator.share_plan(plan) is plan
    assert coordinator.share_metric(0.5) == 0.5
    assert coordinator.first_reason("why") == "why"
    coordinator.run_on_all(lambda: done.append(1))
    assert done == [1]
    assert coordinator.read_rows(None, 0) is None
