"""What hooks receive and what they may answer: plans, shifts, stops, summaries, budgets."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
from cases import Case, Net, Points, assert_same
from test_exact import NAN, at, quick
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from holdfast.cli.ack import ack
from holdfast.core.record.journal import read
from marks import slow
from users_detector import Late

GATES = ["host", "device"]
ONE_GATE = ["host", *slow("device")]
mse = nn.functional.mse_loss


class Notes:
    """A hook with every method; records each call and its step."""

    def __init__(self, guard=None, plan=None):
        self.calls, self.guard, self._plan = [], guard, plan

    def __getattr__(self, name):
        if not name.startswith("on_"):
            raise AttributeError(name)

        def told(argument):
            self.calls.append((name, argument, None if self.guard is None else self.guard.step))
            return self._plan(argument) if name == "on_instability" and self._plan is not None else None

        return told

    def named(self, name):
        return [argument for called, argument, _ in self.calls if called == name]


def case_of(gate="host", faults=(), epochs=3, **recover) -> Case:
    case = Case(optimizer="adamw_fused", shuffle="unique", count=64, epochs=epochs, config=quick(gate, **recover))
    case.faults = at(case, *faults)
    return case


def journal(run_dir):
    return read(run_dir / "journal.jsonl").events


RECOVERED = [*["replayed", "skipped"] * 3, "replayed", "rolled_back", "replayed", *["skipped"] * 3]
"""one bad batch, then three in a row when max_consecutive is 2: the return puts back the two that were skipped"""


# ---- when, and with what


@pytest.mark.slow
@pytest.mark.parametrize("gate", GATES)
def test_every_hook_is_called_at_its_time_with_what_it_is_about(gate, tmp_path):
    case = case_of(gate, [3, 12, 13, 14], max_consecutive=2, probation_steps=50)
    parts, notes = case.build(), Notes()
    guard = notes.guard = holdfast.Guard(
        **parts, clip_grad_norm=1.0, run_dir=tmp_path / "run", config=case.config, hooks=[notes]
    )
    assert notes.calls == []
    with guard:
        assert notes.calls == [("on_train_begin", guard, 0)]
        for step in guard.steps(case.loader(), epochs=case.epochs):
            with step:
                for batch in step.microbatches():
                    step.backward(case.loss(parts["model"], batch))
            if step.number == 6:
                guard.report_eval(0.25)
    summary = guard.summary()
    assert notes.named("on_eval_end") == [0.25]
    ends = notes.named("on_step_end")
    assert all(e.status == "committed" and math.isfinite(e.signal.loss) for e in ends)
    # The number is that of the steps committed then; after the rollback it continues from there.
    assert all(step == outcome.step for name, outcome, step in notes.calls if name == "on_step_end")
    numbers = [e.step for e in ends]
    back = next(e for e in journal(tmp_path / "run") if e.get("action") == "rollback")
    turn = numbers.index(back["from_step"]) + 1
    assert numbers == [*range(1, back["from_step"] + 1), *range(back["to_step"] + 1, guard.step + 1)]
    assert turn == back["from_step"]
    recovered = [o.status for o in notes.named("on_recovery")]
    assert recovered == RECOVERED
    # The incident is one object that grows; each time a plan is proposed with it.
    incidents = notes.named("on_instability")
    assert [i.number for i in incidents] == [1] * len(incidents)
    assert incidents[-1].findings[0].kind == "nonfinite_loss"
    assert len(incidents[-1].findings) == len(incidents) == len(RECOVERED)
    order = [name for name, *_ in notes.calls]
    assert order.index("on_instability") < order.index("on_recovery")
    assert order[-1] == "on_train_end"
    assert str(notes.named("on_train_end")[0]) == str(summary)
    assert order.count("on_train_begin") == order.count("on_train_end") == 1


@pytest.mark.parametrize("late", [False, True])
def test_on_the_device_a_hook_runs_before_the_next_forward_unless_it_says_that_it_may_be_late(late, tmp_path):
    told = []

    class Mine:
        def on_step_end(self, outcome):
            told.append(("end", outcome.step))

    Mine.late = late
    case = case_of("device")
    parts = case.build()
    guard = holdfast.Guard(**parts, config=case.config, hooks=[Mine()])
    with guard:
        for step in guard.steps(case.loader(), max_steps=4):
            with step:
                for batch in step.microbatches():
                    told.append(("forward", step.number))
                    step.backward(case.loss(parts["model"], batch))
    words = "f1 f2 e1 f3 e2 f4 e3 e4" if late else "f1 e1 f2 e2 f3 e3 f4 e4"
    assert " ".join(f"{what[0]}{number}" for what, number in told) == words


@pytest.mark.parametrize("gate", ONE_GATE)
def test_a_hook_that_raises_at_the_end_lets_the_folder_go(gate, tmp_path):
    class Broken:
        def on_step_end(self, outcome):
            if outcome.step == 3:
                raise ZeroDivisionError("in the hook")

    case = case_of(gate)
    parts = case.build()
    with (
        pytest.raises(ZeroDivisionError, match="in the hook"),
        holdfast.Guard(**parts, run_dir=tmp_path / "run", config=case.config, hooks=[Broken()]) as guard,
    ):
        for step in guard.steps(case.loader(), max_steps=9):
            with step:
                for batch in step.microbatches():
                    step.backward(case.loss(parts["model"], batch))
            if step.number == 3:
                break
    assert journal(tmp_path / "run")[-1]["event"] == "run_end"
    with holdfast.Guard(**case.build(), run_dir=tmp_path / "run"):
        pass


def test_a_hook_that_raises_at_the_beginning_lets_the_folder_go(tmp_path):
    class Broken:
        def on_train_begin(self, guard):
            raise ZeroDivisionError("in the hook")

    case = case_of()
    with pytest.raises(ZeroDivisionError), holdfast.Guard(**case.build(), run_dir=tmp_path / "run", hooks=[Broken()]):
        pass
    assert "ZeroDivisionError" in journal(tmp_path / "run")[-1]["error"]
    with holdfast.Guard(**case.build(), run_dir=tmp_path / "run"):
        pass


# ---- plans of its own


class Says:
    """Answers with the plans given, one after another, then leaves it to the policy."""

    def __init__(self, *plans):
        self.plans, self.asked = list(plans), []

    def on_instability(self, incident):
        self.asked.append((incident.number, incident.opened, incident.proposed.actions))
        return self.plans.pop(0) if self.plans else None


@pytest.mark.parametrize("gate", ONE_GATE)
def test_none_leaves_it_to_the_policy(gate, tmp_path):
    case, hook = case_of(gate, [9]), Says(None)
    run = case.guarded(tmp_path / "run", hooks=[hook])
    assert hook.asked == [(1, 10, (holdfast.Replay(),)), (1, 10, (holdfast.Skip(),))]
    assert run.actions() == ["replay", "skip"]
    assert [e["by"] for e in run.journal() if e["event"] == "plan"] == ["policy", "policy"]
    assert_same(run, case.reference(run))


@pytest.mark.parametrize("gate", ONE_GATE)
def test_a_replay_heals_what_was_transient(gate, tmp_path):
    calls = []

    class Flaky(Case):
        def loss(self, model, batch):
            calls.append(1)
            value = super().loss(model, batch)
            return value * float("nan") if len(calls) == 10 else value

    case = case_of(gate)
    flaky = Flaky(**vars(case))
    run = flaky.guarded(tmp_path / "run", hooks=[Says(holdfast.Plan(actions=(holdfast.Replay(),), reason="flaky"))])
    assert run.actions() == ["replay"]
    plan = next(e for e in run.journal() if e["event"] == "plan")
    assert (plan["by"], plan["reason"]) == ("hook", "flaky")
    assert_same(run, case.plain(excluded={"spans": [], "samples": {}}))


@pytest.mark.parametrize("gate", GATES)
def test_a_rollback_that_the_policy_would_not_have_made(gate, tmp_path):
    plan = holdfast.Plan(
        actions=(
            holdfast.Rollback(before=8, at_latest=13),
            holdfast.SkipData(batches=3, around=14),
            holdfast.CutLR(factor=0.25, ramp_steps=5),
            holdfast.TightenClip(max_norm=0.05, steps=4),
        )
    )
    case = case_of(gate, [13])
    run = case.guarded(tmp_path / "run", hooks=[Says(plan)])
    assert run.actions() == ["rollback", "skip_data", "cut_lr", "tighten_clip"]
    back = run.journal()
    assert next(e for e in back if e.get("action") == "rollback")["to_step"] == 8
    assert_same(run, case.reference(run))


@pytest.mark.parametrize("gate", ONE_GATE)
def test_a_rollback_without_a_word_on_data_meets_the_batch_again(gate, tmp_path):
    case = case_of(gate, [13])
    run = case.guarded(
        tmp_path / "run", hooks=[Says(holdfast.Plan(actions=(holdfast.Rollback(before=12, at_latest=13),)))]
    )
    assert run.actions() == ["rollback", "replay", "skip"]
    assert_same(run, case.reference(run))


@pytest.mark.parametrize("gate", ONE_GATE)
def test_a_stop(gate, tmp_path):
    case = case_of(gate, [9])
    plan = holdfast.Plan(actions=(holdfast.Stop("enough of this"),))
    with pytest.raises(holdfast.PolicyStop, match="enough of this") as stop:
        case.guarded(tmp_path / "run", hooks=[Says(plan)])
    assert stop.value.code == 70
    with pytest.raises(holdfast.PolicyStop, match="holdfast ack"):
        case.guarded(tmp_path / "run")


def test_a_stop_that_the_program_swallows_is_in_the_log_when_raised_and_when_opened_again(tmp_path, caplog):
    case = case_of("host", [9])
    plan = holdfast.Plan(actions=(holdfast.Stop("enough of this"),))
    for message in ("enough of this", "holdfast ack"):
        caplog.clear()
        with contextlib.suppress(Exception):
            case.guarded(tmp_path / "run", hooks=[Says(plan)])
        assert any(message in r.message for r in caplog.records if r.levelname == "ERROR")


@pytest.mark.parametrize("gate", ONE_GATE)
def test_an_empty_plan_does_not_let_a_vetoed_update_land(gate, tmp_path):
    case = case_of(gate, [9])
    run = case.guarded(tmp_path / "run", hooks=[Says(holdfast.Plan())])
    assert run.actions() == ["skip"]
    assert_same(run, case.reference(run))


@pytest.mark.parametrize("gate", GATES)
def test_an_empty_plan_lets_stand_what_was_found_after_it_had_landed(gate, tmp_path):
    case = case_of(gate)
    run = case.guarded(tmp_path / "run", hooks=[Says(holdfast.Plan())], detectors=[Late(found=9, onset=5)])
    assert run.actions() == []
    assert_same(run, case.plain(excluded={"spans": [], "samples": {}}))


CUT = holdfast.CutLR(factor=0.5, ramp_steps=6)
CLIP = holdfast.TightenClip(max_norm=0.05, steps=5)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("actions", [(CUT,), (CLIP,), (CUT, CLIP)])
def test_an_intervention_alone_lets_a_landed_update_stand(gate, actions, tmp_path):
    """Found late, judged harmless, but from here on with a lower LR."""
    case = case_of(gate)
    hook = Says(holdfast.Plan(actions=actions))
    run = case.guarded(tmp_path / "run", hooks=[hook], detectors=[Late(found=9, onset=5)])
    assert run.actions() == [{CUT: "cut_lr", CLIP: "tighten_clip"}[a] for a in actions]
    assert run.guard.step == 24
    assert run.excluded() == {"spans": [], "samples": {}}
    assert_same(run, case.reference(run))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("gate", ONE_GATE)
@pytest.mark.parametrize("actions", [(CUT,), (holdfast.Skip(), CUT), (CLIP, holdfast.Skip())])
def test_an_intervention_comes_with_the_skip_of_a_vetoed_step(gate, actions, tmp_path):
    case = case_of(gate, [9])
    run = case.guarded(tmp_path / "run", hooks=[Says(holdfast.Plan(actions=actions))])
    assert sorted(run.actions()) == sorted(["skip", "cut_lr" if CUT in actions else "tighten_clip"])
    assert_same(run, case.reference(run))


@pytest.mark.parametrize("answer", ["skip", True, holdfast.Skip(), [holdfast.Skip()]])
def test_an_answer_that_is_no_plan(answer, tmp_path):
    case = case_of(faults=[9])
    with pytest.raises(holdfast.SetupError, match=r"must return a holdfast\.Plan or None, not"):
        case.guarded(tmp_path / "run", hooks=[Says(answer)])
    assert journal(tmp_path / "run")[-1]["event"] == "run_end"


def test_a_hook_that_replays_for_ever_is_stopped(tmp_path):
    class Again:
        def on_instability(self, incident):
            return holdfast.Plan(actions=(holdfast.Replay(),))

    case = case_of(faults=[9], max_consecutive=3, max_skips_per_incident=5)
    with pytest.raises(holdfast.PolicyStop, match="none committed"):
        case.guarded(tmp_path / "run", hooks=[Again()])


# ---- shifts


def shifted(tmp_path, declare, gate="host", nan=False):
    """The targets move up by a level at step 101; returns what was done about it."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(8 * 160, 8, generator=generator)
    y = 1.0 + 0.3 * torch.randn(8 * 160, 1, generator=generator)
    y[8 * 100 :] += 0.8
    if nan:
        x[8 * 105] = float("nan")
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    nn.init.zeros_(model.weight)
    guard = holdfast.Guard(
        model,
        torch.optim.SGD(model.parameters(), lr=1e-5, fused=True),
        run_dir=tmp_path / f"run-{declare}-{nan}",
        config={"detect": {"gate": gate}, "recover": {"skip_batches": 4}},
    )
    with guard:
        for step in guard.steps(DataLoader(TensorDataset(x, y), batch_size=8), epochs=1):
            if declare and step.number == 101:
                guard.expect_shift("new data stage")
            with step:
                for a, b in step.microbatches():
                    step.backward(mse(model(a), b))
            if guard.summary().rollbacks:
                break
    return [e["action"] for e in journal(tmp_path / f"run-{declare}-{nan}") if e["event"] == "action"]


