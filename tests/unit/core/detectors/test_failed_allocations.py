"""The text of an out-of-memory error, of torch 1.0 to 2.13 and of others, says which kind it is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.base.types import Kind
from holdfast.core.detectors.out_of_memory import OutOfMemory, explain, parse

GIB, MIB = 1 << 30, 1 << 20
LEAK_ADVICE = "If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
CASES = {
    "2.x, full": (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 "
        "GiB of which "
        "1.50 GiB is free. Process 4711 has 77.64 GiB memory in use. Of the allocated memory 76.50 GiB is allocated "
        "by PyTorch, "
        f"and 310.20 MiB is reserved by PyTorch but unallocated. {LEAK_ADVICE}",
        Kind.MEMORY_CAPACITY,
    ),
    "2.x, in pieces": (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 "
        "GiB of which "
        "1.50 GiB is free. Including non-PyTorch memory, this process has 77.64 GiB memory in use. Of the allocated "
        "memory 61.00 "
        f"GiB is allocated by PyTorch, and 15.93 GiB is reserved by PyTorch but unallocated. {LEAK_ADVICE}",
        Kind.FRAGMENTATION,
    ),
    "2.x, a few percent in pieces, a large request": (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB of which 1.50 GiB is "
        "free. Of "
        "the allocated memory 70.00 GiB is allocated by PyTorch, and 6.50 GiB is reserved by PyTorch but unallocated.",
        Kind.FRAGMENTATION,
    ),
    "2.x, a memory fraction": (
        "HIP out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 255.98 GiB of which 244.65 GiB "
        "is free. 1.05 "
        "GiB allowed; Of the allocated memory 1017.01 MiB is allocated by PyTorch, with 17.00 MiB allocated in "
        "private pools "
        "(e.g., HIP Graphs), and 54.99 MiB is reserved by PyTorch but unallocated.",
        Kind.MEMORY_CAPACITY,
    ),
    "hip, the driver refuses": (
        "HIP out of memory. Tried to allocate 432.00 MiB. GPU 0 has a total capacity of 15.92 GiB of which 7.12 GiB "
        "is free. Of the "
        "allocated memory 8.08 GiB is allocated by PyTorch, and 321.96 MiB is reserved by PyTorch but unallocated.",
        Kind.OUT_OF_MEMORY,
    ),
    "hip, in pieces": (
        "HIP out of memory. Tried to allocate 6.64 GiB. GPU 0 has a total capacity of 19.92 GiB of which 6.22 GiB is "
        "free. Of the "
        "allocated memory 5.34 GiB is allocated by PyTorch, and 7.10 GiB is reserved by PyTorch but unallocated.",
        Kind.FRAGMENTATION,
    ),
    "hip, full": (
        "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 1.88 GiB. GPU 0 has a total capacity of 23.98 "
        "GiB of which "
        "1.70 GiB is free. Of the allocated memory 21.65 GiB is allocated by PyTorch, and 279.78 MiB is reserved by "
        "PyTorch but "
        "unallocated.",
        Kind.MEMORY_CAPACITY,
    ),
    "xpu": (
        "torch.OutOfMemoryError: XPU out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 48.00 "
        "GiB. Of the "
        "allocated memory 40.05 GiB is allocated by PyTorch, and 90.00 MiB is reserved by PyTorch but unallocated.",
        Kind.MEMORY_CAPACITY,
    ),
    "1.8, full": (
        "RuntimeError: CUDA out of memory. Tried to allocate 1.20 GiB (GPU 0; 15.78 GiB total capacity; 14.01 GiB already "
        "allocated; 20.00 MiB free; 14.50 GiB reserved in total by PyTorch)",
        Kind.MEMORY_CAPACITY,
    ),
    "1.12, in pieces": (
        "RuntimeError: CUDA out of memory. Tried to allocate 1.20 GiB (GPU 0; 15.78 GiB total capacity; 9.01 GiB already "
        "allocated; 20.00 MiB free; 14.50 GiB reserved in total by PyTorch) If reserved memory is >> allocated memory "
        "try setting "
        "max_split_size_mb to avoid fragmentation.",
        Kind.FRAGMENTATION,
    ),
    "1.0, cached": (
        "RuntimeError: CUDA out of memory. Tried to allocate 64.00 MiB (GPU 0; 11.17 GiB total capacity; 10.63 GiB already "
        "allocated; 20.00 MiB free; 120.50 MiB cached)",
        Kind.MEMORY_CAPACITY,
    ),
    "other processes": (
        "RuntimeError: CUDA out of memory. Tried to allocate 36.00 MiB (GPU 0; 7.93 GiB total capacity; 130.35 MiB already "
        "allocated; 7.06 MiB free; 188.00 MiB reserved in total by PyTorch)",
        Kind.MEMORY_CAPACITY,
    ),
    "host": (
        "RuntimeError: [enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you "
        "tried to "
        "allocate 40000000000 bytes. Error code 12 (Cannot allocate memory)",
        Kind.MEMORY_CAPACITY,
    ),
    "kernel": ("Memory cgroup out of memory: Killed process 4242 (python) total-vm:93824372kB", Kind.MEMORY_CAPACITY),
    "slurm": ("slurmstepd: error: Detected 1 oom_kill event in StepId=1234.0.", Kind.MEMORY_CAPACITY),
    "loader": (
        "RuntimeError: DataLoader worker (pid 812) is killed by signal: Bus error. It is possible that dataloader's "
        "workers are "
        "out of shared memory. Please try to raise your shared memory limit.",
        Kind.MEMORY_CAPACITY,
    ),
    "cublas": (
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        Kind.OUT_OF_MEMORY,
    ),
    "no sizes": ("RuntimeError: CUDA error: out of memory", Kind.OUT_OF_MEMORY),
    "mps, full": (
        "RuntimeError: MPS backend out of memory (MPS allocated: 9.40 GB, other allocations: 512.00 KB, max allowed: 10.20 "
        "GB). Tried to allocate 1.00 GB on private pool.",
        Kind.MEMORY_CAPACITY,
    ),
    "mps, a limit that the request keeps": (
        "RuntimeError: MPS backend out of memory (MPS allocated: 3.40 GB, other allocations: 512.00 KB, max allowed: 10.20 "
        "GB). Tried to allocate 1.00 GB on private pool.",
        Kind.OUT_OF_MEMORY,
    ),
    "tensorflow": (
        "ResourceExhaustedError: OOM when allocating tensor with shape[8,128,64] and type float by allocator GPU_0_bfc",
        Kind.OUT_OF_MEMORY,
    ),
    "2.1, which misspells capacity": (
        "CUDA out of memory. Tried to allocate 30.00 GiB. GPU 0 has a total capacty of 23.65 GiB of which 12.00 GiB is "
        "free. Of the allocated memory 11.00 GiB is allocated by PyTorch, and 200.00 MiB is reserved by PyTorch but "
        "unallocated.",
        Kind.MEMORY_CAPACITY,
    ),
    "mps, filled by others": (
        "MPS backend out of memory (MPS allocated: 8.90 GB, other allocations: 8.55 GB, max allowed: 18.13 GB). Tried to "
        "allocate 1.20 GB on private pool.",
        Kind.MEMORY_CAPACITY,
    ),
    "jax": ("RESOURCE_EXHAUSTED: Attempting to allocate 4.00G. That was not possible.", Kind.OUT_OF_MEMORY),
    "nccl": ("Last error: Failed to CUDA calloc async 608 bytes", Kind.OUT_OF_MEMORY),
}


@pytest.mark.parametrize("name", CASES)
def test_text_says_which_kind_it_is(name):
    text, kind = CASES[name]
    failed = parse(text)
    assert failed is not None and explain(failed).kind == kind, (failed, failed and explain(failed))


@pytest.mark.parametrize(
    ("line", "where"),
    [
        ("OOM when allocating tensor with shape[9] on /job:localhost/device:CPU:0 by allocator cpu", "host"),
        ("Last State: Terminated  Reason: OOMKilled  Exit Code: 137", "host"),
        ("srun: error: node1: task 0: Out Of Memory", "host"),
        ("slurmstepd: error: StepId=22.0 exceeded memory limit (40960 > 33554), being killed", "host"),
        ("=>> PBS: job killed: mem 131072kb exceeded limit 130000kb", "host"),
        ("TERM_MEMLIMIT: job killed after reaching LSF memory usage limit.", "host"),
        ("OutOfMemoryError: Task was killed due to the node running low on memory.", "host"),
        ("OSError: [WinError 1455] The paging file is too small for this operation to complete.", "host"),
        ("memory allocation of 17179869184 bytes failed", "host"),
        ("Failed to allocate 34359 bytes of pinned host memory: CUDA_ERROR_OUT_OF_MEMORY", "host"),
        ("NCCL WARN Error while creating shared memory segment /dev/shm/nccl-Ab (size 9637888)", "shared memory"),
        ("RuntimeError: unable to write to file </torch_1_2>: No space left on device (28)", "shared memory"),
        ("OSError: [Errno 28] No space left on device: '/dev/shm/torch_11'", "shared memory"),
        ("RuntimeError: Invalid buffer size: 32.00 GB", "device"),
    ],
)
def test_text_says_where_memory_ran_out(line, where):
    failed = parse(line)
    assert failed is not None and failed.where == where


def test_sizes_are_read():
    assert parse(CASES["2.x, in pieces"][0]) == OutOfMemory(
        "device", 2 * GIB, 1.5 * GIB, 79.15 * GIB, None, 61 * GIB, pytest.approx(15.93 * GIB)
    )
    old = parse(CASES["1.12, in pieces"][0])
    assert old is not None and old.unallocated == pytest.approx(5.49 * GIB) and old.free == 20 * MIB
    assert parse(CASES["host"][0]) == OutOfMemory("host", asked=4e10)


def test_text_about_others_and_shared_memory_says_so():
    others, loader = parse(CASES["other processes"][0]), parse(CASES["loader"][0])
    assert others is not None and "other processes use about 8" in explain(others).text
    assert loader is not None and "/dev/shm" in explain(loader).cure


@pytest.mark.parametrize(
    "line",
    [
        *("step 10 loss 2.3", "memory: 30.99GiB(32.62%)", "saved memory snapshot", "", "using pinned memory"),
        *("Tip: use checkpointing to avoid CUDA out of memory errors", "if you run out of memory, reduce --batch-size"),
        *("WARNING: more workers may lead to out of memory", "oom_kill_disable 0", "memory.events: oom 0 oom_kill 0"),
        *("grpc: RESOURCE_EXHAUSTED: Received message larger than max", "OSError: [Errno 28] No space left on device"),
        "unable to open shared memory object </torch_1_2> in read-write mode: Too many open files (24)",
        "bfc_allocator.cc: ran out of memory trying to allocate 1.00GiB. The caller indicates that this is not a failure",
    ],
)
def test_other_lines_say_nothing(line):
    assert parse(line) is None


@given(st.text(max_size=300), st.lists(st.floats(0, 1e6), min_size=5, max_size=5))
def test_any_text_is_read_without_an_error(text, sizes):
    asked, total, free, used, rest = sizes
    message = (
        f"{text} CUDA out of memory. Tried to allocate {asked:.2f} GiB. GPU 0 has a total capacity of {total:.2f} GiB "
        f"of which "
        f"{free:.2f} GiB is free. {used:.2f} GiB is allocated by PyTorch, and {rest:.2f} GiB is reserved by PyTorch but "
        f"unallocated. {text}"
    )
    failed = parse(message)
    assert failed is not None
    explain(failed)
