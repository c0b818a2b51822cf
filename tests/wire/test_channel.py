"""Frames between main and a worker, over real sockets."""

from __future__ import annotations

import asyncio
import os
import stat
import threading
from pathlib import Path

import pytest
import zmq

from omni_rt.errors import ProtocolError
from omni_rt.wire import channel as channel_module
from omni_rt.wire.channel import ZmqChannel, ZmqWorkerChannel
from omni_rt.wire.messages import Hello, Ping, Pong, Stop, ToMain

Seen = list[tuple[str, ToMain]]


class Main:
    """Main's end, and what arrived there."""

    def __init__(self) -> None:
        self.channel = ZmqChannel()
        self.seen: Seen = []
        self.garbage: list[str] = []

    def watch(self) -> None:
        self.channel.watch(
            lambda who, messages: self.seen.extend((who, message) for message in messages),
            lambda who, what: self.garbage.append(what),
        )

    async def until(self, count: int) -> None:
        async with asyncio.timeout(5):
            while len(self.seen) + len(self.garbage) < count:
                await asyncio.sleep(0.001)


async def test_frames_go_both_ways_in_order() -> None:
    main = Main()
    worker = ZmqWorkerChannel(main.channel.open_endpoint("echo.0.1"), "echo.0.1")
    main.watch()
    worker.send([Hello(1, 7), Pong(0, {})])
    worker.send([Pong(number, {}) for number in range(1, 600)])
    await main.until(601)
    assert main.seen[0] == ("echo.0.1", Hello(1, 7))
    assert [m.number for _, m in main.seen[1:] if isinstance(m, Pong)] == list(range(600))
    assert main.channel.send("echo.0.1", [Ping(1), Ping(2)])
    assert main.channel.send("echo.0.1", [Stop()])
    received = await asyncio.to_thread(_receive, worker, 3)
    assert received == [Ping(1), Ping(2), Stop()]
    worker.close()
    main.channel.close()


def _receive(worker: ZmqWorkerChannel, count: int) -> list[object]:
    messages: list[object] = []
    while len(messages) < count:
        messages += worker.receive(block=True)
    return messages


async def test_many_frames_at_once_do_not_starve_the_loop_and_none_is_left() -> None:
    """The descriptor is edge-triggered: what is not drained at once must be drained later."""
    main = Main()
    worker = ZmqWorkerChannel(main.channel.open_endpoint("w.0.1"), "w.0.1")
    main.watch()

    def send_all() -> None:
        for number in range(5000):
            worker.send([Pong(number, {})])

    sender = threading.Thread(target=send_all)
    sender.start()
    await main.until(5000)
    sender.join()
    assert [m.number for _, m in main.seen if isinstance(m, Pong)] == list(range(5000))
    worker.close()
    main.channel.close()


async def test_the_address_is_private_and_gone_once_the_worker_is_there() -> None:
    main = Main()
    address = main.channel.open_endpoint("w.0.1")
    folder = Path(address.removeprefix("ipc://")).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    worker = ZmqWorkerChannel(address, "w.0.1")
    main.watch()
    worker.send([Hello(1, 1)])
    await main.until(1)
    main.channel.connected("w.0.1")
    assert not folder.exists()
    assert main.channel.send("w.0.1", [Ping(3)])
    assert await asyncio.to_thread(_receive, worker, 1) == [Ping(3)]
    worker.close()
    main.channel.close()


async def test_nobody_hears_what_is_sent_to_a_worker_that_is_not_there() -> None:
    main = Main()
    main.watch()
    assert not main.channel.send("nobody.0.1", [Stop()])
    main.channel.close()


async def test_a_frame_that_is_no_message_is_reported_and_the_next_is_read() -> None:
    main = Main()
    address = main.channel.open_endpoint("w.0.1")
    worker = ZmqWorkerChannel(address, "w.0.1")
    main.watch()
    for frame in (b"\xff\xfe", b"", os.urandom(200)):
        worker._socket.send(frame)
    worker.send([Hello(1, 1)])
    await main.until(4)
    assert len(main.garbage) == 3
    assert main.seen == [("w.0.1", Hello(1, 1))]
    worker.close()
    main.channel.close()


async def test_too_much_for_a_frame_is_split_and_too_much_for_a_message_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channel_module, "MAX_FRAME_BYTES", 64)
    main = Main()
    worker = ZmqWorkerChannel(main.channel.open_endpoint("w.0.1"), "w.0.1")
    main.watch()
    worker.send([Hello(1, 1)])
    await main.until(1)
    assert main.channel.send("w.0.1", [Ping(n) for n in range(100)])
    received = await asyncio.to_thread(_receive, worker, 100)
    assert received == [Ping(n) for n in range(100)]
    from omni_rt.wire.messages import Free

    with pytest.raises(ProtocolError, match="exceeds 64"):
        main.channel.send("w.0.1", [Free([(1, 2**40, 2**50)] * 20)])
    worker.close()
    main.channel.close()


def test_the_limit_of_a_frame_is_set_on_both_ends() -> None:
    main = ZmqChannel()
    worker = ZmqWorkerChannel(main.open_endpoint("w.0.1"), "w.0.1")
    for end in (main, worker):
        assert end._socket.getsockopt(zmq.MAXMSGSIZE) == channel_module.MAX_FRAME_BYTES
    worker.close()
    main.close()
