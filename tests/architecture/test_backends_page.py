"""The table of docs/backends.md is what the backends in this tree declare.

``python tests/architecture/test_backends_page.py`` writes it anew, from the sources, whatever is installed.
"""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "backends.md"
SOURCES = sorted(path for path in ROOT.glob("backends/*/src") if not path.parent.name.startswith("_"))
MARKS = "<!-- what `headrace plugins --backends` prints -->\n", "<!-- end -->\n"


def declared() -> str:
    """The table of the built-in backends and of all in the folder ``backends``."""
    from headrace.backends.identity import Identity
    from headrace_cli.backend_table import backend_table

    found = [Identity]
    for source in SOURCES:
        if str(source) not in sys.path:
            sys.path.append(str(source))
        project = (source.parent / "pyproject.toml").read_text()
        (module,) = re.findall(r'^\[project\.entry-points\.headrace\]\n\w+ = "([\w.]+)"$', project, re.MULTILINE)
        found += importlib.import_module(module).register_backends()
    return backend_table(found)


def parts() -> tuple[str, str, str]:
    """The page before, in, and after its table."""
    before, _, rest = PAGE.read_text().partition(MARKS[0])
    table, _, after = rest.partition(MARKS[1])
    return before, table, after


def test_every_row_is_what_its_backend_declares() -> None:
    rows, right = parts()[1].splitlines(), declared().splitlines()
    assert len(rows) >= 6
    assert [row for row in rows if row not in right] == [], "run: python tests/architecture/test_backends_page.py"


if __name__ == "__main__":
    before, _, after = parts()
    PAGE.write_text(f"{before}{MARKS[0]}{declared()}{MARKS[1]}{after}")
