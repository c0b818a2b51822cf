"""Frames between main and a worker, over real sockets."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import threading

import msgspec
import pytest

from omni_rt.errors import ProtocolError
from omni_rt.wire import channel as channel_module
from omni_rt.wire.channel import Frames, SocketChannel, SocketWorkerChannel, encode
from omni_rt.wire.messages import Free, Hello, Ping, Pong, Stop, ToMain

Seen = list[tuple[str, ToMain]]


class Main:
    """Main's end, and what arrived there."""

    def __init__(self) -> None:
        self.channel = SocketChannel()
        self.seen: Seen = []
        self.garbage: list[str] = []
        self.channel.watch(
            lambda who, messages: self.seen.extend((who, message) for message in messages),
            lambda who, what: self.garbage.append(what),
        )

    def worker(self, identity: str) -> SocketWorkerChannel:
        return SocketWorkerChannel(self.channel.open(identity).detach())

    async def until(self, count: int) -> None:
        async with asyncio.timeout(10):
            while len(self.seen) + len(self.garbage) < count:
                await asyncio.sleep(0.001)


def _receive(worker: SocketWorkerChannel, count: int) -> list[object]:
    messages: list[object] = []
    while len(messages) < count:
        messages += worker.receive(block=True)
    return messages


async def test_frames_go_both_ways_in_order() -> None:
    main = Main()
    worker = main.worker("echo.0.1")
    await asyncio.to_thread(worker.send, [Hello(1, 7), Pong(0, {})])
    await asyncio.to_thread(worker.send, [Pong(number, {}) for number in range(1, 600)])
    await main.until(601)
    assert main.seen[0] == ("echo.0.1", Hello(1, 7))
    assert [m.number for _, m in main.seen[1:] if isinstance(m, Pong)] == list(range(600))
    assert await asyncio.to_thread(worker.receive, block=False) == []
    assert main.channel.send("echo.0.1", [Ping(1), Ping(2)])
    assert main.channel.send("echo.0.1", [Stop()])
    received = await asyncio.to_thread(_receive, worker, 3)
    assert received == [Ping(1), Ping(2), Stop()]
    worker.close()
    main.channel.close()


async def test_many_frames_at_once_do_not_starve_the_loop_and_none_is_left() -> None:
    main = Main()
    worker = main.worker("w.0.1")
    turns = 0

    def send_all() -> None:
        for number in range(0, 20_000, 4):
            worker.send([Pong(number + i, {"counter": number}) for i in range(4)])

    sender = threading.Thread(target=send_all)
    sender.start()
    async with asyncio.timeout(10):
        while len(main.seen) < 20_000:
            await asyncio.sleep(0)
            turns += 1
    sender.join()
    assert [m.number for _, m in main.seen if isinstance(m, Pong)] == list(range(20_000))
    assert turns > 5
    worker.close()
    main.channel.close()


async def test_a_worker_that_does_not_read_does_not_hold_main_up() -> None:
    main = Main()
    worker = main.worker("w.0.1")
    for number in range(200):  # 20 MB, far more than a socket takes
        assert main.channel.send("w.0.1", [Ping(number), Free([(1, 2**40, 2**50)] * 5000)])
    received = await asyncio.to_thread(_receive, worker, 400)
    assert [m.number for m in received if isinstance(m, Ping)] == list(range(200))
    assert sum(len(m.blocks) for m in received if isinstance(m, Free)) == 1_000_000
    # What waited is gone: the next message goes straight through.
    assert main.channel.send("w.0.1", [Ping(1)])
    assert await asyncio.to_thread(worker.receive, block=True) == [Ping(1)]
    worker.close()
    main.channel.close()


async def test_the_last_words_of_a_worker_are_heard_after_its_end() -> None:
    main = Main()
    worker = main.worker("w.0.1")
    main.channel.send("w.0.1", [Ping(1)])  # which it never reads
    await asyncio.to_thread(worker.send, [Hello(1, 7)])
    worker.close()
    main.channel.forget("w.0.1")
    assert main.seen == [("w.0.1", Hello(1, 7))]
    assert not main.channel.send("w.0.1", [Stop()])
    main.channel.close()


async def test_a_worker_that_ended_is_not_written_to_and_costs_nothing() -> None:
    main = Main()
    worker = main.worker("w.0.1")
    worker.close()
    await asyncio.sleep(0.01)
    assert not main.channel.send("w.0.1", [Stop()])
    turns = len(main.seen)
    await asyncio.sleep(0.01)
    assert len(main.seen) == turns
    main.channel.close()


