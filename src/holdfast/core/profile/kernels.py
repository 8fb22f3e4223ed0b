"""Sorts kernels of a device, and operators of the host, into categories by their names. One table each."""

from __future__ import annotations

import re
from functools import lru_cache

GEMM, ATTENTION, COLLECTIVE, COPY, OPTIMIZER, ELEMENTWISE, OTHER = (
    "gemm", "attention", "collective", "memory copy", "optimizer", "elementwise", "other",
)  # fmt: skip
CATEGORIES = (GEMM, ATTENTION, COLLECTIVE, COPY, OPTIMIZER, ELEMENTWISE, OTHER)

_KERNELS = (
    # Inductor's names hold the operators that a kernel was fused from. What is left of a convolution is elementwise.
    (OPTIMIZER, r"^triton_for_"),
    (ELEMENTWISE, r"^triton_(?:poi|red|per|spl|mix)_"),
    (COLLECTIVE, r"nccl|rccl|msccl|nvshmem|symm_mem|one_shot_all_reduce|two_shot_all_reduce|multimem|(?<![a-z])all_?reduce"
                 r"|oneshotallreduce|twoshotallreduce|cross_device_reduce|userbuffers|all_?gather|reduce_?scatter|all_?to_?all"
                 r"|deep_?ep"),
    (COPY, r"^memcpy|^memset|copybuffer|fillbuffer|^cuda_?memcpy|copydevicetodevice|copyhosttodevice|copydevicetohost"),
    (ATTENTION, r"flash|fmha|attention|attn|sdpa|softmax_warp_.*masked|cudnn.*sdp|aotriton|_bwd_kernel_dk_dv|mha_"),
    (OPTIMIZER, r"multi_tensor|multitensor|fused_?adam|fusedoptimizer|fused_?sgd|fused_?lamb|adam_?w?_|adagrad"
                r"|(?<![a-z])lion_|muon|foreach|koptimizer"),
    (GEMM, r"gemm|gemv|cutlass|nvjet|xmma|cublas|wgmma|hgmma|s\d{3,5}(?:gemm|cudnn)|ampere_|volta_|turing_|hopper_"
           r"|blackwell_|sm\d{2,3}_.*(?:mma|tile|conv)|cijk|tensile|hipblas|matmul|splitk|split_k|conv(?!ert)|winograd|implicit_|[wd]grad|fprop"
           r"|triton_(?:tem_|mm|bmm|addmm)|_mm_kernel|bmm|addmm|marlin|deep_?gemm|(?<![a-z])dot_kernel|reduce_1block_kernel"),
    (ELEMENTWISE, r"elementwise|vectorized|reduce_kernel|softmax|layer_?norm|rms_?norm|batch_?norm|welford|dropout|triton_"
                  r"|index|gather|scatter|cat|fill|copy|cast|gelu|silu|relu|sigmoid|tanh|embedding|nll_loss|cross_entropy"
                  r"|sort|radix|cub|scan|cumsum|transpose|permute|where|arange|random|distribution|bernoulli|compare|unrolled"
                  r"|pool|norm|at::native|cast_kernel|convert|bn_(?:fw|bw)|nchwto|nhwcto|fusion"),
)  # fmt: skip
_OPERATORS = (
    (COLLECTIVE, r"^c10d|^gloo|^nccl|^record_param_comms|all_?reduce|all_?gather|reduce_?scatter|broadcast_$|all_?to_?all"),
    (OPTIMIZER, r"^optimizer|_fused_adam|_fused_sgd|_fused_adagrad|_foreach|_multi_tensor|addcdiv|addcmul|lerp"),
    (ATTENTION, r"scaled_dot_product|flash|attention|_softmax.*attn"),
    (GEMM, r"^(aten|mkldnn|mkl)::_?(t?addmm|mm|bmm|baddbmm|matmul|linear|addbmm|addmv|mv|dot|einsum|mkl_linear"
           r"|.*conv|mkldnn_.*|thnn_conv)|linear_pointwise|_scaled_mm|_grouped_mm|_int_mm"),
    (COPY, r"^aten::(copy_|_to_copy|to|clone|contiguous|item|_local_scalar_dense|cpu|cuda|numpy|_pin_memory|pin_memory)$"),
    (ELEMENTWISE, r"^aten::|^triton_|^cpp_|^inductor|^torch::"),
)  # fmt: skip
_KERNEL_TABLE = tuple((category, re.compile(pattern, re.IGNORECASE)) for category, pattern in _KERNELS)
_OPERATOR_TABLE = tuple((category, re.compile(pattern, re.IGNORECASE)) for category, pattern in _OPERATORS)


@lru_cache(maxsize=65536)
def classify_kernel(name: str) -> str:
    """Return the category of a kernel of a device, by its name as torch's profiler shows it."""
    head = name.removeprefix("void ")
    for category, pattern in _KERNEL_TABLE:
        if pattern.search(head):
            return category
    return OTHER


@lru_cache(maxsize=65536)
def classify_operator(name: str) -> str:
    """Return the category of an operator on the host."""
    for category, pattern in _OPERATOR_TABLE:
        if pattern.search(name):
            return category
    return OTHER
