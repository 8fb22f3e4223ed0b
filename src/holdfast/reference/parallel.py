"""Parallelizes the model: copies (DDP), shards (FSDP2) and split matrices (tensor parallel).

Every rank builds the whole model from the seed and keeps its part. So the weights, their names and their shapes do not
depend on the layout, and a checkpoint of one layout can be read in another.
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

from holdfast.reference.layout import ParallelLayout
from holdfast.reference.model import Transformer


def parallelize(model: Transformer, layout: ParallelLayout, device: torch.device) -> nn.Module:
    """Return `model` distributed over the ranks of `layout`. Every rank must call this with the same weights."""
    if layout.size == 1:
        return model
    if layout.size == layout.data:
        return DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
    mesh = init_device_mesh(
        device.type, (layout.data, layout.shard, layout.tensor), mesh_dim_names=("data", "shard", "tensor")
    )
    if layout.tensor > 1:
        _split_matrices(model, mesh["tensor"])
    if layout.shares > 1:
        # torch 2.13 warns about a tensor-parallel model's logits. Only in-place changes would do harm, and there are none.
        warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")
        # Copies of a tensor-parallel model are hybrid shards of one shard each, to keep all parameters on one mesh.
        shard_mesh = mesh["data", "shard"] if layout.data > 1 else mesh["shard"]
        for block in model.blocks:
            fully_shard(block, mesh=shard_mesh)
        fully_shard(model, mesh=shard_mesh)
    return model


def _split_matrices(model: Transformer, mesh: DeviceMesh) -> None:
    """Split every matrix over `mesh`, in place.

    The outputs of `qkv` and `gate_up` are gathered on every rank. Their rows are all of q, then k, then v (gate, then
    up), so a slice of the rows is not a slice of the heads.
    """
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.RMSNorm):
                setattr(module, name, _ReplicatedRMSNorm(child, mesh))
    heads, whole = Shard(1), Replicate()
    is_tied = model.head.weight is model.embedding.weight
    parallelize_module(
        model,
        mesh,
        {
            "embedding": ColwiseParallel(output_layouts=whole),
            "blocks.*.attention.qkv": ColwiseParallel(output_layouts=whole),
            "blocks.*.attention.core": PrepareModuleInput(
                input_layouts=(whole,) * 3, desired_input_layouts=(heads,) * 3, use_local_output=True
            ),
            "blocks.*.attention.out": RowwiseParallel(),
            "blocks.*.feed_forward.gate_up": ColwiseParallel(output_layouts=whole),
            "blocks.*.feed_forward.down": RowwiseParallel(input_layouts=whole),
            "head": RowwiseParallel(input_layouts=whole),
        },
    )
    if is_tied:  # parallelize_module has made two parameters of the shared one
        model.head.weight = model.embedding.weight


class _ReplicatedRMSNorm(nn.RMSNorm):
    """Holds the whole weight on every rank as a DTensor, so that all parameters share a mesh, and computes locally."""

    def __init__(self, norm: nn.RMSNorm, mesh: DeviceMesh) -> None:
        super().__init__(norm.normalized_shape, eps=norm.eps, device="meta")
        self.weight = nn.Parameter(distribute_tensor(norm.weight.detach(), mesh, [Replicate()]))

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.weight, DTensor)
        return F.rms_norm(x, self.normalized_shape, self.weight.to_local(), self.eps)
