"""A daemon in the foreground on a scripted Gateway: what most integration and fault tests run on."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from tdai_supervisor import client
from tdai_supervisor.decide import paths
from tests.support import processes
from tests.support.command import clean_environment
from tests.support.processes import wait_for

SCRIPTED = Path(__file__).with_name("scripted.py")
QUICK = "probe_interval = 0.2\nhang_after = 1.5\nkill_delay = 1.0\n"


class Kept:
    """One root, its settings, and the daemon on it (kept by the test, keeper "none")."""

    def __init__(self, root: Path, home: Path) -> None:
        self.root, self.home = root, home
        self.port = processes.free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self.argv = [sys.executable, "-I", "-m", "tdai_supervisor", "--root", str(root), "daemon"]
        self.env = clean_environment(home)
        root.mkdir(mode=0o700, exist_ok=True)

    def settings(self, text: str = QUICK, policy: str = "", **stub: str) -> None:
        """One Gateway "default": the scripted one, told by these STUB_* variables."""
        env = ", ".join(f"{k} = {json.dumps(v)}" for k, v in stub.items())
        command = json.dumps([sys.executable, "-E", "-S", str(SCRIPTED)])
        self.write(
            f'[gateway.default]\nkind = "command"\ncommand = {command}\nport = {self.port}\n'
            f"env = {{ {env} }}\n{text}\n[policy]\n{policy}\n"
        )

    def write(self, text: str) -> None:
        """supervisor.toml as it is."""
        (self.root / "supervisor.toml").write_text(text, encoding="utf-8")

    def start(self, *, ready: bool = True, prefix: tuple[str, ...] = (), **env: str) -> int:
        """Run the daemon; its pid, once it answers (and the Gateway is READY)."""
        argv = [*prefix, *self.argv]
        with open(self.root / "daemon.out", "ab") as out:
            self.process = subprocess.Popen(argv, env=self.env | env, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        wait_for(self.answers, 10, "the daemon answers")
        if ready:
            self.wait(state="READY")
        return self.process.pid

    def start_code(self, code: str) -> None:
        """Run a daemon by a line of Python that gets the root as its argument: for one with other constants."""
        with open(self.root / "daemon.out", "ab") as out:
            argv = [sys.executable, "-I", "-c", code, str(self.root)]
            self.process = subprocess.Popen(
                argv, env=clean_environment(self.home), stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )
        wait_for(self.answers, 10, "the daemon answers")
        self.wait(state="READY")

    def crash(self, point: str, when: str) -> None:
        """Run a daemon that dies before or after its first call of a function, and wait until it is dead."""
        argv = [sys.executable, "-m", "tests.support.crashing", str(self.root), point, when]
        with open(self.root / "daemon.out", "ab") as out:
            done = subprocess.run(
                argv,
                env=clean_environment(self.home),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                timeout=15,
                check=False,
            )
        assert done.returncode == -signal.SIGKILL, self.said()

    def answers(self) -> bool:
        """Whether the daemon this test started answers."""
        assert self.process is not None
        assert self.process.poll() is None, self.said()
        with contextlib.suppress(client.NotRunningError, client.NoAnswerError):
            return bool(client.request(str(self.root), "ping", 1.0)["data"]["pid"])
        return False

    def said(self) -> str:
        """The daemon's own log."""
        return (self.root / "daemon.out").read_text(encoding="utf-8", errors="replace")

    def ask(self, verb: str, timeout: float = 30.0, **arguments: Any) -> dict[str, Any]:
        """One request to the daemon."""
        return client.request(str(self.root), verb, timeout, **arguments)

    def gateway(self, name: str = "default") -> dict[str, Any]:
        """What status says about one Gateway."""
        found = self.ask("status")["data"]["gateways"]
        return next(g for g in found if g["name"] == name)

    def wait(self, timeout: float = 10.0, name: str = "default", **wanted: Any) -> dict[str, Any]:
        """The Gateway's status once every named field has the wanted value."""

        def look() -> dict[str, Any] | None:
            found = self.gateway(name)
            return found if all(found[k] == v for k, v in wanted.items()) else None

        found = wait_for(look, timeout, f"{name} becomes {wanted}")
        assert found is not None
        return found

    def do(self, mode: str) -> None:
        """Tell the scripted Gateway what to do."""
        body = json.dumps({"mode": mode}).encode()
        with socket.create_connection(("127.0.0.1", self.port), 5) as connection:
            connection.sendall(b"POST /__do HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")

    def kill(self) -> None:
        """kill -9 the daemon."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        self.process = None

    def end(self, number: int = signal.SIGTERM, timeout: float = 15.0) -> int:
        """Signal the daemon and wait for its exit code."""
        assert self.process is not None
        self.process.send_signal(number)
        code = self.process.wait(timeout)
        self.process = None
        return code

    def journal(self) -> list[dict[str, Any]]:
        """Every transition so far."""
        path = Path(paths.journal(str(self.root)))
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []

    def record(self, name: str = "default") -> dict[str, Any]:
        """The endpoint record."""
        found = client.read_object(paths.record(str(self.root), name))
        assert found is not None
        return found

    def close(self) -> None:
        """End the daemon and whatever carries this root."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        processes.end_all(self.root)


def alive(pid: int) -> bool:
    """Whether pid lives; a zombie does not."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False


def fds_and_threads(pid: int) -> tuple[int, int]:
    """Open descriptors and threads of a process."""
    return len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))
