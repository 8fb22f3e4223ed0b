"""A checkpoint whose checksums fit and whose contents do not: nothing of it reaches the run, and an older one is used."""

from __future__ import annotations

import json
import os

import pytest
import torch
from cases import Net
from ended import Dead, health_seen, often
from resealed import BIN, INDEX, resealed
from resumed import assert_continued, copied, health_of, idle, live
from test_parts import one
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from holdfast.core.base.errors import HoldfastError, RunDirError, SetupError
from holdfast.core.checkpoints.verify import verify

HUGE = 400_000_000_000


class Counted:
    """An object with state that the loop registers."""

    def __init__(self) -> None:
        self.total = torch.zeros(3)
        self.count = 0

    def state_dict(self):
        return {"total": self.total, "count": self.count}

    def load_state_dict(self, state):
        self.total, self.count = state["total"] + 0, int(state["count"])


def scheduled():
    """AdamW with a schedule, a buffer, and a registered object."""
    model = Net()
    model.register_buffer("seen", torch.zeros(2))
    optimizer = AdamW(model.parameters(), lr=1e-2)
    made = one(model, optimizer)
    made.schedulers, made.intervals = [LambdaLR(optimizer, lambda s: 1 / (1 + s / 50))], ["step"]
    made.registered = {"counted": Counted()}
    return made


@pytest.fixture(scope="module")
def dead(tmp_path_factory) -> Dead:
    return Dead(tmp_path_factory.mktemp("dead"), scheduled)


def at(*path, value=None, remove=False):
    """Return a change of the value at a path in nested JSON."""

    def change(whole):
        inner = whole
        for key in path[:-1]:
            inner = inner[key]
        if remove:
            del inner[path[-1]]
        else:
            inner[path[-1]] = value

    return change


def adam(name, value=None, remove=False):
    """Return a change of one entry of the optimizer's first state. Parameters are counted, so the keys are numbers."""

    def change(whole):
        (_, state), *_ = whole["light"]["optimizer_state"][0]["$dict"]
        at(name, value=value, remove=remove)(state)

    return change


def whole_state(value):
    def change(whole):
        whole["light"]["optimizer_state"][0]["$dict"][0][1] = value

    return change


def owner(value):
    def change(whole):
        whole["light"]["optimizer_state"][0]["$dict"][0][0] = value

    return change


PARTS = {
    "no light": at("light", remove=True),
    "light is a list": at("light", value=[]),
    "the step is text": at("step", value="nine"),
    "another step": at("step", value=10),
    "no optimizer state": at("light", "optimizer_state", remove=True),
    "two optimizers": at("light", "optimizer_state", value=[{}, {}]),
    "state that is text": whole_state("exp_avg"),
    "a state without a moment": adam("exp_avg_sq", remove=True),
    "a moment that is a number": adam("exp_avg", 5),
    "a moment that is the weights": adam("exp_avg", {"$tensor": "model.first.weight"}),
    "a moment that is not there": adam("exp_avg", {"$tensor": "optimizer.0.0.nothing"}),
    "a count that is text": adam("step", "three"),
    "a parameter that is not there": owner(99),
    "a negative parameter": owner(-1),
    "a parameter that is a list": owner([1]),
    "groups of text": at("light", "optimizer_groups", value=[["lr"]]),
    "no group": at("light", "optimizer_groups", value=[[]]),
    "an LR of text": at("light", "optimizer_groups", 0, 0, "lr", value="high"),
    "no weight decay": at("light", "optimizer_groups", 0, 0, "weight_decay", value=None),
    "betas of text": at("light", "optimizer_groups", 0, 0, "betas", value={"$tuple": ["a", "b"]}),
    "no scheduler": at("light", "schedulers", value=[]),
    "a scheduler of text": at("light", "schedulers", value=["LambdaLR"]),
    "a schedule at no step": at("light", "schedulers", 0, "last_epoch", value="one"),
    "interventions of text": at("light", "interventions", value="none"),
    "a ramp of text": at("light", "interventions", "turns", value="two"),
    "registered is a list": at("light", "registered", value=["counted"]),
    "no random state": at("rng", remove=True),
    "a random state of text": at("rng", "python", value="random"),
    "a short random state": at("rng", "python", value={"$tuple": [3, {"$tuple": [1, 2]}, None]}),
    "torch's random state is the weights": at(
        "rng", "torch", value={"$tensor": "part.data.order.streams.python.words"}
    ),
    "a device's random state is text": at("rng", "devices", value={"$tuple": ["text"]}),
    "numpy's random state is empty": at("rng", "numpy", value={}),
    "data of another kind": at("data", "kind", value="pickle"),
    "no position": at("data", "sample", remove=True),
    "a position of text": at("data", "batch", value="four"),
    "an order without a digest": at("data", "order", "deals", value=[[1, 0, 3]]),
    "an order of an unknown sampler": at("data", "order", "about", value={"kind": "other"}),
    "detectors is a list": at("detectors", value=["loss_spike"]),
    "a tensor without a name": at("data", "order", "streams", "torch", value={"$tensor": 5}),
    "deeply nested": at("detectors", value=json.loads("[" * 400 + "]" * 400)),
}