@pytest.mark.parametrize("gate", ONE_GATE)
def test_a_declared_shift_is_learned_and_an_undeclared_one_rolled_back(gate, tmp_path):
    assert "rollback" in shifted(tmp_path, False, gate)
    assert shifted(tmp_path, True, gate) == []
    (shift,) = [e for e in journal(tmp_path / "run-True-False") if e["event"] == "shift"]
    assert (shift["step"], shift["reason"]) == (100, "new data stage")


@pytest.mark.parametrize("gate", ONE_GATE)
def test_a_declared_shift_does_not_mute_nan(gate, tmp_path):
    assert shifted(tmp_path, True, gate, nan=True) == ["replay", "skip"]


# ---- what a loop may say and ask


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("where", ["inside", "after", "hook"])
def test_stop_ends_after_the_current_step(gate, where, tmp_path):
    case = case_of(gate)
    parts = case.build()

    class Stops:
        def on_step_end(self, outcome):
            if where == "hook" and outcome.step == 5:
                guard.stop("seen enough")

    guard = holdfast.Guard(**parts, run_dir=tmp_path / "run", config=case.config, hooks=[Stops()])
    with guard:
        for step in guard.steps(case.loader(), epochs=3):
            with step:
                for batch in step.microbatches():
                    step.backward(case.loss(parts["model"], batch))
                    if where == "inside" and step.number == 5:
                        guard.stop("seen enough")
            if where == "after" and step.number == 5:
                guard.stop("seen enough")
        assert guard.step == 5
        assert step.outcome.status == "committed"
    events = journal(tmp_path / "run")
    assert events[-1]["stopped"] == "seen enough"
    assert "error" not in events[-1]
    assert [e["reason"] for e in events if e["event"] == "stop_requested"] == ["seen enough"]
    # Not a stop by policy: the next process starts without an acknowledgement.
    with holdfast.Guard(**case.build(), run_dir=tmp_path / "run"):
        pass


