"""Traces are read whatever their form, their categories add up, and a comparison names the cause."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.base.errors import LogRefused
from holdfast.core.detectors.slowdown import Slowdown
from holdfast.core.profile.kernels import classify_kernel, classify_operator
from holdfast.core.profile.trace import is_trace, read_trace
from holdfast.core.profile.verdict import Circumstances, compare, explain, render, render_summary


@pytest.mark.parametrize(
    ("name", "category"),
    [
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT", "gemm"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute", "gemm"),
        (
            "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_nt_align8>(T1::Params)",
            "gemm",
        ),
        ("void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<...>>", "gemm"),
        ("ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn", "gemm"),
        ("void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4, false>", "gemm"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>", "gemm"),
        ("Cijk_Ailk_Bljk_BBS_BH_Bias_HAS_SAV_UserArgs_MT256x256x64_MI16x16x1_SN", "gemm"),
        ("triton_tem_fused_mm_3", "gemm"),
        ("cudnn::engines_precompiled::nchwToNhwcKernel_conv", "gemm"),
        ("void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128, 128, 4>>", "attention"),
        ("void flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<...>>", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention)", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_64x128x128", "attention"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "collective"),
        ("ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)", "collective"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "collective"),
        ("Memcpy DtoH (Device -> Pinned)", "memory copy"),
        ("Memcpy HtoD (Pageable -> Device)", "memory copy"),
        ("Memset (Device)", "memory copy"),
        (
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedOptimizerMetadata>",
            "optimizer",
        ),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>", "elementwise"),
        (
            "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float>>>",
            "elementwise",
        ),
        ("triton_poi_fused_add_gelu_0", "elementwise"),
        ("triton_red_fused_native_layer_norm_1", "elementwise"),
        ("void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, float, float, float>", "elementwise"),
        ("triton_mm", "gemm"),
        ("void dot_kernel<float, 128, 0, cublasDotParams<cublasGemvTensor<float const>>>", "gemm"),
        ("triton_tem_fused_flex_attention_0", "attention"),
        ("triton_poi_fused_convolution_relu_1", "elementwise"),
        ("triton_per_fused__scaled_dot_product_efficient_attention_backward_3", "elementwise"),
        ("triton_poi_fused_convert_element_type_0", "elementwise"),
        ("triton_for_fused_0", "optimizer"),
        ("void kOptimizer32bit2State<float, 0>", "optimizer"),
        ("void (anonymous namespace)::GammaBetaBackwardCUDAKernelTemplate<at::native::bf16>", "elementwise"),
        ("void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, int, 512, true, 1, true>", "elementwise"),
        ("void vllm::cross_device_reduce_2stage<__nv_bfloat16, 8>", "collective"),
        ("small_reduce_kernel", "elementwise"),
        ("CopyHostToDevice", "memory copy"),
        ("my_own_kernel", "other"),
    ],
)
def test_kernels_are_sorted_by_their_names(name, category):
    assert classify_kernel(name) == category


def test_operators_are_sorted_by_their_names():
    found = {name: classify_operator(name) for name in ("aten::addmm", "aten::copy_", "c10d::allreduce_", "aten::gelu")}
    assert list(found.values()) == ["gemm", "memory copy", "collective", "elementwise"]
    assert classify_operator("Optimizer.step#AdamW.step") == "optimizer"


class Trace:
    """Writes a trace of a device, step by step: a host thread that launches, and two streams."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "args": {"name": "python"}}]
        self.now = 1000.0
        self.rank = 0

    def add(self, cat: str, name: str, length: float, *, at: float | None = None, tid: int = 7, **args: Any) -> None:
        start = self.now if at is None else at
        self.events.append(
            {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": tid, "ts": start, "dur": length, "args": args}
        )
        self.now = self.now + length if at is None else self.now

    def step(
        self,
        scale: float = 1.0,
        comm: float = 100.0,
        small: int = 10,
        copies: int = 0,
        gap: float = 0.0,
        group: int = 8,
        products: int = 10,
        grid: int = 64,
        host: float = 5.0,
        compiling: float = 0.0,
        loading: float = 0.0,
        saving: float = 0.0,
        memory: float = 1.0,
    ) -> None:
        for name, length in (("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", loading),):
            self.add("user_annotation", name, length, tid=1)
            self.add("gpu_user_annotation", name, length, at=self.now - length)
        for name in ("entire_frame_compile (dynamo_timed)", "_compile.compile_inner (dynamo_timed)"):
            if compiling:
                self.add("cpu_op", name, compiling, at=self.now, tid=1)
        self.now += compiling
        if saving:
            self.add("python_function", "train.py(80): save_checkpoint", saving, at=self.now, tid=1)
            self.add("python_function", "torch/serialization.py(957): save", saving, at=self.now, tid=1)
            for _ in range(20):
                self.add("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", saving / 40)
            self.now += saving / 2
        self.add("user_annotation", "Optimizer.step#AdamW.step", 1.0, at=self.now, tid=1)
        for _ in range(products):
            self.add("kernel", "nvjet_tst_128x256", 100.0 * scale, grid=[grid, 1, 1])
            self.now += host - 5.0
            self.add("cpu_op", "aten::mm", host, at=self.now, tid=1)
            self.add("cuda_runtime", "cudaLaunchKernel", 4.0, at=self.now, tid=1)
        self.add("kernel", "flash_fwd_kernel", 200.0 * scale)
        for _ in range(small):
            self.now += gap
            self.add("kernel", "vectorized_elementwise_kernel", 10.0 * scale * memory)
            self.add("cpu_op", "aten::add", 5.0, at=self.now, tid=1)
        for _ in range(copies):
            self.add("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 30.0)
            self.add("cpu_op", "aten::_to_copy", 60.0, at=self.now - 30, tid=1)
            self.add("python_function", "train.py(12): log_norms", 80.0, at=self.now - 40, tid=1)
            self.now += 20.0
        half = {"Group size": group}
        self.add("kernel", "ncclDevKernel_AllReduce_Sum", 60.0, at=self.now - 60.0, tid=8, **half)  # overlapped
        self.add("kernel", "ncclDevKernel_AllReduce_Sum", comm, tid=8, **half)  # exposed

    def write(self, path: Path, form: str = "kineto") -> Path:
        if form == "kineto":
            process = {"backend": "nccl", "rank": self.rank, "world_size": 8, "pg_config": [{"pg_size": 8}]}
            header = {"schemaVersion": 1, "deviceProperties": [], "distributedInfo": process}
            text = json.dumps({**header, "traceEvents": self.events}, indent=2)
        elif form == "array":
            text = json.dumps(self.events)
        else:  # an array whose end is missing, an event a line
            text = "[\n" + ",\n".join(json.dumps(each) for each in self.events) + ",\n"
        path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
        return path


def trace(path: Path, steps: int = 5, rank: int = 0, **step: Any) -> Any:
    made = Trace()
    made.rank = rank
    for _ in range(steps):
        made.step(**step)
    return read_trace(made.write(path))


@pytest.mark.parametrize("form", ["kineto", "array", "lines"])
@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_every_form_is_read_and_adds_up(tmp_path, form, name):
    made = Trace()
    for _ in range(3):
        made.step()
    path = made.write(tmp_path / name, form)
    assert is_trace(path)
    found = read_trace(path, 3)
    kernels = [each for each in made.events if each.get("cat") in ("kernel", "gpu_memcpy")]
    assert found.kernel_time == pytest.approx(sum(each["dur"] for each in kernels))
    assert sum(found.seconds.values()) == pytest.approx(found.kernel_time)
    assert found.seconds["gemm"] == 3000.0 and found.counts["collective"] == 6 and found.launches == 30
    assert found.exposed_collective == pytest.approx(300.0) and found.overlapped_collective == pytest.approx(180.0)
    assert "MatMul/GEMM" in render_summary(found)


CASES = {
    "host_device_copies": {"copies": 20},
    "framework_overhead": {"small": 200, "gap": 5.0},
    "network_degraded": {"comm": 1500.0},
    "parallelism_crosses_nodes": {"comm": 1500.0, "group": 64},
    "clocks_throttled": {"scale": 1.6},
    "recompilation_storm": {"compiling": 4000.0},
    "input_bound": {"loading": 4000.0},
    "checkpoint_interference": {"saving": 4000.0},
    "not_established": {},
}


@pytest.mark.parametrize("cause", CASES)
def test_a_pair_of_traces_gives_the_cause(tmp_path, cause):
    before, after = trace(tmp_path / "a.json"), trace(tmp_path / "b.json", steps=3, **CASES[cause])
    verdict = explain(None, before, after)
    assert verdict.cause == cause, verdict
    text = render(compare(before, after), verdict)
    assert "exposed communication" in text and verdict.advice in text
    if cause == "host_device_copies":
        assert verdict.evidence["line"] == "train.py(12): log_norms"


def test_the_parts_of_a_comparison_are_no_more_than_the_whole(tmp_path):
    before, after = trace(tmp_path / "a.json"), trace(tmp_path / "b.json", compiling=4000.0, loading=1000.0)
    assert after.compiles == 5 and after.compile_time == pytest.approx(20_000) and after.loader == pytest.approx(5000)
    verdict = explain(None, before, after)
    growth = after.per_step(after.span) - before.per_step(before.span)
    assert verdict.cause == "recompilation_storm" and max(verdict.evidence["parts_ms"].values()) <= growth + 0.001


def test_a_host_that_takes_longer_for_the_same_operations_is_framework_overhead(tmp_path):
    verdict = explain(None, trace(tmp_path / "a.json"), trace(tmp_path / "b.json", host=150.0))
    assert verdict.cause == "framework_overhead", verdict


def test_low_clocks_of_the_cores_are_found_if_the_grids_say_that_the_work_is_the_same(tmp_path):
    before = trace(tmp_path / "a.json", small=40)
    slower = {"scale": 1.5, "memory": 1 / 1.45, "small": 40}
    assert explain(None, before, trace(tmp_path / "b.json", **slower)).cause == "clocks_throttled"
    verdict = explain(None, before, trace(tmp_path / "c.json", scale=1.5, grid=128, small=40))
    assert verdict.cause == "not_established" and "times as many blocks" in verdict.text


def test_what_cannot_be_compared_is_not_established_and_the_text_says_why(tmp_path):
    before = trace(tmp_path / "a.json")
    faster = explain(None, trace(tmp_path / "b.json", scale=2.0), before)
    assert faster.cause == "not_established" and "give it first" in faster.text
    larger = explain(None, before, trace(tmp_path / "c.json", products=40, small=40))
    assert larger.cause == "not_established" and "40 matrix products a step instead of 10" in larger.text
    other = Trace()
    for name in ("conv", "bn", "relu", "pool", "linear", "add"):
        other.add("cpu_op", f"aten::{name}", 2000.0, tid=1)
        other.add("kernel", f"{name}_kernel", 2000.0)
    names = read_trace(other.write(tmp_path / "d.json"))
    elsewhere = explain(None, names, trace(tmp_path / "e.json", steps=1, small=2000))
    assert elsewhere.cause == "not_established" and "another program" in elsewhere.text


def test_traces_of_two_ranks_name_the_one_that_the_other_waits_for(tmp_path):
    waiting = trace(tmp_path / "a.json", rank=0, comm=1000.0)
    late = trace(tmp_path / "b.json", rank=3, scale=1.7)
    for pair in ((waiting, late), (late, waiting)):
        verdict = explain(None, *pair)
        assert verdict.cause == "one_slow_rank" and verdict.evidence["rank"] == 3
    assert explain(None, waiting, trace(tmp_path / "c.json", rank=3, comm=1000.0)).cause == "not_established"


def test_groups_of_one_size_with_ranks_further_apart_are_other_groups(tmp_path):
    pair = []
    for apart, comm in ((1, 100.0), (8, 3000.0)):
        made = Trace()
        made.step(comm=comm)
        for event in made.events:
            if "nccl" in event["name"]:
                event["args"]["Process Group Ranks"] = str([apart * rank for rank in range(8)])
        pair.append(read_trace(made.write(tmp_path / f"{apart}.json")))
    assert explain(None, *pair).cause == "parallelism_crosses_nodes"


def test_traces_of_xla_are_read_by_the_names_of_their_streams(tmp_path):
    def named(kind: str, name: str, **where: int) -> dict[str, Any]:
        return {"ph": "M", "name": kind, "args": {"name": name}, **where}

    names = [named("process_name", "/device:GPU:0", pid=3), named("thread_name", "XLA Ops", pid=3, tid=1)]
    names += [named("thread_name", "Stream #13(Compute)", pid=3, tid=13), named("process_name", "/host:CPU", pid=7)]
    work = [
        ("gemm_fusion_dot_1", 3, 13),
        ("loop_add_fusion", 3, 13),
        ("MemcpyH2D", 3, 13),
        ("dot", 3, 1),
        ("main", 7, 13),
    ]
    events = [{"ph": "X", "name": n, "pid": p, "tid": t, "ts": 9.0, "dur": 5.0} for n, p, t in work]
    (tmp_path / "a.json").write_text(json.dumps({"traceEvents": names + events}))
    found = read_trace(tmp_path / "a.json")
    assert found.seconds == {"gemm": 5.0, "elementwise": 5.0, "memory copy": 5.0} and found.transfers == 1


def slowdown(phase: str = "forward", rank: int | None = None) -> Slowdown:
    return Slowdown(
        step=300, onset=290, seconds_before=0.1, seconds_after=0.2, phase=phase, rank=rank,
        phases_before={phase: 0.05}, phases_after={phase: 0.15},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("found", "known", "cause"),
    [
        (slowdown("data"), Circumstances(), "input_bound"),
        (slowdown("data"), Circumstances(saving_after=0.9), "checkpoint_interference"),
        (slowdown("compute", rank=3), Circumstances(), "one_slow_rank"),
        (slowdown(), Circumstances(compiles_per_step=0.8), "recompilation_storm"),
        (slowdown(), Circumstances(throttled="thermal slowdown by hardware"), "clocks_throttled"),
        (slowdown("collective"), Circumstances(), "network_degraded"),
        (slowdown(), Circumstances(saving_after=0.9, saving_before=0.9), "not_established"),
        (slowdown(), Circumstances(), "not_established"),
    ],
)
def test_what_was_observed_directly_gives_the_cause(found, known, cause):
    verdict = explain(found, known=known)
    assert verdict.cause == cause
    note = found.finding(verdict.cause, verdict.advice, verdict.evidence)
    assert "since step 290" in note.message and note.onset == 290 and note.evidence["slowdown_cause"] == cause


def test_damage_is_skipped_and_counted(tmp_path):
    made = Trace()
    made.step()
    text = json.dumps({"traceEvents": made.events})
    broken = text.replace('"aten::mm"', r'"C:\q\x"', 1).replace('"dur": 100.0', '"dur": "soon"', 1)
    (tmp_path / "a.json").write_text(broken)
    found = read_trace(tmp_path / "a.json", 1)
    assert found.skipped == 2 and found.seconds["gemm"] == 900.0
    (tmp_path / "cut.json").write_text(text[: len(text) // 2])
    cut = read_trace(tmp_path / "cut.json", 1)
    assert 0 < cut.seconds["gemm"] <= 1000.0 and cut.is_cut and not found.is_cut
    (tmp_path / "cut.json.gz").write_bytes(gzip.compress(text.encode())[:-20])
    assert read_trace(tmp_path / "cut.json.gz", 1).kernel_time > 0


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"traceEvents": []}', "\x00\x01", '{"loss": 1}', '{"traceEvents": [1, "x", null]}']
)
def test_what_is_no_trace_is_refused(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(LogRefused):
        read_trace(tmp_path / "a.json")
