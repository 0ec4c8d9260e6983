"""TencentDB Agent Memory for Hermes: recall before a turn, capture after it.

Hermes finds this directory by the words register_memory_provider in this file and calls register().

Nothing in this package is imported back from here: Hermes executes every other module of the directory first, and a
symbol of this file does not exist yet at that time. And nothing is imported here until it is asked for: the daemon runs
memory_tencentdb.drain alone.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .provider import TencentDBMemoryProvider

__all__ = ["TencentDBMemoryProvider", "register"]


def register(ctx: Any) -> None:
    """Hand the provider to the host, and the maintenance skill to hosts that take skills.

    The provider goes first: on hosts without skills the rest must not be able to cost it.
    """
    ctx.register_memory_provider(importlib.import_module(".provider", __name__).TencentDBMemoryProvider())
    if hasattr(ctx, "register_skill"):
        skill = os.path.join(os.path.dirname(os.path.abspath(__file__)), "skills", "maintenance", "SKILL.md")
        ctx.register_skill("maintenance", skill, "Look after the long-term memory: status, doctor, flush")


def __getattr__(name: str) -> Any:
    if name == "TencentDBMemoryProvider":
        return importlib.import_module(".provider", __name__).TencentDBMemoryProvider
    raise AttributeError(name)
