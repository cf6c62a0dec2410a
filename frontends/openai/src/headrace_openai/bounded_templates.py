"""Templates of Jinja that can do no harm: without files, private attributes, and endless loops.

Every loop and every call of a template passes a `_Budget` of time and steps. Imported only if a model has a template.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from datetime import datetime
from time import monotonic
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headrace import ConfigError, InvalidArgument, one_line

#: The longest time that a template may run, in seconds, and the most steps of its loops and calls together.
MOST_S, MOST_STEPS = 2.0, 1_000_000
#: The most characters of a prompt, and of a string that a template makes by ``*``.
MOST_CHARACTERS = 16 << 20
_BOUNDED = "headrace_bounded"


class _TooMuch(Exception):
    """The template has used up its budget."""


class _Refused(Exception):
    """The template has called ``raise_exception``."""


class _Budget:
    """The time and steps that remain for one rendering."""

    def __init__(self) -> None:
        self._ends_s, self._steps = monotonic() + MOST_S, 0

    def spend(self) -> None:
        self._steps += 1
        if self._steps > MOST_STEPS:
            raise _TooMuch(f"runs more than {MOST_STEPS} steps")
        if self._steps % 256 == 0 and monotonic() > self._ends_s:
            raise _TooMuch(f"runs for more than {MOST_S:g} s")


_budget: ContextVar[_Budget] = ContextVar("budget")


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("*", "**", "%"))

    def call(self, /, *args: Any, **more: Any) -> Any:
        _budget.get().spend()
        return super().call(*args, **more)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _budget.get().spend()
        if operator == "**" or (operator == "%" and isinstance(left, str)):
            raise _TooMuch(f"has the operator {operator}, which may make endless values")
        if operator == "*" and _length(left) * _length(right) > MOST_CHARACTERS:
            raise _TooMuch(f"makes a value of more than {MOST_CHARACTERS} characters")
        return super().call_binop(context, operator, left, right)


def compile_template(source: str, who: str) -> Template:
    """Return the template. Raises `ConfigError` with the line that is wrong; ``who`` begins its text."""
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters |= {_BOUNDED: _bounded, "tojson": _to_json}
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    for name in ("center", "format", "indent", "lipsum"):  # they make long strings of short ones
        environment.filters.pop(name, None)
        environment.globals.pop(name, None)
    try:
        tree = environment.parse(source)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, _BOUNDED, [], [], None, None)
        return Template.from_code(environment, environment.compile(tree), environment.globals)
    except TemplateSyntaxError as error:
        raise ConfigError(f"{who}: line {error.lineno}: {one_line(error.message or '')}") from None
    except (TemplateError, RecursionError) as error:
        raise ConfigError(f"{who}: {type(error).__name__}: {one_line(str(error))}") from None


def render(template: Template, values: Mapping[str, Any], who: str) -> str:
    """Return the prompt. Raises `InvalidArgument` if the template refuses ``values``, fails or takes too much."""
    _budget.set(_Budget())
    try:
        parts, size = [], 0
        for part in template.generate(values):
            parts.append(part)
            size += len(part)
            if size > MOST_CHARACTERS:
                raise _TooMuch(f"makes a prompt of more than {MOST_CHARACTERS} characters")
        return "".join(parts)
    except _Refused as error:
        raise InvalidArgument(f"the template of the model refuses the messages: {one_line(str(error))}") from None
    except _TooMuch as error:
        raise InvalidArgument(f"{who} {error}") from None
    except Exception as error:
        raise InvalidArgument(f"{who} fails: {type(error).__name__}: {one_line(str(error))[:500]}") from None


def _bounded(values: Iterable[Any]) -> Iterator[Any]:
    """Yield ``values``, of any loop of a template."""
    spend = _budget.get().spend
    for each in values:
        spend()
        yield each


def _raise_exception(text: object) -> NoReturn:
    raise _Refused(str(text)[:500])


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(str(form)[:100])


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
    """Return ``value`` as JSON for a model: Jinja's own filter writes it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _length(value: Any) -> int:
    return value if isinstance(value, int) else len(value) if isinstance(value, str | list | tuple) else 1
