"""Runs ranks that fail, die, hang or leave early under a StoreWatchdog, which they call as the guard does.

`run_scenarios` forks one process a rank. It writes each rank's exit code, and the seconds from `mark` to its exit, to
FOLDER/SCENARIO/exits.json. As a program, under torchrun, this runs `restarted`.
"""

from __future__ import annotations

import ctypes
import json
import logging
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from holdfast.core.base.config import LivenessSection
from holdfast.core.record.rank_records import RankRecords
from holdfast.distributed.notices import connect
from holdfast.distributed.watchdog import StoreWatchdog

LIMIT_SECONDS = 20
NO_PINGS = LivenessSection(every_steps=0, timeout_seconds=LIMIT_SECONDS, grace_seconds=0.5)
PINGS = LivenessSection(every_steps=1, timeout_seconds=1, grace_seconds=0.5)


class Oops(Exception):
    pass


class CallInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Callable[[str], None]) -> Tensor:
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.call("backward")
        return gradients[0], None


class Model(nn.Module):
    def __init__(self, at: Callable[[str], None]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)
        self.at = at

    def forward(self, x: Tensor) -> Tensor:
        self.at("forward")
        return self.last(CallInBackward.apply(self.first(x), self.at))


class PlainOptimizer:
    """Averages gradients and descends. DDP and torch's optimizers would take seconds to import the compiler."""

    def __init__(self, model: nn.Module, inside: Callable[[str], None]) -> None:
        self.model, self.inside = model, inside

    def step(self) -> None:
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.data -= 0.1 * parameter.grad
        self.inside("update")
        self.model.zero_grad()


class CallingSgd(torch.optim.SGD):
    """Calls `inside` at the beginning of its step."""

    def __init__(self, model: nn.Module, inside: Callable[[str], None]) -> None:
        super().__init__(model.parameters(), lr=0.1)
        self.inside = inside

    def step(self, closure: Any = None) -> None:
        self.inside("update")
        super().step()
        self.zero_grad()


class Rank:
    """One rank: its watchdog and the model it trains. It calls `at(rank, step, where)` inside each part of a step."""

    def __init__(self, folder: Path, rank: int, size: int, config: LivenessSection, session: str = "one") -> None:
        self.folder, self.rank, self.size = folder, rank, size
        self.records = RankRecords(folder, rank)
        self.watchdog = StoreWatchdog(rank, size, config, record=self.records.write, session=session)
        self.step, self.where = 0, "between steps"

    def train(self, steps: int, at: Callable[[int, int, str], None], batches: Any = None, ddp: bool = False) -> None:
        def inside(where: str) -> None:
            self.where = where
            at(self.rank, self.step, where)

        torch.manual_seed(0)
        model: nn.Module = DistributedDataParallel(Model(inside)) if ddp else Model(inside)
        optimizer = CallingSgd(model, inside) if ddp else PlainOptimizer(model, inside)
        self.watchdog.start()
        try:
            for self.step, (x,) in zip(range(1, steps + 1), batches or [(torch.ones(2, 4),)] * steps, strict=False):
                self.watchdog.enter_step(self.step)
                model(x).sum().backward()
                inside("ping")
                self.watchdog.ping(self.step)
                optimizer.step()
                self.watchdog.leave_step()
        except BaseException as error:
            self.watchdog.report_failure(error, self.step, self.where)
            raise
        self.watchdog.wait_for_others_to_finish(self.step)
        self.watchdog.close()

    def mark(self) -> None:
        """Record the time of the fault."""
        (self.folder / "mark").write_text(str(time.time()))

    def fail(self) -> None:
        self.mark()
        raise Oops(f"rank {self.rank} breaks")


def breaks(where: str, ranks: set[int]) -> Callable[..., None]:
    def scenario(me: Rank) -> None:
        def at(rank: int, step: int, now: str) -> None:
            if (step, now) == (3, where) and rank in ranks:
                me.fail()

        me.train(9, at, ddp=True)

    return scenario


