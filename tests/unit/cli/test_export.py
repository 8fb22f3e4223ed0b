"""`holdfast checkpoints export`: what other libraries read back is the live state, bit for bit."""

from __future__ import annotations

import shutil
import subprocess
import sys
import warnings

import pytest
import safetensors
import safetensors.torch
import torch
from torch.distributed.checkpoint import load as dcp_load
from torch.utils.data import DataLoader, TensorDataset

from holdfast import Guard, HoldfastWarning

FORMATS = ["safetensors", "torch", "dcp"]


class Model(torch.nn.Module):
    """Has tied weights, frozen ones, bfloat16, and buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(6, 8, bias=False)
        self.frozen = torch.nn.Linear(8, 8).requires_grad_(False)
        self.norm = torch.nn.BatchNorm1d(8)
        self.low = torch.nn.Linear(8, 6).to(torch.bfloat16)
        self.head = torch.nn.Linear(6, 8, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.arange(3.0), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        hidden = self.norm(self.frozen(self.embed(x)))
        return self.head(self.low(hidden.to(torch.bfloat16)).float()) + self.table.sum()


def build() -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = Model()
    groups = [
        {"params": [p for n, p in model.named_parameters() if p.requires_grad and p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for n, p in model.named_parameters() if p.requires_grad and p.dim() < 2], "weight_decay": 0.0},
    ]
    return model, torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run directory, and its model and optimizer as they were at the end."""
    path = tmp_path_factory.mktemp("export") / "run"
    model, optimizer = build()
    x = torch.randn(40, 6)
    with warnings.catch_warnings(action="ignore", category=HoldfastWarning):
        guard = Guard(model, optimizer, run_dir=path, config={"checkpoint": {"every_steps": 5, "certify_after": 2}})
        with guard:
            for step in guard.steps(DataLoader(TensorDataset(x), 4), epochs=1):
                with step:
                    for (batch,) in step.microbatches():
                        step.backward(model(batch).square().mean())
    return path, model, optimizer


