"""Completion and man page come from the parser and really work."""

from __future__ import annotations

import contextlib
import os
import pty
import shutil
import subprocess

import pytest

from tdai_supervisor.cli import manners
from tdai_supervisor.cli.main import parser
from tests.support.command import Ctl


def test_every_verb_is_in_help_completion_and_man(ctl: Ctl) -> None:
    """One source: no verb is forgotten anywhere."""
    verbs = list(manners.subparsers(parser()))
    for said in (ctl("--help"), ctl("completion", "bash"), ctl("completion", "fish"), ctl("man")):
        assert said.code == 0
        assert all(verb.replace("-", "\\-") in said.out or verb in said.out for verb in verbs), said.out


def test_help_starts_with_an_example_and_fits_80_columns(ctl: Ctl) -> None:
    """Example first; every page fits a small terminal."""
    assert "example: memory-tencentdb-ctl start" in ctl("--help").out.split("\n\n")[1]
    for path, _ in manners.walk(parser()):
        said = ctl(*path, "--help", env={"COLUMNS": "80"})
        assert said.code == 0
        assert max(map(len, said.out.splitlines())) <= 80, path


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("memory-tencentdb-ctl sta", "start status"),
        ("memory-tencentdb-ctl config vdb-", "vdb-off vdb-on"),
        ("memory-tencentdb-ctl start --no", "--no-wait"),
    ],
)
def test_bash_completes(ctl: Ctl, line: str, expected: str) -> None:
    """The script, sourced by a real bash."""
    words = line.split()
    script = ctl("completion", "bash").out
    code = f"{script}\nCOMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _memory_tencentdb_ctl"
    code += '; echo "${COMPREPLY[*]}"'
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == expected


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_take_their_scripts(ctl: Ctl, shell: str) -> None:
    """Where the shell is installed it parses the script; its content is there in any case."""
    script = ctl("completion", shell).out
    assert "start" in script
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True)


def test_an_unknown_shell_is_a_usage_error(ctl: Ctl) -> None:
    """It names the known ones."""
    said = ctl("completion", "tcsh")
    assert said.code == 2
    assert "bash, zsh, fish" in said.err


def test_whoever_waits_at_a_terminal_is_told(ctl: Ctl) -> None:
    """After a second a line on the terminal, gone when the work is done; a pipe sees nothing of it."""
    ctl.settings('[gateway.default]\nkind = "command"\ncommand = ["/bin/sleep", "600"]\n')
    words = [*ctl.argv, "start", "--timeout", "2.5"]
    terminal, other = pty.openpty()
    said = b""
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=other, env=ctl.env) as started:
        os.close(other)
        with contextlib.suppress(OSError):  # EIO: nobody writes to it any more
            while block := os.read(terminal, 4096):
                said += block
        os.close(terminal)
        assert started.stdout is not None
        assert b"at work" not in started.stdout.read()
    assert started.returncode == 1
    assert b"start: at work (1 s)" in said
    assert b"\r\x1b[Kcannot start default" in said
    assert "at work" not in ctl("stop").err


@pytest.mark.parametrize(
    ("env", "coloured"),
    [({"TERM": "xterm"}, True), ({"TERM": "xterm", "NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)],
)
def test_colour_only_on_a_terminal_that_wants_it(ctl: Ctl, env: dict[str, str], coloured: bool) -> None:
    """READY is green at a terminal, plain with NO_COLOR, at a dumb one, and in a pipe whatever is forced."""
    ctl.start()
    terminal, other = pty.openpty()
    said = b""
    with subprocess.Popen([*ctl.argv, "status"], stdout=other, stderr=other, env={**ctl.env, **env}) as shown:
        os.close(other)
        with contextlib.suppress(OSError):
            while block := os.read(terminal, 4096):
                said += block
    os.close(terminal)
    assert shown.returncode == 0
    assert (b"\x1b[32mREADY   \x1b[0m" in said) is coloured, said
    assert coloured or b"\x1b" not in said
    assert "\x1b" not in ctl("status", env={"FORCE_COLOR": "1"}).out