def wait_for(marks: list[Path]) -> None:
    """Wait until the other ranks have left the last collective."""
    ends = time.monotonic() + LIMIT_SECONDS
    while not all(mark.exists() for mark in marks):
        assert time.monotonic() < ends
        time.sleep(0.005)


def killed(who: int, others_sleep: bool, workers: int = 0) -> Callable[..., None]:
    """A rank dies in forward. The others wait for it in a collective, or sleep, so that no collective breaks."""

    def scenario(me: Rank) -> None:
        def at(rank: int, step: int, where: str) -> None:
            if (step, where) != (3, "forward"):
                return
            if rank == who:
                wait_for([me.folder / f"at-{other}" for other in range(me.size) if other != who])
                time.sleep(0.3)  # they wait in the next collective now
                me.mark()
                os.kill(os.getpid(), signal.SIGKILL)
                return
            (me.folder / f"at-{rank}").touch()
            if others_sleep:
                time.sleep(LIMIT_SECONDS)

        fork = multiprocessing.get_context("fork") if workers else None
        data = TensorDataset(torch.ones(40, 4))
        loader = DataLoader(data, batch_size=2, num_workers=workers, multiprocessing_context=fork)
        me.train(9, at, loader if workers else None)

    return scenario


def pauses(me: Rank) -> None:
    """Rank 1 is stopped for five seconds, rank 2 holds the GIL for as long. Both are alive."""

    def at(rank: int, step: int, where: str) -> None:
        if (step, where) != (3, "forward"):
            return
        if rank == 1 and (child := os.fork()) == 0:
            time.sleep(5)
            os.kill(os.getppid(), signal.SIGCONT)
            os._exit(0)
        elif rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
            os.waitpid(child, 0)
        elif rank == 2:
            ctypes.PyDLL(None).usleep(5_000_000)

    me.train(9, at)
    assert not me.records.path.exists()
    dist.barrier()


def ends_apart(me: Rank) -> None:
    """The ranks finish together and exit one after the other, the host of the store first."""
    me.watchdog.start()
    dist.barrier()
    time.sleep(0.5)  # two polls: the ranks are connected
    me.watchdog.wait_for_others_to_finish(0)
    time.sleep(0.4 * me.rank)
    me.watchdog.close()
    assert not me.records.path.exists()


def leaves_early(me: Rank) -> None:
    me.train(5 if me.rank == 1 else 9, lambda rank, step, where: me.mark() if (rank, step) == (1, 5) else None)


def sleeps(me: Rank) -> None:
    def at(rank: int, step: int, where: str) -> None:
        if (rank, step, where) == (1, 3, "ping"):
            me.mark()
            time.sleep(LIMIT_SECONDS)

    me.train(9, at)


def stops(who: int) -> Callable[..., None]:
    def scenario(me: Rank) -> None:
        def at(rank: int, step: int, where: str) -> None:
            if (rank, step, where) == (who, 3, "ping"):
                me.mark()
                os.kill(os.getpid(), signal.SIGSTOP)

        me.train(9, at)

    return scenario


def hangs_on_exit(me: Rank) -> None:
    try:
        breaks("forward", {0})(me)
    except Oops:
        me.watchdog.close()
        time.sleep(LIMIT_SECONDS)


def healthy(me: Rank) -> None:
    """Train 60 steps, with a ping in every second one, and forked loader workers that report a failure."""

    def worker(_: int) -> None:
        me.watchdog.report_failure(Oops("in a worker"), 1, "forward")
        me.watchdog.wait_for_others_to_finish(1)
        me.watchdog.close()

    data, fork = TensorDataset(torch.ones(120, 4)), multiprocessing.get_context("fork")
    loader = DataLoader(data, batch_size=2, num_workers=1, worker_init_fn=worker, multiprocessing_context=fork)
    me.train(60, lambda *_: None, loader)
    assert not connect(dist.distributed_c10d._get_default_store()).check(["holdfast/one/failure"])
    assert not me.records.path.exists()
    dist.barrier()  # the host of the store exits last


