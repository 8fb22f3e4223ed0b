"""Ranks that fail, vanish, stop or leave early under a StoreWatchdog, driven as the guard drives it.

`python watched.py FOLDER SCENE:SIZE ...` imports once, then plays one scene after the other, a forked process a rank, and
writes to FOLDER/SCENE/ends.json with what status and how long after `mark` each rank ended. Under torchrun: `restarted`.
"""

from __future__ import annotations

import json
import logging
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

BOUND = 20
POLICY = LivenessSection(every_steps=0, timeout_seconds=BOUND, grace_seconds=0.5)
PINGS = LivenessSection(every_steps=1, timeout_seconds=1, grace_seconds=0.5)


class Oops(Exception):
    pass


class Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, step: Callable[[str], None]) -> Tensor:
        ctx.step = step
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.step("backward")
        return gradients[0], None


class Model(nn.Module):
    def __init__(self, at: Callable[[str], None]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)
        self.at = at

    def forward(self, x: Tensor) -> Tensor:
        self.at("forward")
        return self.last(Layer.apply(self.first(x), self.at))


class Plain:
    """Sums gradients one by one, and descends. DDP and torch's optimizers take seconds to import what they compile with."""

    def __init__(self, model: nn.Module, inside: Callable[[str], None]) -> None:
        self.model, self.inside = model, inside

    def step(self) -> None:
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.data -= 0.1 * parameter.grad
        self.inside("update")
        self.model.zero_grad()


class Descent(torch.optim.SGD):
    """Is called in the middle of its step."""

    def __init__(self, model: nn.Module, inside: Callable[[str], None]) -> None:
        super().__init__(model.parameters(), lr=0.1)
        self.inside = inside

    def step(self, closure: Any = None) -> None:
        self.inside("update")
        super().step()
        self.zero_grad()


class Rank:
    """One rank: its watch, and a model it trains. `at(rank, step, where)` is called inside each part of a step."""

    def __init__(self, folder: Path, rank: int, size: int, policy: LivenessSection, session: str = "one") -> None:
        self.folder, self.rank, self.size = folder, rank, size
        self.records = RankRecords(folder, rank)
        self.watch = StoreWatchdog(rank, size, policy, record=self.records.write, session=session)
        self.step, self.where = 0, "between steps"

    def train(self, steps: int, at: Callable[[int, int, str], None], batches: Any = None, ddp: bool = False) -> None:
        def inside(where: str) -> None:
            self.where = where
            at(self.rank, self.step, where)

        torch.manual_seed(0)
        model: nn.Module = DistributedDataParallel(Model(inside)) if ddp else Model(inside)
        optimizer = Descent(model, inside) if ddp else Plain(model, inside)
        self.watch.start()
        try:
            for self.step, (x,) in zip(range(1, steps + 1), batches or [(torch.ones(2, 4),)] * steps, strict=False):
                self.watch.enter_step(self.step)
                model(x).sum().backward()
                inside("ping")
                self.watch.ping(self.step)
                optimizer.step()
                self.watch.leave_step()
        except BaseException as error:
            self.watch.report_failure(error, self.step, self.where)
            raise
        self.watch.wait_for_others_to_finish(self.step)
        self.watch.close()

    def mark(self) -> None:
        """From here on the others' time counts."""
        (self.folder / "mark").write_text(str(time.time()))

    def fail(self) -> None:
        self.mark()
        raise Oops(f"rank {self.rank} breaks")


def breaks(where: str, ranks: set[int]) -> Callable[..., None]:
    def scene(me: Rank) -> None:
        def at(rank: int, step: int, now: str) -> None:
            if (step, now) == (3, where) and rank in ranks:
                me.fail()

        me.train(9, at, ddp=True)

    return scene


def killed_apart(me: Rank) -> None:
    """The host of the store dies while the others are busy with something of their own."""

    def at(rank: int, step: int, where: str) -> None:
        if (step, where) != (3, "forward"):
            return
        if rank == 0:
            time.sleep(0.3)  # the others are past the collectives they share with it
            me.mark()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(BOUND)

    me.train(9, at)


def killed_within(me: Rank) -> None:
    def at(rank: int, step: int, where: str) -> None:
        if (rank, step, where) == (0, 3, "forward"):
            me.mark()
            os.kill(os.getpid(), signal.SIGKILL)

    me.train(9, at)


def leaves_early(me: Rank) -> None:
    me.train(5 if me.rank == 1 else 9, lambda rank, step, where: me.mark() if (rank, step) == (1, 5) else None)


def sleeps(me: Rank) -> None:
    def at(rank: int, step: int, where: str) -> None:
        if (rank, step, where) == (1, 3, "ping"):
            me.mark()
            time.sleep(BOUND)

    me.train(9, at)


