"""Evidence of a step that runs again: batches become plain values and back, and observing never ends a step."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from holdfast.core.base.config import load
from holdfast.core.base.errors import ConfigError, DataError
from holdfast.core.base.types import Plan
from holdfast.core.origin.report import OriginReport
from holdfast.runtime.incidents.batch import pack_batch, unpack_batch
from holdfast.runtime.incidents.evidence import StepEvidence
from holdfast.runtime.incidents.fp32 import Fp32Modules
from holdfast.runtime.incidents.harmless import HarmlessObserver
from holdfast.runtime.incidents.judgement import judge_attempt
from holdfast.runtime.snapshots.encoding import decode, encode

Pair = namedtuple("Pair", "x y")


@dataclass
class Sample:
    x: torch.Tensor
    name: str


def through_a_file(value: Any) -> Any:
    tensors: dict[str, torch.Tensor] = {}
    text = encode({"batch": pack_batch(value)}, tensors)
    return unpack_batch(decode(text, tensors)["batch"], torch.device("cpu"))


def test_a_batch_of_any_nesting_survives_a_file():
    x = torch.arange(6.0).reshape(2, 3)
    batch = {
        "a": [x, (x + 1, None)],
        3: "text",
        "n": Pair(x * 2, 5),
        "d": Sample(x * 3, "s"),
        "v": np.ones((2, 2), "int32"),
    }
    found = through_a_file(batch)
    assert torch.equal(found["a"][0], x) and torch.equal(found["a"][1][0], x + 1) and found["a"][1][1] is None
    assert found[3] == "text" and torch.equal(found["n"].x, x * 2) and found["n"].y == 5
    assert torch.equal(found["d"].x, x * 3) and found["d"].name == "s"
    assert found["v"].dtype == np.int32 and found["v"].shape == (2, 2)


def test_a_batch_with_an_object_of_its_own_is_refused_with_its_type():
    with pytest.raises(DataError, match="holds a Linear"):
        pack_batch({"x": [nn.Linear(1, 1)]})


@pytest.mark.parametrize(
    "run",
    [
        lambda layer: torch.sparse.mm(torch.eye(4).to_sparse() * torch.nan, layer(torch.ones(4, 4))),
        lambda layer: torch.func.vmap(lambda x: layer(x) * torch.nan)(torch.ones(3, 4)),
        lambda layer: (
            torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=torch.jagged)
            .mul(torch.nan)
            .values()
        ),
    ],
    ids=["sparse", "vmap", "nested"],
)
def test_what_cannot_be_observed_does_not_end_the_step(run):
    layer = nn.Linear(4, 4)
    expected = run(layer)
    observer = HarmlessObserver({"": layer})
    with observer:
        found = run(layer)
        if found.requires_grad:
            found.sum().backward()
    assert torch.equal(found.isnan(), expected.isnan()) and found.isnan().all()


def test_an_error_of_the_users_own_op_comes_out():
    observer = HarmlessObserver({"": nn.Linear(4, 4)})
    with pytest.raises(RuntimeError, match="size of tensor|must match"), observer:
        torch.ones(3) + torch.ones(4)
    assert observer.failure is None


def test_an_error_inside_a_module_comes_out_without_a_warning(recwarn):
    class Outside(nn.Linear):
        """No part of the model: torch calls a global hook for it, after an error without the keyword arguments."""

    model, outside = nn.Linear(4, 4), Outside(4, 4)
    with HarmlessObserver({"": model}) as observer:
        for module in (model, outside):
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                module(torch.ones(2, 3))
        model(torch.ones(2, 4))
    assert [str(each.message) for each in recwarn] == [] and observer.failure is None
    assert [row.module for row in observer.report().path] == [""]


def test_every_op_is_watched_only_as_long_as_allowed_and_modules_to_the_end():
    model = nn.Sequential(nn.Linear(4, 4), nn.LogSigmoid(), nn.Linear(4, 1))
    with torch.no_grad():
        model[2].weight.mul_(1e38)
    observer = HarmlessObserver({"": model}, seconds=0.0)
    with observer:
        model(torch.ones(2, 4) * 1e3).square().sum().backward()
    report = observer.report()
    assert observer.is_late and report.op == ""
    assert [row.module for row in report.path] == ["0", "1", "2", ""]


def test_a_bad_row_is_named_although_the_time_was_not_enough_for_an_op():
    evidence = StepEvidence(None, None, Plan(), [], torch.nan, [], observes=True, seconds=0.0, weights_bytes=None)
    evidence.report, evidence.why_not = OriginReport(phase="backward"), "watching every op ended after 0.0 s"
    verdict = judge_attempt(evidence, [(0, 5)], torch.nan, is_bad=True)
    assert verdict["cause"] == "data_row" and "row 5" in verdict["text"] and evidence.why_not in verdict["against"]
    evidence.report = OriginReport(phase="forward", module="head")
    assert judge_attempt(evidence, [(0, 5)], torch.nan, is_bad=True)["cause"] != "data_row"


def test_a_module_in_fp32_is_in_its_state_and_goes_back():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    chosen, dtypes = Fp32Modules([("", model)]), list[torch.dtype]()
    model[1].register_forward_hook(lambda module, args, output: dtypes.append(output.dtype))
    chosen.load_state_dict({"modules": ["1", "gone"]})
    assert chosen.state_dict() == {"modules": ["1"]} and chosen.why_not("1") is not None
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(torch.ones(2, 4))
            assert torch.is_autocast_enabled("cpu")
        out.float().sum().backward()
        chosen.remove("1")
    assert dtypes == [torch.float32, torch.bfloat16]
    assert "half precision" in (chosen.why_not("0") or "") if model.half() else False


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"act": True, "when": "offline"}, 'needs when = "inline"'),
        ({"fp32_modules": True}, "without act = true"),
        ({"entry": "train.py"}, "write FILE.py:FUNCTION"),
        ({"when": "sometimes"}, "choose one of"),
    ],
)
def test_a_section_that_contradicts_itself_is_refused(section, said):
    with pytest.raises(ConfigError, match=said):
        load({"replay": section})
