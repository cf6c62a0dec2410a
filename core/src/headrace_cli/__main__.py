"""``python -m headrace_cli`` is ``headrace``."""

from __future__ import annotations

import sys

from headrace_cli import main

sys.exit(main())
