"""A machine whose process 1 is a real systemd, in namespaces of this one.

Invariants: nothing outside its namespaces is changed: mounts are private, file systems are an overlay in memory or
read-only, kernel settings are read-only, its cgroup is its own; it ends with whoever made it, and after LONGEST s.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from tests.support.command import PATH, Done
from tests.support.processes import wait_for

HERE = Path(__file__).resolve().parent
SYSTEMD = "/lib/systemd/systemd"
USER, UID = "memuser", 47110
LONGEST = "150"  # s
_numbers = itertools.count()
NAMESPACES = ("--mount", "--pid", "--cgroup", "--uts", "--ipc", "--net")


def why_not() -> str | None:
    """Why there can be no machine here, or None."""
    if os.geteuid() != 0:
        return "not root: systemd cannot be booted in namespaces"
    for name in (SYSTEMD, "unshare", "nsenter", "setpriv", "dbus-daemon", "pivot_root"):
        if shutil.which(name, path=f"{PATH}:/usr/sbin:/sbin") is None:
            return f"no {name}"
    if not [*Path("/usr/lib").glob("*/security/pam_systemd.so"), *Path("/usr/lib/security").glob("pam_systemd.so")]:
        return "no pam_systemd, without which no user's systemd starts"
    if cgroup2() is None:
        return "no cgroup2 that can be written to"
    words = ["unshare", *NAMESPACES, "--propagation", "private", "--fork", "mount", "-t", "tmpfs", "none", "/mnt"]
    tried = subprocess.run(words, stdin=-3, capture_output=True, text=True, timeout=20, check=False)
    return None if tried.returncode == 0 else f"no namespaces: {tried.stderr.strip()}"


def cgroup2() -> str | None:
    """Where cgroup2 is mounted and can be written to."""
    with open("/proc/self/mountinfo", encoding="utf-8") as file:
        for line in file:
            fields, _, rest = line.partition(" - ")
            where = fields.split()[4]
            if rest.startswith("cgroup2 ") and os.access(os.path.join(where, "cgroup.procs"), os.W_OK):
                with contextlib.suppress(OSError):
                    tried = os.path.join(where, f"memory-test-{os.getpid()}")
                    os.mkdir(tried)
                    os.rmdir(tried)
                    return where
    return None


def fingerprint() -> dict[str, object]:
    """What of this machine a careless boot would change."""
    with open("/proc/self/mountinfo", encoding="utf-8") as file:
        mounts = file.read()
    etc: dict[str, object] = {}
    for folder, _, names in os.walk("/etc"):
        for name in names:
            path = os.path.join(folder, name)
            about = os.lstat(path)
            etc[path] = (about.st_mode, about.st_size, about.st_mtime_ns)
    settings = ("kernel/hostname", "kernel/core_pattern", "fs/file-max", "fs/nr_open", "kernel/sysrq")
    values = {name: Path("/proc/sys", name).read_text() for name in settings if Path("/proc/sys", name).exists()}
    return {
        "mounts": mounts,
        "etc": etc,
        "run": sorted(os.listdir("/run")),
        "home": sorted(os.listdir("/home")),
        "sysctl": values,
        "cgroups": sorted(p.name for p in Path(cgroup2() or "/nonexistent").glob(f"memory-test-{os.getpid()}*")),
    }


def changes(before: dict[str, object]) -> list[str]:
    """What is different from what fingerprint() said before."""
    after = fingerprint()
    return [f"{name}: {before[name]} -> {after[name]}"[:2000] for name in before if before[name] != after[name]]


class Machine:
    """One machine, that may be booted again and again. shown: paths of this one that it sees, read-only."""

    def __init__(self, directory: Path, shown: list[Path]) -> None:
        self.directory, self.space, self.shown = directory, directory / "space", shown
        directory.mkdir(exist_ok=True)
        mounted = cgroup2()
        assert mounted is not None
        self.cgroup = Path(mounted, f"memory-test-{os.getpid()}-{next(_numbers)}")
        self.cgroup.mkdir()
        self.log = open(directory / "console", "ab")  # noqa: SIM115  (lives as long as the machine)
        self.init: int | None = None
        self.boots = 0
        words = ["timeout", "-k", "5", "300", "unshare", "--mount", "--propagation", "private"]
        words += ["sh", str(HERE / "machine_prepare.sh"), str(self.space), USER, str(UID), *map(str, shown)]
        self.outer = subprocess.Popen(words, stdin=-3, stdout=subprocess.PIPE, stderr=self.log, start_new_session=True)
        assert self.outer.stdout is not None
        assert self.outer.stdout.readline() == b"prepared\n", self.said()
        self.booted: subprocess.Popen[bytes] | None = None

    def log_in_never(self) -> None:
        """Have its user's systemd run without a login."""
        assert self("loginctl", "enable-linger", USER).code == 0
        wait_for(lambda: self("systemctl", "is-active", f"user@{UID}").code == 0, 20, "the user's systemd")

    def said(self) -> str:
        """What was written to its console."""
        return (self.directory / "console").read_text(encoding="utf-8", errors="replace")

    def boot(self, timeout: float = 20.0) -> float:
        """Switch it on and wait until systemd has started all it is to start; how long that took in s."""
        began = time.monotonic()
        holder = _child(self.outer.pid)
        # Its cgroup first: the namespace begins where the process is when it is made.
        enter = f'echo 0 >"{self.cgroup}/cgroup.procs" && exec "$@"'
        words = ["sh", "-c", enter, "sh", "nsenter", f"--target={holder}", "--mount"]
        words += ["timeout", "-k", "5", LONGEST, "unshare", *NAMESPACES, "--propagation", "private", "--fork"]
        words += ["--kill-child", "sh", str(HERE / "machine_boot.sh"), str(self.space / "root")]
        self.booted = subprocess.Popen(words, stdin=-3, stdout=self.log, stderr=self.log, start_new_session=True)
        self.boots += 1
        self.init = wait_for(self._find_init, timeout, "process 1")
        assert self("pwd").out == "/\n", "commands must be inside altogether"
        wait_for(lambda: self("systemctl", "is-system-running").out.strip() in ("running", "degraded"), timeout)
        return time.monotonic() - began

    def _find_init(self) -> int | None:
        assert self.booted is not None
        assert self.booted.poll() is None, self.said()
        pid = self.booted.pid
        for _ in range(2):  # timeout, unshare, process 1
            pid = _child(pid)
            if not pid:
                return None
        with contextlib.suppress(OSError):
            return pid if os.readlink(f"/proc/{pid}/exe").endswith("/systemd") else None
        return None

    def __call__(
        self, *words: str, user: bool = False, timeout: float = 40.0, env: Mapping[str, str] | None = None
    ) -> Done:
        """Run a command in it, as root or as its user, in a clean environment."""
        assert self.init is not None
        argv = ["nsenter", f"--target={self.init}", "--mount", "--pid", "--cgroup", "--uts", "--ipc", "--net"]
        argv += ["--root", "--wd"]  # those of process 1: ours would still be outside
        home = f"/home/{USER}" if user else "/root"
        if user:
            argv += ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups"]
        variables = {"HOME": home, "PATH": PATH, "LANG": "C.UTF-8", **(env or {})}
        argv += ["env", "-i", *(f"{k}={v}" for k, v in variables.items()), *words]
        done = subprocess.run(argv, stdin=-3, capture_output=True, timeout=timeout, check=False)
        return Done(done.returncode, done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace"))

    def off(self, timeout: float = 40.0) -> None:
        """Shut it down in order: every unit is stopped."""
        assert self.booted is not None
        self("systemctl", "poweroff", "--no-block")
        self.booted.wait(timeout)
        self.init = None

    def close(self) -> None:
        """End all of it."""
        for started in (self.booted, self.outer):
            if started is not None and started.poll() is None:
                started.send_signal(signal.SIGTERM)  # timeout passes it on, and KILLs after 5 s
                if started is self.booted and self.init is not None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(self.init, signal.SIGKILL)
                started.wait(15)
        assert self.outer.stdout is not None
        self.outer.stdout.close()
        self.log.close()
        wait_for(self._cgroup_gone, 10, "its cgroup is empty")

    def _cgroup_gone(self) -> bool:
        for path in sorted(self.cgroup.rglob("*"), key=lambda p: len(p.parts), reverse=True):
            if path.is_dir():
                with contextlib.suppress(OSError):
                    path.rmdir()
        with contextlib.suppress(OSError):
            self.cgroup.rmdir()
        return not self.cgroup.exists()


def _child(pid: int) -> int:
    """The first child of a process, 0 where it has none."""
    with contextlib.suppress(OSError):
        return int((Path(f"/proc/{pid}/task/{pid}/children").read_text().split() or ["0"])[0])
    return 0


def python_paths(checkout: Path) -> list[Path]:
    """What the Python that runs these tests needs, besides /usr."""
    found = [checkout, Path(sys.prefix), Path(os.path.realpath(sys.base_prefix))]
    outside = sorted({p.resolve() for p in found if not str(p.resolve()).startswith("/usr/")})
    return [p for p in outside if not any(p != o and p.is_relative_to(o) for o in outside)]
