"""Where a package comes from: an archive or a directory, brought into a stage; the registry goes through npm.

Invariants: only regular files and directories leave an archive, and only downwards; a source is never changed; what is
for development only does not come along; the digest names the content, so the same source is the same version.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import tarfile
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from tdai_supervisor.decide.launch import INSTALLED, SERVER
from tdai_supervisor.host import node

Kind = Literal["registry", "archive", "directory"]
_NAME = re.compile(r"(@[a-z0-9~][a-z0-9._~-]*/)?[a-z0-9~][a-z0-9._~-]*")
_NOT_COPIED = (".git", "node_modules", INSTALLED)
HIDDEN_LOCK = "node_modules/.package-lock.json"  # what npm itself says is installed there


class SourceError(Exception):
    """What was given is no package; the message says why."""


def kind_of(given: str) -> Kind:
    """What a word on the command line means. Raises SourceError."""
    if os.path.isdir(given):
        return "directory"
    if os.path.isfile(given):
        return "archive"
    if given.startswith((".", "/", "~")) or given.endswith((".tgz", ".tar.gz", ".tar")):
        raise SourceError(f"there is no {given}")
    if not _NAME.fullmatch(given):
        raise SourceError(f"{given} is neither a file, nor a directory, nor the name of a package")
    return "registry"


def integrity(path: str) -> str:
    """The digest of an archive, as npm writes it. Raises OSError."""
    with open(path, "rb") as file:
        return "sha512-" + base64.b64encode(hashlib.file_digest(file, "sha512").digest()).decode()


def digest(directory: str) -> str:
    """The digest of a directory: its files, and for node_modules what npm has noted. Raises OSError."""
    total = hashlib.sha256()
    for relative in sorted(_files(directory)):
        with open(os.path.join(directory, relative), "rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        total.update(f"{relative}\0{content}\0".encode("utf-8", "surrogateescape"))
    return "sha256-" + base64.b64encode(total.digest()).decode()


def _files(directory: str) -> Iterator[str]:
    for folder, folders, names in os.walk(directory):
        folders[:] = [f for f in folders if f not in _NOT_COPIED]
        for name in [*names, HIDDEN_LOCK]:
            path = os.path.join(folder, name)
            if os.path.isfile(path) and name not in _NOT_COPIED:
                yield os.path.relpath(path, directory)


def unpack(archive: str, into: str) -> None:
    """The files of an npm archive, without the folder that each has around it. Raises SourceError, OSError."""
    try:
        with tarfile.open(archive, "r:*") as tar:
            for member in tar:
                _, _, relative = os.path.normpath(member.name).partition("/")
                if not member.isfile() or not relative or member.name.startswith("/") or ".." in relative.split("/"):
                    continue
                content = tar.extractfile(member)
                assert content is not None
                path = os.path.join(into, relative)
                os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
                mode = 0o700 if member.mode & 0o100 else 0o600
                with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as out:
                    shutil.copyfileobj(content, out)
    except (tarfile.TarError, EOFError, ValueError) as error:
        first = next(iter(str(error).splitlines()), "it is cut").rstrip(":")
        raise SourceError(f"{archive} is no npm archive: {first}") from None
    except OSError as error:
        if error.errno is None:  # gzip says so of what is not gzip
            raise SourceError(f"{archive} is no npm archive: {error}") from None
        raise


def copy(directory: str, into: str) -> None:
    """A directory with its node_modules, but without what is for development only. Raises SourceError, OSError."""
    if os.path.realpath(into).startswith(os.path.realpath(directory) + os.sep):
        raise SourceError(f"{directory} holds the directory that it would be copied to")
    skip = {os.path.normpath(os.path.join(directory, p)) for p in _development(directory)}

    def left_out(folder: str, names: list[str]) -> set[str]:
        return {n for n in names if n in (".git", INSTALLED) or os.path.join(folder, n) in skip}

    try:
        shutil.copytree(directory, into, symlinks=True, ignore=left_out, dirs_exist_ok=True)
    except shutil.Error as error:  # a list, of which the first tells enough
        raise SourceError(f"cannot copy {error.args[0][0][0]}: {error.args[0][0][2]}") from None
    os.chmod(into, 0o700)  # the source may be read-only, a stage must not be
    modules = os.path.join(into, "node_modules")
    if os.path.islink(modules):  # a version must not depend on what it was made from
        real = os.path.realpath(os.path.join(directory, "node_modules"))
        os.unlink(modules)
        shutil.copytree(real, modules, symlinks=True)


def _development(directory: str) -> list[str]:
    try:
        with open(os.path.join(directory, HIDDEN_LOCK), encoding="utf-8") as file:
            packages = json.load(file)["packages"]
        return [path for path, about in packages.items() if about.get("dev")]
    except (OSError, ValueError, KeyError, AttributeError):
        return []


def missing(place: str, about: Mapping[str, Any]) -> list[str]:
    """The names of dependencies that node_modules does not have."""
    wanted = about.get("dependencies")
    names = sorted({*(wanted if isinstance(wanted, dict) else ()), "tsx"})
    return [n for n in names if not os.path.isdir(os.path.join(place, "node_modules", n))]


def server(directory: str) -> str:
    """Where in a directory the Gateway is. Raises SourceError."""
    place = node.inner(directory)
    if place is None:
        raise SourceError(f"it holds no {SERVER}, so it is not the Gateway's package")
    return place
