"""A root on a bad file system, and a root in which somebody planted what does not belong there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.command import Ctl, Done, run
from tests.support.kept import Kept
from tests.support.processes import wait_for

pytestmark = pytest.mark.timeout(60)
# What runs the command where flock is not implemented, as on some network file systems.
NO_FLOCK = """
import errno, fcntl, os, sys
def flock(*_): raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
fcntl.flock = flock
from tdai_supervisor.cli.main import main
sys.exit(main())
"""
PLANTED = [
    *("run/supervisor.lock", "run/supervisor.pid", "run/control.sock", "run/keeper.lock", "run/environment.json"),
    *("run/default.json", "run/default.pid", "run/default.key", "run/default.want", "journal.jsonl"),
    *("memory-tdai/logs/gateway.stdout.log", "memory-tdai/tdai-gateway.json", "spools/a.json", "sessions/1-1-1.json"),
]


@pytest.mark.parametrize("verb", ["daemon", "start", "stop"])
def test_f15_no_file_locks_is_a_named_error(ctl: Ctl, verb: str) -> None:
    """Never a soft lock in its place: exit code 1, and a sentence that names the cause."""
    (Path(ctl.root) / "run").mkdir(parents=True, mode=0o700)
    done = run([sys.executable, "-c", NO_FLOCK, verb, "--json"], ctl.env, timeout=30)
    assert done.code == 1, done
    said = done.json["errors"][0]["message"]
    assert "locks available" in said or "no file locks" in said or "has no flock" in said, said
    assert sorted(p.name for p in (Path(ctl.root) / "run").iterdir() if p.suffix == ".lock") in (
        ["keeper.lock"],
        ["supervisor.lock"],
        ["keeper.lock", "supervisor.lock"],
    )


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs a mount namespace")
@pytest.mark.parametrize("verb", ["daemon", "start", "status", "stop", "doctor"])
def test_f15_a_read_only_root_is_a_named_error(ctl: Ctl, verb: str) -> None:
    """One clear sentence with the path, no traceback, in a moment; looking still works."""
    root = Path(ctl.root)
    (root / "run").mkdir(parents=True, mode=0o700)
    # In a mount namespace of its own: the root alone is read-only there.
    prepare = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"'
    words = ["unshare", "--mount", "/bin/sh", "-c", prepare, ctl.root, *ctl.argv, verb]
    began = time.monotonic()
    done: Done = run(words, ctl.env, timeout=30)
    assert time.monotonic() - began < 15
    assert "Traceback" not in done.err
    if verb in ("daemon", "start"):
        assert done.code in (1, 4)
        assert "Read-only file system" in done.err and ctl.root in done.err
    elif verb == "status":
        assert done.code == 3


@pytest.mark.parametrize("what", ["link", "fifo"])
@pytest.mark.parametrize("where", PLANTED)
def test_f28_what_is_planted_in_a_root_is_not_followed(kept: Kept, tmp_path: Path, where: str, what: str) -> None:
    """Somebody else's file behind a link stays as it is, a FIFO blocks nobody: READY, or a refusal within seconds."""
    victim = tmp_path / "victim"
    victim.write_text("precious\n")
    victim.chmod(0o644)
    path = kept.root / where
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if what == "link":
        path.symlink_to(victim)
    else:
        os.mkfifo(path, 0o600)
    kept.write(f'[gateway.default]\nkind = "embedded"\nport = {kept.port}\n')
    with open(kept.root / "daemon.out", "ab") as out:
        kept.process = subprocess.Popen(
            kept.argv, env=kept.env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )

    def decided() -> bool:
        """Whether it refused, or runs and has come to a state that is not on the way to another."""
        assert kept.process is not None
        if kept.process.poll() is not None:
            return True
        return kept.answers() and kept.gateway()["state"] in ("READY", "FATAL", "BLOCKED")

    wait_for(decided, 20, "READY or a refusal")
    if kept.process.poll() is not None:
        assert kept.process.returncode in (1, 4, 6), kept.said()
        assert "Traceback" not in kept.said(), kept.said()
        assert path.name in kept.said()
    elif kept.gateway()["state"] != "READY":
        assert path.name in kept.gateway()["cause"], kept.gateway()
    assert victim.read_text() == "precious\n"
    assert victim.stat().st_mode & 0o777 == 0o644
