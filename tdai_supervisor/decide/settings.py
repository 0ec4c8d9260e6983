"""supervisor.toml and the environment become Settings, each value with its origin.

Invariants: pure (the file text, the environment and an `exists` test are passed in); an unknown key or a wrong type is
an error that names the key, never a default taken silently; an explicit TDAI_LLM_* beats MEMORY_TENCENTDB_LLM_*; the
environment names of one Gateway (host, port, data directory, key, command) speak of "default" only.
"""

from __future__ import annotations

import os.path
import re
import shlex
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tdai_supervisor.decide import checks
from tdai_supervisor.decide.checks import SettingsError

DEFAULT_PORT = 8420
ENVIRONMENT_NAMES = re.compile(r"(MEMORY_TENCENTDB|TDAI)_[A-Z0-9_]+|HERMES_HOME|HERMES_AGENT_DIR")
LLM_NAMES = ("API_KEY", "BASE_URL", "MODEL")
RESERVED_NAMES = frozenset({"all", "control", "daemon", "environment", "keeper", "supervisor", "supervisord"})
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")

Kind = Literal["auto", "node", "embedded", "command"]


@dataclass(frozen=True, slots=True)
class Policy:
    """When a dead Gateway starts again. Seconds, except death_budget (deaths per death_window)."""

    backoff_initial: float = 1.0
    backoff_max: float = 30.0
    backoff_reset: float = 60.0
    death_budget: int = 10
    death_window: float = 600.0
    trial_interval: float = 300.0


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """One Gateway as configured. Durations in seconds, sizes in bytes, paths absolute.

    port is None where nobody asked for one: then 8420 or the next free port is taken and kept.
    """

    name: str
    kind: Kind
    host: str
    port: int | None
    data_dir: str
    config_file: str
    log_dir: str
    command: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    node: str | None = None
    auth: Literal["auto", "off"] = "auto"
    api_key: str | None = field(default=None, repr=False)
    startup_timeout: float = 60.0
    probe_interval: float = 5.0
    probe_deadline: float = 2.0
    hang_after: float = 15.0
    busy_limit: float = 120.0
    kill_delay: float = 6.0
    memory_limit: int | None = None
    log_max_bytes: int = 20 * 1024**2
    log_backups: int = 3
    hold_while_llm_down: bool = False


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything the daemon runs by. origins maps "gateway.NAME.key" or "policy.key" to where the value came from.

    llm holds TDAI_LLM_* names; profile_env is `.env` of the default Hermes profile, which is asked last for them.
    """

    root: str
    gateways: Mapping[str, GatewaySettings]
    policy: Policy
    notify: tuple[str, ...]
    llm: Mapping[str, str]
    profile_env: str
    install_dir: str
    origins: Mapping[str, str]
    warnings: tuple[str, ...]


def shell_exports(text: str) -> dict[str, str]:
    """The names of ours that a shell fragment exports (`export TDAI_LLM_MODEL=x`); other lines are passed over.

    Nothing is executed or expanded: a value with `$` or a command in it is left out.
    """
    found = {}
    for line in text.splitlines():
        words = _words(line)
        name, equals, value = words[-1].partition("=") if words else ("", "", "")
        plain = len(words) == 1 or (len(words) == 2 and words[0] == "export")
        if plain and equals and ENVIRONMENT_NAMES.fullmatch(name) and not any(c in value for c in "$`"):
            found[name] = value
    return found


def _words(line: str) -> list[str]:
    """The words of a shell line up to its comment, which starts a word: a `#` within a word is part of it."""
    for text in (line, re.sub(r"(^|\s)#.*", "", line)):  # an apostrophe in a comment is no open quote
        try:
            words = shlex.split(text)
        except ValueError:
            continue
        return words[: next((i for i, w in enumerate(words) if w.startswith("#")), None)]
    return []


def hermes_home(env: Mapping[str, str], home: str) -> str:
    """The home of the default Hermes profile: $HERMES_HOME (or above it, if that is a profile's), else ~/.hermes."""
    given = _absolute(env.get("HERMES_HOME", "").strip() or "~/.hermes", home)
    above, name = os.path.split(os.path.dirname(given))
    return above if name == "profiles" else given


def check_name(name: str) -> str:
    """name, if it is a Gateway's name: 1-63 letters, digits, "-" and "_", safe as a file name; raises SettingsError."""
    if not _NAME.fullmatch(name) or name.lower() in RESERVED_NAMES:
        raise SettingsError(
            f"cannot use the Gateway name {name!r}: 1-63 letters, digits, '-' or '_', starting with a letter or digit, "
            f"and not one of {', '.join(sorted(RESERVED_NAMES))}"
        )
    return name


def load(root: str, text: str, env: Mapping[str, str], exists: Callable[[str], bool] = lambda _: False) -> Settings:
    """Settings from the text of supervisor.toml (may be empty) and an environment.

    Raises SettingsError for text that is not TOML, an unknown key (with a suggestion), a wrong type or range.
    """
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"cannot read supervisor.toml: {error}") from None
    checks.known(document, ("gateway", "policy", "notify"), "")
    tables = checks.table(document, "gateway")
    home = env.get("HOME") or os.path.expanduser("~")
    origins: dict[str, str] = {}
    warnings: list[str] = []
    gateways = {}
    for name in dict.fromkeys(["default", *tables]):
        table = checks.table(tables, name, "gateway.")
        gateways[check_name(name)] = _gateway(_Source(name, table, env, home, root, exists, origins, warnings))
    _distinct(gateways)
    policy = _policy(checks.table(document, "policy"), origins)
    notify = checks.strings(document.get("notify", []), "notify")
    return Settings(
        root=root,
        gateways=gateways,
        policy=policy,
        notify=notify,
        llm=llm_names(env),
        profile_env=os.path.join(hermes_home(env, home), ".env"),
        install_dir=_install_dir(root, home, env, exists),
        origins=origins,
        warnings=tuple(warnings),
    )


