"""Every regular expression of the tree takes time linear in what it is given.

A pattern that begins anew at each place, or tries many ways to match, lets a caller or a model's author stop
the server with a few kilobytes. All patterns are found in the sources; each is asked to search repetitions of
what its own characters make, short and four times as long: quadratic ones take sixteen times as long.
"""

from __future__ import annotations

import ast
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from headrace.frontends import failures
from headrace_http import url_paths
from headrace_http.absent_routes import absent_routes
from headrace_http.http_extensions import OWN

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for each in ("core", "testing", "backends/*") for path in ROOT.glob(f"{each}/src/**/*.py"))
#: Functions of `re` that take a pattern first.
TAKING = {"compile", "search", "match", "fullmatch", "split", "findall", "finditer", "sub", "subn"}
#: Characters of attacks, besides those that a pattern names.
ALWAYS = 'a0 \\"'
SHORT = 600
#: Between the linear factor of four and the quadratic one of sixteen.
LIMIT = 9.0
#: Below this nothing is judged: the clock is coarse, and no harm is done.
HARMLESS_S = 0.003


def patterns(source: str, name: str = "source") -> Iterator[tuple[str, re.Pattern[Any] | None]]:
    """Return each line of ``source`` that uses a pattern, and the pattern; None if it is not a literal."""
    if not re.search(r"\bre\b", source):
        return  # most modules use no pattern, and parsing takes time
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            if isinstance(owner, ast.Name) and owner.id == "re" and node.func.attr in TAKING and node.args:
                # What only ever has to match from the beginning, or altogether, is judged so.
                begin = r"\A(?:%s)" if node.func.attr in ("match", "fullmatch") else "%s"
                yield f"{name}:{node.lineno}", _written(node, begin)
        elif isinstance(node, ast.ImportFrom) and node.module == "re":
            raise AssertionError(f"{name}:{node.lineno}: write 'import re', so that patterns are found")


def _written(call: ast.Call, form: str) -> re.Pattern[Any] | None:
    try:
        value = ast.literal_eval(call.args[0])
    except ValueError:
        return None
    flags = re.RegexFlag(0)
    for flag in re.findall(r"\bre\.([A-Z]+)\b", " ".join(map(ast.unparse, [*call.args[1:], *call.keywords]))):
        flags |= re.RegexFlag[flag]
    return re.compile(value if isinstance(value, bytes) else form % value, flags)


PATHS = {part.name.partition(" ")[2] for extension in OWN for part in extension.adds}
PATHS |= {route.path for route in absent_routes()}

#: Patterns that are put together elsewhere: where, and those that come of it.
MADE: dict[str, Callable[[], list[re.Pattern[Any]]]] = {
    "core/src/headrace/frontends/failures.py": lambda: [failures._paths()],
    "core/src/headrace_http/url_paths.py": lambda: [
        url_paths.template(path).pattern for path in (*PATHS, "/{a}/b/{version}/{c}")
    ],
}


def found() -> list[Any]:
    cases = []
    for path in SOURCES:
        name = str(path.relative_to(ROOT))
        for place, pattern in patterns(path.read_text(), name):
            made = MADE[name]() if pattern is None and name in MADE else [pattern]
            cases += [pytest.param(each, id=f"{place} {number}") for number, each in enumerate(made)]
    return cases


def characters(pattern: Any) -> list[str]:
    """Return the characters for attacks on ``pattern``: those that it names, and a few of each kind."""
    text = pattern.decode("latin-1") if isinstance(pattern, bytes) else pattern
    named = re.sub(r"\\[AZbBdDsSwWnrtf]|\\x[0-9a-f]{2}|\\u[0-9a-f]{4}|\(\?P?[<:!=][^>)]*>?|[\[\](){}|?*+^$]", "", text)
    return sorted({*ALWAYS, *[each for each in named if each.isascii() and each.isprintable()]})[:10]


def words(pattern: Any) -> list[str]:
    """The literal words that ``pattern`` may begin an attempt with."""
    text = pattern.decode("latin-1") if isinstance(pattern, bytes) else pattern
    return [each.replace("\\", "") for each in re.findall(r"(?:[A-Za-z\"'<:/-]|\\\.)+", text)][:12]


def slowness(compiled: re.Pattern[Any], limit: float = LIMIT) -> tuple[float, str]:
    """The worst factor that ``compiled`` takes longer for four times as much, and what it was given."""
    letters, starts = characters(compiled.pattern), ["", *words(compiled.pattern)]
    units = [*letters, *map("".join, product(letters, repeat=2)), *starts[1:]]
    worst = (0.0, "")
    for start, unit in [("", unit) for unit in units] + [(start, unit) for start in starts[1:] for unit in letters]:
        for end in ("", "\0"):
            long = _cost(compiled, start + unit * (4 * SHORT // len(unit)) + end)
            if long < HARMLESS_S:
                continue
            # Slow: is it so because it is long? The best of a few, because others use the machine, too.
            short = min(_cost(compiled, start + unit * (SHORT // len(unit)) + end) for _ in range(3))
            long = min(long, *(_cost(compiled, start + unit * (4 * SHORT // len(unit)) + end) for _ in range(2)))
            if long >= HARMLESS_S:
                worst = max(worst, (long / short, f"{start!r} and {unit!r} again and again and {end!r}"))
            if worst[0] >= limit:
                return worst
    return worst


def _cost(pattern: re.Pattern[Any], text: str) -> float:
    given: Any = text.encode("latin-1") if isinstance(pattern.pattern, bytes) else text
    began = time.process_time()
    deque(pattern.finditer(given), 0)
    pattern.fullmatch(given)
    return time.process_time() - began


@pytest.mark.parametrize("pattern", found())
def test_the_pattern_takes_linear_time(pattern: re.Pattern[Any] | None) -> None:
    assert pattern is not None, "a pattern that is not written here: list it in MADE, with what it becomes"
    factor, given = slowness(pattern)
    assert factor < LIMIT, f"{factor:.1f} times as long for four times as much: {given}"


@pytest.mark.parametrize(
    "pattern",
    [
        r'"(?:[^"\\]|\\.)*"|Inf(?!inity)',
        rb'"(?:[^"\\]|\\.)*"|Inf(?!inity)',
        r"(?:^|\s+)#.*$",
        r"\S+\.(?:cc|h):\d+ ",
        r"\d+x",
        r"\s*=",
    ],
)
def test_a_pattern_that_is_quadratic_is_found(pattern: str | bytes) -> None:
    assert slowness(re.compile(pattern))[0] >= LIMIT


@pytest.mark.parametrize("source", ["re.compile(name)", "re.sub('a' + b, '', text)", "re.fullmatch(f'{x}', text)"])
def test_a_pattern_that_is_not_written_is_found(source: str) -> None:
    assert [pattern for _, pattern in patterns(source)] == [None]


def test_patterns_are_found() -> None:
    source = "re.compile('a', re.VERBOSE)\nif re.match('b', x): pass\nre.escape('c')"
    assert [each for _, each in patterns(source)] == [re.compile("a", re.VERBOSE), re.compile(r"\A(?:b)")]
    assert len(found()) > 20