def test_flush_settles_the_last_step(tmp_path):
    case = case_of("device")
    parts = case.build()
    guard = holdfast.Guard(**parts, run_dir=tmp_path / "run", config=case.config)
    with guard:
        for step in guard.steps(case.loader(), max_steps=6):
            with step:
                for batch in step.microbatches():
                    step.backward(case.loss(parts["model"], batch))
            assert guard.step == step.number - 1
            guard.flush()
            assert guard.step == step.number
            guard.flush()
    assert guard.step == 6


@pytest.mark.slow
@pytest.mark.parametrize("gate", GATES)
def test_the_outcome_of_each_step_is_what_became_of_it(gate, tmp_path):
    """Reading it settles the step, on the device too; and reading changes nothing."""
    case = case_of(gate, [3, 12, 13, 14], max_consecutive=2)
    parts, seen = case.build(), []
    guard = holdfast.Guard(**parts, clip_grad_norm=case.clip, run_dir=tmp_path / "run", config=case.config)
    with guard:
        for step in guard.steps(case.loader(), epochs=3):
            with pytest.raises(holdfast.StepError, match="known after"):
                _ = step.outcome
            with step:
                for batch in step.microbatches():
                    step.backward(case.loss(parts["model"], batch))
            outcome = step.outcome
            assert outcome is step.outcome
            assert (outcome.step, outcome.signal.attempt) == (step.number, step.attempt)
            seen.append(outcome.status)
    assert [s for s in seen if s != "committed"] == RECOVERED
    quiet = case.guarded(tmp_path / "other")
    for p, q in zip(parts["model"].parameters(), quiet.model.parameters(), strict=True):
        assert torch.equal(p, q)