async def test_main_s_end_is_an_error_for_a_worker() -> None:
    main = Main()
    worker = main.worker("w.0.1")
    main.channel.send("w.0.1", [Ping(1)])
    main.channel.close()
    assert await asyncio.to_thread(worker.receive, block=True) == [Ping(1)]
    with pytest.raises(ProtocolError, match="main closed the channel"):
        await asyncio.to_thread(worker.receive, block=True)
    worker.close()


async def test_nobody_hears_what_is_sent_to_a_worker_that_is_not_there() -> None:
    main = Main()
    assert not main.channel.send("nobody.0.1", [Stop()])
    main.channel.close()


async def test_a_frame_that_is_no_message_is_reported_and_the_next_is_read() -> None:
    main = Main()
    worker = main.worker("w.0.1")
    for frame in (b"\xff\xfe", b"", os.urandom(200)):
        await asyncio.to_thread(worker._socket.sendall, len(frame).to_bytes(4, "little") + frame)
    await asyncio.to_thread(worker.send, [Hello(1, 1)])
    await main.until(4)
    assert len(main.garbage) == 3
    assert main.seen == [("w.0.1", Hello(1, 1))]
    worker.close()
    main.channel.close()


async def test_a_length_above_the_limit_is_reported_and_nothing_more_is_read() -> None:
    main = Main()
    worker = main.worker("w.0.1")
    await asyncio.to_thread(worker.send, [Hello(1, 1)])
    await asyncio.to_thread(worker._socket.sendall, b"\xff\xff\xff\xff")
    await main.until(2)
    await asyncio.to_thread(worker.send, [Pong(1, {})])
    await asyncio.sleep(0.02)
    assert main.seen == [("w.0.1", Hello(1, 1))]
    assert main.garbage == [
        f"a frame of {2**32 - 1} bytes exceeds {channel_module.MAX_FRAME_BYTES}"
    ]
    worker.close()
    main.channel.close()


async def test_too_much_for_a_frame_is_split_and_too_much_for_a_message_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channel_module, "MAX_FRAME_BYTES", 64)
    main = Main()
    worker = main.worker("w.0.1")
    assert main.channel.send("w.0.1", [Ping(n) for n in range(100)])
    received = await asyncio.to_thread(_receive, worker, 100)
    assert received == [Ping(n) for n in range(100)]
    with pytest.raises(ProtocolError, match="exceeds 64"):
        main.channel.send("w.0.1", [Free([(1, 2**40, 2**50)] * 20)])
    worker.close()
    main.channel.close()


async def test_nothing_of_a_worker_is_left_open() -> None:
    main = Main()
    before = len(os.listdir("/proc/self/fd"))
    for number in range(50):
        worker = main.worker(f"w.0.{number}")
        await asyncio.to_thread(worker.send, [Hello(1, number)])
        worker.close()
        main.channel.forget(f"w.0.{number}")
    assert len(os.listdir("/proc/self/fd")) == before
    main.channel.close()


@pytest.mark.parametrize("seed", range(20))
def test_frames_are_cut_the_same_however_the_stream_is_read(seed: int) -> None:
    rng = random.Random(seed)
    frames = [rng.randbytes(rng.choice((0, 1, 3, 4, 100, 70_000))) for _ in range(50)]
    stream = b"".join(len(frame).to_bytes(4, "little") + frame for frame in frames)
    cutter, cut, at = Frames(), [], 0
    while at < len(stream):
        size = rng.choice((1, 2, 3, 5, 1000, 65_536))
        cut += [bytes(frame) for frame in cutter.cut(stream[at : at + size])]
        at += size
    assert cut == frames


def test_a_frame_is_its_length_and_a_list_of_messages() -> None:
    frame = encode(msgspec.msgpack.Encoder(), [Ping(7)])
    assert int.from_bytes(frame[:4], "little") == len(frame) - 4
    assert msgspec.msgpack.decode(frame[4:], type=list[Ping]) == [Ping(7)]


def test_the_ends_are_not_inherited_by_other_processes() -> None:
    channel = SocketChannel()
    theirs = channel.open("w.0.1")
    assert not theirs.get_inheritable()
    assert theirs.family == socket.AF_UNIX
    theirs.close()
    channel.close()
