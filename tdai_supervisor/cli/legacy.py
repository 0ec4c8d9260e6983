"""The verb `migrate`: directories of earlier installations go into the root, where nothing uses them.

Invariants: one rename or nothing, never a copy that could end in half; what any process may still use stays, and so
does what has a newer one beside it: both are named. A link is only removed where it leads nowhere, or to its successor.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Mapping

from tdai_supervisor.cli import envelope
from tdai_supervisor.cli.envelope import Result

INSTALLED = "tdai-memory-openclaw-plugin"


def places(root: str, env: Mapping[str, str], home: str) -> list[tuple[str, str]]:
    """(earlier path, path in the root) of data and of the npm package; without those a variable asks for by name."""
    pairs = [("TDAI_DATA_DIR", "memory-tdai"), ("TDAI_INSTALL_DIR", INSTALLED)]
    asked = [v for v, _ in pairs if env.get(v, "").strip()]
    return [(os.path.join(home, name), os.path.join(root, name)) for v, name in pairs if v not in asked]


def run(root: str, a: Namespace) -> Result:
    """The verb `migrate`."""
    done, kept = [], []
    for earlier, place in places(root, os.environ, os.path.expanduser("~")):
        if not os.path.lexists(earlier) or os.path.normpath(earlier) == os.path.normpath(place):
            continue
        reason = _reason_to_stay(earlier, place)
        if reason is None:
            try:
                done.append(_move(earlier, place, dry_run=a.dry_run))
                continue
            except OSError as error:
                reason = f"it cannot be moved to {place} ({error.strerror})"
        kept.append({"path": earlier, "reason": reason})
    errors = [{"code": "kept", "message": f"{k['path']} stays where it is: {k['reason']}", "hint": None} for k in kept]
    code = envelope.FAILED if kept else envelope.OK
    return Result("migrate", {"changes": done, "kept": kept, "dry_run": a.dry_run}, code, errors)


def _reason_to_stay(earlier: str, place: str) -> str | None:
    """Why a path is left alone, or None where it may be moved (a link: removed)."""
    if os.path.islink(earlier):
        if os.path.exists(earlier) and os.path.realpath(earlier) != os.path.realpath(place):
            return f"it is a link to {os.readlink(earlier)}"
        return None
    if os.path.lexists(place):
        return f"{place} exists too, and is the one in use; look into both and remove what is not needed"
    user = _user_of(earlier)
    return f"{user} uses it; end that first, then run this again" if user else None


def _user_of(directory: str) -> str | None:
    """A process that uses a directory: by its lease, its working directory, its environment, or an open file."""
    from tdai_supervisor.host import process, tree
    from tdai_supervisor.host.locks import Lease

    if not process.LINUX:
        return "perhaps a process that this system does not show"
    mark = os.fsencode(os.path.realpath(directory))
    for pid in process.pids():
        if pid == os.getpid() or process.uid_of(pid) != os.geteuid():
            continue
        if tree.open_below(pid, directory) or _names(pid, mark):
            return f"pid {pid} ({tree.command_line(pid) or 'unknown command'})"
    return None if Lease(directory).is_free() else "a process that holds its lease"


def _names(pid: int, mark: bytes) -> bool:
    """Whether a process works in a directory, or is told of it by its command line or by TDAI_* variables."""
    try:
        if (os.fsencode(os.readlink(f"/proc/{pid}/cwd")) + b"/").startswith(mark + b"/"):
            return True
        with open(f"/proc/{pid}/cmdline", "rb") as command, open(f"/proc/{pid}/environ", "rb") as environ:
            told = [line for line in environ.read().split(b"\0") if line.startswith(b"TDAI_")]
            return any(mark + b"/" in text + b"/" for text in [*command.read().split(b"\0"), *told])
    except OSError:
        return False


def _move(earlier: str, place: str, *, dry_run: bool) -> str:
    if os.path.islink(earlier):
        if not dry_run:
            os.unlink(earlier)
        return f"remove the link {earlier}"
    if not dry_run:
        os.makedirs(os.path.dirname(place), mode=0o700, exist_ok=True)
        os.rename(earlier, place)
        if place.endswith("memory-tdai"):
            os.chmod(place, 0o700)
    return f"move {earlier} to {place}"
