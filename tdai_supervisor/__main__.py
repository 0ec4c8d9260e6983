"""python -m tdai_supervisor is memory-tencentdb-ctl."""

import sys

from tdai_supervisor.cli.main import main

sys.exit(main())
