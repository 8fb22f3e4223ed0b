"""The heartbeat tells another process which phase the training thread is in."""

from __future__ import annotations

import mmap
import os
import threading

import pytest

import holdfast
from holdfast.core.hang.heartbeat import DATA, EVAL, FORWARD, SIZE, USER, Heartbeat, HeartbeatReader


def shared() -> tuple[Heartbeat, HeartbeatReader]:
    memory = memoryview(bytearray(SIZE))
    heartbeat = Heartbeat()
    heartbeat.share(memory)
    return heartbeat, HeartbeatReader(memory)


def test_every_phase_that_ended_is_read_once_with_its_time():
    heartbeat, reader = shared()
    heartbeat.enter(DATA)
    heartbeat.step = 4
    heartbeat.enter(FORWARD)
    heartbeat.enter(USER)
    ended = reader.read()
    assert [(beat.phase, beat.step, following.phase) for beat, following in ended] == [
        (DATA, 0, FORWARD),
        (FORWARD, 4, USER),
    ]
    assert all(following.since >= beat.since for beat, following in ended)
    assert reader.read() == []
    assert (reader.beat.phase, reader.thread) == (USER, threading.get_ident())


def test_a_reader_that_comes_late_reads_the_newest_beat():
    heartbeat, reader = shared()
    for _ in range(5000):  # several times around the ring
        heartbeat.enter(DATA)
        heartbeat.enter(FORWARD)
    heartbeat.step = 9
    heartbeat.enter(EVAL)
    assert 0 < len(reader.read()) < 4200
    assert (reader.beat.phase, reader.beat.step) == (EVAL, 9)
    heartbeat.enter(USER)
    assert [beat.phase for beat, _ in reader.read()] == [EVAL]


def test_beats_from_before_the_memory_was_shared_are_read_too():
    heartbeat = Heartbeat()
    heartbeat.enter(DATA)
    heartbeat.enter(FORWARD)
    memory = memoryview(bytearray(SIZE))
    heartbeat.share(memory)
    assert [beat.phase for beat, _ in HeartbeatReader(memory).read()] == [DATA]


def test_another_process_reads_the_beats():
    memory = mmap.mmap(-1, SIZE)
    heartbeat = Heartbeat()
    heartbeat.share(memoryview(memory))
    if (child := os.fork()) == 0:
        heartbeat.enter(EVAL)
        os._exit(0)
    os.waitpid(child, 0)
    reader = HeartbeatReader(memoryview(memory))
    reader.read()
    assert reader.beat.phase == EVAL


def test_a_declared_phase_ends_with_its_block_also_by_an_error():
    heartbeat = Heartbeat()
    with pytest.raises(ZeroDivisionError), heartbeat.during("eval"):
        assert heartbeat.phase == EVAL
        raise ZeroDivisionError
    assert heartbeat.phase == USER


def test_an_unknown_phase_is_refused_with_the_known_ones():
    with pytest.raises(holdfast.StepError, match="'evaluate'.*eval"), Heartbeat().during("evaluate"):
        pass