def test_the_summary_says_it_in_words(tmp_path):
    case = case_of(faults=[3, 12, 13, 14], max_consecutive=2, probation_steps=50)
    run = case.guarded(tmp_path / "run")
    lines = str(run.guard.summary()).splitlines()
    assert lines[0] == f"recovered: {run.guard.step} steps committed, 6 skipped, 5 replayed, 1 rolled back"
    assert lines[1].startswith("data left out: ")
    assert lines[-1].startswith(
        "incident 1: nonfinite_loss at step 4: replay x5, skip x6, rollback; cause: data (batch"
    )
    clean = case_of().guarded(tmp_path / "clean").guard.summary()
    assert str(clean) == "clean: 24 steps committed"


def test_samples_can_be_quarantined_by_hand_for_this_life_and_the_next(tmp_path):
    seen = []

    def train(model, batch):
        seen.extend(batch[2].tolist())
        return mse(model(batch[0]), batch[1])

    def live(epochs):
        seen.clear()
        torch.manual_seed(0)
        model, points = Net(), Points(64)
        data = TensorDataset(points.x, points.y, torch.arange(64))
        guard = holdfast.Guard(model, torch.optim.AdamW(model.parameters()), run_dir=tmp_path / "run")
        with guard:
            if epochs == 2:
                guard.quarantine([3, 4, 60, 3], "mislabelled")
            guard.fit(train, DataLoader(data, batch_size=8, shuffle=True), epochs=epochs)
        return guard

    guard = live(2)
    assert sorted(seen) == sorted([i for i in range(64) if i not in (3, 4, 60)] * 2)
    assert guard.summary().samples_quarantined == 3
    (event,) = [e for e in journal(tmp_path / "run") if e["event"] == "quarantine"]
    assert (event["samples"], event["reason"]) == ([3, 4, 60], "mislabelled")
    live(3)  # of which two are done
    assert sorted(seen) == [i for i in range(64) if i not in (3, 4, 60)]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("faults", [[], [2, 3, 7], [9], [10, 11]])