def stops(who: int) -> Callable[..., None]:
    def scene(me: Rank) -> None:
        def at(rank: int, step: int, where: str) -> None:
            if (rank, step, where) == (who, 3, "ping"):
                me.mark()
                os.kill(os.getpid(), signal.SIGSTOP)

        me.train(9, at)

    return scene


def hangs_in_its_end(me: Rank) -> None:
    try:
        breaks("forward", {0})(me)
    except Oops:
        me.watch.close()
        time.sleep(BOUND)


def healthy(me: Rank) -> None:
    """200 steps, a ping in every second, and loader workers that are forked and say that they have failed."""

    def worker(_: int) -> None:
        me.watch.report_failure(Oops("in a worker"), 1, "forward")
        me.watch.wait_for_others_to_finish(1)
        me.watch.close()

    data = TensorDataset(torch.ones(400, 4))
    me.train(200, lambda *_: None, DataLoader(data, batch_size=2, num_workers=1, worker_init_fn=worker))
    assert not connect(dist.distributed_c10d._get_default_store()).check(["holdfast/one/failure"])
    assert not me.records.path.exists()
    dist.barrier()  # the host of the store goes last


SCENES: dict[str, tuple[Callable[[Rank], None], LivenessSection]] = {
    "forward": (breaks("forward", {1}), POLICY),
    "backward": (breaks("backward", {0}), POLICY),
    "update": (breaks("update", {1}), POLICY),
    "both": (breaks("forward", {0, 2}), POLICY),
    "killed_apart": (killed_apart, POLICY),
    "killed_within": (killed_within, POLICY),
    "leaves_early": (leaves_early, POLICY),
    "sleeps": (sleeps, PINGS),
    "stops": (stops(1), PINGS),
    "host_stops": (stops(0), PINGS),
    "hangs_in_its_end": (hangs_in_its_end, POLICY),
    "healthy": (healthy, LivenessSection(every_steps=2, timeout_seconds=BOUND)),
}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def rank_main(scene: str, folder: Path, rank: int, size: int, port: int) -> None:
    """A forked rank; it never returns."""
    status = 1
    os.dup2(os.open(folder / f"rank_{rank}.err", os.O_WRONLY | os.O_CREAT), 2)
    logging.basicConfig(stream=sys.stderr)
    try:
        where = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("gloo", where, timedelta(seconds=3 * BOUND), size, rank)
        play, policy = SCENES[scene]
        play(Rank(folder, rank, size, policy))
        dist.destroy_process_group()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def play(scene: str, folder: Path, size: int) -> None:
    folder.mkdir()
    port = free_port()
    ranks: dict[int, int] = {}
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            rank_main(scene, folder, rank, size, port)
        ranks[pid] = rank
    ends: dict[int, tuple[int, float]] = {}
    until = time.monotonic() + 2 * BOUND
    while len(ends) < size and time.monotonic() < until:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            ends[ranks[pid]] = (os.waitstatus_to_exitcode(status), time.time())
        elif len(ends) == size - 1 and "stops" in scene:  # the one that is stopped does not end by itself
            (left,) = [pid for pid, rank in ranks.items() if rank not in ends]
            os.kill(left, signal.SIGKILL)
        else:
            time.sleep(0.005)
    for pid, rank in ranks.items():
        if rank not in ends:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            ends[rank] = (-999, float("inf"))
    mark = folder / "mark"
    since = float(mark.read_text()) if mark.exists() else 0.0
    told = [(ends[rank][0], ends[rank][1] - since) for rank in range(size)]
    (folder / "ends.json").write_text(json.dumps(told))


def restarted(folder: Path) -> None:
    """Under torchrun: rank 1 breaks in the first life; the second trains to the end."""
    logging.basicConfig()
    life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    # The agent's store still holds the first life's addresses: without a prefix gloo may connect to those, and hang
    # (pytorch issue 135712). The watch goes to the store behind the prefix, where the first life's failure is.
    shared = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=dist.PrefixStore(f"life_{life}", shared), rank=rank, world_size=size)
    sessions: list[Any] = [os.urandom(8).hex()]
    dist.broadcast_object_list(sessions)
    me = Rank(folder, rank, size, POLICY, sessions[0])
    me.train(6, lambda rank, step, where: me.fail() if (life, rank, step, where) == (0, 1, 3, "forward") else None)
    me.records.write("done", life=life)
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    place = Path(sys.argv[1])
    if "TORCHELASTIC_RESTART_COUNT" in os.environ:
        restarted(place)
    else:
        scenes = [words.split(":") for words in sys.argv[2:]]
        if any(name in ("forward", "backward", "update", "both") for name, _ in scenes):
            import torch._dynamo  # DDP imports it: once here, not in every rank
        for name, size in scenes:
            play(name, place / name, int(size))