@dataclass(frozen=True)
class _Source:
    """Where one Gateway's values come from: its table first, then (for "default") the environment."""

    name: str
    table: Mapping[str, Any]
    env: Mapping[str, str]
    home: str
    root: str
    exists: Callable[[str], bool]
    origins: dict[str, str]
    warnings: list[str]

    def variable(self, *names: str) -> tuple[str, str] | None:
        """The first of these variables that is set and not blank, trimmed, as (name, value)."""
        if self.name != "default":
            return None
        for name in names:
            value = self.env.get(name, "").strip()
            if value:
                return name, value
        return None

    def note(self, key: str, origin: str) -> None:
        self.origins[f"gateway.{self.name}.{key}"] = origin

    def path(self, text: str) -> str:
        return _absolute(text, self.home)


def _gateway(source: _Source) -> GatewaySettings:
    checks.known(source.table, list(_KEYS), f"gateway.{source.name}.")
    values: dict[str, Any] = {}
    for key, check in _KEYS.items():
        if key in source.table:
            values[key] = check(source.table[key], f"gateway.{source.name}.{key}")
            source.note(key, "supervisor.toml")
    _from_environment(source, values)
    data_dir = source.path(values.pop("data_dir", None) or _default_data_dir(source))
    kind: Kind = values.pop("kind", None) or ("command" if values.get("command") else "auto")
    if kind == "command" and not values.get("command"):
        raise SettingsError(
            f'cannot run the Gateway {source.name!r}: kind is "command" but there is no command; '
            f'add command = ["program", "argument"] to [gateway.{source.name}]'
        )
    return GatewaySettings(
        name=source.name,
        kind=kind,
        host=values.pop("host", "127.0.0.1"),
        port=values.pop("port", None),
        data_dir=data_dir,
        config_file=_config_file(source, data_dir),
        log_dir=_log_dir(source, data_dir),
        **values,
    )


def _from_environment(source: _Source, values: dict[str, Any]) -> None:
    """Lay the environment under the table: a key of supervisor.toml stays what it is."""

    def offer(key: str, found: tuple[str, str] | None) -> str | None:
        if found is None or key in values:
            return None
        source.note(key, found[0])
        return found[1]

    if (host := offer("host", source.variable("MEMORY_TENCENTDB_GATEWAY_HOST", "TDAI_GATEWAY_HOST"))) is not None:
        values["host"] = host
    found = source.variable("MEMORY_TENCENTDB_GATEWAY_PORT", "TDAI_GATEWAY_PORT")
    if (port := offer("port", found)) is not None and found is not None:
        if port.isdecimal() and 1 <= int(port) <= 65535:
            values["port"] = int(port)
        else:
            source.warnings.append(f"{found[0]}={port!r} is not a port (1..65535): using {DEFAULT_PORT}")
            source.note("port", "default")
    if (path := offer("data_dir", source.variable("TDAI_DATA_DIR"))) is not None:
        values["data_dir"] = path
    key = source.variable("MEMORY_TENCENTDB_GATEWAY_API_KEY", "TDAI_GATEWAY_API_KEY")
    if (secret := offer("api_key", key)) is not None:
        values["api_key"] = secret
    if "kind" not in values:
        command = offer("command", source.variable("MEMORY_TENCENTDB_GATEWAY_CMD"))
        # Today's installer wrote a shell line that runs the npm package: that is kind node, run without the shell.
        if command is not None and "src/gateway/server.ts" in command:
            values["kind"] = "node"
        elif command is not None:
            values["kind"], values["command"] = "command", _shell_words(command)


