"""systemd's units: the text of ours, and which unit a process lives in. Facts and templates in, text out.

Invariants: every path in a unit is absolute and fixed when it is installed, so that no profile, working directory or
environment of a later day changes what is kept; a character that systemd reads as syntax is escaped, and one that no
unit can hold is an error.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Iterable, Mapping

from tdai_supervisor.decide.checks import SettingsError

NAME = "memory-tencentdb"
_WORD = re.compile(r"@([A-Z]+)@")
_INSTANCE = re.compile(r"[^A-Za-z0-9:_.-]")
# What a unit's process does not inherit from a login; systemd's default for user and system services is much the same.
DEFAULT_PATH = "/usr/local/bin:/usr/bin:/bin"


def unit_name(user: str | None) -> str:
    """The name of our unit: of a user's own systemd (None), or of the system's for this user."""
    return f"{NAME}.service" if user is None else f"{NAME}@{escape_instance(user)}.service"


def escape_instance(user: str) -> str:
    """A user name as the instance of a unit; "\\xNN" for what a unit's name cannot hold."""
    return _INSTANCE.sub(lambda m: "".join(f"\\x{byte:02x}" for byte in m[0].encode()), user)


def escape(text: str) -> str:
    """text for between double quotes in a unit. Raises SettingsError for what no unit can hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise SettingsError(f"cannot write {text!r} into a unit: it is not UTF-8") from None
    if any(ord(c) < 32 or ord(c) == 127 for c in text):
        raise SettingsError(f"cannot write {text!r} into a unit: it holds a control character")
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")


def render(template: str, words: Mapping[str, str], writable: Iterable[str] = ()) -> str:
    """The unit: every @WORD@ of the template replaced by its escaped value, @WRITABLE@ by the quoted directories."""
    values = {name: escape(value) for name, value in words.items()}
    values["WRITABLE"] = " ".join(f'"{escape(path)}"' for path in outermost(writable))
    return _WORD.sub(lambda m: values[m[1]], template)


def outermost(directories: Iterable[str]) -> list[str]:
    """These absolute directories without the ones that lie in another of them, in order."""
    kept: list[str] = []
    for directory in sorted({os.path.normpath(d) for d in directories}):
        if not any(directory == k or directory.startswith(k.rstrip("/") + "/") for k in kept):
            kept.append(directory)
    return kept


def names_root(unit: str, root: str) -> bool:
    """Whether the text of one of our units is about this root."""
    try:
        return f'Environment="MEMORY_TENCENTDB_ROOT={escape(root)}"' in unit.splitlines()
    except SettingsError:
        return False


def foreign_unit(cgroups: str) -> str | None:
    """The service that a process with this /proc/PID/cgroup ends with, or None: no service, ours, a user's systemd.

    A scope (a login session, a terminal, a container) is no service: what is started in it is meant to outlive it.
    """
    for line in cgroups.splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers not in ("", "name=systemd"):
            continue
        named = [part for part in path.split("/") if part.endswith((".service", ".scope"))]
        if not named:
            continue
        last = named[-1]
        mine = last.partition(".")[0].partition("@")[0] in (NAME, "user")
        return None if last.endswith(".scope") or mine else last
    return None


def shell_words(argv: Iterable[str]) -> str:
    """These words as a shell reads them."""
    return " ".join(w if re.fullmatch(r"[\w@+=:,./-]+", w) else "'" + w.replace("'", "'\\''") + "'" for w in argv)


def crontab_line(argv: Iterable[str]) -> str:
    """The line of a crontab that runs these words at every start of the machine; cron reads "%" as a line break."""
    return "@reboot " + shell_words(argv).replace("%", "\\%")
