"""Checks of single values of supervisor.toml: each takes (value, key) and returns it, or raises SettingsError.

Invariants: pure; an error names the key, what it must be and what it was.
"""

from __future__ import annotations

import re

TYPE_CHECKING = False  # typing itself costs 3 of the 50 ms that `status` may take
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

_SIZE = re.compile(r"(\d+)\s*([KMG]?)(i?)B?", re.IGNORECASE)


class SettingsError(ValueError):
    """The settings cannot be used; the message names the key and the way out."""


def known(table: Mapping[str, Any], keys: Sequence[str], prefix: str) -> None:
    """Refuse a key that nobody knows, with a suggestion."""
    for key in table:
        if key not in keys:
            import difflib  # noqa: PLC0415  (only a mistake pays for it)

            close = difflib.get_close_matches(key, keys, 1)
            hint = f"; did you mean {prefix}{close[0]}?" if close else f"; known are {', '.join(keys)}"
            raise SettingsError(f"cannot use supervisor.toml: unknown key {prefix}{key}{hint}")


def table(parent: Mapping[str, Any], key: str, prefix: str = "") -> Mapping[str, Any]:
    """The table at key, empty where there is none."""
    value = parent.get(key, {})
    if not isinstance(value, dict):
        raise SettingsError(f"cannot use supervisor.toml: {prefix}{key} must be a table, like [{prefix}{key}]")
    return value


def wrong(key: str, need: str, value: Any) -> SettingsError:
    """The error for a value of the wrong kind."""
    return SettingsError(f"cannot use supervisor.toml: {key} must be {need}, not {value!r}")


def seconds(value: Any, key: str) -> float:
    """A positive number of seconds, at most a year."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 86400 * 365:
        raise wrong(key, "a positive number of seconds", value)
    return float(value)


def count(value: Any, key: str) -> int:
    """A whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise wrong(key, "a whole number of at least 1", value)
    return value


def backups(value: Any, key: str) -> int:
    """A whole number, 0 to 100."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 100:
        raise wrong(key, "a whole number, 0 to 100", value)
    return value


def size(value: Any, key: str) -> int:
    """Bytes: an integer, or a text such as "5MiB" (1024) or "5MB" (1000)."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if not match or int(match[1]) < 1:
        raise wrong(key, 'a size such as 5242880 or "5MiB"', value)
    base = 1024 if match[3] or not match[2] else 1000
    return int(match[1]) * int(base ** ("KMG".index(match[2].upper()) + 1) if match[2] else 1)


def text(value: Any, key: str) -> str:
    """A text that is not empty, trimmed."""
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise wrong(key, "a text that is not empty", value)
    return value.strip()


def flag(value: Any, key: str) -> bool:
    """true or false."""
    if not isinstance(value, bool):
        raise wrong(key, "true or false", value)
    return value


def port(value: Any, key: str) -> int:
    """1 to 65535."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 65535:
        raise wrong(key, "a port, 1 to 65535", value)
    return value


def strings(value: Any, key: str) -> tuple[str, ...]:
    """A list of texts."""
    if not isinstance(value, list) or not all(isinstance(x, str) and "\0" not in x for x in value):
        raise wrong(key, 'a list of texts, like ["program", "argument"]', value)
    return tuple(value)


def command(value: Any, key: str) -> tuple[str, ...]:
    """A list of texts with a program in front."""
    words = strings(value, key)
    if not words or not words[0]:
        raise wrong(key, 'a list of texts, like ["program", "argument"]', value)
    return words


def environment(value: Any, key: str) -> dict[str, str]:
    """A table of texts."""
    if not isinstance(value, dict) or not all(isinstance(v, str) and "\0" not in v for v in value.values()):
        raise wrong(key, 'a table of texts, like { NAME = "value" }', value)
    return dict(value)


def choice(*allowed: str) -> Callable[[Any, str], str]:
    """A check for one of a few words."""

    def check(value: Any, key: str) -> str:
        if value not in allowed:
            raise wrong(key, "one of " + ", ".join(f'"{a}"' for a in allowed), value)
        return str(value)

    return check
