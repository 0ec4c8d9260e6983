"""Setup and status lines for the host's own commands.

Invariants: answers go to the profile file (0600, merged, unknown keys kept); nothing is required, so that a provider
without a running Gateway counts as ready; a key is shown by its last four characters at most.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any

from ..settings import (
    NAME,
    PROFILE_KEYS,
    parse_port,
    parse_url,
    save_profile,
)
from .report import look, summary

_MASKS = ("***", "…", "...", "xxxx", "your-", "your_", "<")


def schema() -> list[dict[str, Any]]:
    """The fields that the host's setup and dashboard know; the llm_* ones are the Gateway's, kept in .env."""
    return [
        {"key": "gateway_url", "description": "URL of the memory Gateway (blank: the local one)"},
        {"key": "gateway", "description": "Name of the Gateway under the supervisor (blank: default)"},
        {"key": "gateway_host", "description": "Host of the Gateway", "default": "127.0.0.1"},
        {"key": "gateway_port", "description": "Port of the Gateway", "default": "8420"},
        {
            "key": "gateway_api_key",
            "description": "API key of the Gateway (blank: the supervisor's)",
            "secret": True,
            "env_var": "MEMORY_TENCENTDB_GATEWAY_API_KEY",
        },
        {
            "key": "gateway_cmd",
            "description": "Command of a Gateway that the supervisor is to run (blank: its own choice)",
        },
        {
            "key": "llm_api_key",
            "description": "API key of the LLM that extracts memories",
            "secret": True,
            "env_var": "MEMORY_TENCENTDB_LLM_API_KEY",
        },
        {"key": "llm_base_url", "description": "Base URL of that LLM", "env_var": "MEMORY_TENCENTDB_LLM_BASE_URL"},
        {"key": "llm_model", "description": "Model of that LLM", "env_var": "MEMORY_TENCENTDB_LLM_MODEL"},
    ]


def save(values: Mapping[str, Any], hermes_home: str) -> None:
    """Merge what was answered into the profile file. Raises ValueError for an answer that cannot be used, OSError."""
    defaults = {field["key"]: field.get("default") for field in schema()}
    kept = {key: value for key, value in values.items() if key not in defaults or value != defaults[key]}
    check(kept)
    save_profile(hermes_home, kept)


def check(values: Mapping[str, Any]) -> None:
    """Raises ValueError for an answer that cannot be used: a bad URL or port, or a masked key."""
    if url := str(values.get("gateway_url") or "").strip():
        parse_url(url)
    if port := str(values.get("gateway_port") or "").strip():
        warnings: list[str] = []
        parse_port(port, "gateway_port", warnings)
        if warnings:
            raise ValueError(f"cannot use gateway_port {port!r}: it must be 1..65535")
    key = str(values.get("gateway_api_key") or "")
    if key and any(mask in key.lower() for mask in _MASKS):
        raise ValueError("cannot use gateway_api_key: it looks masked or like a placeholder; paste the key itself")


def post_setup(hermes_home: str, config: dict[str, Any]) -> None:
    """Ask what is worth asking (on a terminal only), save it, make this the provider. Prints what it did."""
    if sys.stdin is not None and sys.stdin.isatty():
        _ask(hermes_home)
    if not isinstance(config.get("memory"), dict):
        config["memory"] = {}
    config["memory"]["provider"] = NAME
    importlib.import_module("hermes_cli.config").save_config(config)
    print(f"\n  Memory provider: {NAME}\n  Start a new session to use it.\n")
    for key, value in status_lines(hermes_home).items():
        print(f"  {key}: {value}")
    print(f"\n  To look after it: hermes {NAME} status | doctor | flush | start | stop\n")


def _ask(hermes_home: str) -> None:
    print("\n  The local Gateway needs no answers; press Enter to keep what is set.\n")
    for field in schema():
        if field["key"] not in PROFILE_KEYS:
            continue
        while answer := _read(f"  {field['description']}: ", secret=bool(field.get("secret"))):
            try:
                check({field["key"]: answer})
                save_profile(hermes_home, {field["key"]: answer})
                break
            except (ValueError, OSError) as error:
                print(f"  {error}")


def _read(prompt: str, *, secret: bool) -> str:
    try:
        if secret:
            return str(importlib.import_module("getpass").getpass(prompt)).strip()
        return input(prompt).strip()
    except EOFError:
        return ""


def status_lines(hermes_home: str) -> dict[str, str]:
    """What ``hermes memory status`` shows, by the same look as ``hermes memory_tencentdb status``."""
    return {name.replace(" ", "_"): value for name, value in summary(look(hermes_home)).items()}
