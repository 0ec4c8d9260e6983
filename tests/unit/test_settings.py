"""supervisor.toml and the environment."""

from __future__ import annotations

import re

import pytest

from tdai_supervisor.decide.checks import SettingsError
from tdai_supervisor.decide.settings import Settings, load

HOME = {"HOME": "/home/u"}


def settings(text: str = "", exists: tuple[str, ...] = (), **env: str) -> Settings:
    return load("/r", text, {**HOME, **env}, lambda path: path in exists)


def test_defaults_of_the_contract() -> None:
    """Nothing configured: one Gateway, the documented places and figures."""
    gateway = settings().gateways["default"]
    assert (gateway.kind, gateway.host, gateway.port, gateway.auth) == ("auto", "127.0.0.1", None, "auto")
    assert gateway.data_dir == "/r/memory-tdai"
    assert gateway.config_file == "/r/memory-tdai/tdai-gateway.json"
    assert gateway.log_dir == "/r/memory-tdai/logs"
    assert (gateway.startup_timeout, gateway.hang_after, gateway.kill_delay) == (60.0, 15.0, 6.0)
    assert settings().install_dir == "/r/tdai-memory-openclaw-plugin"


def test_legacy_data_directory_only_where_it_alone_exists() -> None:
    """~/memory-tdai is used when there is no newer one."""
    assert settings(exists=("/home/u/memory-tdai",)).gateways["default"].data_dir == "/home/u/memory-tdai"
    both = settings(exists=("/home/u/memory-tdai", "/r/memory-tdai"))
    assert both.gateways["default"].data_dir == "/r/memory-tdai"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("kind = ", "cannot read supervisor.toml"),
        ("[gatway.default]", "did you mean gateway?"),
        ("[gateway.default]\nprobe_intervall = 1", "did you mean gateway.default.probe_interval?"),
        ("[gateway.default]\nport = '8420'", "gateway.default.port must be a port"),
        ("[gateway.default]\nport = true", "gateway.default.port must be a port"),
        ("[gateway.default]\nport = 70000", "gateway.default.port must be a port"),
        ("[gateway.default]\nhang_after = -1", "gateway.default.hang_after must be a positive number"),
        ("[gateway.default]\nkind = 'docker'", 'one of "auto", "node", "embedded", "command"'),
        ("[gateway.default]\nkind = 'command'", "there is no command"),
        ("[gateway.default]\ncommand = 'sleep 1'", "a list of texts"),
        ("[gateway.default]\nenv = { A = 1 }", "a table of texts"),
        ("[gateway.default]\nmemory_limit = 'many'", "a size such as"),
        ("[gateway.default]\nlog_backups = 101", "0 to 100"),
        ("[policy]\ndeath_budget = 0", "a whole number of at least 1"),
        ("[gateway.'../x']", "cannot use the Gateway name"),
        ("[gateway.supervisor]", "cannot use the Gateway name"),
        ("[gateway.a]\nport = 9\n[gateway.b]\nport = 9", "with the same port 9"),
        ("[gateway.a]\ndata_dir = '/d'\n[gateway.b]\ndata_dir = '/d/'", "with the same data_dir /d"),
        ("gateway = 3", "gateway must be a table"),
    ],
)
def test_mistakes_name_the_key_and_the_way_out(text: str, says: str) -> None:
    """No mistake becomes a default."""
    with pytest.raises(SettingsError, match=re.escape(says)):
        settings(text)


@pytest.mark.parametrize(
    ("text", "value"), [("1000", 1000), ("'5MiB'", 5 << 20), ("'5 kB'", 5000), ("'2G'", 2_000_000_000), ("'7B'", 7)]
)
def test_sizes(text: str, value: int) -> None:
    """Sizes are integers or have a unit."""
    assert settings(f"[gateway.default]\nlog_max_bytes = {text}").gateways["default"].log_max_bytes == value


def test_environment_of_today_is_honoured_below_the_file() -> None:
    """MEMORY_TENCENTDB_* speak for "default"; a key of supervisor.toml wins; the origin is kept."""
    env = {
        "MEMORY_TENCENTDB_GATEWAY_PORT": " 9000 ",
        "MEMORY_TENCENTDB_GATEWAY_HOST": "0.0.0.0",
        "TDAI_DATA_DIR": "~/d",
    }
    found = settings("", (), **env)
    gateway = found.gateways["default"]
    assert (gateway.port, gateway.host, gateway.data_dir) == (9000, "0.0.0.0", "/home/u/d")
    assert found.origins["gateway.default.port"] == "MEMORY_TENCENTDB_GATEWAY_PORT"
    assert settings("[gateway.default]\nport = 8000", (), **env).gateways["default"].port == 8000
    assert settings("[gateway.work]", (), **env).gateways["work"].port is None


@pytest.mark.parametrize("port", ["abc", "0", "65536", "-1", "8420x"])
def test_a_port_that_is_none_is_8420_with_a_warning(port: str) -> None:
    """The real Gateway takes 84x as 84: we do not."""
    found = settings("", (), MEMORY_TENCENTDB_GATEWAY_PORT=port)
    assert found.gateways["default"].port is None
    assert "using 8420" in found.warnings[0]


def test_llm_names_are_translated_and_explicit_ones_win() -> None:
    """The names the old documentation gave reach the Gateway under the names it reads."""
    env = {f"MEMORY_TENCENTDB_LLM_{n}": f"m-{n}" for n in ("API_KEY", "BASE_URL", "MODEL")}
    assert settings("", (), **env).llm["TDAI_LLM_BASE_URL"] == "m-BASE_URL"
    assert settings("", (), **env, TDAI_LLM_MODEL="t").llm["TDAI_LLM_MODEL"] == "t"


@pytest.mark.parametrize(
    ("command", "kind", "words"),
    [
        ("cd /x && exec node --import tsx src/gateway/server.ts", "node", ()),
        ("my-gateway --flag 'a b'", "command", ("my-gateway", "--flag", "a b")),
        ("cd /x && ./run", "command", ("/bin/sh", "-c", "cd /x && ./run")),
    ],
)
def test_gateway_cmd(command: str, kind: str, words: tuple[str, ...]) -> None:
    """A command line of today's installer for node is kind node; others run as they are."""
    gateway = settings("", (), MEMORY_TENCENTDB_GATEWAY_CMD=command).gateways["default"]
    assert (gateway.kind, gateway.command) == (kind, words)


def test_log_directories() -> None:
    """Hermes mode, MEMORY_TENCENTDB_LOG_DIR, and a folder each for other names."""
    hermes = {"MEMORY_TENCENTDB_MODE": "hermes", "HERMES_HOME": "/h"}
    assert settings("", (), **hermes).gateways["default"].log_dir == "/h/logs/memory_tencentdb"
    chosen = settings("[gateway.work]", (), MEMORY_TENCENTDB_LOG_DIR="/logs", **hermes)
    assert chosen.gateways["default"].log_dir == "/logs"
    assert chosen.gateways["work"].log_dir == "/logs/work"


def test_a_key_does_not_show_in_the_repr() -> None:
    """Whatever prints settings prints no secret."""
    gateway = settings("", (), MEMORY_TENCENTDB_GATEWAY_API_KEY="very-secret").gateways["default"]
    assert gateway.api_key == "very-secret"
    assert "very-secret" not in repr(gateway)
