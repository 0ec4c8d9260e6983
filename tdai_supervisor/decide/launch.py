"""What is executed for a Gateway: its command line and its environment.

Invariants: values are resolved first and set by us; an inherited TDAI_GATEWAY_* or TDAI_DATA_DIR never reaches the
child; proxies stay (the child's LLM may need them); `env` of the settings is laid over everything but the cookie.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tdai_supervisor.decide.model import COOKIE_NAME, Cookie
from tdai_supervisor.decide.settings import GatewaySettings

SERVER = "src/gateway/server.ts"  # of the npm package, run through tsx
EMBEDDED = "tdai_supervisor.embedded"
INSTALLED = ".memory-tencentdb.json"  # in a package that `gateway install` put there: what it is and what for
# Measured on the real Gateway with sqlite and no embedding provider: boot 3.3 -> 0.8 s, 593 -> 241 MB, same results;
# and generation B's /recall answers an error with the default strategy.
PAYS = {"memory.bm25.enabled": False, "memory.recall.strategy": "keyword"}
_OURS = ("TDAI_GATEWAY_", "MEMORY_TENCENTDB_")
_SYSTEMD = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "INVOCATION_ID", "JOURNAL_STREAM", "SYSTEMD_EXEC_PID")
_NOT_INHERITED = ("TDAI_DATA_DIR", COOKIE_NAME, *_SYSTEMD)


def command_line(kind: str, settings: GatewaySettings, python: str, node: str | None) -> Sequence[str]:
    """The words to exec: kind is node, embedded or command; node is the absolute path of a Node that fits."""
    if kind == "command":
        return settings.command
    if kind == "node":
        assert node is not None
        return (node, "--import", "tsx", SERVER)
    return (python, "-I", "-m", EMBEDDED)


def environment(
    inherited: Mapping[str, str],
    settings: GatewaySettings,
    *,
    port: int,
    key: str | None,
    cookie: Cookie,
    llm: Mapping[str, str],
) -> dict[str, str]:
    """The whole environment of the child. key is None where auth is off."""
    values = {
        name: value
        for name, value in inherited.items()
        if not name.startswith(_OURS) and name not in _NOT_INHERITED and not name.startswith("SUPERVISOR_")
    }
    values |= llm
    values |= {
        "MEMORY_TENCENTDB_ROOT": cookie.root,
        "TDAI_GATEWAY_PORT": str(port),
        "TDAI_GATEWAY_HOST": settings.host,
        "TDAI_GATEWAY_CONFIG": settings.config_file,
        "TDAI_DATA_DIR": settings.data_dir,
    }
    if key is not None:
        values["TDAI_GATEWAY_API_KEY"] = key
    values |= settings.env
    # Last: ownership must not be something a configuration can claim.
    values[COOKIE_NAME] = str(cookie)
    return values
