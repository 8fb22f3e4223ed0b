"""States in the memory of several hosts: kept twice, completed at a restart, and passed over if they cannot be."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from host_threads import LABEL, Job, contents, rewrite, tensors_of

from holdfast.core.base import durable
from holdfast.distributed.checkpoint import replication
from holdfast.distributed.checkpoint.replicated_store import ReplicatedMemoryStore

NAME = "step_00000012"
MakeJob = Callable[..., Job]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeJob]:
    jobs: list[Job] = []

    def make(hosts: str, timeout: float = 30.0) -> Job:
        jobs.append(Job(tmp_path, hosts, monkeypatch, timeout))
        return jobs[-1]

    yield make
    for job in jobs:
        for store in job.stores:
            store.abort()


def crash_after_save(make: MakeJob, hosts: str) -> Job:
    job = make(hosts)
    assert job.attach() == [None] * len(hosts)
    assert job.save(12) == [("saved", "")] * len(hosts)
    job.crash()
    return job


def assert_restored(job: Job) -> None:
    """Every rank has the same state complete, and restores what was saved."""
    assert job.entries() == [{NAME: None}] * len(job.hosts)
    expected = {n: t.tolist() for n, t in tensors_of(12).items()}
    assert job.load(NAME) == [(expected, rank) for rank in range(len(job.hosts))]


def ranks_kept(job: Job, host: str) -> set[int]:
    return {int(file.name[5:10]) for file in job.state(host, NAME).glob("rank_*.bin")}


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_each_host_keeps_its_files_and_those_of_the_host_before(make):
    job = crash_after_save(make, "aabbcc")
    assert [ranks_kept(job, host) for host in "abc"] == [{0, 1, 4, 5}, {2, 3, 0, 1}, {4, 5, 2, 3}]
    assert len({(job.state(host, NAME) / "manifest.json").read_bytes() for host in "abc"}) == 1
    assert not [name for host in "abc" for name in job.files(host) if ".tmp" in name or "note" in name]


@pytest.mark.parametrize("hosts", ["aabb", "aabbcc", "abab"])
def test_restart_restores_what_was_saved(make, hosts):
    crash_after_save(make, hosts)
    job = make(hosts)
    job.attach()
    assert_restored(job)


@pytest.mark.parametrize(("hosts", "lost"), [("aabb", "a"), ("aabb", "b"), ("aabbcc", "a"), ("aabbcc", "b")])
def test_replaced_host_fetches_everything_from_the_others(make, hosts, lost):
    folder = crash_after_save(make, hosts).folder
    shutil.rmtree(folder / lost)
    job = make(hosts)
    job.attach(makes=False)
    assert_restored(job)
    assert ranks_kept(job, lost) == set(range(len(hosts)))


def test_ranks_that_moved_to_other_hosts_are_restored(make):
    crash_after_save(make, "aabbcc")
    job = make("cbacba")
    job.attach()
    assert_restored(job)


def test_host_lost_together_with_its_neighbour_is_reported(make):
    folder = crash_after_save(make, "abc").folder
    shutil.rmtree(folder / "b")
    shutil.rmtree(folder / "c")
    job = make("abc")
    job.attach()
    assert job.entries() == [{NAME: "no host has rank_00001.bin and 1 more of its files"}] * 3


def test_file_that_is_damaged_on_one_host_is_fetched_from_the_other(make, caplog):
    job = crash_after_save(make, "aabb")
    flip_bit(job.state("a", NAME) / "rank_00002.bin")
    flip_bit(job.state("b", NAME) / "rank_00001.bin")
    job = make("aabb")
    job.attach()
    assert_restored(job)
    assert (
        "a: rank_00002.bin is not what was saved" in caplog.text
        and "b: rank_00001.bin is not what was saved" in caplog.text
    )


@pytest.mark.parametrize("file", ["rank_00002.bin", "rank_00002.json"])
def test_file_that_is_damaged_on_both_hosts_is_reported_with_both(make, file):
    job = crash_after_save(make, "aabb")
    flip_bit(job.state("a", NAME) / file)
    flip_bit(job.state("b", NAME) / file)
    job = make("aabb")
    job.attach()
    for states in job.entries():
        assert f"a: {file} is not what was saved" in states[NAME] and "host b" in states[NAME], states


@pytest.mark.parametrize("file", ["manifest.json", "health.json"])
@pytest.mark.parametrize("host", ["a", "b"])
def test_damaged_manifest_of_one_host_is_replaced(make, host, file, caplog):
    job = crash_after_save(make, "aabb")
    flip_bit(job.state(host, NAME) / file)
    job = make("aabb")
    job.attach()
    assert_restored(job)
    assert f"{NAME} in the shared memory of {host} is passed over: {file}" in caplog.text


@pytest.mark.parametrize(
    ("changes", "why"),
    [({"run": "f" * 32}, f"it belongs to run {'f' * 32}"), ({"format": 0}, "manifest.json is of format 0")],
)
def test_state_of_another_run_or_version_is_not_restored(make, changes, why, caplog):
    job = crash_after_save(make, "ab")
    for host in "ab":
        rewrite(job.state(host, NAME), **changes)
    job = make("ab")
    job.attach()
    assert job.entries() == [{NAME: "no host has a valid manifest of this run"}] * 2
    assert f"{NAME} in the shared memory of b is passed over: {why}" in caplog.text


def test_new_state_replaces_the_one_before_on_every_host(make):
    job = crash_after_save(make, "aabb")
    job = make("aabb")
    job.attach()
    assert job.save(16) == [("saved", "")] * 4
    job.each(lambda store: (store.remove([NAME]), store.wait()))
    for host in "ab":
        assert [p.name for p in job.state(host, "step_00000016").parent.iterdir()] == ["step_00000016"]


@pytest.mark.slow
def test_crash_while_hosts_publish_leaves_a_state_that_is_complete(make, monkeypatch):
    """One of four hosts has published when all ranks die. The state before it is still on all of them."""
    job = crash_after_save(make, "abcd")
    job = make("abcd")
    job.attach()
    monkeypatch.setattr(ReplicatedMemoryStore, "_remove_elsewhere", lambda *_: None)
    monkeypatch.setattr(job.stores[0], "_other_leads", lambda: iter([job.stores[0]._peers[2], unreachable()]))
    job.each(lambda store: setattr(store, "_timeout", 3.0))
    assert job.save(16)[0][0] == "failed" and job.state("c", "step_00000016").is_dir()
    job.crash()
    job = make("abcd")
    job.attach()
    assert job.entries() == [{NAME: None, "step_00000016": "no host has rank_00000.bin and 3 more of its files"}] * 4
    assert len(job.load(NAME)) == 4


def unreachable() -> replication.Peer:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        return replication.Peer(1, "b", "127.0.0.1", closed.getsockname()[1], "token")


def test_orderly_end_leaves_nothing_on_any_host(make):
    job = make("aabbcc")
    job.attach()
    job.save(12)
    job.end()
    assert [list((job.folder / host).iterdir()) for host in "abc"] == [[], [], []]


def test_rank_that_cannot_write_keeps_the_state_from_every_host(make):
    job = make("aabb")
    job.attach()

    def work(store):
        def fail(name):
            if store._world.rank == 2:
                raise OSError(28, "No space left on device")

        store.save(contents(12, store._world.rank, wait=fail), LABEL)
        store.wait()
        return store.events.popleft()

    events = job.each(work)
    assert [event.status for event in events] == ["failed"] * 4
    assert "rank 2" in events[0].why and "No space left" in events[0].why
    assert not [name for host in "ab" for name in job.files(host) if "step" in name]


def test_host_without_room_for_the_copy_keeps_the_state_from_every_host(make, monkeypatch):
    """The receiving host has no room left, which only the kernel of that host knows."""
    job = make("ab")
    job.attach()
    write_all = durable.write_all

    def full(descriptor, data):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if f"{job.folder}/b/" in path and "rank_00000.bin" in path:
            raise OSError(28, "No space left on device")
        write_all(descriptor, data)

    monkeypatch.setattr(durable, "write_all", full)
    events = job.save(12)
    assert [status for status, _ in events] == ["failed"] * 2
    assert "host b" in events[0][1] and "No space left" in events[0][1]
    assert not [name for host in "ab" for name in job.files(host) if "step" in name]


def test_shared_memory_removed_on_one_host_ends_the_write_at_once(make):
    job = make("aabb")
    job.attach()
    shutil.rmtree(job.folder / "b" / "holdfast-0")
    began = time.monotonic()
    events = job.save(12)
    assert [status for status, _ in events] == ["failed"] * 4 and time.monotonic() - began < 20
    assert "b/holdfast-0" in events[0][1] and "was removed" in events[0][1], events
    assert not [name for name in job.files("a") if "step" in name]


def test_hosts_of_different_names_with_one_folder_are_refused(make):
    job = make("ab")
    shutil.rmtree(job.folder / "b")
    (job.folder / "b").symlink_to(job.folder / "a")
    problems = job.attach()
    assert all("share" in problem for problem in problems), problems


def test_fetch_without_room_is_refused(make, monkeypatch):
    folder = crash_after_save(make, "aabb").folder
    shutil.rmtree(folder / "b")
    job = make("aabb")
    job.attach()
    for store in job.stores[2:]:
        monkeypatch.setattr(store, "room", lambda: (1000, 1 << 30))
    for states in job.entries():
        assert "to fetch the rest" in states[NAME], states


# ---- strangers


def connect(job: Job, rank: int) -> socket.socket:
    local = job.stores[rank]._exchange.local
    return socket.create_connection((local.address, local.port), 10)


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"\x00\xff" * 40_000,
        b"GET / HTTP/1.1\r\n\r\n",
        b'{"token":"","action":"remove","state":"step_00000012"}\n',
        b'{"token":"\\ud800","action":"remove","state":"step_00000012"}\n',
        b"[" * 10_000 + b"\n",
    ],
    ids=["nothing", "noise", "http", "no token", "no text", "nested"],
)
def test_stranger_changes_nothing(make, sent, monkeypatch):
    monkeypatch.setattr(replication, "HELLO_SECONDS", 1.0)
    job = make("ab")
    job.attach()
    job.save(12)
    before = {host: job.files(host) for host in "ab"}
    strangers = [connect(job, rank) for rank in (0, 1) for _ in range(3)]
    for stranger in strangers:
        with contextlib.suppress(OSError):
            stranger.sendall(sent)
    assert job.save(16) == [("saved", "")] * 2
    for stranger in strangers:
        stranger.settimeout(10)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(100) == b"", "a stranger gets no answer"
        stranger.close()
    assert {host: [f for f in job.files(host) if NAME in f] for host in "ab"} == {
        host: [f for f in before[host] if NAME in f] for host in "ab"
    }


def test_more_strangers_than_connections_delay_a_write_and_do_not_stop_it(make, monkeypatch):
    monkeypatch.setattr(replication, "HELLO_SECONDS", 0.5)
    job = make("ab")
    job.attach()
    strangers = [connect(job, 1) for _ in range(100)]
    assert job.save(12) == [("saved", "")] * 2
    for stranger in strangers:
        stranger.close()


@pytest.mark.parametrize(
    ("action", "state", "file"),
    [
        ("get", "../../../run", "run.json"),
        ("get", NAME, "../../run_dir"),
        ("put", "step_00000099", "../x"),
        ("put", "step_00000012", ".hidden"),
        ("publish", "step_00000099", ""),
        ("remove", "checkpoints", ""),
    ],
)
def test_request_outside_the_states_is_refused(make, action, state, file):
    job = make("ab", timeout=1.0)
    job.attach()
    job.save(12)
    before = {host: job.files(host) for host in "ab"}
    exchange, peer = job.stores[0]._exchange, job.stores[1]._exchange.local
    with pytest.raises(Exception, match="host b"):
        if action == "get":
            exchange.get_file(peer, state, job.folder / file, replication.FileSum(1, "crc32:00000000"), 5)
        else:
            exchange.send(peer, action, state, 5, file, b"content")
    assert {host: job.files(host) for host in "ab"} == before


def test_rank_that_ends_waits_for_no_transfer(make):
    """A host that accepts connections and never answers, as one that was stopped."""
    job = make("ab", timeout=60.0)
    job.attach()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        job.stores[0]._peers[1] = replication.Peer(1, "b", "127.0.0.1", silent.getsockname()[1], "token")
        job.stores[0].save(contents(12, 0), LABEL)
        silent.settimeout(30)
        connection = silent.accept()[0]
        began = time.monotonic()
        job.stores[0].abort()
        job.stores[0].wait()
        assert time.monotonic() - began < 40
        assert job.stores[0].events.popleft().status == "failed"
        connection.close()
