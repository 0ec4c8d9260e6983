"""npm: fetches a package and its dependencies. The registry is whatever npm itself is configured for.

Invariants: no lifecycle script runs; packages for this platform stay, those for development do not come; what npm says
is passed on without what could be a secret; npm and all it started is ended when its time is over.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence

FETCH_WITHIN = 300.0  # s for one archive
INSTALL_WITHIN = 1800.0  # s for all dependencies (350-460 MB, measured)
QUIET = ("--ignore-scripts", "--no-audit", "--no-fund", "--no-update-notifier", "--no-progress", "--loglevel=error")
# One more try, soon: npm's own patience with a registry that refuses is minutes, and a user waits for one line.
SOON = ("--fetch-retries=1", "--fetch-retry-mintimeout=1000", "--fetch-retry-maxtimeout=5000")
_SECRET = re.compile(r"(//)[^/@\s]+(?=@)|([_?&](?:auth|key)=|oken[=:]|assword[=:])\S+|npm_\w{20,}")
_SAID = re.compile(r"npm (?:error|ERR!)\s?(.*)")
_NO_CAUSE = ("code ", "errno ", "syscall ", "A complete log", "Log files", "stack ", "path ", "type ")


class NpmError(Exception):
    """npm could not do it; the message is npm's own cause, in one line."""


def find(node: str, env: Mapping[str, str]) -> list[str] | None:
    """The words that run the npm of a Node, else that on PATH; None where there is none."""
    lib = os.path.join(os.path.dirname(os.path.realpath(node)), "..", "lib", "node_modules", "npm", "bin", "npm-cli.js")
    if os.path.isfile(lib):
        return [node, os.path.normpath(lib)]
    path = shutil.which("npm", path=os.path.dirname(node)) or shutil.which("npm", path=env.get("PATH"))
    return None if path is None else [os.path.abspath(path)]


def fetch(npm: Sequence[str], spec: str, into: str, env: Mapping[str, str]) -> str:
    """Download the archive of a package (name, or name@version) into a directory; its path. Raises NpmError."""
    _run([*npm, "pack", spec, "--pack-destination", into, *QUIET, *SOON], into, env, FETCH_WITHIN)
    found = glob.glob(os.path.join(glob.escape(into), "*.tgz"))
    if len(found) != 1:
        raise NpmError(f"npm pack left {len(found)} archives")
    return found[0]


def install(npm: Sequence[str], place: str, env: Mapping[str, str], further: Sequence[str] = ()) -> None:
    """Bring the dependencies of the package in a directory, as its lock file says where it has one, and further ones.

    Raises NpmError.
    """
    # Said on the command line: a user's own `omit` or `ignore-scripts` must not decide what runs as the Gateway.
    _run([*npm, "install", *further, "--omit=dev", "--include=optional", *QUIET, *SOON], place, env, INSTALL_WITHIN)


def _run(argv: Sequence[str], cwd: str, env: Mapping[str, str], within: float) -> None:
    try:
        child = subprocess.Popen(
            argv,
            cwd=cwd,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise NpmError(f"{argv[0]} does not run: {error.strerror}") from None
    try:
        _, said = child.communicate(timeout=within)
    except subprocess.TimeoutExpired:
        raise NpmError(f"npm was not done after {within:g} s") from None
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)  # its session is its own; whatever it left ends with it
        child.wait()
        if child.stderr is not None:
            child.stderr.close()
    if child.returncode:
        raise NpmError(cause(said) or f"npm ended with {child.returncode}")


def cause(said: str) -> str:
    """The one line that tells why, of all that npm said; empty where it said nothing."""
    lines = [m[1].strip() if (m := _SAID.match(line)) else line.strip() for line in said.splitlines()]
    code = next((line.partition(" ")[2] for line in lines if line.startswith("code ")), "")
    causes = [line for line in lines if line and not line.startswith(_NO_CAUSE)] or [""]
    first = causes[0 if _SAID.search(said) else -1]  # what is no npm's, says it last
    text = first if not code or code in first else f"{code}: {first}" if first else code
    return _SECRET.sub(lambda m: f"{m[1] or m[2] or ''}***", text)[:400]
