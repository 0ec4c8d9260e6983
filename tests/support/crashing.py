"""The daemon, made to die at one step: python crashing.py ROOT MODULE.NAME before|after.

The named function of the project is wrapped; its first call ends the process as kill -9 would.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from typing import Any

from tdai_supervisor.engine import entry


def main() -> None:
    root, point, when = sys.argv[1:4]
    path, _, name = point.rpartition(".")
    try:
        owner: Any = importlib.import_module(path)
    except ModuleNotFoundError:
        module, _, class_ = path.rpartition(".")
        owner = getattr(importlib.import_module(module), class_)
    real = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if when == "after":
            real(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, wrapped)
    entry.main(root, "none")


if __name__ == "__main__":
    main()
