"""Where a run of the benchmark happens: a scratch folder, the child, and what the children tell.

Invariants: every process of a run carries BENCH_MARK=<scratch> in its environment, and only such processes are ever
ended; times are CLOCK_MONOTONIC, taken by the child itself, so no polling of ours lies in a figure.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from tests.support.command import PATH, clean_environment
from tests.support.processes import alive, wait_for

SOURCE = Path(__file__).with_name("child.c")
ANSWER_TIME = 1.0  # s an HTTP request of ours may take


class MissingError(Exception):
    """A peer or a tool that is not installed here."""


class Told(NamedTuple):
    """What a child told: who, what (main, listen, bind, term), its pid, and when (monotonic seconds)."""

    who: str
    what: str
    pid: int
    at: float


class Board:
    """Collects what the children tell, and keeps count of those that lived at the same time under one name."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(path)
        self._news = threading.Condition()
        self._told: list[Told] = []
        self.doubles: list[str] = []
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while True:
            who, what, pid, at = self._socket.recv(512).decode().split()
            told = Told(who, what, int(pid), int(at) / 1e9)
            with self._news:
                if what == "main":
                    self._note_doubles(told)
                self._told.append(told)
                self._news.notify_all()

    def _note_doubles(self, told: Told) -> None:
        others = {t.pid for t in self._told if t.who == told.who and t.what == "main" and t.pid != told.pid}
        self.doubles += [f"{told.who}: pid {told.pid} began while pid {pid} lived" for pid in others if alive(pid)]

    def all(self, who: str, what: str, since: float = 0.0) -> list[Told]:
        """Everything of this kind told by who at or after since."""
        with self._news:
            return [t for t in self._told if t.who == who and t.what == what and t.at >= since]

    def wait(self, who: str, what: str, since: float, timeout: float) -> Told | None:
        """The first of this kind at or after since; None where it does not come within timeout seconds."""
        deadline = time.monotonic() + timeout
        with self._news:
            while True:
                for told in self._told:
                    if told.who == who and told.what == what and told.at >= since:
                        return told
                if (left := deadline - time.monotonic()) <= 0:
                    return None
                self._news.wait(left)


class Lab:
    """The scratch folder of one run, and the means every measurement uses."""

    def __init__(self) -> None:
        self.scratch = Path(tempfile.mkdtemp(prefix="tdai-bench-"))
        self.child = str(self.scratch / "child")
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            raise MissingError("a C compiler")
        subprocess.run([compiler, "-O2", "-o", self.child, str(SOURCE)], check=True)
        self.board = Board(str(self.scratch / "board"))
        self.broken: list[str] = []  # promises that did not hold
        self.ours: set[str] = set()  # names under which children of ours tell
        self._marked = f"BENCH_MARK={self.scratch}".encode()
        self._folders = 0

    def folder(self) -> Path:
        """A new empty folder."""
        self._folders += 1
        path = self.scratch / str(self._folders)
        path.mkdir(mode=0o700)
        return path

    def environment(self, who: str, **more: str) -> dict[str, str]:
        """The environment of everything that belongs to who; PATH finds the peers as this process does."""
        own = {"BENCH_MARK": str(self.scratch), "BENCH_SOCKET": str(self.scratch / "board"), "BENCH_WHO": who}
        path = os.environ.get("PATH", PATH)
        return clean_environment(self.scratch, **own, **more) | {"PATH": path}

    def processes(self, who: str | None = None) -> list[int]:
        """The live processes of this run, or only those of who."""
        wanted = {self._marked} | ({f"BENCH_WHO={who}".encode()} if who else set())
        found = []
        for name in os.listdir("/proc"):
            if not name.isdecimal() or int(name) == os.getpid():
                continue
            with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
                if wanted <= set(file.read().split(b"\0")):
                    found.append(int(name))
        return [pid for pid in found if alive(pid)]

    def owners(self, who: str) -> list[int]:
        """The live processes of who that are not its child."""
        return [pid for pid in self.processes(who) if not self.is_child(pid)]

    def is_child(self, pid: int) -> bool:
        """Whether pid runs the C child."""
        try:
            return os.path.samefile(f"/proc/{pid}/exe", self.child)
        except OSError:
            return False

    def end(self, who: str | None = None) -> list[int]:
        """KILL what is left of who (or of the whole run) until nobody is; what there was at first."""
        first = self.processes(who)

        def nobody() -> bool:
            left = self.processes(who)
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return not left

        wait_for(nobody, 20, f"nobody left of {who or 'the run'}")
        return first

    def close(self) -> None:
        """End what is left, which breaks a promise, and remove the scratch folder."""
        for pid in self.processes():
            with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
                self.broken.append("left over: " + file.read().replace(b"\0", b" ").decode("utf-8", "replace").strip())
        self.end()
        shutil.rmtree(self.scratch, ignore_errors=True)


def answers(port: int) -> bool:
    """Whether one HTTP request to port is answered with 200 within a second."""
    try:
        with socket.create_connection(("127.0.0.1", port), ANSWER_TIME) as connection:
            connection.settimeout(ANSWER_TIME)
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
            answer = b""
            while more := connection.recv(4096):
                answer += more
    except OSError:
        return False
    return answer.startswith(b"HTTP/1.1 200") and b"}" in answer


def gone(pids: list[int], timeout: float) -> bool:
    """Wait until none of these processes lives (a zombie does not); False after timeout seconds."""
    deadline = time.monotonic() + timeout
    while any(alive(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


def wait_end(process: subprocess.Popen[bytes], timeout: float) -> int:
    """The exit code of a child of ours, the moment it has ended; KILL after timeout seconds.

    Popen.wait(timeout) sleeps up to 50 ms at a time, which would be most of what is measured.
    """
    pidfd = os.pidfd_open(process.pid)
    try:
        if not select.select([pidfd], [], [], timeout)[0]:
            process.kill()
    finally:
        os.close(pidfd)
    return process.wait()


def timed(call: Callable[[], object]) -> float:
    """Milliseconds that call() takes."""
    begun = time.monotonic()
    call()
    return (time.monotonic() - begun) * 1000


@contextlib.contextmanager
def load(port: int, per_second: int = 50) -> Iterator[list[tuple[float, bool]]]:
    """Requests at this rate meanwhile; the list fills with (when, answered)."""
    seen: list[tuple[float, bool]] = []
    over = threading.Event()

    def run() -> None:
        due = time.monotonic()
        while not over.is_set():
            seen.append((time.monotonic(), answers(port)))
            due += 1 / per_second
            over.wait(max(0.0, due - time.monotonic()))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()
