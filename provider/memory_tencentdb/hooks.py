"""The hooks that the host calls without a session: setup, status lines, backup.

Invariants: callable without initialize(); network only where status is asked for, 2 s at most.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from . import host
from .settings import profile_environment, read_settings

logger = logging.getLogger(__name__)


def aside(name: str) -> Any:
    """A module that sessions do without, imported when it is used."""
    return importlib.import_module(f".aside.{name}", __package__)


class Faults:
    """What a hook could not do: counted by name, logged with its trace the first time, never raised."""

    def __init__(self) -> None:
        self.faults: dict[str, int] = {}

    def _count(self, what: str) -> int:
        self.faults[what] = self.faults.get(what, 0) + 1
        return self.faults[what]

    @contextmanager
    def _guard(self, hook: str) -> Iterator[None]:
        """Whatever goes wrong in a hook costs that hook only."""
        try:
            yield
        except Exception:
            if self._count(hook) == 1:
                logger.exception("memory_tencentdb: %s failed", hook)


class SetupHooks:
    """The part of the provider that knows no session."""

    def get_config_schema(self) -> list[dict[str, Any]]:
        """What the setup of the host may ask; nothing is required."""
        schema: list[dict[str, Any]] = aside("configure").schema()
        return schema

    def save_config(self, values: Mapping[str, Any], hermes_home: str) -> None:
        """Merge answers into the profile file (0600). Raises OSError or ValueError, which the host prints."""
        aside("configure").save(values, hermes_home)

    def post_setup(self, hermes_home: str, config: dict[str, Any]) -> None:
        """The whole of ``hermes memory setup memory_tencentdb``."""
        aside("configure").post_setup(hermes_home, config)

    def get_status_config(self, provider_config: Mapping[str, Any] | None = None) -> dict[str, str]:
        """Lines for ``hermes memory status``; at most 2 s."""
        lines: dict[str, str] = aside("configure").status_lines(host.hermes_home())
        return lines

    def backup_paths(self) -> list[str]:
        """What lies outside HERMES_HOME and is not a live database: the settings of the supervisor root."""
        home = host.hermes_home()
        return [os.path.join(read_settings(home, profile_environment(home)).root, "supervisor.toml")]
