"""The scripts of `holdfast init --slurm` and `--torchrun`: they deliver a signal to the training and tell how it ended."""

from __future__ import annotations

import shlex
from typing import NamedTuple

SLURM_FILE = "train.sbatch"
TORCHRUN_FILE = "train.sh"
CPUS_PER_PROCESS = 8


class Launch(NamedTuple):
    """What to start, on how many nodes and GPUs, and the name of the script that does."""

    file: str
    command: list[str]
    nodes: int
    gpus: int
    """per node; 0 for a training on CPUs"""
    processes: int
    """per node"""
    time: str
    array: str | None


def slurm_script(launch: Launch) -> str:
    """Return a batch script that trains with torchrun and returns to the queue after a signal."""
    resources = [
        f"--nodes={launch.nodes}",
        "--ntasks-per-node=1              # one torchrun, which starts the processes of its node",
        *([f"--gpus-per-node={launch.gpus}"] if launch.gpus else []),
        f"--cpus-per-task={CPUS_PER_PROCESS * launch.processes}               # of all processes of a node",
        f"--time={launch.time}",
        *([f"--array={launch.array}"] if launch.array else []),
        f"--output=%x-{'%A_%a' if launch.array else '%j'}.out",
    ]
    return _SLURM.format(
        file=shlex.quote(launch.file),
        resources="\n".join(f"#SBATCH {line}" for line in resources),
        processes=launch.processes,
        command=_quote(launch.command),
    )


def torchrun_script(launch: Launch) -> str:
    """Return a script that trains with torchrun and ends with status 75 after a signal."""
    rendezvous = _STANDALONE if launch.nodes == 1 else _SEVERAL_NODES.format(nodes=launch.nodes)
    return _TORCHRUN.format(rendezvous=rendezvous, processes=launch.processes, command=_quote(launch.command))


def _quote(command: list[str]) -> str:
    """Return the command as a line of shell, without the interpreter: torchrun starts it."""
    return shlex.join(command[1:] if command[0] in ("python", "python3") else command)


_SLURM = """\
#!/bin/bash
# Trains under Slurm. Before a time limit and on a preemption or a requeue the training saves a checkpoint, the job
# returns to the queue, and its next start resumes. docs/slurm.md of Holdfast gives the reason for each line.
#   start:                 sbatch {file}
#   save and requeue now:  scancel --signal=USR1 JOB
#   stop for good:         scancel JOB
#   resume another job:    RESUME=ITS_JOB_ID sbatch {file}

{resources}
#SBATCH --signal=USR1@180                # to the processes of srun, 180 s (up to 240) before the time limit
#SBATCH --requeue                        # keeps its job ID, and so its run directory
#SBATCH --open-mode=append               # a requeued job does not overwrite its log
##SBATCH --partition=...                 # remove one # to use a line
##SBATCH --account=...

# Set up the environment here if `sbatch` does not run in it: module load ..., source .venv/bin/activate

# The run directory of this job, or of this task of an array: Guard(..., run_dir=os.environ["RUN_DIR"])
job="${{SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}}"
task="${{SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}}"
export RUN_DIR="runs/${{RESUME:-$job}}$task"

head="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
export ENDPOINT="$head:$((20000 + SLURM_JOB_ID % 10000))"
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=3600   # torch 2.11 ignores it: torchrun kills a save after 30 s
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # with torchrun's own store, restarted ranks may wait for dead ones

# Runs on every node. Slurm signals every process in it; torchrun then restarts nothing and waits for its workers.
# The trap runs when torchrun has ended. torchrun's own status does not tell a signal from a crash.
# shellcheck disable=SC2317  # srun calls it
train() {{
    trap 'stopped=75' USR1 TERM
    torchrun --nnodes "$SLURM_NNODES" --nproc-per-node {processes} --max-restarts 3 \\
        --rdzv-backend c10d --rdzv-endpoint "$ENDPOINT" --rdzv-id "$SLURM_JOB_ID-${{SLURM_RESTART_COUNT:-0}}" \\
        --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \\
        {command}
    status=$?
    [ "$status" -eq 0 ] || status="${{stopped:-$status}}"
    return "$status"
}}
export -f train

trap : TERM   # when Slurm ends the job it signals this shell too, which must wait for the training
srun ${{SLURM_CPUS_PER_TASK:+"--cpus-per-task=$SLURM_CPUS_PER_TASK"}} bash -c train
status=$?

# 75: a signal ended the training. 0 is its orderly end, anything else a failure or a stop by policy: no requeue.
# A job that Slurm is ending is COMPLETING: Slurm requeues it if it should be, and one that was cancelled stays so.
if [ "$status" -eq 75 ] && [ "$(squeue -h -j "$job$task" -o %T)" != COMPLETING ]; then
    scontrol requeue "$job$task" || echo "not requeued; to resume: RESUME=$job sbatch {file}" >&2
fi
exit "$status"
"""

_STANDALONE = "--standalone"
_SEVERAL_NODES = """\
--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint "${{HEAD:?name of the first node}}:29500" \\
   """

_TORCHRUN = """\
#!/bin/bash
# Trains with torchrun. After SIGTERM, SIGINT or SIGUSR1 to this script the training saves a checkpoint and ends.
# Status 0: finished. 75: ended by a signal; start it again, and it resumes. Else: failed, or stopped by policy.
# docs/slurm.md of Holdfast gives the reason for each line.

set -m   # torchrun gets a process group of its own: Ctrl-C reaches this script only, which passes it on once
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=3600   # torch 2.11 ignores it: torchrun kills a save after 30 s
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # with torchrun's own store, restarted ranks may wait for dead ones

# torchrun runs in the background, because a trap waits for a command in the foreground. It passes SIGTERM to its
# workers, restarts none and waits for them. Its own status does not tell a signal from a crash.
trap 'stopped=75; kill -TERM "$torchrun" 2>/dev/null' TERM INT HUP USR1
torchrun {rendezvous} --nproc-per-node {processes} --max-restarts 3 \\
    {command} &
torchrun=$!
[ -z "$stopped" ] || kill -TERM "$torchrun"   # the signal came before there was a process to pass it to

while :; do
    wait "$torchrun"   # a trap interrupts it
    status=$?
    kill -0 "$torchrun" 2>/dev/null || break
done
[ "$status" -eq 0 ] || status="${{stopped:-$status}}"
exit "$status"
"""
