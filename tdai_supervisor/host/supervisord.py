"""supervisord as the keeper: one of our own for a root, or a site's that includes our program.

Invariants: it is recognised by what it is (its command and working directory), never by a pidfile alone; nothing of the
environment is written into its configuration, so no character of a path or a key can break it; a site's supervisord is
used, and never started or ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping

from tdai_supervisor.decide import paths
from tdai_supervisor.host import disk, process, systemd, tree
from tdai_supervisor.host.process import Process

PYTHON_NAME = "MEMORY_TENCENTDB_KEEPER_PYTHON"
CONFIG, SOCKET, PIDFILE = "supervisord.conf", "supervisord.sock", "supervisord.pid"
PATIENCE = 10.0  # s for supervisord to come up or go

# Paths are relative to run/ through /proc/self/cwd or the working directory: a root may be long and hold any character.
# startsecs=0: a daemon that dies young is started again about once a second, for ever; 0 and 75 are final.
_TEMPLATE = """\
; Written by memory-tencentdb-ctl at each start; changes are lost.
[supervisord]
nodaemon=true
silent=true
logfile=supervisord.log
logfile_maxbytes=1MB
logfile_backups=1
pidfile={pidfile}
childlogdir=.
umask=077
identifier=memory-tencentdb
{user}
[unix_http_server]
file={socket}
chmod=0600

[rpcinterface:supervisor]
supervisor.rpcinterface_factory = supervisor.rpcinterface:make_main_rpcinterface

[program:daemon]
command=/bin/sh -c 'exec "${python}" -I -m tdai_supervisor --root "$MEMORY_TENCENTDB_ROOT" daemon --keeper supervisord'
autostart=true
autorestart=unexpected
exitcodes=0,75
startsecs=0
stopsignal=TERM
stopwaitsecs={stop_wait}
stdout_logfile=NONE
redirect_stderr=true
"""


class Supervisord:
    """The `supervisor` package as the keeper of one root; the words are those of keepers.Keeper."""

    name = "supervisord"

    def __init__(self, root: str) -> None:
        self.root = root
        self.run = paths.run(root)

    def lives(self) -> bool:
        """Whether a supervisord keeps this root: ours, or the one that started the daemon that died last."""
        return self._pid() is not None or self._site_lives()

    def _site_lives(self) -> bool:
        # A daemon that crashed leaves its pidfile, and the site's supervisord will start another.
        with contextlib.suppress(OSError, ValueError):
            about = disk.read_object(paths.pidfile(self.root)) or {}
            pid = about.get("keeper_pid")
            if about.get("boot_id") == process.boot_id() and isinstance(pid, int):
                stat = process.read_stat(pid)
                return stat is not None and not stat.dead and "supervisord" in (tree.command_line(pid) or "")
        return False

    def _pid(self) -> int | None:
        """The pid of our living supervisord of this root, by its pidfile or else among our processes."""
        text = None
        with contextlib.suppress(OSError):
            text = disk.read(os.path.join(self.run, PIDFILE))
        if text and text.strip().isdecimal() and self._is_ours(int(text)):
            return int(text)
        return next((pid for pid in process.pids() if process.uid_of(pid) == os.geteuid() and self._is_ours(pid)), None)

    def _is_ours(self, pid: int) -> bool:
        stat = process.read_stat(pid)
        command = tree.command_line(pid) or ""
        if stat is None or stat.dead or "supervisor.supervisord" not in command:
            return False
        try:
            return os.path.samefile(f"/proc/{pid}/cwd", self.run)
        except OSError:
            return not process.LINUX and self.run in command

    def bring_up(self, env: Mapping[str, str], stop_wait: float) -> str | None:
        """Start supervisord in a session of its own, outside the service we may run in, and wait until it listens."""
        user = "user=root\n" if os.geteuid() == 0 else ""
        text = _TEMPLATE.format(
            pidfile=PIDFILE, socket=self._socket_path(), python=PYTHON_NAME, stop_wait=int(stop_wait) + 1, user=user
        )
        disk.write(os.path.join(self.run, CONFIG), text, durable=False)
        for stale in (SOCKET, PIDFILE):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(self.run, stale))
        within, service = systemd.detachment()
        runtime = systemd.runtime() if within else {}
        log = disk.append_only(os.path.join(self.run, "supervisord.err"))
        try:
            os.ftruncate(log, 0)
            started = subprocess.Popen(
                [*within, sys.executable, "-I", "-m", "supervisor.supervisord", "-c", CONFIG],
                cwd=self.run,
                env={**env, **runtime, PYTHON_NAME: sys.executable, "MEMORY_TENCENTDB_ROOT": self.root},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                umask=0o077,
            )
        finally:
            os.close(log)
        deadline = time.monotonic() + PATIENCE
        while not self._poke():
            if started.poll() is not None or time.monotonic() > deadline:
                said = "; ".join(disk.tail(os.path.join(self.run, "supervisord.err"), 3)) or "it said nothing"
                raise subprocess.SubprocessError(f"supervisord did not come up: {said}")
            time.sleep(0.005)
        if service is None:
            return None
        return f"keeper and daemon run inside {service} and end with it; try `memory-tencentdb-ctl service install`"

    def _socket_path(self) -> str:
        return f"/proc/self/cwd/{SOCKET}" if process.LINUX else os.path.join(self.run, SOCKET)

    def _poke(self) -> bool:
        """Connect once: that ends supervisord's poll, which otherwise waits up to 1 s. Whether it listens."""
        try:
            directory = os.open(self.run, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            return False
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(1.0)
                base = f"/proc/self/fd/{directory}" if process.LINUX else self.run
                connection.connect(os.path.join(base, SOCKET))
            return True
        except OSError:
            return False
        finally:
            os.close(directory)

    def end(self, *, at_once: bool = False) -> bool:
        """TERM it, and poke it so that it looks up at once; KILL it after PATIENCE. Whether it is gone.

        at_once: KILL it without waiting for its daemon, which is stuck and would be waited for.
        """
        pid = self._pid()
        held = Process.open(pid) if pid is not None else None
        if held is None or not self._is_ours(held.pid):
            return pid is None or self._pid() is None
        held.signal(signal.SIGTERM)
        held.signal(signal.SIGCONT)
        deadline = time.monotonic() + (0 if at_once else PATIENCE)
        while held.alive():
            if time.monotonic() > deadline:
                held.signal(signal.SIGKILL)
            self._poke()
            time.sleep(0.01)
        held.close()
        for left in (SOCKET, PIDFILE):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(self.run, left))
        return True