def check_falls_back(path, dead, caplog):
    """The newest is marked bad, the one before it is used, and the run ends as the uninterrupted one."""
    newest = dead.good[0]
    assert verify(path / "checkpoints" / newest) is None, "it must pass the checksums"
    health, look = health_seen(path)
    life = live(often(scheduled), path, before=look)
    passed = {p["name"]: p["why"] for p in life.resumed()["passed_over"]}
    assert life.began == 6 and newest in passed
    assert health[newest] == "bad"
    lines = [r.getMessage() for r in caplog.records if newest in r.getMessage() and "cannot be used" in r.getMessage()]
    assert len(lines) == 1 and lines[0].startswith("holdfast:"), lines
    assert_continued(life, dead.whole)


QUICK = ("no light", "a state without a moment", "an LR of text", "a short random state", "a position of text")


@pytest.mark.parametrize(
    "what", [what if what in QUICK else pytest.param(what, marks=pytest.mark.slow) for what in PARTS]
)
def test_contents_of_the_wrong_type_are_marked_and_an_older_checkpoint_is_used(what, dead, tmp_path, caplog):
    path = copied(dead.path, tmp_path / "run")
    resealed(path / "checkpoints" / dead.good[0], parts=PARTS[what])
    check_falls_back(path, dead, caplog)


def chunk(content, name):
    return next(c for c in content["tensors"] if c["name"] == name)


def retyped(name, **changes):
    def change(content):
        chunk(content, name).update(changes)

    return change


def turned(name):
    def change(content):
        found = chunk(content, name)
        found["shape"] = found["sizes"] = found["shape"][::-1]

    return change


def renamed(name, other):
    return lambda content: chunk(content, name).update(name=other)


TENSORS = {
    "weights of another shape": turned("model.first.weight"),
    "weights of another dtype": retyped("model.first.weight", dtype="int32"),
    "weights of another name": renamed("model.first.weight", "model.first.other"),
    "a moment of another shape": turned("optimizer.0.0.exp_avg"),
    "a moment of another dtype": retyped("optimizer.0.0.exp_avg", dtype="int32"),
    "a name that no part of a run has": renamed("optimizer.0.0.exp_avg", "__class__"),
}


@pytest.mark.parametrize("what", [pytest.param(w, marks=pytest.mark.slow if n else ()) for n, w in enumerate(TENSORS)])
def test_tensors_of_another_shape_dtype_or_name_are_marked_too(what, dead, tmp_path, caplog):
    path = copied(dead.path, tmp_path / "run")
    resealed(path / "checkpoints" / dead.good[0], index=TENSORS[what])
    check_falls_back(path, dead, caplog)


