"""Where things lie in a root. One function a file; nothing here touches the disk."""

from __future__ import annotations

from os.path import join

SUN_PATH = 100  # bytes of a socket address that fit everywhere (108 on Linux, 104 on macOS)


def run(root: str) -> str:
    """The directory of everything that describes the present: locks, socket, pidfiles, records, wants, keys."""
    return join(root, "run")


def settings(root: str) -> str:
    """supervisor.toml"""
    return join(root, "supervisor.toml")


def lock(root: str) -> str:
    """The supervisor lock."""
    return join(root, "run", "supervisor.lock")


def pidfile(root: str) -> str:
    """The daemon's pid and start ticks."""
    return join(root, "run", "supervisor.pid")


def socket(root: str) -> str:
    """The control socket."""
    return join(root, "run", "control.sock")


def environment(root: str) -> str:
    """The names of the environment that `start` saw when it started the daemon."""
    return join(root, "run", "environment.json")


def daemon_log(root: str) -> str:
    """What the daemon says."""
    return join(root, "run", "daemon.log")


def record(root: str, name: str) -> str:
    """The endpoint record of a Gateway."""
    return join(root, "run", f"{name}.json")


def pid(root: str, name: str) -> str:
    """The pidfile of a Gateway."""
    return join(root, "run", f"{name}.pid")


def key(root: str, name: str) -> str:
    """The API key of a Gateway."""
    return join(root, "run", f"{name}.key")


def paying(root: str, name: str) -> str:
    """Which keys of a Gateway's own file were written by the daemon, not chosen by the user."""
    return join(root, "run", f"{name}.paying.json")


def want(root: str, name: str) -> str:
    """The persisted want of a Gateway."""
    return join(root, "run", f"{name}.want")


def journal(root: str) -> str:
    """Every transition, one JSON object a line."""
    return join(root, "journal.jsonl")
