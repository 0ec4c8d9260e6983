"""The text of our units, and what unit a process lives in: decided without a systemd."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tdai_supervisor.decide import units
from tdai_supervisor.decide.checks import SettingsError

SYSTEMD = Path(__file__).resolve().parents[2] / "systemd"
PRINTABLE = st.text(st.characters(min_codepoint=32, exclude_characters="\x7f", exclude_categories=["Cs"]))


def unquoted(text: str) -> str:
    """What systemd makes of text between double quotes: escapes undone, then "%%" a percent sign."""
    return re.sub(r"\\(.)", r"\1", text).replace("%%", "%")


@given(PRINTABLE)
def test_escaping_can_be_undone(text: str) -> None:
    """Nothing in a path is syntax of systemd any more, and all of it is still there."""
    escaped = units.escape(text)
    assert re.fullmatch(r'(?:[^"\\%]|\\.|%%)*', escaped)
    assert unquoted(escaped) == text


@pytest.mark.parametrize("text", ["a\nExecStart=/bin/evil", "tab\there", "\x7f", "\udcff"])
def test_what_no_unit_can_hold_is_an_error(text: str) -> None:
    """A line break would be a setting of its own; what is not UTF-8 makes systemd ignore the line."""
    with pytest.raises(SettingsError, match="cannot write"):
        units.escape(text)


@pytest.mark.parametrize("name", ["memory-tencentdb.service", "memory-tencentdb@.service"])
def test_rendered_units(name: str) -> None:
    """No word is left over, paths are absolute, and the unit is recognised by its root and by no other."""
    root = "/home/a b/100% \"x\" 'y' $Z"
    words = {
        "ROOT": root,
        "PYTHON": "/venv/bin/python",
        "PATH": "/usr/bin:/bin",
        "USER": "alice",
        "PROTECTHOME": "read-only",
        "CAPABILITIES": "",
    }
    text = units.render((SYSTEMD / name).read_text(encoding="utf-8"), words, ["/home/a b", root])
    settings = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert not [line for line in settings if re.search("@[A-Z]+@", line)]
    assert 'ReadWritePaths="/home/a b"' in settings or "@" not in name
    assert units.names_root(text, root)
    assert not units.names_root(text, "/home/a b")
    assert not units.names_root(text, root + "\n")
    exec_start = next(line for line in settings if line.startswith("ExecStart="))
    words_ = shlex.split(exec_start.removeprefix("ExecStart=:").replace("%%", "%"))
    assert words_[:6] == ["/venv/bin/python", "-I", "-m", "tdai_supervisor", "--root", root]


@pytest.mark.parametrize("name", ["memory-tencentdb.service", "memory-tencentdb@.service"])
@pytest.mark.parametrize(
    ("result", "swept"),
    [
        ("success exited 0", False),  # stopped by itself, or left on purpose
        ("success killed TERM", True),  # told to stop before it could listen to it
        ("timeout killed KILL", True),  # did not stop in time
        ("timeout killed TERM", False),  # did not start in time
        ("signal killed KILL", False),  # crashed
        ("watchdog killed KILL", False),  # hung
        ("exit-code exited 75", False),  # another daemon has the root
        ("oom-kill killed KILL", False),
    ],
)
def test_what_is_swept_after_the_daemon(name: str, result: str, swept: bool) -> None:
    """Only a stop that did not succeed leaves Gateways that must be ended; a crash leaves some that must live."""
    text = (SYSTEMD / name).read_text(encoding="utf-8")
    line = next(line for line in text.splitlines() if line.startswith("ExecStopPost=:"))
    argv = shlex.split(line.removeprefix("ExecStopPost=:"))
    assert argv[:2] == ["/bin/sh", "-c"]
    assert argv[3:] == ["@PYTHON@", "-I", "-m", "tdai_supervisor", "--root", "@ROOT@", "daemon", "--sweep"]
    env = dict(zip(("SERVICE_RESULT", "EXIT_CODE", "EXIT_STATUS"), result.split(), strict=True))
    done = subprocess.run([*argv[:3], "echo", "swept"], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "swept\n" if swept else "")


@pytest.mark.parametrize(
    ("text", "service"),
    [
        ("0::/", None),
        ("", None),
        ("0::/user.slice/user-1000.slice/session-3.scope", None),
        ("0::/user.slice/user-1000.slice/user@1000.service/init.scope", None),
        ("0::/user.slice/user-1000.slice/user@1000.service", None),
        ("0::/user.slice/user-1000.slice/user@1000.service/app.slice/hermes.service", "hermes.service"),
        ("0::/user.slice/user-1000.slice/user@1000.service/app.slice/vte-spawn-1.scope", None),
        ("0::/user.slice/user-1000.slice/user@1000.service/app.slice/memory-tencentdb.service", None),
        ("0::/system.slice/system-memory\\x2dtencentdb.slice/memory-tencentdb@alice.service", None),
        ("0::/system.slice/hermes.service/payload/worker", "hermes.service"),
        ("0::/system.slice/docker-0123.scope", None),
        ("0::/system.slice/memory-tencentdb-notes.service", "memory-tencentdb-notes.service"),
        ("4:memory:/system.slice/x.service\n1:name=systemd:/system.slice/cron.service\n0::/", "cron.service"),
        ("4:memory:/system.slice/x.service\n0::/", None),
        ("nonsense", None),
    ],
)
def test_the_service_we_run_in(text: str, service: str | None) -> None:
    """The innermost unit counts; scopes, a user's systemd and our own units are no foreign services."""
    assert units.foreign_unit(text) == service


def test_outermost() -> None:
    """A directory within another one needs no mention."""
    found = units.outermost(["/home/a/x", "/home/a", "/home/ab", "/data/../data/y", "/home/a/"])
    assert found == ["/data/y", "/home/a", "/home/ab"]


@pytest.mark.parametrize(
    ("user", "name"),
    [
        (None, "memory-tencentdb.service"),
        ("alice", "memory-tencentdb@alice.service"),
        ("DOM\\bob é", "memory-tencentdb@DOM\\x5cbob\\x20\\xc3\\xa9.service"),
    ],
)
def test_unit_names(user: str | None, name: str) -> None:
    """A user name becomes an instance whatever it holds."""
    assert units.unit_name(user) == name


@given(st.lists(PRINTABLE.filter(bool), min_size=1))
def test_shell_words(argv: list[str]) -> None:
    """What is printed for a shell is read by a shell as it was meant; what is for cron holds no bare percent sign."""
    assert shlex.split(units.shell_words(argv)) == argv
    line = units.crontab_line(argv)
    assert shlex.split(line.removeprefix("@reboot ").replace("\\%", "%")) == argv
    assert not re.search(r"(?<!\\)%", line)
