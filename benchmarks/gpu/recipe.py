"""A small transformer under FSDP2 or DDP, trained with and without a guard on the same data."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import holdfast
from holdfast.distributed.checkpoint.disk_store import DiskCheckpointStore
from holdfast.distributed.norms import MeshNorms
from holdfast.distributed.replicas import MeshReplicas
from holdfast.distributed.world import World
from holdfast.runtime.guard.guard import Wiring
from holdfast.runtime.ports.distributed_context import DistributedContext

VOCABULARY, LENGTH, HEADS = 1024, 64, 4
SIZES = {"cuda": (256, 4), "cpu": (32, 2)}
"""width and blocks of the model"""
GLOBAL, STEPS = 16, 24
"""samples of a step over all ranks, and steps of the epoch"""
FACTORS = {"nan": float("nan"), "huge": 1e5}
QUICK = {
    "snapshot": {"every_steps": 4, "certify_after": 2},
    "recover": {"rollback_margin": 1, "skip_batches": 2, "probation_steps": 6, "lr_factor": 1.0},
    "quarantine": {"nonfinite_samples": False},
    "checkpoint": {"enabled": False},
}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = self.attend(self.before(x)).view(rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        # Not a fused kernel: its backward is not deterministic everywhere.
        scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        seen = scores.masked_fill(future, float("-inf")).softmax(-1) @ v
        x = x + self.dropout(self.join(seen.transpose(1, 2).reshape(rows, length, -1)))
        x = x + self.dropout(self.down(nn.functional.gelu(self.up(self.between(x)))))
        return x


class Transformer(nn.Module):
    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(self.norm(x)).float()
        return scores


class Text(Dataset[dict[str, Any]]):
    """Sample i is a function of i. `faults` maps some samples to what their loss is made to be."""

    def __init__(self, faults: dict[int, str]) -> None:
        self.faults = faults

    def __len__(self) -> int:
        return GLOBAL * STEPS

    def __getitem__(self, i: int) -> dict[str, Any]:
        start = torch.randint(VOCABULARY, (1,), generator=torch.Generator().manual_seed(i))
        return {
            "tokens": (start + 3 * torch.arange(LENGTH + 1)) % VOCABULARY,
            "factor": FACTORS.get(self.faults.get(i, ""), 1.0),
        }


class Setting:
    """Holds the device, precision, optimizer, gate and parallel layout of a run."""

    def __init__(
        self, device: str, precision: str = "fp32", *, fused: bool, layout: str = "fsdp2", gate: str = ""
    ) -> None:
        self.device, self.precision, self.fused, self.layout = device, precision, fused, layout
        self.gate = gate or ("device" if fused else "host")

    def __str__(self) -> str:
        return f"{self.layout} {self.precision} {'fused' if self.fused else 'foreach'} {self.gate}"


class Training:
    """Builds a model from the seed, its optimizer and its data. Call `bare` or `guarded` once."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        torch.manual_seed(5)
        model = Transformer(*SIZES[setting.device]).to(setting.device)
        self.core = model
        self.parameters = sum(p.numel() for p in model.parameters())
        self.model: nn.Module = model
        if setting.layout == "ddp":
            self.model = DistributedDataParallel(model)
        else:
            mesh = init_device_mesh(setting.device, (dist.get_world_size(),))
            lower = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            policy = lower if setting.precision == "bf16" else MixedPrecisionPolicy()
            for part in (*model.blocks, model):
                fully_shard(part, mesh=mesh, mp_policy=policy)
        how: Any = {"fused": True} if setting.fused else {"foreach": True}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, **how)

    def loader(self, faults: dict[int, str] | None = None) -> DataLoader[dict[str, Any]]:
        text, ranks = Text(faults or {}), dist.get_world_size()
        sampler: Any = DistributedSampler(text, num_replicas=ranks, rank=dist.get_rank(), shuffle=False)
        return DataLoader(text, batch_size=GLOBAL // ranks, sampler=sampler, pin_memory=self.setting.device == "cuda")

    def loss(self, batch: dict[str, Any]) -> Tensor:
        tokens = batch["tokens"].to(self.setting.device, non_blocking=True)
        factor = batch["factor"].to(self.setting.device, non_blocking=True).float()
        scores = self.model(tokens[:, :-1]).transpose(1, 2)
        each = nn.functional.cross_entropy(scores, tokens[:, 1:], reduction="none").mean(1)
        loss: Tensor = (each * factor).mean()
        return loss

    def bare(
        self, clip: float | None = 1.0, without: set[int] | None = None, each: Callable[[int], None] | None = None
    ) -> Training:
        """Train without a guard over the epoch, without the steps in `without`. `each` is called at the end of a step."""
        for number, batch in enumerate(self.loader(), 1):
            if number in (without or ()):
                continue
            self.loss(batch).backward()  # type: ignore[no-untyped-call]
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip)
            self.optimizer.step()
            self.optimizer.zero_grad()
            if each is not None:
                each(number)
        return self

    def guarded(self, run_dir: Path, **how: Any) -> Guarded:
        return Guarded(self, run_dir, **how)

    def state(self) -> list[Tensor]:
        """Return this rank's parameters, optimizer state and random state."""
        tensors: list[Any] = [p.detach() for p in self.model.parameters()]
        for p in self.model.parameters():
            tensors += [v for _, v in sorted(self.optimizer.state[p].items()) if isinstance(v, Tensor)]
        local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
        random = [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if self.setting.device == "cuda" else [])]
        return [*local, *random]

    def flip(self) -> None:
        """Flip one bit of a weight. Through `data`, so that torch does not count it as a write."""
        weight: Any = self.core.blocks[1].up.weight  # type: ignore[union-attr]
        local = (weight.to_local() if hasattr(weight, "to_local") else weight).data
        local.view(torch.int32).view(-1)[3].bitwise_xor_(1 << 20)


