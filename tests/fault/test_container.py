"""The daemon as the first process of a container: a pid namespace of its own, where it is PID 1."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.kept import Kept
from tests.support.processes import wait_for

UNSHARE = ("unshare", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc")


def possible() -> bool:
    """Whether a pid and a mount namespace can be made here."""
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode == 0


pytestmark = [
    pytest.mark.skipif(not possible(), reason="needs the right to make pid and mount namespaces"),
    pytest.mark.timeout(60),
]


def inside(kept: Kept) -> int:
    """The pid of the daemon as it is seen from outside."""
    assert kept.process is not None
    children = Path(f"/proc/{kept.process.pid}/task/{kept.process.pid}/children").read_text().split()
    assert len(children) == 1
    return int(children[0])


def zombies(pid: int) -> list[str]:
    """The dead children of a process that nobody has taken away."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] == "Z" and fields[1] == str(pid):
            found.append(stat.parent.name)
    return found


def test_orphans_are_reaped_and_exit_codes_are_not_invented(kept: Kept) -> None:
    """C8: dead orphans of the container are taken away, and how a Gateway ended is still told."""
    kept.settings(policy="backoff_max = 0.1\ndeath_budget = 100")
    kept.start(prefix=UNSHARE)
    daemon = inside(kept)
    orphan = f"for i in 1 2 3; do (setsid sleep 0.$i >/dev/null 2>&1 &) ; done; exec {Path('/bin/sleep')} 1"
    entered = ("nsenter", "--target", str(daemon), "--pid", "--mount", "/bin/sh", "-c", orphan)
    subprocess.run(entered, check=True, timeout=10)
    wait_for(lambda: len(zombies(daemon)) > 0, 10, "orphans that died")
    for number in range(3):
        before = kept.gateway()["pid"]
        kept.do("die:7")
        wait_for(lambda b=before: kept.gateway()["pid"] not in (None, b), 10, "another Gateway")
        kept.wait(state="READY", restarts=number + 1)
        assert kept.gateway()["last_exit"]["code"] == 7
    wait_for(lambda: zombies(daemon) == [], 20, "no zombie is left")


def test_signals_end_it_with_a_meaningful_code(kept: Kept) -> None:
    """TERM ends the Gateway with one TERM and the container with 0; while it waits for the root, with 143."""
    terms = kept.root / "terms"
    kept.settings(STUB_TERMS=str(terms))
    kept.start(prefix=UNSHARE)
    second = subprocess.Popen(
        [*UNSHARE, *kept.argv],
        env=kept.env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
    )
    with second:
        wait_for(lambda: Path(f"/proc/{second.pid}/task/{second.pid}/children").read_text().strip() != "", 5)
        first_child = Path(f"/proc/{second.pid}/task/{second.pid}/children").read_text().split()[0]
        wait_for(lambda: handles_term(int(first_child)), 10, "the second waits for the lock")
        os.kill(int(first_child), signal.SIGTERM)
        assert second.wait(5) == 128 + signal.SIGTERM
    os.kill(inside(kept), signal.SIGTERM)
    assert kept.process is not None
    assert kept.process.wait(15) == 0
    kept.process = None
    assert terms.read_text().count("\n") == 1


def handles_term(pid: int) -> bool:
    """Whether a process has a handler for TERM."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught, 16) & 1 << (signal.SIGTERM - 1))


def test_no_capability_and_a_read_only_root_file_system(kept: Kept) -> None:
    """As the manifest confines it: one writable volume, no capabilities, all addresses; asked as the probes ask."""
    volume = kept.root.parent / "volume"
    volume.mkdir()
    # Flags of this mount namespace alone: the volume first, then everything else read-only.
    prepare = 'mount --bind "$0" "$0" && mount -o remount,bind,ro / && exec setpriv "$@"'
    confined = ("--bounding-set", "-all", "--inh-caps", "-all", "--no-new-privs")
    prefix = (*UNSHARE, "/bin/sh", "-c", prepare, str(volume), *confined)
    kept.root = volume / "memory-tencentdb"
    kept.argv[kept.argv.index("--root") + 1] = str(kept.root)
    kept.env |= {"HOME": str(volume), "TMPDIR": str(volume), "MEMORY_TENCENTDB_GATEWAY_HOST": "0.0.0.0"}
    with open(volume.parent / "said", "wb") as log:
        kept.process = subprocess.Popen(
            [*prefix, *kept.argv],
            env=kept.env | {"MEMORY_TENCENTDB_GATEWAY_PORT": str(kept.port)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )

    def healthy() -> bool:
        assert kept.process is not None and kept.process.poll() is None, (volume.parent / "said").read_text()
        if not (kept.root / "run" / "control.sock").exists():
            return False
        probe = ("nsenter", "--target", str(inside(kept)), "--pid", "--mount", *kept.argv[:-1], "health")
        return subprocess.run(probe, env=kept.env, capture_output=True, check=False).returncode == 0

    wait_for(healthy, 20, "health is 0")
    daemon = inside(kept)
    mounts = Path(f"/proc/{daemon}/mountinfo").read_text().splitlines()
    assert any(line.split()[4] == "/" and line.split()[5].startswith("ro") for line in mounts)
    assert "CapEff:\t0000000000000000\n" in Path(f"/proc/{daemon}/status").read_text()
    os.kill(daemon, signal.SIGTERM)
    assert kept.process is not None
    assert kept.process.wait(15) == 0
    kept.process = None