SCENARIOS: dict[str, tuple[Callable[[Rank], None], LivenessSection]] = {
    "forward": (breaks("forward", {1}), NO_PINGS),
    "backward": (breaks("backward", {0}), NO_PINGS),
    "update": (breaks("update", {1}), NO_PINGS),
    "both": (breaks("forward", {0, 2}), NO_PINGS),
    **{f"killed_{who}_asleep": (killed(who, others_sleep=True), NO_PINGS) for who in range(4)},
    **{f"killed_{who}_in_collective": (killed(who, others_sleep=False), NO_PINGS) for who in range(4)},
    "killed_with_workers": (killed(2, others_sleep=True, workers=2), NO_PINGS),
    "pauses": (pauses, NO_PINGS),
    "ends_apart": (ends_apart, NO_PINGS),
    "leaves_early": (leaves_early, NO_PINGS),
    "sleeps": (sleeps, PINGS),
    "stops": (stops(1), PINGS),
    "host_stops": (stops(0), PINGS),
    "hangs_on_exit": (hangs_on_exit, NO_PINGS),
    "healthy": (healthy, LivenessSection(every_steps=2, timeout_seconds=LIMIT_SECONDS)),
}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def rank_main(scenario: str, folder: Path, rank: int, size: int, port: int) -> None:
    """Run a forked rank; never return."""
    status = 1
    os.dup2(os.open(folder / f"rank_{rank}.err", os.O_WRONLY | os.O_CREAT), 2)
    logging.basicConfig(stream=sys.stderr)
    try:
        address = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("gloo", address, timedelta(seconds=3 * LIMIT_SECONDS), size, rank)
        program, config = SCENARIOS[scenario]
        program(Rank(folder, rank, size, config))
        dist.destroy_process_group()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def run_scenario(scenario: str, folder: Path, size: int) -> None:
    folder.mkdir()
    port = free_port()
    ranks: dict[int, int] = {}
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            rank_main(scenario, folder, rank, size, port)
        ranks[pid] = rank
    exits: dict[int, tuple[int, float]] = {}
    deadline = time.monotonic() + 2 * LIMIT_SECONDS
    while len(exits) < size and time.monotonic() < deadline:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            exits[ranks[pid]] = (os.waitstatus_to_exitcode(status), time.time())
        elif len(exits) == size - 1 and "stops" in scenario:  # the stopped process does not exit by itself
            (left,) = [pid for pid, rank in ranks.items() if rank not in exits]
            os.kill(left, signal.SIGKILL)
        else:
            time.sleep(0.005)
    for pid, rank in ranks.items():
        if rank not in exits:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            exits[rank] = (-999, float("inf"))
    mark = folder / "mark"
    since = float(mark.read_text()) if mark.exists() else 0.0
    timed = [(exits[rank][0], exits[rank][1] - since) for rank in range(size)]
    (folder / "exits.json").write_text(json.dumps(timed))


def run_scenarios(folder: Path, log: Path, *scenarios: str) -> None:
    """Run each SCENARIO:SIZE in a process group of its own, with the output in a log."""
    os.setsid()
    opened = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(opened, 1)
    os.dup2(opened, 2)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    for name, size in (scenario.split(":") for scenario in scenarios):
        run_scenario(name, folder / name, int(size))


def restarted(folder: Path) -> None:
    """Under torchrun: rank 1 fails in the first attempt; the second attempt trains to the end."""
    logging.basicConfig()
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    # The agent's store still holds the addresses of the first attempt: without a prefix gloo may connect to them and hang
    # (pytorch issue 135712). The watchdog uses the store behind the prefix, which holds the first attempt's failure.
    shared = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=dist.PrefixStore(f"attempt_{attempt}", shared), rank=rank, world_size=size)
    sessions: list[Any] = [os.urandom(8).hex()]
    dist.broadcast_object_list(sessions)
    me = Rank(folder, rank, size, NO_PINGS, sessions[0])
    me.train(6, lambda rank, step, where: me.fail() if (attempt, rank, step, where) == (0, 1, 3, "forward") else None)
    me.records.write("done", attempt=attempt)
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    restarted(Path(sys.argv[1]))