def grown(folder, name):
    """Make a tensor 400 GB long without a byte on disk."""

    def change(content):
        last = chunk(content, name)
        content["tensors"].remove(last)
        at = max(c["at"] + c["bytes"] for c in content["tensors"])
        last.update(at=-(-at // 64) * 64, bytes=HUGE, shape=[HUGE // 4], sizes=[HUGE // 4], offset=[0], dtype="float32")
        content["tensors"] = _packed(content["tensors"]) + [last]
        last["at"] = _end(content["tensors"][:-1])
        content["bytes"] = last["at"] + HUGE
        os.truncate(folder / BIN, content["bytes"])

    return change


def _end(tensors):
    return -(-max(c["at"] + c["bytes"] for c in tensors) // 64) * 64


def _packed(tensors):
    at = 0
    for each in tensors:
        each["at"] = at
        at = -(-(at + each["bytes"]) // 64) * 64
    return tensors


@pytest.mark.parametrize("name", ["model.first.weight", "optimizer.0.0.exp_avg", "buffer.seen", "part.rng.torch"])
def test_a_sparse_tensor_of_400_gb_is_never_allocated(name, dead, tmp_path):
    path = copied(dead.path, tmp_path / "run")
    newest = path / "checkpoints" / dead.good[0]
    resealed(newest, index=grown(newest, name), sparse=True)
    assert (newest / BIN).stat().st_blocks * 512 < 1 << 24
    life = live(often(scheduled), path)
    passed = {p["name"]: p["why"] for p in life.resumed()["passed_over"]}
    assert life.began == 6 and dead.good[0] in passed
    assert_continued(life, dead.whole)


@pytest.mark.parametrize("what", ["no light", "a moment that is a number", "data of another kind"])
def test_a_checkpoint_that_load_path_names_is_refused_and_no_other_is_used(what, dead, tmp_path):
    path = copied(dead.path, tmp_path / "run")
    newest = path / "checkpoints" / dead.good[0]
    resealed(newest, parts=PARTS[what])
    recipe = often(scheduled, checkpoint={"load_path": str(newest)})
    untouched = recipe.make().model.state_dict()
    made = recipe.make()
    recipe.make = lambda: made
    with pytest.raises(RunDirError if what != "a moment that is a number" else SetupError, match=dead.good[0]):
        live(recipe, path)
    for name, value in made.model.state_dict().items():
        assert torch.equal(value, untouched[name]), f"{name} was written"


def test_a_rollback_passes_over_such_a_checkpoint_too(tmp_path):
    config = often(scheduled).case.config
    config["snapshot"]["enabled"] = False
    recipe = often(scheduled, config=config, epochs=4)
    path, struck = tmp_path / "run", []

    def strike(guard, parts, step):
        idle(guard)
        if step.number == 11 and not struck:
            struck.append("step_00000006")
            resealed(path / "checkpoints" / struck[0], parts=PARTS["a moment that is a number"])
            parts.model.first.weight.data[0, 0] = float("nan")

    life = live(recipe, path, before=strike)
    back = next(e for e in life.journal() if e.get("action") == "rollback")
    assert [p["name"] for p in back["passed_over"]] == struck and back["to_step"] == 3
    assert_continued(life, live(recipe, tmp_path / "whole"), seen=False)


def test_when_none_is_left_the_error_names_each_and_why(dead, tmp_path):
    path = copied(dead.path, tmp_path / "run")
    for name in dead.good:
        resealed(path / "checkpoints" / name, parts=PARTS["light is a list"])
    with pytest.raises(HoldfastError) as caught:
        live(often(scheduled), path)
    assert all(name in str(caught.value) for name in dead.good) and "load_path" in str(caught.value)


# ---- names


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (at("light", "optimizer_groups", 0, 0, "evil", value=1), "evil"),
        (at("light", "optimizer_groups", 0, 0, "params", value=[]), "params"),
        (at("light", "optimizer_own", 0, "step", value=1), "step"),
        (at("light", "schedulers", 0, "step", value=1), "step"),
        (at("light", "schedulers", 0, "get_lr", value=None), "get_lr"),
    ],
)
def test_no_name_that_the_run_does_not_have_is_set(change, name, dead, tmp_path):
    path = copied(dead.path, tmp_path / "run")
    resealed(path / "checkpoints" / dead.good[0], parts=change)
    life = live(often(scheduled), path)
    optimizer, scheduler = life.parts.optimizers[0], life.parts.schedulers[0]
    assert "evil" not in optimizer.param_groups[0] and optimizer.param_groups[0]["params"]
    assert name not in ("step", "get_lr") or callable(getattr(scheduler, name))
    assert callable(optimizer.step)
    assert_continued(life, dead.whole)


def test_a_program_with_another_model_is_refused_and_marks_nothing(dead, tmp_path):
    """The checkpoints are as they were saved: it is the program that has changed."""

    def transposed():
        made = scheduled()
        weight = made.model.first.weight
        weight.data = weight.data.T.contiguous()
        return made

    path = copied(dead.path, tmp_path / "run")
    before = health_of(path)
    with pytest.raises(SetupError, match=r"first\.weight"):
        live(often(transposed), path)
    assert health_of(path) == before


def test_the_helper_changes_only_what_it_is_told(dead, tmp_path):
    path = copied(dead.path, tmp_path / "run")
    newest = path / "checkpoints" / dead.good[0]
    before = json.loads((newest / INDEX).read_text())
    resealed(newest)
    assert json.loads((newest / INDEX).read_text()) == before and verify(newest) is None
