"""systemctl, as far as our command asks it, for one user unit: it starts what the unit says.

$FAKE_SYSTEMD holds what it knows: `log` (a line per call), `pid`, `enabled`; with `dead` there it answers as where no
systemd runs, with `broken` what it starts ends soon.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

STATE = Path(os.environ["FAKE_SYSTEMD"])
UNIT = "memory-tencentdb.service"


def file() -> Path:
    return Path(os.environ["HOME"], ".config/systemd/user", UNIT)


def alive() -> int:
    try:
        pid = int((STATE / "pid").read_text())
        return pid if Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z" else 0
    except (OSError, ValueError):
        return 0


def start() -> None:
    if alive():
        return
    line = next(line for line in file().read_text(encoding="utf-8").splitlines() if line.startswith("ExecStart=:"))
    argv = shlex.split(line.removeprefix("ExecStart=:").replace("%%", "%"))
    if (STATE / "broken").exists():
        argv = ["sleep", "0.5"]
    env = {"HOME": os.environ["HOME"], "PATH": os.environ["PATH"]}
    process = subprocess.Popen(argv, env=env, stdin=-3, stdout=-3, stderr=-3, start_new_session=True)
    (STATE / "pid").write_text(str(process.pid))


def show(words: list[str]) -> None:
    if UNIT not in words:
        print("Version=252")
        return
    pid = alive()
    known = {
        "ActiveState": "active" if pid else "inactive",
        "SubState": "running" if pid else "dead",
        "MainPID": str(pid),
        "LoadState": "loaded" if file().exists() else "not-found",
        "FragmentPath": str(file()) if file().exists() else "",
        "UnitFileState": "enabled" if (STATE / "enabled").exists() else "disabled",
        "NRestarts": "0",
        "Result": "success",
    }
    asked = next(w for w in words if w.startswith("--property=")).partition("=")[2].split(",")
    print("\n".join(f"{name}={known[name]}" for name in asked if name in known))


def main() -> None:
    words = sys.argv[1:]
    with open(STATE / "log", "a", encoding="utf-8") as log:
        log.write(shlex.join(words) + "\n")
    if (STATE / "dead").exists() or "--user" not in words:
        sys.exit("System has not been booted with systemd as init system (PID 1). Can't operate.")
    verb = next(w for w in words if not w.startswith("-"))
    if verb == "show":
        show(words)
    elif verb == "start":
        start()
    elif verb == "stop":
        if pid := alive():
            os.kill(pid, signal.SIGTERM)
        while alive():
            time.sleep(0.01)
    elif verb == "enable":
        (STATE / "enabled").touch()
    elif verb == "disable":
        (STATE / "enabled").unlink(missing_ok=True)


main()
