"""Whether an interpreter can run a model."""

from __future__ import annotations

import json
import logging
import tempfile
from functools import lru_cache

from headrace import LoadError, ending
from headrace_python.program import run

log = logging.getLogger("headrace.python")

OLDEST = (3, 10)
_TIMEOUT_S = 60.0

#: Runs in any Python, however old.
_PROBE = """
import json, sys
found = {"version": list(sys.version_info[:2])}
try:
    import numpy
except Exception as error:
    found["error"] = "%s: %s" % (type(error).__name__, error)
print("\\n" + json.dumps(found))
"""


@lru_cache(maxsize=256)
def check(python: str, changed_ns: int, environ: tuple[tuple[str, str], ...]) -> None:
    """Raises `LoadError` unless the interpreter runs, is new enough and has NumPy."""
    with tempfile.TemporaryFile() as output:
        try:
            code = run([python, "-c", _PROBE], _TIMEOUT_S, environ=dict(environ), output=output.fileno())
        except TimeoutError:
            raise LoadError(f"'{python}' did not answer within {_TIMEOUT_S:g} s") from None
        except OSError as error:
            raise LoadError(f"'{python}' cannot be run: {error.strerror}") from error
        output.seek(0)
        said = output.read(1 << 16).decode(errors="backslashreplace").strip()
    try:
        found = json.loads(said.rpartition("\n")[2])
    except ValueError:
        log.error("'%s' is no Python that runs: it %s\n%s", python, ending(code), said[-2000:])
        raise LoadError(f"'{python}' is no Python that runs: it {ending(code)}") from None
    if tuple(found["version"]) < OLDEST:
        version, oldest = (".".join(map(str, each)) for each in (found["version"], OLDEST))
        raise LoadError(f"environment of '{python}' has Python {version}; Headrace needs {oldest} or newer")
    if "error" in found:
        raise LoadError(f"environment of '{python}' cannot import numpy, which models need: {found['error']}")
