"""A worker's memory at its start: with a pool on its device if main asks for it and it works."""

from __future__ import annotations

import logging
from collections.abc import Callable

from omni_rt.errors import OmniError
from omni_rt.wire.arena import Arena
from omni_rt.wire.messages import OnDevice, ToMain, WorkerSpec
from omni_rt_workers.cuda.driver import DeviceDriver
from omni_rt_workers.cuda.pool import DevicePool
from omni_rt_workers.memory import Memory

log = logging.getLogger(__name__)


def cuda_driver() -> DeviceDriver:
    from omni_rt_workers.cuda.runtime import CudaDriver

    return CudaDriver()


def open_memory(
    spec: WorkerSpec,
    arena: Arena,
    make_driver: Callable[[], DeviceDriver] = cuda_driver,
    *,
    granule_bytes: int | None = None,
    slot_bytes: int | None = None,
) -> tuple[Memory, list[ToMain]]:
    """The memory, and what main is told of it: where it is, who can read it, or why nobody can.

    What goes wrong on the device is no error here: tensors then cross in the arena. The sizes are
    for tests.
    """
    if not spec.device:
        return Memory(arena, spec.epoch), []
    pool = None
    try:
        driver = make_driver()
        device = _uuid(driver, spec.device)
        if spec.pool:
            pool = DevicePool(
                driver,
                spec.pool,
                device,
                spec.pool_bytes,
                readers=spec.pool_readers,
                epoch=spec.epoch,
                slot_bytes=slot_bytes,
                granule_bytes=granule_bytes,
                table=arena.view(spec.table, arena.size_bytes - spec.table),
            )
        memory = Memory(arena, spec.epoch, driver, device, pool, table=spec.table)
        reads = tuple(other for other in driver.devices() if driver.can_peer(device, other))
        offers = [memory.offer(reader) for reader in range(spec.pool_readers)]
        return memory, [OnDevice(device, reads), *offers]
    except Exception as error:  # whatever the device's libraries raise where there is no device
        log.warning("tensors cannot cross on %s: %s", spec.device, error)
        if pool is not None:
            pool.close()
        memory = Memory(arena, spec.epoch, table=spec.table)
        return memory, [OnDevice("", (), str(error))]


def _uuid(driver: DeviceDriver, name: str) -> str:
    """The UUID of "cuda:N"."""
    number, devices = int(name.partition(":")[2]), driver.devices()
    if number >= len(devices):
        raise OmniError(f"there is no device {name}: this process sees {len(devices)}")
    return devices[number]
