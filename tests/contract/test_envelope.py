"""The JSON object of --json: its key set is frozen for every verb, in success, in failure and for a usage error."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tdai_supervisor.cli.arguments import parser
from tests.support.command import Ctl, Done
from tests.support.reference import actions_of

ENVELOPE = {"schema", "command", "ok", "exit_code", "data", "errors"}
ERROR = {"code", "message", "hint"}
VERBS = sorted(actions_of(parser())[0])
COMPLETE = {"config": ["config", "path"], "hermes": ["hermes", "list"], "completion": ["completion", "bash"]}
ACTING = {"start", "stop", "restart", "daemon"}
TESTED_ELSEWHERE = {"backup", "diagnose", "enable-hermes-memory", "gateway", "hermes", "import", "restore"}


def envelope_of(done: Done, verb: str) -> dict[str, Any]:
    """The checked envelope of a finished command."""
    value = done.json
    assert set(value) == ENVELOPE
    assert value["schema"] == 1
    assert value["command"] == verb
    assert value["exit_code"] == done.code
    assert value["ok"] is (done.code == 0)
    assert isinstance(value["errors"], list)
    for error in value["errors"]:
        assert set(error) >= ERROR
        assert error["code"] and error["message"]
    return value


@pytest.mark.parametrize(
    "verb",
    [
        "start",
        "restart",
        *sorted(set(VERBS) - ACTING - TESTED_ELSEWHERE),
    ],
)
def test_success(running: Ctl, verb: str) -> None:
    """A verb that succeeds says ok, carries data and names no error."""
    value = envelope_of(running(*COMPLETE.get(verb, [verb]), "--json"), verb)
    if verb != "doctor":  # which may well find something on a machine that runs tests
        assert value["ok"], value
        assert value["errors"] == []
    assert value["data"] is not None


def test_stop_succeeds(ctl: Ctl) -> None:
    """`stop` of a running root answers with the status it leaves behind."""
    ctl.start()
    value = envelope_of(ctl("stop", "--json"), "stop")
    assert value["ok"], value
    assert value["data"]["daemon"]["running"] is False
    assert [g["state"] for g in value["data"]["gateways"]] == ["STOPPED"]


@pytest.mark.parametrize("verb", ["start", "stop", "restart", "status", "health", "logs"])
def test_unknown_name_fails(running: Ctl, verb: str) -> None:
    """A Gateway nobody configured is a failure with a sentence, in the same envelope."""
    value = envelope_of(running(verb, "nobody", "--json"), verb)
    assert not value["ok"]
    assert "nobody" in value["errors"][0]["message"]


def test_restart_daemon_fails_without_one(ctl: Ctl) -> None:
    """`restart --daemon` with no daemon says so."""
    value = envelope_of(ctl("restart", "--daemon", "--json"), "restart")
    assert value["exit_code"] == 7
    assert "try" in value["errors"][0]["hint"]


@pytest.mark.parametrize("verb", VERBS)
def test_usage_error(ctl: Ctl, verb: str) -> None:
    """A wrong option is exit code 2 and one object; nothing is started or written for it."""
    value = envelope_of(ctl(verb, "--json", "--no-such-option"), verb)
    assert value["exit_code"] == 2
    assert value["errors"][0]["code"] == "usage"
    assert "--help" in value["errors"][0]["message"] + str(value["errors"][0]["hint"])
    assert not Path(ctl.root).exists()


@pytest.mark.parametrize("words", [["--json"], ["--json", "no-such-verb"], ["start", "--json", "--timeout", "-1"]])
def test_other_usage_errors(ctl: Ctl, words: list[str]) -> None:
    """No verb, an unknown verb and a bad value are usage errors in the envelope."""
    value = ctl(*words).json
    assert set(value) == ENVELOPE
    assert value["exit_code"] == 2


@pytest.mark.parametrize("verb", ["start", "stop", "restart"])
def test_broken_settings(ctl: Ctl, verb: str) -> None:
    """A supervisor.toml that cannot be used is exit code 6, and the sentence names the key."""
    ctl.settings("[gateway.default]\nhots = 'x'\n")
    (Path(ctl.root) / "run").mkdir(mode=0o700)
    value = envelope_of(ctl(verb, "--json"), verb)
    assert value["exit_code"] == 6
    assert "gateway.default.hots" in value["errors"][0]["message"]


def test_silent_daemon(ctl: Ctl) -> None:
    """`status` of a daemon that does not answer is exit code 4, the envelope, and what is known."""
    ctl.start()
    pid = ctl.status()["daemon"]["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        value = envelope_of(ctl("status", "--json", timeout=2.5), "status")
        assert value["exit_code"] == 4
        assert str(pid) in value["errors"][0]["message"]
        assert value["data"]["daemon"]["pid"] == pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def test_words_for_people(running: Ctl) -> None:
    """Without --json, data goes to stdout and errors to stderr as "cannot X: cause"."""
    done = running("status")
    assert "READY" in done.out
    assert done.err == ""
    failed = running("start", "nobody")
    assert failed.out == ""
    assert failed.err.startswith("cannot ")
    assert "Traceback" not in failed.err
