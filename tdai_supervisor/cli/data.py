"""Verbs about the data: backup and restore.

Invariants: a database is only ever read through SQLite's backup API, so a copy is consistent under write load; an
archive is complete or not there; what is restored was checked before anything running is touched, and what it replaces
is kept beside it under a name.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import sqlite3
import tarfile
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from tdai_supervisor import __version__, client
from tdai_supervisor.cli.envelope import FAILED, NOT_CONFIGURED, Result, failure
from tdai_supervisor.decide import settings

MANIFEST = "manifest.json"
LEFT_OUT = ("logs",)  # folders of a data directory that are no data
DATABASES = (".db", ".sqlite", ".sqlite3")
SIDE_FILES = ("-wal", "-shm", "-journal")
PAGES = 1024  # copied between two looks at the writers


class DataError(Exception):
    """A backup or restore cannot be made; the message says why and what was left as it is."""


def _gateway(root: str, name: str) -> settings.GatewaySettings | None:
    return client.configured(root).gateways.get(name)


def backup(root: str, name: str, target: str) -> Result:
    """Everything in a Gateway's data directory into one archive, while it runs."""
    gateway = _gateway(root, name)
    if gateway is None:
        return failure("backup", "unknown-name", f"cannot find a Gateway named {name!r}", None, NOT_CONFIGURED)
    path = os.path.abspath(target)
    if os.path.lexists(path):
        return failure("backup", "exists", f"cannot write {path}: it is there already", "give another file")
    try:
        files = _write_archive(gateway, path)
    except (OSError, sqlite3.Error, DataError) as error:
        return failure("backup", "io", f"cannot back up {gateway.data_dir}: {error}", "nothing was written")
    return Result("backup", {"path": path, "files": files, "bytes": os.path.getsize(path)})


SNAPSHOT_WITHIN = 1800.0  # s for the daemon to make one


def snapshot(root: str, name: str) -> str:
    """A snapshot of a Gateway now, as the night makes it: its path. Raises DataError.

    By the daemon where it has the Gateway READY (it lets old ones go), else here.
    """
    folder = os.path.join(root, "snapshots")
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    first = f"{name}-{stamp}.tar.gz"
    try:
        made = (client.request(root, "snapshot", SNAPSHOT_WITHIN, name=name).get("data") or {}).get(name) or [""]
        if made[-1] >= first:
            return os.path.join(folder, made[-1])
    except (client.NotRunningError, client.NoAnswerError, OSError, ValueError):
        pass  # no daemon that could: then here
    path = os.path.join(folder, first)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    result = backup(root, name, path)
    if result.exit_code:
        raise DataError(result.errors[0]["message"])
    return path


