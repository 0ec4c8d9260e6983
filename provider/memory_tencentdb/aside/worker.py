"""The background thread of a session that has something to deliver.

Invariants:
* No thread while nothing is pending: it begins with the first kick and ends when the spool is empty, so that a hundred
  initialised providers cost nothing.
* It never sits in a blocking call: every wait is cut into pieces that stop() ends, and stop() is registered with
  atexit while the thread lives: a daemon thread that is caught by the end of the interpreter can abort the process.
* Where another thread of this process drains the same spool this one ends: the other looks once more after it lets go.
  Where another process does, this one stays and looks again, because that process may be killed.
"""

from __future__ import annotations

import atexit
import contextvars
import logging
import os
import threading
import time
from collections.abc import Callable

from .. import host
from .drainer import Drainer

logger = logging.getLogger(__name__)
RETRY_LOCK = 1.0
"""Seconds between two tries to become the drainer of a spool that another process drains."""

LONGEST_WAIT = 5.0
"""Seconds until the spool is looked at again in any case: another process may have appended to it."""


def spawn(target: Callable[[], None], name: str) -> threading.Thread:
    """An unstarted daemon thread that keeps the profile of its caller, the way the host makes one where it can."""
    if (make := host.context_thread()) is not None:
        return make(target, name=name)
    return threading.Thread(target=contextvars.copy_context().run, args=(target,), name=name, daemon=True)


class Worker:
    """Runs a drainer while there is something to deliver.

    ``make(sleep)`` makes the drainer; ``idle()``: whether the spool looks empty; ``closing`` is set when the session
    ends, which is what all its network calls look at.
    """

    def __init__(
        self, make: Callable[[Callable[[float], bool]], Drainer], idle: Callable[[], bool], closing: threading.Event
    ) -> None:
        self.drainer = make(closing.wait)
        self.error = ""
        self._idle = idle
        self._stop = closing
        self._busy_until = 0.0
        self._shut_out = False
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    def kick(self) -> None:
        """Something is to be delivered, or the Gateway is back. Starts the thread if there is none. Never blocks."""
        with self._lock:
            if self._stop.is_set():
                return
            self._wake.set()
            if self._thread is None or not self._thread.is_alive():
                thread = spawn(self._run, "memory_tencentdb-drain")
                atexit.register(self._at_exit)
                try:
                    thread.start()
                except RuntimeError:
                    return  # the interpreter ends; what is on disk is delivered by the next session
                self._thread = thread

    def wait_idle(self, seconds: float) -> None:
        """Wait until everything is delivered, at most ``seconds``, and no longer than there is hope."""
        end = time.monotonic() + seconds
        while (thread := self._thread) is not None and thread.is_alive() and time.monotonic() < end:
            if self._shut_out or self._busy_until > end or self.drainer.trouble is not None:
                return
            thread.join(0.005)

    def stop(self, seconds: float) -> None:
        """End the thread, waiting for it at most ``seconds``. No kick starts another one afterwards."""
        self._stop.set()
        self._wake.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(seconds)

    def _at_exit(self) -> None:
        self.stop(0.5)

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._wake.clear()
                if not self._work():
                    break
        finally:
            atexit.unregister(self._at_exit)

    def _work(self) -> bool:
        """Drain once. False when the thread may end: decided under the lock that kick() takes."""
        drainer = self.drainer
        try:
            self._shut_out = not drainer.acquire()
            if self._shut_out:
                return self._wait_for_lock(drainer)
            try:
                self._drain(drainer)
            finally:
                drainer.release()
        except Exception as error:  # noqa: BLE001  shown by status and logged once; the records stay on disk
            if not self.error:
                logger.warning("memory_tencentdb: cannot deliver: %s: %s", type(error).__name__, error)
            self.error = f"cannot deliver: {error}"
            self._stop.wait(RETRY_LOCK)
            return True
        return not self._may_end(drainer.caught_up)

    def _wait_for_lock(self, drainer: Drainer) -> bool:
        if drainer.lock.holder() == os.getpid() and drainer.relies_on_others:
            with self._lock:
                self._thread = None
            return False
        self._wake.wait(RETRY_LOCK)
        return not self._may_end(self._idle)

    def _drain(self, drainer: Drainer) -> None:
        while not self._stop.is_set() and (wait := drainer.step()) is not None:
            self.error = ""
            if wait > 0:
                self._busy_until = time.monotonic() + wait
                self._wake.wait(min(wait, LONGEST_WAIT))
                self._wake.clear()
            self._busy_until = 0.0

    def _may_end(self, settled: Callable[[], bool]) -> bool:
        with self._lock:
            if self._stop.is_set() or (not self._wake.is_set() and settled()):
                self._thread = None
                return True
            return False
