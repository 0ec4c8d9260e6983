"""memory-tencentdb-ctl as a user runs it: an own process in a clean environment.

Invariants: nothing of the environment of the test run reaches the command but what a package installer needs; a `stop`
without NAME that says it is done is checked to have left no process of its root.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from tests.support import processes

PATH = "/usr/local/bin:/usr/bin:/bin"
# Where packages come from is a matter of the machine, as are its certificates.
MACHINE = ("PIP_", "SSL_CERT", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")


def clean_environment(home: str | os.PathLike[str], **more: str) -> dict[str, str]:
    """What a fresh login of a user with this home has, and more."""
    return {"HOME": os.fspath(home), "PATH": PATH, "LANG": "C.UTF-8", **more}


def machine_environment() -> dict[str, str]:
    """The variables that a package installer on this machine needs."""
    return {name: value for name, value in os.environ.items() if name.startswith(MACHINE)}


class Done(NamedTuple):
    """A finished command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The one JSON object on stdout; AssertionError where there is anything else."""
        lines = self.out.splitlines()
        assert len(lines) == 1, f"not one line on stdout: {self.out!r}, stderr {self.err!r}"
        value = json.loads(lines[0])
        assert isinstance(value, dict)
        return value

    @property
    def data(self) -> dict[str, Any]:
        """data of the envelope."""
        value = self.json["data"]
        assert isinstance(value, dict), self
        return value


def run(argv: list[str], env: Mapping[str, str], timeout: float = 60.0, cwd: str | None = None) -> Done:
    """Run argv to its end with exactly this environment and no standard input."""
    done = subprocess.run(
        argv, env=dict(env), cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout, check=False
    )
    return Done(done.returncode, done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace"))


class Ctl:
    """The command on one root. Calling it runs one verb: ctl("status", "--json")."""

    def __init__(
        self, root: str | os.PathLike[str], home: str | os.PathLike[str], argv: list[str] | None = None
    ) -> None:
        self.root, self.home = os.fspath(root), os.fspath(home)
        self.argv = argv or [sys.executable, "-I", "-m", "tdai_supervisor"]
        self.env = clean_environment(home, MEMORY_TENCENTDB_ROOT=self.root)

    def __call__(self, *words: str, env: Mapping[str, str] | None = None, timeout: float = 60.0) -> Done:
        """Run the command with these words, and env over the clean environment."""
        done = run([*self.argv, *words], {**self.env, **(env or {})}, timeout)
        if words[:1] == ("stop",) and done.code == 0 and all(w.startswith("-") for w in words[1:]):
            assert processes.of_root(self.root) == [], "stop says it is done"
        return done

    def start(self, *words: str, env: Mapping[str, str] | None = None) -> dict[str, Any]:
        """`start`, which must succeed; the first Gateway of its data."""
        done = self("start", "--json", *words, env=env)
        assert done.code == 0, done
        gateway = done.data["gateways"][0]
        assert isinstance(gateway, dict)
        return gateway

    def status(self) -> dict[str, Any]:
        """data of `status`, whatever its exit code."""
        return self("status", "--json").data

    def gateway(self, name: str = "default") -> dict[str, Any]:
        """What `status` says about one Gateway."""
        return next(g for g in self.status()["gateways"] if g["name"] == name)

    def file(self, name: str) -> str:
        """The text of a file of the root."""
        with open(os.path.join(self.root, name), encoding="utf-8") as file:
            return file.read()

    def record(self, name: str = "default") -> dict[str, Any]:
        """The endpoint record of a Gateway."""
        value = json.loads(self.file(f"run/{name}.json"))
        assert isinstance(value, dict)
        return value

    def settings(self, text: str) -> None:
        """Write supervisor.toml."""
        os.makedirs(self.root, mode=0o700, exist_ok=True)
        with open(os.path.join(self.root, "supervisor.toml"), "w", encoding="utf-8") as file:
            file.write(text)
