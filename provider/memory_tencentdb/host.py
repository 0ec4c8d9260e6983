"""What the host gives and what it may not: its base class, its home, its callbacks.

Invariants:
* Importable without Hermes: the daemon and the tests run the spool and the drainer without it.
* A callback of the host that raises costs its message only.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable
from typing import Any


def base_class() -> Any:
    """The host's MemoryProvider, or object where there is no host."""
    try:
        return importlib.import_module("agent.memory_provider").MemoryProvider
    except ImportError:
        return object


def hermes_home() -> str:
    """The home of the profile that this process runs for, for calls that come without initialize()."""
    try:
        return str(importlib.import_module("hermes_constants").get_hermes_home())
    except ImportError:
        return os.path.expanduser(os.environ.get("HERMES_HOME") or "~/.hermes")


def checkpoint_api() -> int:
    """The version of the pre-compress contract that the host speaks: 2 where a raise blocks the compression, else 1."""
    try:
        return int(getattr(importlib.import_module("agent.memory_provider"), "PRE_COMPRESS_CHECKPOINT_API_VERSION", 1))
    except ImportError:
        return 1


def context_thread() -> Callable[..., threading.Thread] | None:
    """The host's own maker of threads that keep the profile of their caller; None on hosts without one."""
    try:
        make: Callable[..., threading.Thread] | None = getattr(
            importlib.import_module("agent.memory_provider"), "spawn_context_thread", None
        )
    except ImportError:
        return None
    return make


def tell(callback: Callable[[str], object] | None, message: str) -> bool:
    """Say it to the user, where the host lets us. False when it did not get there."""
    if callback is None:
        return False
    try:
        callback(message)
    except Exception:  # noqa: BLE001  the host's terminal is the host's matter; the caller logs the same line
        return False
    return True
