"""supervisor.toml, changed by commands.

Invariants: what a user wrote (comments, order, formatting) stays byte for byte; nothing is written that a daemon could
not be started with; two commands at once change it one after the other.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tdai_supervisor.decide import paths, settings

if TYPE_CHECKING:
    from tomlkit import TOMLDocument

    from tdai_supervisor.decide.settings import Settings


def change(root: str, alter: Callable[[TOMLDocument], None], *, dry_run: bool = False) -> tuple[str, str, Settings]:
    """Let alter change supervisor.toml: the text before, the text after, and the settings it makes.

    With dry_run nothing is written. Raises SettingsError where the text before or after cannot be used, OSError where
    the file cannot be read or written; then the file is as it was.
    """
    import tomlkit

    from tdai_supervisor.host import disk, locks

    def altered() -> tuple[str, str, Settings]:
        before = disk.read(paths.settings(root)) or ""
        settings.load(root, before, os.environ, os.path.exists)  # names what is wrong better than tomlkit
        document = tomlkit.parse(before)
        alter(document)
        after = tomlkit.dumps(document)
        return before, after, settings.load(root, after, os.environ, os.path.exists)

    if dry_run:
        return altered()
    disk.private_dir(root)
    with locks.keeper_lock(root):
        before, after, made = altered()
        if after != before:
            disk.write(paths.settings(root), after, durable=True)
        return before, after, made


def gateway(document: TOMLDocument, name: str) -> Any:
    """The table [gateway.NAME] of a document, made where there is none."""
    import tomlkit

    settings.check_name(name)
    within: Any = document
    for key, above in (("gateway", True), (name, False)):
        if key not in within:
            within[key] = tomlkit.table(is_super_table=above)
        within = within[key]
    return within