def assert_same(one, other):
    """Compare nested state, tensors bit for bit."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and one.shape == other.shape
        assert (
            one.contiguous().view(-1).view(torch.uint8).tolist()
            == other.contiguous().view(-1).view(torch.uint8).tolist()
        )
    elif isinstance(one, dict):
        assert list(one) == list(other) or sorted(map(str, one)) == sorted(map(str, other))
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    else:
        assert one == other


def plain(state):
    return dict(state)


def test_safetensors_holds_the_model_and_loads_into_it(run, holdfast, tmp_path):
    path, model, _ = run
    answer = holdfast("checkpoints", "export", path, "--format", "safetensors", "-o", tmp_path / "a.safetensors")
    assert answer.status == 0, answer.err
    assert "exported step_00000010 to" in answer.out
    (tmp_path / "new").touch()
    assert (tmp_path / "a.safetensors").stat().st_mode == (tmp_path / "new").stat().st_mode
    tensors = safetensors.torch.load_file(tmp_path / "a.safetensors")
    expected = plain(model.state_dict())
    del expected["head.weight"]
    assert_same(tensors, expected)
    other, _ = build()
    safetensors.torch.load_model(other, tmp_path / "a.safetensors", strict=True)
    assert_same(plain(other.state_dict()), plain(model.state_dict()))
    with safetensors.safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "step": "10", "head.weight": "embed.weight"}


def test_torch_holds_state_dicts_that_load_without_pickle(run, holdfast, tmp_path):
    path, model, optimizer = run
    answer = holdfast("checkpoints", "export", path, "--format", "torch", "-o", tmp_path / "a.pt", "--json")
    assert answer.status == 0, answer.err
    state = torch.load(tmp_path / "a.pt", weights_only=True)
    assert list(state) == ["step", "model", "optimizer"] and state["step"] == 10
    assert_same(state["model"], plain(model.state_dict()))
    assert_same(state["optimizer"], optimizer.state_dict())
    other, its_optimizer = build()
    other.load_state_dict(state["model"], strict=True)
    its_optimizer.load_state_dict(state["optimizer"])
    assert_same(its_optimizer.state_dict(), optimizer.state_dict())
    assert answer.json == {
        "schema": "holdfast.checkpoints.export/1",
        "ok": True,
        "checkpoint": str(path / "checkpoints" / "step_00000010"),
        "step": 10,
        "health": "candidate",
        "format": "torch",
        "path": str(tmp_path / "a.pt"),
        "bytes": (tmp_path / "a.pt").stat().st_size,
        "tensors": len(model.state_dict()) - 1,
        "tied": {"head.weight": "embed.weight"},
        "optimizers": 1,
        "notes": [],
    }


def test_dcp_is_read_by_torch_distributed_checkpoint(run, holdfast, tmp_path):
    path, model, optimizer = run
    assert holdfast("checkpoints", "export", path, "--format", "dcp", "-o", tmp_path / "a").status == 0
    other, _ = build()
    target = {"model": other.state_dict(), "optimizer": optimizer.state_dict(), "step": 0}
    for entry in target["optimizer"]["state"].values():
        for name in entry:
            entry[name] = torch.zeros_like(entry[name])
    dcp_load(target, checkpoint_id=tmp_path / "a", no_dist=True)
    assert target["step"] == 10
    assert_same(plain(target["model"]), plain(model.state_dict()))
    assert_same(target["optimizer"], optimizer.state_dict())


def test_a_named_checkpoint_is_written_to_the_working_folder(run, holdfast, tmp_path, monkeypatch):
    path, _, _ = run
    monkeypatch.chdir(tmp_path)
    answer = holdfast("checkpoints", "export", path / "checkpoints" / "step_00000005", "--format", "torch")
    assert answer.status == 0, answer.err
    assert torch.load("step_00000005.pt", weights_only=True)["step"] == 5
    assert [each.name for each in tmp_path.iterdir()] == ["step_00000005.pt"]


@pytest.mark.parametrize("format", FORMATS)
def test_nothing_is_overwritten(run, holdfast, tmp_path, format):
    (tmp_path / "there").write_text("mine")
    answer = holdfast("checkpoints", "export", run[0], "--format", format, "-o", tmp_path / "there")
    assert answer.status == 1
    assert "exists and is not overwritten" in answer.err
    assert (tmp_path / "there").read_text() == "mine"


@pytest.mark.parametrize("format", FORMATS)
def test_a_damaged_checkpoint_is_refused_and_nothing_is_left(run, holdfast, tmp_path, format):
    damaged = tmp_path / "checkpoints" / "step_00000010"
    shutil.copytree(run[0] / "checkpoints" / "step_00000010", damaged)
    content = bytearray((damaged / "rank_00000.bin").read_bytes())
    content[-1] ^= 1  # in a part that safetensors does not export
    (damaged / "rank_00000.bin").write_bytes(content)
    answer = holdfast("checkpoints", "export", damaged, "--format", format, "-o", tmp_path / "out", "--json")
    assert answer.status == 1
    assert answer.json["ok"] is False
    assert "rank_00000.bin" in answer.err and "damaged" in answer.err
    assert "Traceback" not in answer.err
    assert [each.name for each in tmp_path.iterdir()] == ["checkpoints"]


def test_a_mistake_is_answered_in_one_line(run, holdfast, tmp_path):
    path, inside = run[0], run[0] / "checkpoints" / "step_00000010"
    for words, message in {
        (path, "--format", "onnx"): "onnx",
        (path,): "--format",
        (tmp_path / "none", "--format", "torch"): "no such folder",
        (path / "checkpoints" / "step_00000099", "--format", "torch"): "no such checkpoint",
        (tmp_path, "--format", "torch"): "is not a run directory",
        (path, "--format", "torch", "-o", tmp_path / "none" / "a.pt"): "there is no folder",
        (path, "--format", "torch", "-o", inside / "a.pt"): "inside the checkpoint step_00000010",
        (path, "--format", "torch", "-o", ""): "-o",
    }.items():
        answer = holdfast("checkpoints", "export", *words)
        assert answer.status in (1, 2), words
        assert message in answer.err, answer.err
        assert "Traceback" not in answer.err
    assert sorted(each.name for each in inside.iterdir()) == [
        "health.json",
        "manifest.json",
        "rank_00000.bin",
        "rank_00000.json",
    ]


def test_a_folder_that_cannot_be_written_is_named(run, holdfast, tmp_path):
    answer = holdfast("checkpoints", "export", run[0], "--format", "torch", "-o", "/proc/model.pt")
    assert answer.status == 1
    assert "/proc/model.pt cannot be written" in answer.err


def test_missing_safetensors_is_named_with_its_cure(run, holdfast, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    answer = holdfast("checkpoints", "export", run[0], "--format", "safetensors", "-o", tmp_path / "a")
    assert answer.status == 1
    assert "install it with: pip install safetensors" in answer.err
    assert "Traceback" not in answer.err


def test_missing_torch_is_named_with_its_cure(run, tmp_path):
    source = "import sys; sys.modules['torch'] = None; from holdfast.cli import main; main.run(sys.argv[1:])"
    words = ["checkpoints", "export", str(run[0]), "--format", "torch", "-o", str(tmp_path / "a")]
    done = subprocess.run([sys.executable, "-c", source, *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "pip install 'holdfast[torch]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_help_shows_examples(holdfast):
    answer = holdfast("checkpoints", "export", "--help")
    assert answer.status == 0
    assert "holdfast checkpoints export runs/a --format safetensors" in answer.out
