"""Imported by the fork server before anything else: takes the working directory off `sys.path`.

The server is started with `python -c`, which puts the working directory first. A repository's own `mcp/` package, or
any other folder named like a library, would be imported in the library's place.
"""

from __future__ import annotations

import os
import sys

sys.path[:] = [entry for entry in sys.path if entry and entry != os.getcwd()]  # noqa: PTH109  imports nothing
