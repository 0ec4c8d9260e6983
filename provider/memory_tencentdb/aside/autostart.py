"""autostart: where the daemon is down, `memory-tencentdb-ctl start --no-wait`, once per process.

Invariants: only where the profile file says "autostart": true; nothing is waited for but the shell that lets go of the
command at once; the command has a session, an environment and no descriptor of ours; a failure is logged, never raised.
It is the one thing that a provider ever starts, and that command is the one that may start a daemon.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys

from .. import proof
from ..settings import dotenv
from ..spool import read_json

logger = logging.getLogger(__name__)
CTL = "memory-tencentdb-ctl"
_LET_GO = '"$0" "$@" & exit 0'
LET_GO_WITHIN = 0.5  # s, of a shell that takes 2 ms
_tried: set[int] = set()  # pids of processes that have: a forked child may once, too


def find(root: str) -> str | None:
    """The command: on PATH, in the root's installation, beside this interpreter, in ~/.local/bin; or None."""
    beside = (os.path.join(root, "venv", "bin"), os.path.dirname(sys.executable), os.path.expanduser("~/.local/bin"))
    every = [shutil.which(CTL), *(os.path.join(folder, CTL) for folder in beside)]
    return next((path for path in every if path is not None and os.access(path, os.X_OK)), None)


def daemon_lives(root: str) -> bool:
    """Whether the daemon that the root's pidfile names lives, as far as can be known."""
    about = read_json(os.path.join(root, "run", "supervisor.pid"))
    pid, ticks = about.get("pid"), about.get("start_ticks")
    if about and about.get("pid_ns") != proof.pid_namespace():
        return True  # its pid says nothing here
    return isinstance(pid, int) and isinstance(ticks, int) and proof.alive(pid, ticks)


def environment(home: str) -> dict[str, str]:
    """Ours; but what the .env of one profile among several sets is not meant for the daemon of all of them."""
    if os.path.basename(os.path.dirname(home)) != "profiles":
        return dict(os.environ)
    own = {*dotenv(home), "HERMES_HOME"}
    return {name: value for name, value in os.environ.items() if name not in own}


def start_once(root: str, home: str) -> bool:
    """Have the daemon of this root started where it is down; whether a command was run."""
    if os.getpid() in _tried or daemon_lives(root):
        return False
    _tried.add(os.getpid())
    path = find(root)
    if path is None:
        logger.warning("memory_tencentdb: cannot autostart: %s is not installed", CTL)
        return False
    argv = ["/bin/sh", "-c", _LET_GO, path, "--root", root, "start", "--no-wait"]
    null = subprocess.DEVNULL
    try:
        # Through a shell that ends at once: the command becomes nobody's child, and leaves no zombie in the host.
        letting_go = subprocess.Popen(
            argv, env=environment(home), cwd="/", stdin=null, stdout=null, stderr=null, start_new_session=True
        )
        letting_go.wait(LET_GO_WITHIN)
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("memory_tencentdb: cannot autostart: %s", error)
        return False
    logger.info("memory_tencentdb: no daemon lives: ran %s start", path)
    return True
