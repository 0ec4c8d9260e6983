"""The loop's helpers: the one worker thread, and waiting for processes to die.

Invariants: everything that may wait for a disk or walk /proc runs in the worker, in order; nothing else has a thread.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Iterable
from typing import TypeVar

from tdai_supervisor.host.process import Process

T = TypeVar("T")
POLL_WITHOUT_PIDFD = 0.05  # s


class Worker:
    """One thread for disk writes and sweeps, first in first out."""

    def __init__(self) -> None:
        self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="worker")

    async def run(self, call: Callable[..., T], *arguments: object) -> T:
        """The result of call(*arguments), run in the worker."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, call, *arguments)

    def post(self, call: Callable[..., object], *arguments: object) -> None:
        """Run call(*arguments) in the worker some time soon; what it raises is for the loop's exception handler."""
        loop = asyncio.get_running_loop()

        def done(future: concurrent.futures.Future[object]) -> None:
            if (error := future.exception()) is not None:
                context = {"message": "the worker failed", "exception": error}
                loop.call_soon_threadsafe(loop.call_exception_handler, context)

        self._pool.submit(call, *arguments).add_done_callback(done)

    def close(self) -> None:
        """Wait for everything posted, then end the thread."""
        self._pool.shutdown(wait=True)


def on_death(process: Process, call: Callable[[], None]) -> Callable[[], None]:
    """Have call() run once when process has died; returns what cancels that."""
    loop = asyncio.get_running_loop()
    fd = process.fileno()
    if fd >= 0:

        def fired() -> None:
            loop.remove_reader(fd)
            call()

        loop.add_reader(fd, fired)

        def cancel() -> None:
            loop.remove_reader(fd)

        return cancel

    handle: list[asyncio.TimerHandle] = []

    def poll() -> None:
        if process.alive():
            handle[:] = [loop.call_later(POLL_WITHOUT_PIDFD, poll)]
        else:
            call()

    handle.append(loop.call_later(POLL_WITHOUT_PIDFD, poll))

    def cancel_timer() -> None:
        handle[0].cancel()

    return cancel_timer


async def any_death(processes: Iterable[Process], patience: float) -> None:
    """Return when one of processes has died, or after patience seconds."""
    woken = asyncio.Event()
    cancels = [on_death(p, woken.set) for p in processes]
    try:
        await asyncio.wait_for(woken.wait(), patience)
    except TimeoutError:
        pass
    finally:
        for cancel in cancels:
            cancel()