def test_max_steps_counts_committed_steps_only(gate, faults, tmp_path):
    case = case_of(gate, faults, max_consecutive=9)
    case.max_steps = 10
    run = case.guarded(tmp_path / "run")
    assert run.guard.step == 10
    drawn = [f for f in range(24) if f not in faults][9] + 1
    assert run.guard.summary().skipped == sum(f < drawn for f in faults)
    assert_same(run, case.reference(run))


# ---- taken out


@pytest.mark.parametrize("scaled", [False, True])
def test_with_holdfast_off_the_hooks_still_hear_of_the_run(scaled, tmp_path, monkeypatch):
    monkeypatch.setenv("HOLDFAST_OFF", "1")
    case = Case(count=64, accumulate=3, precision="fp16" if scaled else "fp32", init_scale=2.0**40)
    parts, notes, seen = case.build(), Notes(), []
    guard = notes.guard = holdfast.Guard(**parts, run_dir=tmp_path / "run", hooks=[notes])
    with guard:
        for step in guard.steps(case.loader(), accumulate=3, epochs=2):
            with step:
                for batch in step.microbatches():
                    step.backward(case.loss(parts["model"], batch))
            seen.append(step.outcome.status)
        guard.report_eval(0.5)
        guard.flush()
        guard.expect_shift("nothing to tell it to")
    order = [name for name, *_ in notes.calls]
    assert order[0] == "on_train_begin"
    assert order[-2:] == ["on_eval_end", "on_train_end"]
    assert order.count("on_step_end") == guard.step == seen.count("committed")
    assert seen[-1] == "discarded"
    assert ("overflowed" in seen) == scaled
    assert notes.named("on_train_end")[0].status == "off"
    assert not (tmp_path / "run").exists()


# ---- budgets


def garbage(x):
    return 400 * x.flip(0)


