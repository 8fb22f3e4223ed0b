"""One model over several ranks: whole copies, shards (FSDP2), and matrices cut in slices (tensor parallel).

Every rank builds the whole model from the seed and keeps its part, so that the weights are those of one rank whatever the
layout; names and shapes are too, so that a checkpoint of one layout can be read in another.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from holdfast.reference.layout import Layout
from holdfast.reference.model import Transformer


def spread(model: Transformer, layout: Layout, device: torch.device) -> nn.Module:
    """`model` over the ranks of `layout`, of which every one has called this with the same weights."""
    if layout.size == 1:
        return model
    if layout.size == layout.data:
        return DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
    mesh = init_device_mesh(
        device.type, (layout.data, layout.shard, layout.tensor), mesh_dim_names=("data", "shard", "tensor")
    )
    if layout.tensor > 1:
        _slice(model, mesh["tensor"])
    if layout.shares > 1:
        # Said of a sliced model's logits by torch 2.13. It is changes in place that would do harm, and nothing makes any.
        warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")
        # Copies of a sliced model are hybrid shards too, of one shard each: all parameters then live on one mesh.
        over = mesh["data", "shard"] if layout.data > 1 else mesh["shard"]
        for block in model.blocks:
            fully_shard(block, mesh=over)
        fully_shard(model, mesh=over)
    return model


def _slice(model: Transformer, mesh: DeviceMesh) -> None:
    """Cut every matrix. What `qkv` and `gate_up` give is put together again on every rank: their rows are q, k and v (gate
    and up) one after another, not head by head, so that a slice of them is no slice of the heads."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.RMSNorm):
                setattr(module, name, _Copied(child, mesh))
    heads, whole = Shard(1), Replicate()
    tied = model.head.weight is model.embedding.weight
    parallelize_module(
        model,
        mesh,
        {
            "embedding": ColwiseParallel(output_layouts=whole),
            "blocks.*.attention.qkv": ColwiseParallel(output_layouts=whole),
            "blocks.*.attention.mix": PrepareModuleInput(
                input_layouts=(whole,) * 3, desired_input_layouts=(heads,) * 3, use_local_output=True
            ),
            "blocks.*.attention.out": RowwiseParallel(),
            "blocks.*.feed_forward.gate_up": ColwiseParallel(output_layouts=whole),
            "blocks.*.feed_forward.down": RowwiseParallel(input_layouts=whole),
            "head": RowwiseParallel(input_layouts=whole),
        },
    )
    if tied:  # each has been cut into a parameter of its own
        model.head.weight = model.embedding.weight


class _Copied(nn.RMSNorm):
    """A norm whose weight every rank has whole: it lives on the mesh with the others, and is used where it is."""

    def __init__(self, norm: nn.RMSNorm, mesh: DeviceMesh) -> None:
        super().__init__(norm.normalized_shape, eps=norm.eps, device="meta")
        self.weight = nn.Parameter(distribute_tensor(norm.weight.detach(), mesh, [Replicate()]))

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.weight, DTensor)
        return F.rms_norm(x, self.normalized_shape, self.weight.to_local(), self.eps)
