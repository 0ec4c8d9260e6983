"""The interpreter that children of ours run on."""

import os
import sys

# The venv itself, not a link to it: an upgrade switches the link, and a living child must not import from another venv.
IN_VENV = sys.prefix != sys.base_prefix
PYTHON = os.path.join(os.path.realpath(sys.prefix), "bin", "python") if IN_VENV else sys.executable
