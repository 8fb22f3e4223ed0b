# Every target sets up what it needs in .venv, from the versions in constraints.txt.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

# One thread per process: torch's own pool only adds noise next to pytest-xdist.
export OMP_NUM_THREADS = 1
export MKL_NUM_THREADS = 1
# Compile each module once, and not in each of the processes that tests start.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: test test-slow test-all check soak mutate matrix demo bench bench-detectors bench-diagnosis bench-clean bench-faults bench-checkpoint bench-agreement bench-gpu bench-gpu-overhead bench-growth bench-trainers bench-hangs bench-reports gpu-libs clean
# In CI, where other programs slow the machine down, tests that failed run once more, one after another. The first failures stay in
# the output, and a second one is final. Status 1 says that every test has run.
ONCE_MORE = || { test $$? -eq 1 && test -n "$$CI" && echo "failed tests run once more, by themselves" && \
	$(BIN)/python -m pytest -q -x -m "not soak" --last-failed --last-failed-no-failures=none; }

# The quick tests, under 5 minutes on two cores. tests/conftest.py says how they are chosen. `make check` has those of the
# architecture.
test: $(READY)
	$(BIN)/python -m pytest -q -n 2 --dist worksteal --ignore tests/architecture $(PYTEST_OPTIONS) $(ONCE_MORE)

# What `make test` leaves to `make test-all`: after both, every test but those of `make soak` has run.
test-slow: $(READY)
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m "slow and not soak" $(PYTEST_OPTIONS) $(ONCE_MORE)

# Every test but those of `make soak`, with more random examples, over an hour on two cores.
test-all: $(READY)
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not soak" $(PYTEST_OPTIONS)

check: $(READY)
	$(BIN)/ruff check --no-cache src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/architecture

# Long runs: 650 processes ended by SIGKILL, 200 by KeyboardInterrupt, 250 by SIGTERM, 300 in which a file-system call fails; 10,000 damaged
# run directories through every command and a resume.
soak: $(READY)
	$(BIN)/python -m pytest -q -s -m soak

# The share of small changes to src that `make test` notices, drawn at random; survivors are listed with their diff.
mutate: $(READY)
	$(BIN)/python tests/mutate.py --count 64 --json build/mutate.json

# The table of drivers in docs/your_loop.md, from the results of the tests that are marked `shows`.
matrix: $(READY)
	$(BIN)/python tests/matrix.py

# What the guard costs on two cores: a step of about 50 ms and one of about 5 ms; docs/performance.md has its table.
bench: $(READY)
	$(BIN)/python -m benchmarks.overhead --json build/overhead.json

# The detectors against the frozen test seeds, real logs (HOLDFAST_CORPUS) and controlled runs; docs/detectors.md has its table.
bench-detectors: $(READY)
	$(BIN)/python -m benchmarks.detectors --check --plot docs/detectors.svg --json build/detectors.json

# Diagnoses against the labels of real logs, big logs, and fuzzed ones.
bench-diagnosis: $(READY)
	$(BIN)/python -m benchmarks.diagnosis.score
	$(BIN)/python -m benchmarks.diagnosis.big_log
	$(BIN)/python -m benchmarks.diagnosis.fuzz

# Clean loops of many kinds, guarded and unguarded: none may be harmed (half an hour on two cores).
bench-clean: $(READY)
	$(BIN)/python -m benchmarks.experiments.clean --json build/clean.json

# Every fault on three models, beside calm and unguarded runs (half an hour on two cores).
bench-faults: $(READY)
	$(BIN)/python -m benchmarks.experiments.faults --json build/faults.json

# Checkpoints beside torch.save, DCP save and DCP async_save, interleaved; docs/checkpoints.md has its table.
bench-checkpoint: $(READY)
	$(BIN)/python -m benchmarks.checkpoint --check --json build/checkpoint.json

# What agreeing costs a step against the number of ranks, on gloo; docs/ranks.md has its table.
bench-agreement: $(READY)
	$(BIN)/python -m benchmarks.agreement --rounds 15 --check --json build/agreement.json

# The invariants on a GPU: one rank on NCCL with FSDP2, two on gloo; docs/ranks.md has its table.
bench-gpu: $(READY)
	$(BIN)/python -m benchmarks.gpu.smoke --json build/gpu.json
	$(BIN)/python -m benchmarks.gpu.oom

# What the guard costs on a GPU, beside a bare loop and others, and how it grows; docs/performance.md has its tables.
bench-gpu-overhead: $(READY)
	$(BIN)/python -m benchmarks.gpu.overhead --check-equal --profile --check --budget 7200 --json build/gpu-overhead.json
	$(BIN)/python -m benchmarks.gpu.overhead --models 1.4b --batch 2 --rounds 0 --rollback --check --json build/gpu-rollback.json
	$(BIN)/python -m benchmarks.gpu.growth --json build/gpu-growth.json

# What the hang watch costs, and how long it takes to name a hang; docs/hangs.md has the table.
bench-hangs: $(READY)
	$(BIN)/python -m benchmarks.hangs cost --check
	$(BIN)/python -m benchmarks.hangs cases

# What the guard costs inside Hugging Face Trainer and Lightning, beside the same trainer without it.
bench-trainers: $(READY)
	$(BIN)/python -m benchmarks.trainers --check --json build/trainers.json

# The report of a million steps and the list of 200 runs; docs/report.md has the table.
bench-reports: $(READY)
	$(BIN)/python -m benchmarks.reports --check --json build/reports.json

# How it grows with a million steps (half an hour) and with ranks, on the CPU; docs/performance.md has the tables.
bench-growth: $(READY)
	$(BIN)/python -m benchmarks.gpu.growth --device cpu --what steps --steps 1000000 --check --json build/growth-steps.json
	$(BIN)/python -m benchmarks.ranks.growth --json build/growth-ranks.json

# What the benchmarks need beside torch on a machine without network: unpacked into .gpu_libs, to be copied along.
GPU_PYTHON ?= 3.12
gpu-libs:
	$(PYTHON) -m pip install -q --disable-pip-version-check --target .gpu_libs --upgrade --no-deps \
		--only-binary=:all: --python-version $(GPU_PYTHON) -c constraints.txt msgspec

demo: $(READY)
	$(BIN)/holdfast demo

$(READY): constraints.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "holdfast needs Python 3.11 or newer; try: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[torch,hf,lightning,dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