def _write_archive(gateway: settings.GatewaySettings, path: str) -> int:
    """Write the archive beside its name and rename it when it is complete; the number of files."""
    if not os.path.isdir(gateway.data_dir):
        raise DataError("there is no such directory")
    partial = f"{path}.{os.getpid()}.part"
    manifest: dict[str, Any] = {"schema": 1, "version": __version__, "gateway": gateway.name, "files": {}}
    manifest["at"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with (
            os.fdopen(fd, "wb") as out,
            tarfile.open(fileobj=out, mode="w:gz", compresslevel=3) as archive,
            tempfile.TemporaryDirectory(prefix=".backup-", dir=os.path.dirname(path)) as scratch,
        ):
            for relative, source in _sources(gateway, scratch):
                manifest["files"][relative] = _add(archive, f"data/{relative}", source)
            raw = json.dumps(manifest, indent=1).encode()
            info = tarfile.TarInfo(MANIFEST)
            info.size, info.mode = len(raw), 0o600
            archive.addfile(info, io.BytesIO(raw))
            out.flush()
        _sync(partial)
        os.rename(partial, path)
    except BaseException:
        os.unlink(partial)
        raise
    return len(manifest["files"])


def _sources(gateway: settings.GatewaySettings, scratch: str) -> Iterator[tuple[str, str]]:
    """(path below the data directory, file to read) of everything worth keeping; databases as checked copies."""
    base, logs = gateway.data_dir, os.path.realpath(gateway.log_dir)
    for folder, folders, names in os.walk(base):
        folders[:] = sorted(
            f for f in folders if os.path.realpath(os.path.join(folder, f)) != logs and f not in LEFT_OUT
        )
        for name in sorted(names):
            source = os.path.join(folder, name)
            if name.endswith(SIDE_FILES) or name.startswith(".write-check-") or not os.path.isfile(source):
                continue
            relative = os.path.relpath(source, base)
            if name.endswith(DATABASES):
                copy = os.path.join(scratch, hashlib.sha256(relative.encode()).hexdigest())
                copy_database(source, copy)
                yield relative, copy
                os.unlink(copy)
            else:
                yield relative, source


def copy_database(source: str, target: str) -> None:
    """A consistent copy of a live SQLite database, integrity checked. Raises sqlite3.Error or DataError."""
    reading = sqlite3.connect(f"file:{_uri(source)}?mode=ro", uri=True, timeout=30)
    writing = sqlite3.connect(target)
    try:
        reading.backup(writing, pages=PAGES, sleep=0.001)
        (verdict,) = writing.execute("PRAGMA quick_check(1)").fetchone()
    finally:
        writing.close()
        reading.close()
    if verdict != "ok":
        raise DataError(f"the copy of {source} is not sound: {verdict}")


def _uri(path: str) -> str:
    from urllib.parse import quote

    return quote(os.path.abspath(path))


def _add(archive: tarfile.TarFile, name: str, source: str) -> str:
    """Add a file as it is at this moment; its sha256. A text that grows is cut at its last complete line."""
    with open(source, "rb") as file:
        data = file.read()
    if source.endswith(".jsonl"):
        data = data[: data.rfind(b"\n") + 1]
    info = tarfile.TarInfo(name)
    info.size, info.mode, info.mtime = len(data), 0o600, int(os.stat(source).st_mtime)
    archive.addfile(info, io.BytesIO(data))
    return hashlib.sha256(data).hexdigest()


def _sync(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def restore(root: str, name: str, source: str) -> Result:
    """The data directory as it was in an archive: checked first, then the Gateway is stopped, and started if it ran."""
    gateway = _gateway(root, name)
    if gateway is None:
        return failure("restore", "unknown-name", f"cannot find a Gateway named {name!r}", None, NOT_CONFIGURED)
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    fresh, kept = f"{gateway.data_dir}.restoring-{stamp}", f"{gateway.data_dir}.before-restore-{stamp}"
    try:
        files = _unpack(source, fresh)
    except (OSError, tarfile.TarError, EOFError, ValueError, KeyError, sqlite3.Error, DataError) as error:
        shutil.rmtree(fresh, ignore_errors=True)
        return failure("restore", "archive", f"cannot restore {source}: {error}", "nothing was changed")
    from tdai_supervisor.cli import lifecycle, observe

    before = observe.status(root, name).data
    wanted = bool(before) and before["gateways"][0]["want"] == "up"
    stopped = lifecycle.stop(root, name)
    if stopped.exit_code:
        shutil.rmtree(fresh, ignore_errors=True)
        return stopped.but(command="restore")
    replaced = os.path.isdir(gateway.data_dir)
    if replaced:
        os.rename(gateway.data_dir, kept)
    os.rename(fresh, gateway.data_dir)
    data = {"files": files, "data_dir": gateway.data_dir, "kept": kept if replaced else None}
    if not wanted:
        return Result("restore", data)
    started = lifecycle.start(root, name, wait=True, timeout=None, take_over=False)
    return Result("restore", data, FAILED if started.exit_code else 0, started.errors)


def _unpack(source: str, fresh: str) -> int:
    """Unpack an archive of ours into a new directory and check every file; their number."""
    os.makedirs(fresh, mode=0o700)
    with tarfile.open(source, "r:gz") as archive:
        member = archive.extractfile(MANIFEST)
        manifest = json.loads(member.read()) if member else {}
        files = manifest["files"]
        for relative, digest in files.items():
            target = os.path.normpath(os.path.join(fresh, relative))
            if not target.startswith(fresh + os.sep):
                raise DataError(f"{relative} leads out of the data directory")
            entry = archive.extractfile(f"data/{relative}")
            data = entry.read() if entry else b""
            if hashlib.sha256(data).hexdigest() != digest:
                raise DataError(f"{relative} is damaged")
            os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)
            with open(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
                out.write(data)
                out.flush()
                os.fsync(out.fileno())
            if relative.endswith(DATABASES):
                _check(target)
    return len(files)


def _check(path: str) -> None:
    with sqlite3.connect(path) as database:
        (verdict,) = database.execute("PRAGMA quick_check(1)").fetchone()
    database.close()
    if verdict != "ok":
        raise DataError(f"{os.path.basename(path)} is not sound: {verdict}")
