"""`gateway use KIND`: another kind of Gateway on the same data directory, with the conversations of the one before.

Invariants: the data is copied before anything changes; the new kind stays only if it gets READY, else the old one runs
again; conversations are carried over after that, and running the command again carries on.
"""

from __future__ import annotations

import os
import sqlite3
from argparse import Namespace
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tdai_supervisor import client
from tdai_supervisor.cli import carry, data, observe, tables
from tdai_supervisor.cli.envelope import FAILED, NOT_CONFIGURED, NOT_INSTALLED, Result, failure
from tdai_supervisor.cli.progress import Progress
from tdai_supervisor.decide import paths

if TYPE_CHECKING:
    from tomlkit import TOMLDocument


def use(root: str, a: Namespace) -> Result:
    """The verb `gateway use`."""
    from tdai_supervisor.host import disk, locks

    kind, name = a.kind, a.name or "default"
    chosen = client.configured(root)
    gateway = chosen.gateways.get(name)
    if gateway is None:
        known = ", ".join(chosen.gateways)
        message = f"cannot use {kind}: there is no Gateway named {name!r}: configured are {known}"
        return failure("gateway", "unknown-name", message, None, NOT_CONFIGURED)
    if kind == "node":
        from tdai_supervisor.host import node

        try:
            node.package(chosen.install_dir)
            node.find(gateway.node, os.environ)
        except node.NodeError as error:
            cause = str(error).replace("cannot run kind node: ", "")
            hint = "nothing was changed; try `memory-tencentdb-ctl gateway install`"
            return failure("gateway", "not-installed", f"cannot use node: {cause}", hint, NOT_INSTALLED)
    seen = observe.status(root, name)
    if seen.data is None or seen.errors:  # without an answer of the daemon nothing could be taken back
        return seen.but(command="gateway", data=None, exit_code=FAILED)
    try:
        waiting = carry.waiting(kind, gateway.data_dir)
        if a.dry_run:
            todo = waiting.turns - waiting.already
            change = f"set kind = {kind} for {name} and carry {todo} of {waiting.turns} turns over"
            return Result("gateway", {"dry_run": True, "name": name, "kind": kind, "changes": [change]})
        disk.private_dir(root)
        lock = os.path.join(disk.private_dir(paths.run(root)), f"{name}.use.lock")
        with Progress(f"gateway use {kind}") as progress, locks.exclusive(lock):
            return _Use(root, name, kind, gateway.kind, progress).run(seen.data, waiting)
    except locks.BusyError:
        message = f"cannot use {kind}: another `gateway use` is at work for {name}"
        return failure("gateway", "busy", message, "try again when it has ended")
    except (OSError, sqlite3.Error, data.DataError) as error:
        return failure(
            "gateway", "data", f"cannot use {kind}: {error}", "nothing was changed; mend that, then try again"
        )


class _Use:
    """One change of kind."""

    def __init__(self, root: str, name: str, kind: str, configured: str, progress: Progress) -> None:
        self._root, self._name, self._kind, self._configured = root, name, kind, configured
        self._progress = progress

    def run(self, status: dict[str, Any], waiting: carry.Count) -> Result:
        """Copy the data, set the kind, restart where a daemon has it run, carry over."""
        g = status["gateways"][0]
        owned = status["daemon"]["running"] and g["want"] == "up"
        other = g["kind"] != self._kind or g["state"] != "READY"
        result: dict[str, Any] = {"name": self._name, "kind": self._kind, "was": g["kind"], "snapshot": None}
        result |= {"restarted": False, "conversations": None, "changes": []}
        if (self._configured != self._kind or waiting.turns > waiting.already) and os.path.isdir(g["data_dir"]):
            self._progress.step("copying the data")
            result["snapshot"] = data.snapshot(self._root, self._name)
        before, after, _ = self._set(self._kind)
        if before != after:
            result["changes"].append(f"kind = {self._kind} for {self._name} in supervisor.toml")
        if not owned:
            result["changes"].append(
                f"{self._name} does not run: `memory-tencentdb-ctl start`, then this command again carries its "
                f"{waiting.turns - waiting.already} turns over"
            )
            return Result("gateway", result)
        if other:
            from tdai_supervisor.cli import lifecycle

            self._progress.step(f"restarting {self._name} as {self._kind}")
            started = lifecycle.restart(self._root, self._name, daemon=False, timeout=None)
            if started.exit_code:
                return self._back(g, started)
            g = started.data["gateways"][0]
            result["restarted"] = True
            result["changes"].append(f"{self._name} is READY as {self._kind}")
        return self._carry(g, result)

    def _carry(self, g: dict[str, Any], result: dict[str, Any]) -> Result:
        self._progress.step("carrying conversations over")
        count = carry.carry(self._root, g, self._kind, self._progress)
        result["conversations"] = asdict(count)
        result["changes"].append(
            f"{count.carried} of {count.turns} turns carried over, {count.already} were there"
            + (f", {count.left_out} left out" if count.left_out else "")
            + (f", {count.failed} failed" if count.failed else "")
        )
        if count.trouble is None:
            return Result("gateway", result)
        message = f"cannot carry every conversation over: {count.trouble}"
        error = {"code": "carry", "message": message, "hint": "run the same command again to go on"}
        return Result("gateway", result, FAILED, [error])

    def _set(self, kind: str) -> tuple[str, str, Any]:
        def alter(document: TOMLDocument) -> None:
            table = tables.gateway(document, self._name)
            if table.get("kind") != kind:
                table["kind"] = kind

        return tables.change(self._root, alter)

    def _back(self, g: dict[str, Any], failed: Result) -> Result:
        """The new kind did not get READY: what ran before runs again, by name, for `auto` would choose it again."""
        old = g["kind"] if g["kind"] != self._kind else self._configured
        if old in (self._kind, "auto"):
            old = "embedded"
        why = failed.errors[0]["message"] if failed.errors else "no reason given"
        cause = f"cannot use {self._kind}: {why.removeprefix(f'cannot start {self._name}: ')}"
        log = failed.errors[0].get("log") if failed.errors else None
        if old == self._kind:
            error = {"code": "not-ready", "message": cause, "hint": "try `memory-tencentdb-ctl logs`", "log": log}
            return Result("gateway", None, FAILED, [error])
        from tdai_supervisor.cli import lifecycle

        self._progress.step(f"{self._kind} does not get READY: back to {old}")
        self._set(old)
        again = lifecycle.restart(self._root, self._name, daemon=False, timeout=None)
        state = "runs again" if not again.exit_code else f"does not run either: {again.errors[0]['message']}"
        error = {"code": "not-ready", "message": f"{cause}; kind {old} is back and {state}", "hint": None, "log": log}
        return Result("gateway", None, FAILED, [error | {"hint": "try `memory-tencentdb-ctl logs`"}])
