"""What today's shell script did, and how it is spelled now: docs/migration.md holds the table."""

from __future__ import annotations

import json
from pathlib import Path

from tdai_supervisor.decide.settings import shell_exports
from tests.support.command import Ctl

SECRET = "a'b\"c $d%e"


def test_dry_run_before_and_after_the_verb(ctl: Ctl) -> None:
    """Nothing is started, in either place."""
    for words in (("--dry-run", "start"), ("start", "--dry-run"), ("stop", "--dry-run"), ("--dry-run", "restart")):
        done = ctl(*words)
        assert done.code == 0
        assert "would" in done.out
    assert ctl("status").code == 3
    assert not Path(ctl.root, "run", "supervisor.pid").exists()


def test_logs_takes_stream_and_number_in_any_order(ctl: Ctl) -> None:
    """logs out 5, logs 5 stderr, logs all."""
    ctl.start()
    for words in (("out", "5"), ("5", "stderr"), ("all",), ("default", "err", "1")):
        assert ctl("logs", *words).code == 0
    assert len(ctl("logs", "out", "--json").data) == 1
    assert len(ctl("logs", "all", "--json").data) == 2
    assert ctl("stop").code == 0


def test_hermes_mode_moves_logs_and_writes_the_fragment(ctl: Ctl, home: Path) -> None:
    """--hermes: logs under Hermes' home, and config llm keeps env.d in step, quoted for a shell, 0600."""
    fragment = home / ".hermes" / "env.d" / "memory-tencentdb-llm.sh"
    words = ("config", "llm", "--api-key", SECRET, "--model", "m")
    assert ctl(*words).code == 0
    assert not fragment.exists(), "not without --hermes"
    assert ctl(*words[:-1], "m2", "--hermes").code == 0
    assert fragment.stat().st_mode & 0o077 == 0
    logs = ctl("--hermes", "logs", "--json").data
    assert all(path.startswith(str(home / ".hermes" / "logs" / "memory_tencentdb")) for path in logs)
    assert all("memory-tdai/logs" in path for path in ctl("logs", "--json").data)


def test_fragments_of_the_old_installer_reach_the_gateway(ctl: Ctl, home: Path) -> None:
    """env.d is read where the caller's environment does not say otherwise."""
    fragment = home / ".hermes" / "env.d" / "memory-tencentdb-llm.sh"
    fragment.parent.mkdir(parents=True)
    fragment.write_text("export TDAI_LLM_MODEL='from the file'\nexport TDAI_LLM_BASE_URL=http://file/v1\n")
    pid = ctl.start(env={"TDAI_LLM_BASE_URL": "http://shell/v1"})["pid"]
    environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    assert b"TDAI_LLM_MODEL=from the file" in environment
    assert b"TDAI_LLM_BASE_URL=http://shell/v1" in environment
    assert ctl("stop").code == 0


def test_shell_exports_execute_nothing() -> None:
    """Only plain assignments of our names."""
    text = """
export TDAI_LLM_MODEL="a b"  # c
MEMORY_TENCENTDB_GATEWAY_PORT=9
export TDAI_LLM_API_KEY=$(cat /etc/passwd)
export TDAI_X=`id`
PATH=/evil
[ -f x ] && export TDAI_Y=1
export TDAI_Z='unclosed
"""
    assert shell_exports(text) == {"TDAI_LLM_MODEL": "a b", "MEMORY_TENCENTDB_GATEWAY_PORT": "9"}


def test_enable_hermes_memory_is_hermes_enable(ctl: Ctl, home: Path) -> None:
    """The old verb still works."""
    (home / ".hermes").mkdir()
    done = ctl("enable-hermes-memory", "--json")
    assert done.code == 0, done
    assert "memory_tencentdb" in (home / ".hermes" / "config.yaml").read_text()
    assert json.loads(done.out)["command"] == "enable-hermes-memory"