class Mirror(World):
    """Simulates a second rank that does exactly what the first does: NCCL refuses two processes on one GPU. Each row goes
    through a group of one and is returned twice."""

    def __init__(self) -> None:
        super().__init__(0, 2)

    def supports_device(self, device: torch.device) -> bool:
        return World(0, 1).supports_device(device)

    def all_gather_rows(self, row: Tensor) -> Tensor:
        return World(0, 1).all_gather_rows(row).expand(2, -1).contiguous()

    def all_gather_object(self, value: Any) -> list[Any]:
        return World().all_gather_object(value) * 2

    def broadcast_object(self, value: Any) -> Any:
        return World().broadcast_object(value)


class MirrorGuard(holdfast.Guard):
    def _wire(self, run_dir: Any, config: Any) -> Wiring:
        return Wiring(
            run_dir,
            DiskCheckpointStore(run_dir, World(), 60.0),
            DistributedContext(Mirror(), MeshNorms(2), MeshReplicas(2)),
        )


class Guarded:
    """Runs a guarded loop to its end, and keeps the outcome of each step."""

    late = True

    def __init__(
        self,
        training: Training,
        run_dir: Path,
        *,
        faults: dict[int, str] | None = None,
        clip: float | None = 1.0,
        config: dict[str, Any] | None = None,
        inside: Callable[[int], None] | None = None,
        each: Callable[[int], None] | None = None,
        max_steps: int | None = None,
        mirrored: bool = False,
    ) -> None:
        """`inside` is called after a step's backward, `each` at the end of a step."""
        self.training, self.run_dir = training, run_dir
        self.outcomes: list[tuple[int, str]] = []
        gate = {"gate": training.setting.gate, "warmup_steps": 8}
        self.guard = (MirrorGuard if mirrored else holdfast.Guard)(
            training.model,
            training.optimizer,
            clip_grad_norm=clip,
            run_dir=run_dir,
            config={**QUICK, "detect": gate, **(config or {})},
            hooks=[self],
        )
        with self.guard:
            for step in self.guard.steps(training.loader(faults), epochs=1, max_steps=max_steps):
                with step:
                    for batch in step.microbatches():
                        step.backward(training.loss(batch))
                    if inside is not None:
                        inside(step.number)
                if each is not None:
                    each(step.number)

    def on_step_end(self, outcome: Any) -> None:
        self.outcomes.append((outcome.step, str(outcome.status)))

    on_recovery = on_step_end

    def not_committed(self) -> list[tuple[int, str]]:
        return [o for o in self.outcomes if o[1] != "committed"]

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = (self.run_dir / "journal.jsonl").read_text().splitlines()
        return [e for e in map(json.loads, lines) if e["event"] == name]

    def excluded(self) -> set[int]:
        """Return the steps whose data is quarantined, counted from 1."""
        entries = json.loads((self.run_dir / "quarantine.json").read_text())["entries"]
        spans = [span for entry in entries for span in entry.get("spans", [])]
        return {n + 1 for n in range(STEPS) for _, a, b in spans if a < (n + 1) * GLOBAL and n * GLOBAL < b}


def same(ours: Training, theirs: Training) -> None:
    """Assert that both ended with the same bits."""
    for n, (a, b) in enumerate(zip(ours.state(), theirs.state(), strict=True)):
        assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)), f"tensor {n} differs"
