"""The verb `gateway ACTION`: which module does which action."""

from __future__ import annotations

from argparse import Namespace

from tdai_supervisor.cli.envelope import Result


def run(root: str, a: Namespace) -> Result:
    """The verb `gateway ACTION`."""
    if a.action == "install":
        from tdai_supervisor.cli import package

        return package.install(root, a)
    from tdai_supervisor.cli import kinds

    return kinds.use(root, a)
