"""The other process of test_cuda_ipc.py: `python -m tests.gpu.consumer DEVICE_NUMBER TABLE_FD`.

Reads an `AttachPool`, then a `Command` a line, and answers each with a line.
"""

from __future__ import annotations

import sys
from typing import Any, Literal

import msgspec
import torch

from omni_rt.errors import OmniError
from omni_rt.wire.arena import TABLE_BYTES, Arena
from omni_rt.wire.messages import AttachPool
from omni_rt.wire.tensors import DeviceBlock
from omni_rt_workers.cuda.probe import take_device
from omni_rt_workers.cuda.reader import DevicePoolReader
from omni_rt_workers.cuda.runtime import CudaDriver


class Command(msgspec.Struct):
    what: Literal["probe", "sum", "hold", "open twice", "close"]
    ref: DeviceBlock | None = None


class Consumer:
    def __init__(self, number: int, table: int, attach: AttachPool) -> None:
        torch.cuda.set_device(number)
        self.driver = CudaDriver()
        self.device = self.driver.devices()[number]
        self.attach = attach
        self.arena = Arena.attach(attach.arena, table, TABLE_BYTES, writable=False)
        self.reader = self.open()

    def open(self) -> DevicePoolReader:
        table = self.arena.view(self.attach.table, TABLE_BYTES)
        return DevicePoolReader.attach(self.driver, self.attach, self.device, table)

    def answer(self, command: Command) -> Any:
        stream = self.driver.current_stream(self.device)
        if command.what == "close":
            return self.reader.close()
        if command.what == "open twice":
            try:
                self.open()
            except OmniError as error:
                return str(error)
        assert command.ref is not None
        if command.what == "probe":
            attempt = take_device(self.reader, self.driver, stream, command.ref)
            return attempt.problem
        block = self.reader.open(command.ref, stream)
        if command.what == "hold":
            return None
        total = block.tensor().sum(dtype=torch.int64)
        block.release()  # before the sum is known here
        return int(total)


def main() -> None:
    attach = msgspec.json.decode(sys.stdin.buffer.readline(), type=AttachPool)
    consumer = Consumer(int(sys.argv[1]), int(sys.argv[2]), attach)
    for line in sys.stdin.buffer:
        answer = consumer.answer(msgspec.json.decode(line, type=Command))
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
