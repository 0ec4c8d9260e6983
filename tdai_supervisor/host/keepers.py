"""Keepers: who keeps the daemon alive. All of them answer to the same few words.

Invariants: one keeper a root: what is installed for it wins where it answers, supervisord is for where nothing else is;
a keeper is brought up and ended only under the keeper lock.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from tdai_supervisor.host import systemd
from tdai_supervisor.host.supervisord import Supervisord


class Keeper(Protocol):
    """What a keeper can do."""

    @property
    def name(self) -> str:
        """As `status` shows it."""

    def lives(self) -> bool:
        """Whether it keeps this root now: the daemon runs under it, or will within moments."""

    def bring_up(self, env: Mapping[str, str], stop_wait: float) -> str | None:
        """Have it keep a daemon, which need not answer yet; what the user should be warned of.

        env: what a keeper of our own inherits; stop_wait: s that the daemon may take to end. Raises OSError or
        subprocess.SubprocessError with what it said; systemd.PrivilegeError where only another user may.
        """

    def end(self, *, at_once: bool = False) -> bool:
        """End it (and the daemon, if it still runs); whether it is gone. at_once: do not wait for a stuck daemon."""


def of(root: str) -> Keeper:
    """The keeper of a root: the systemd that has a unit of ours for it and answers, else supervisord."""
    installed = systemd.installed(root)
    return next((unit for unit in installed if unit.answers()), None) or Supervisord(root)


def every(root: str) -> list[Keeper]:
    """Every keeper that could keep a daemon of this root."""
    return [*(unit for unit in systemd.installed(root) if unit.answers()), Supervisord(root)]