def _shell_words(command: str) -> tuple[str, ...]:
    """The words of a command line, or a shell for a line that needs one."""
    try:
        words = shlex.split(command)
    except ValueError:
        words = []
    plain = words and not any(c in command for c in "|&;<>$`()*?~")
    return tuple(words) if plain else ("/bin/sh", "-c", command)


def _default_data_dir(source: _Source) -> str:
    if source.name != "default":
        return os.path.join(source.root, "gateways", source.name)
    ours, legacy = os.path.join(source.root, "memory-tdai"), os.path.join(source.home, "memory-tdai")
    return legacy if source.exists(legacy) and not source.exists(ours) else ours


def _config_file(source: _Source, data_dir: str) -> str:
    found = source.variable("TDAI_GATEWAY_CONFIG")
    if found:
        source.note("config_file", found[0])
        return source.path(found[1])
    return os.path.join(data_dir, "tdai-gateway.json")


def _log_dir(source: _Source, data_dir: str) -> str:
    found = source.env.get("MEMORY_TENCENTDB_LOG_DIR", "").strip()
    hermes = source.env.get("HERMES_HOME", "").strip() or os.path.join(source.home, ".hermes")
    if not found and source.env.get("MEMORY_TENCENTDB_MODE", "").strip().lower() == "hermes":
        found = os.path.join(hermes, "logs", "memory_tencentdb")
    if not found:
        return os.path.join(data_dir, "logs")
    directory = source.path(found)
    return directory if source.name == "default" else os.path.join(directory, source.name)


def _install_dir(root: str, home: str, env: Mapping[str, str], exists: Callable[[str], bool]) -> str:
    chosen = env.get("TDAI_INSTALL_DIR", "").strip()
    if chosen:
        return _absolute(chosen, home)
    name = "tdai-memory-openclaw-plugin"
    places = [os.path.join(p, name) for p in (root, home, os.path.join(home, ".hermes", "plugins"))]
    return next((p for p in places if exists(p)), places[0])


def llm_names(env: Mapping[str, str]) -> dict[str, str]:
    """TDAI_LLM_* in an environment: its own names win, MEMORY_TENCENTDB_LLM_* are translated."""
    values = {k: v for k, v in env.items() if k.startswith("TDAI_LLM_") and v.strip()}
    for name in LLM_NAMES:
        if other := env.get(f"MEMORY_TENCENTDB_LLM_{name}", "").strip():
            values.setdefault(f"TDAI_LLM_{name}", other)
    return values


def _policy(table: Mapping[str, Any], origins: dict[str, str]) -> Policy:
    kinds: dict[str, Callable[[Any, str], Any]] = dict.fromkeys(Policy.__slots__, checks.seconds)
    kinds["death_budget"] = checks.count
    checks.known(table, list(kinds), "policy.")
    for key in table:
        origins[f"policy.{key}"] = "supervisor.toml"
    return Policy(**{key: kinds[key](value, f"policy.{key}") for key, value in table.items()})


def _distinct(gateways: Mapping[str, GatewaySettings]) -> None:
    """Two Gateways never share a data directory or an asked-for port: one owner each."""
    seen: dict[object, str] = {}
    for g in gateways.values():
        for what, value in (("data_dir", os.path.normpath(g.data_dir)), ("port", g.port)):
            other = seen.setdefault((what, value), g.name) if value is not None else g.name
            if other != g.name:
                raise SettingsError(
                    f"cannot run {g.name!r} and {other!r} with the same {what} {value}: give one its own"
                )


def _absolute(text: str, home: str) -> str:
    """Absolute and `~`-free, of this home (the caller's HOME, not the password database)."""
    if text == "~" or text.startswith("~/"):
        text = home + text[1:]
    return os.path.normpath(os.path.join(home, text))


_KEYS: dict[str, Callable[[Any, str], Any]] = {
    "kind": checks.choice("auto", "node", "embedded", "command"),
    "host": checks.text,
    "port": checks.port,
    "data_dir": checks.text,
    "command": checks.command,
    "env": checks.environment,
    "node": checks.text,
    "auth": checks.choice("auto", "off"),
    "startup_timeout": checks.seconds,
    "probe_interval": checks.seconds,
    "probe_deadline": checks.seconds,
    "hang_after": checks.seconds,
    "busy_limit": checks.seconds,
    "kill_delay": checks.seconds,
    "memory_limit": checks.size,
    "log_max_bytes": checks.size,
    "log_backups": checks.backups,
    "hold_while_llm_down": checks.flag,
}
