"""What a process imports before it does its work: `status` stays light, the daemon stays small."""

from __future__ import annotations

import sys

from tests.support.command import Ctl, clean_environment, run


def imported(argv: list[str], env: dict[str, str]) -> set[str]:
    """The modules a Python command imports."""
    done = run([sys.executable, "-I", "-X", "importtime", *argv], env)
    lines = [line for line in done.err.splitlines() if line.startswith("import time:")]
    assert len(lines) > 10, done
    return {line.rpartition("|")[2].strip() for line in lines}


def test_status_is_light(running: Ctl) -> None:
    """With a living daemon `status` imports neither asyncio, psutil nor filelock, nor anything of the engine."""
    modules = imported(["-m", "tdai_supervisor", "status", "--json"], running.env)
    assert "tdai_supervisor.client" in modules
    for heavy in ("asyncio", "psutil", "filelock", "subprocess", "requests", "aiohttp", "http.client"):
        assert heavy not in modules
    assert not [m for m in modules if m.startswith(("tdai_supervisor.engine", "tdai_supervisor.host"))]


def test_daemon_imports_no_web_framework() -> None:
    """The daemon needs no HTTP library: it would cost more memory than all the rest of it."""
    modules = imported(["-c", "import tdai_supervisor.engine.entry"], clean_environment("/nonexistent"))
    for heavy in ("aiohttp", "requests", "httpx", "supervisor", "http.server", "xmlrpc"):
        assert heavy not in modules


def test_provider_imports_only_the_standard_library() -> None:
    """Loading the provider imports nothing but Python's own modules and itself."""
    code = "import memory_tencentdb, sys; print(*sys.modules)"
    done = run([sys.executable, "-I", "-c", code], clean_environment("/nonexistent"))
    names = {name.partition(".")[0] for name in done.out.split()}
    assert "memory_tencentdb" in names, done
    started_with = run(
        [sys.executable, "-I", "-c", "import sys; print(*sys.modules)"], clean_environment("/nonexistent")
    )
    assert names - set(started_with.out.split()) - set(sys.stdlib_module_names) == {"memory_tencentdb"}
