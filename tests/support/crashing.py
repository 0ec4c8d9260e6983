"""A program made to die at one step, as kill -9 would end it: the n-th call of a function of the project.

python -m tests.support.crashing ROOT MODULE.NAME before|after            the daemon, at the first call
python -m tests.support.crashing ctl MODULE.NAME before|after N WORD...   the command
"""

from __future__ import annotations

import importlib
import itertools
import os
import signal
import sys
from typing import Any

from tdai_supervisor.cli import main as command
from tdai_supervisor.engine import entry


def arm(point: str, when: str, nth: int = 1) -> None:
    """End this process before or after the nth call of MODULE.NAME or MODULE.CLASS.NAME."""
    path, _, name = point.rpartition(".")
    try:
        owner: Any = importlib.import_module(path)
    except ModuleNotFoundError:
        module, _, class_ = path.rpartition(".")
        owner = getattr(importlib.import_module(module), class_)
    real = getattr(owner, name)
    calls = itertools.count(1)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        last = next(calls) == nth
        if last and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(*args, **kwargs)
        if last:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, wrapped)


def main() -> None:
    what, point, when, *rest = sys.argv[1:]
    if what == "ctl":
        arm(point, when, int(rest[0]))
        sys.exit(command.main(rest[1:]))
    arm(point, when)
    entry.main(what, "none")


if __name__ == "__main__":
    main()