def test_under_the_strict_preset_the_third_spike_stops_the_run(tmp_path):
    """Three windows of garbage, far apart: two are rolled back and left out, the third is one too many. A single batch
    lands."""
    case = Case(shuffle="unique", count=160, epochs=4, norm=False, config=quick(preset="strict", skip_batches=12))
    case.faults = at(case, *(first + n for first in (20, 40, 60) for n in range(4)), how=garbage)
    with pytest.raises(holdfast.PolicyStop, match="spike 3 of the run, under the strict preset") as stop:
        case.guarded(tmp_path / "run")
    assert stop.value.code == 70
    actions = [e["action"] for e in journal(tmp_path / "run") if e["event"] == "action"]
    assert actions == [*["rollback", "skip_data"] * 2, "stop"]
    case.faults = at(case, 20, 40, 60, how=garbage)
    run = case.guarded(tmp_path / "single")
    assert run.actions() == []
    assert_same(run, case.plain({"spans": [], "samples": {}}))


@pytest.mark.parametrize("gate", ONE_GATE)
def test_data_that_stays_non_finite_stops_the_run_after_two_rollbacks(gate, tmp_path):
    case = Case(optimizer="adamw_fused", shuffle="unique", count=160, epochs=6, norm=False)
    case.config = quick(gate, max_consecutive=3, probation_steps=50)
    case.faults = at(case, *range(40, 120), how=NAN["nan"])
    with pytest.raises(holdfast.PolicyStop, match="it came back after 2 returns") as stop:
        case.guarded(tmp_path / "run")
    assert stop.value.code == 70
    assert isinstance(stop.value, SystemExit)
    events = journal(tmp_path / "run")
    actions = [e["action"] for e in events if e["event"] == "action"]
    assert actions.count("rollback") == 2
    assert actions[-1] == "stop"
    assert events[-1]["event"] == "run_end"
    # The first return changes nothing, the second one cuts the LR. Each puts back what was skipped before it.
    to = [e["to_step"] for e in events if e.get("action") == "rollback"]
    assert to[1] <= to[0] < 40
    assert [e["factor"] for e in events if e.get("action") == "cut_lr"] == [0.5]
    assert [len(e["spans"]) for e in events if e["event"] == "released"] == [3, 6]
    assert "skip_data" not in actions


@pytest.mark.slow
def test_budgets_hold_in_the_next_life_until_somebody_acknowledges(tmp_path):
    """Two rollbacks in one process that ends on probation; the next process has none left; after an ack it has two again."""

    def live(steps):
        case = Case(shuffle="unique", count=160, epochs=6, norm=False, max_steps=steps)
        case.config = quick(max_consecutive=3, probation_steps=1000)
        case.faults = at(case, *range(40, 120), how=NAN["nan"])
        # What another life has found is quarantined: each life meets bad data of its own.
        return case.guarded(tmp_path / "run")

    first = live(38)
    assert first.actions() == []
    with pytest.raises(holdfast.PolicyStop, match="it came back after 2 returns"):
        live(None)
    spent = journal(tmp_path / "run")
    assert [e.get("action") for e in spent].count("rollback") == 2
    with pytest.raises(holdfast.PolicyStop, match="was stopped by policy.*holdfast ack"):
        live(10)
    ack(str(tmp_path / "run"), note="a test has looked")
    assert journal(tmp_path / "run")[-1]["event"] == "ack"
    with pytest.raises(holdfast.PolicyStop, match="it came back after 2 returns"):
        live(None)
    after = journal(tmp_path / "run")[len(spent) :]
    assert [e.get("action") for e in after].count("rollback") == 2


@pytest.mark.slow
def test_an_incident_left_open_by_one_life_counts_in_the_next(tmp_path):
    """One rollback that changes nothing, then the life ends; the next one cuts the LR, and there is no third."""

    def live(faults, stop_at=None):
        case = Case(shuffle="unique", count=160, epochs=3, norm=False)
        case.config = quick(max_consecutive=2, probation_steps=1000, skip_batches=4)
        case.faults = at(case, *faults)

        class Ends:
            def on_recovery(self, outcome):
                if outcome.status == "rolled_back" and stop_at is not None:
                    self.guard.stop("enough for one life")

            guard = None

        return case.guarded(tmp_path / "run", hooks=[Ends()])

    first = live([20, 21, 22], stop_at=1)
    assert first.actions().count("rollback") == 1
    assert "cut_lr" not in first.actions()
    second = live(range(30, 35), stop_at=1)
    assert second.actions().count("rollback") == 2
    assert second.actions()[-1] == "cut_lr"
    with pytest.raises(holdfast.PolicyStop, match="it came back after 2 returns"):
        live(range(40, 45))
