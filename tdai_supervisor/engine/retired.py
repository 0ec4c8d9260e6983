"""Gateways whose names are gone from the settings.

Invariants: each is ended like any other (tree, lease, port), its record says STOPPED, and only then it is forgotten; a
name that comes back meanwhile is the same Gateway again.
"""

from __future__ import annotations

from collections.abc import Iterator

from tdai_supervisor.decide.model import Event, State, Want
from tdai_supervisor.engine.gateway import Gateway

WHY = "no longer configured"


class Retired:
    """The Gateways on their way out, by name."""

    def __init__(self) -> None:
        self._waiting: dict[str, Gateway] = {}
        self._ending: dict[str, Gateway] = {}

    def __iter__(self) -> Iterator[Gateway]:
        yield from [*self._waiting.values(), *self._ending.values()]

    def get(self, name: str) -> Gateway | None:
        """The one of that name, or None."""
        return self._waiting.get(name) or self._ending.get(name)

    def add(self, gateway: Gateway) -> None:
        """Take one; nothing is done to it before end()."""
        self._waiting[gateway.name] = gateway

    def back(self, name: str) -> Gateway | None:
        """Give one back whose name is configured again, or None."""
        return self._waiting.pop(name, None) or self._ending.pop(name, None)

    def end(self) -> None:
        """Begin to end those that wait for it."""
        while self._waiting:
            name, gateway = self._waiting.popitem()
            self._ending[name] = gateway
            gateway.want = Want.DOWN
            gateway.fire(Event.DOWN, WHY)
            gateway.task(self._forget(gateway))

    async def _forget(self, gateway: Gateway) -> None:
        await gateway.settled(lambda: gateway.state is State.STOPPED, float("inf"))
        if self._ending.get(gateway.name) is gateway:
            del self._ending[gateway.name]
            gateway.detach()
