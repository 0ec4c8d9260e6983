"""What the Gateway's own config file means for a spawn: its key and port, settings that pay, and drift.

Invariants: runs in the worker; a file that does not parse is never written and never ignored (the real Gateway would
run without auth); values are compared by digest, so no secret is kept twice.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tdai_supervisor import gwconfig
from tdai_supervisor.decide import paths
from tdai_supervisor.decide import settings as names
from tdai_supervisor.decide.checks import SettingsError
from tdai_supervisor.decide.launch import PAYS
from tdai_supervisor.decide.settings import GatewaySettings, Settings
from tdai_supervisor.host import disk

log = logging.getLogger("tdai_supervisor")


def read_settings(root: str, env: Mapping[str, str]) -> Settings:
    """Settings from supervisor.toml and env. Raises SettingsError, also for a file that cannot be read."""
    try:
        text = disk.read(paths.settings(root)) or ""
    except OSError as error:
        raise SettingsError(f"cannot read {paths.settings(root)}: {error.strerror or error}") from None
    return names.load(root, text, env, os.path.exists)


def kept_environment(root: str) -> dict[str, str]:
    """The names `start` saw when it started the daemon; empty where nothing is kept."""
    try:
        kept = disk.read_object(paths.environment(root))
    except (OSError, ValueError) as error:
        log.warning("Ignored %s: %s", paths.environment(root), error)
        return {}
    return {k: v for k, v in (kept or {}).items() if isinstance(v, str) and names.ENVIRONMENT_NAMES.fullmatch(k)}


@dataclass(frozen=True)
class GatewayFile:
    """One config file as it is now."""

    path: str
    text: str = field(repr=False)
    values: Mapping[str, Any] = field(repr=False)

    @property
    def api_key(self) -> str | None:
        """server.apiKey, if it holds one."""
        key = gwconfig.get(self.values, "server.apiKey")
        return key.strip() or None if isinstance(key, str) else None

    @property
    def port(self) -> int | None:
        """server.port, if it is one."""
        port = gwconfig.get(self.values, "server.port")
        return port if gwconfig.check("server.port", port) is None else None


def read(settings: GatewaySettings) -> GatewayFile:
    """The config file of a Gateway. Raises SettingsError, with line and column, for one that cannot be used."""
    path = gwconfig.find(settings.config_file)
    try:
        text = disk.read(path) or ""
    except OSError as error:
        raise SettingsError(f"cannot read {path}: {error.strerror or error}") from None
    return GatewayFile(path, text, gwconfig.parse(path, text))


def llm(chosen: Settings, values: Mapping[str, Any], *, with_file: bool = False) -> dict[str, str]:
    """TDAI_LLM_* that a child is given: the daemon's own, and a Hermes profile's where neither they nor values say one.

    with_file: those of the file too, which the Gateway reads by itself.
    """
    try:
        text = disk.read(chosen.profile_env) or ""
    except OSError:
        text = ""  # a profile that is not for us to read has nothing to give
    found = gwconfig.llm(chosen.llm, values, names.llm_names(names.shell_exports(text)))
    return {name: value for name, (value, origin) in found.items() if with_file or origin != "file"}


def make_it_pay(file: GatewayFile, noted: str) -> GatewayFile:
    """Write the settings that pay, where the user has not chosen and the backend is sqlite without embeddings.

    noted: the file that keeps which ones were written by us. Raises OSError.
    """
    provider = gwconfig.get(file.values, "memory.embedding.provider")
    if gwconfig.get(file.values, "memory.storeBackend") == "tcvdb" or provider not in (None, "none"):
        return file
    changes = {key: value for key, value in PAYS.items() if gwconfig.get(file.values, key) is None}
    if not changes:
        return file
    text = gwconfig.patch(file.path, file.text, changes)
    disk.write(noted, json.dumps(changes) + "\n", durable=True)  # first: a choice of ours never looks like the user's
    disk.write(file.path, text, durable=True)
    return GatewayFile(file.path, text, gwconfig.parse(file.path, text))


def fingerprint(settings: GatewaySettings, file: Mapping[str, Any], given_llm: Mapping[str, str]) -> dict[str, str]:
    """A digest of everything a running Gateway was given, by key: what differs later has drifted."""
    given: dict[str, Any] = dict(gwconfig.flatten(file))
    own = ("kind", "host", "port", "data_dir", "command", "env", "node", "auth", "api_key", "config_file", "log_dir")
    given |= {f"gateway.{settings.name}.{key}": getattr(settings, key) for key in own}
    given |= dict(given_llm)
    return {key: _digest(value) for key, value in given.items()}


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:12]


def drift(
    chosen: Settings, settings: GatewaySettings, launched: Mapping[str, str], values: Mapping[str, Any] | None
) -> list[str]:
    """The keys in which the running Gateway differs from file and environment; empty where that is not known.

    values: the content of its file, None to read it.
    """
    if not launched:
        return []
    try:
        values = read(settings).values if values is None else values
        now = fingerprint(settings, values, llm(chosen, values))
    except SettingsError as error:
        return [str(error)]
    return sorted(key for key in now.keys() | launched.keys() if now.get(key) != launched.get(key))
