"""The fields of the host's dashboard. Loaded by path in the host's web server, so it imports nothing of this package.

CONFIG_SCHEMA is made when it is asked for: every session executes this file too, and the host's types cost it 3 ms.

Values are kept by the host in $HERMES_HOME/memory_tencentdb/config.json; the profile file beats them (settings.py).
"""

from __future__ import annotations

import importlib
from typing import Any


def _schema() -> Any:
    """The host's schema object, or None where there is no host with a dashboard."""
    try:
        host = importlib.import_module("plugins.memory.config_schema")
        field, schema = host.ProviderField, host.ProviderConfigSchema
    except (ImportError, AttributeError):
        return None
    return schema(
        name="memory_tencentdb",
        label="TencentDB Agent Memory",
        fields=(
            field(
                key="gateway_url",
                label="Gateway URL",
                placeholder="the local Gateway",
                description="Only for a Gateway on another machine, or on another port than the supervisor gave it.",
                inline=True,
            ),
            field(
                key="gateway",
                label="Gateway name",
                placeholder="default",
                description="Which Gateway of the supervisor this profile uses; its own one keeps memories apart.",
                inline=True,
            ),
            field(
                key="gateway_api_key",
                label="Gateway API key",
                kind="secret",
                env_key="MEMORY_TENCENTDB_GATEWAY_API_KEY",
                env_fallbacks=("TDAI_GATEWAY_API_KEY",),
                description="Only for a Gateway that the supervisor does not run.",
            ),
        ),
    )


def __getattr__(name: str) -> Any:
    if name == "CONFIG_SCHEMA":
        return _schema()
    raise AttributeError(name)
