"""Device pools between real processes on real devices."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from msgspec.structs import replace

from omni_rt.wire.arena import TABLE_BYTES, Arena
from omni_rt.wire.messages import AttachPool
from omni_rt.wire.tensors import DeviceBlock
from omni_rt_workers.cuda.pool import DevicePool, Place
from omni_rt_workers.cuda.probe import offer_device
from omni_rt_workers.cuda.runtime import CudaDriver

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
SLOT = 1 << 20


class Reader:
    """The consumer process."""

    def __init__(self, writer: Writer, reader: int, number: int = 0) -> None:
        table = writer.arena.fd
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.consumer", str(number), str(table)],
            pass_fds=[table],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'workers'}"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.write(writer.attachment(reader))

    def write(self, message: Any) -> None:
        assert self.process.stdin
        self.process.stdin.write(msgspec.json.encode(message) + b"\n")
        self.process.stdin.flush()

    def ask(self, what: str, ref: DeviceBlock | None = None) -> Any:
        self.write({"what": what, "ref": ref})
        return self.answer()

    def answer(self) -> Any:
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert line, f"the consumer is gone: {self.process.wait()}"
        return msgspec.json.decode(line)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe
            pipe.close()


class Writer:
    def __init__(self) -> None:
        self.driver = CudaDriver()
        self.device = self.driver.devices()[0]
        self.arena = Arena.create(5, TABLE_BYTES)
        self.pool = self.make(1, 32 << 20)
        self.stream = self.driver.current_stream(self.device)

    def make(self, number: int, size_bytes: int) -> DevicePool:
        return DevicePool(
            self.driver, number, self.device, size_bytes,
            readers=2, epoch=1, slot_bytes=SLOT, table=self.arena.view(0, TABLE_BYTES),
        )  # fmt: skip

    def attachment(self, reader: int) -> AttachPool:
        return replace(self.pool.attachment(reader), arena=self.arena.id)

    def reserve(self, nbytes: int) -> Place:
        place = self.pool.reserve(nbytes, self.stream)
        assert place
        return place


@pytest.fixture
def writer() -> Iterator[Writer]:
    writer = Writer()
    yield writer
    torch.cuda.synchronize()
    writer.pool.close()
    writer.arena.close()


@pytest.fixture
def reader(writer: Writer) -> Iterator[Reader]:
    reader = Reader(writer, 0)
    yield reader
    if reader.process.poll() is None:
        reader.ask("close")
    reader.kill()


def _ref(place: Place) -> DeviceBlock:
    shape = (place.nbytes,)
    return DeviceBlock(1, place.offset, place.generation, place.slot, "uint8", shape)


def test_a_probe_arrives_byte_by_byte(writer: Writer, reader: Reader) -> None:
    ref = offer_device(writer.pool, writer.driver, writer.stream)
    assert reader.ask("probe", ref) is None
    assert writer.pool.in_use_bytes == 0


def test_a_probe_reaches_a_peer(writer: Writer) -> None:
    devices = writer.driver.devices()
    peers = [n for n in range(1, len(devices)) if writer.driver.can_peer(devices[n], devices[0])]
    if not peers:
        pytest.skip("no second device that can read the first one's memory")
    reader = Reader(writer, 0, peers[0])
    try:
        ref = offer_device(writer.pool, writer.driver, writer.stream)
        assert reader.ask("probe", ref) is None
        reader.ask("close")
    finally:
        reader.kill()


def test_slots_are_reused_thousands_of_times_with_the_right_bytes(
    writer: Writer, reader: Reader
) -> None:
    rng = random.Random(1)
    for _ in range(300):
        sent = []
        for _ in range(8):
            place = writer.reserve(rng.randint(1, 3 * SLOT))
            value = rng.randint(0, 255)
            writer.pool.tensor(place).fill_(value)
            writer.pool.publish(place)
            reader.write({"what": "sum", "ref": _ref(place)})
            sent.append((place, value * place.nbytes))
        for place, expected in sent:
            assert reader.answer() == expected
            writer.pool.free(place.offset, place.generation)
    assert writer.pool.in_use_bytes == 0


def test_the_reader_waits_for_work_that_is_not_done_yet(writer: Writer, reader: Reader) -> None:
    place = writer.reserve(SLOT)
    writer.pool.tensor(place).fill_(1)
    torch.cuda.synchronize()
    large = torch.randn(8192, 8192, device="cuda")
    for _ in range(20):
        large = large @ large
    writer.pool.tensor(place).fill_(2)
    writer.pool.publish(place)
    assert reader.ask("sum", _ref(place)) == 2 * SLOT
    writer.pool.free(place.offset, place.generation)


def test_a_handle_is_opened_once(reader: Reader) -> None:
    assert "open in this process already" in reader.ask("open twice")


def test_a_killed_reader_blocks_nothing(writer: Writer) -> None:
    for _ in range(5):
        victim = Reader(writer, 1)
        place = writer.reserve(32 << 20)
        writer.pool.tensor(place).fill_(7)
        writer.pool.publish(place)
        victim.ask("hold", _ref(place))
        victim.kill()
        writer.pool.reader_died(1)
        writer.pool.free(place.offset, place.generation)
    again = writer.reserve(32 << 20)
    writer.pool.tensor(again).fill_(8)
    torch.cuda.synchronize()
    writer.pool.free(again.offset, again.generation)


def test_all_of_the_device_memory_comes_back() -> None:
    writer = Writer()
    writer.pool.close()
    torch.cuda.synchronize()
    before, _ = torch.cuda.mem_get_info()
    writer.pool = writer.make(2, 64 << 20)
    reader = Reader(writer, 0)
    reader.ask("close")
    reader.kill()
    writer.pool.close()
    after, _ = torch.cuda.mem_get_info()
    assert after >= before
