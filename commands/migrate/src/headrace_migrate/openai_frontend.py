"""The command line of Triton's OpenAI frontend, ``openai_frontend/main.py``: each flag as one of ``headrace serve``.

Source: ``python/openai/openai_frontend/main.py`` of Triton's server repository.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from headrace import ConfigError, parse_options
from headrace_migrate.report import Report, Verdict
from headrace_migrate.server_flags import BASE, has_variable

PAGE = "docs/migrating.md#tritons-openai-frontend"
#: Flags with the same meaning here, under this name.
_SAME = {
    "model-repository": "model-repository",
    "openai-port": "openai-port",
    "lora-separator": "openai-lora-separator",
    "kserve-http-port": "http-port",
    "kserve-grpc-port": "grpc-port",
    "tritonserver-log-verbose-level": "log-verbose",
}
#: The verdicts on the other flags with a value.
_ELSEWHERE = {
    "tokenizer": (Verdict.CHANGED, "left out: the model has its tokenizer and its chat template"),
    "uvicorn-log-level": (Verdict.CHANGED, "left out: no uvicorn is here"),
    "tool-call-parser": (Verdict.DIFFERS, "left out: the model's config names it, tool_parser of vllm"),
    "chat-template": (Verdict.DIFFERS, "left out: the model's config names it, by the parameter chat_template"),
    "default-max-tokens": (Verdict.DIFFERS, "left out: a chat ends with the model, a completion after 16 tokens"),
}
#: Categories of ``--openai-restricted-api``, as ``--http-restricted-api`` calls them.
_CATEGORIES = {"inference": "inference", "model-repository": "metadata", "health": "health"}
_COUNTS = {"openai-restricted-api": 3, "enable-kserve-frontends": 0}
_KNOWN = (*_SAME, *_ELSEWHERE, *_COUNTS, "host", "backend")
_PROGRAM = ("openai_frontend", "main.py")


def frontend_at(words: Sequence[str]) -> int | None:
    """Return the index of the word that is a path to ``openai_frontend/main.py``; None without one."""
    return next((at for at, word in enumerate(words) if PurePosixPath(word).parts[-2:] == _PROGRAM), None)


@dataclass(frozen=True, slots=True)
class _Flag:
    name: str
    values: Sequence[str]
    line: int
    shown: str  #: as it is written


def review_frontend(words: Sequence[str], lines: Sequence[int], report: Report) -> tuple[str, list[str]]:
    """Report on ``words``, what follows the program. Return the new command, and the repositories that it names."""
    report.distributions.add("headrace-openai")
    flags = list(_flags(words, lines, report))
    names = {flag.name for flag in flags}
    new = [each for flag in flags for each in _renamed(flag, report)]
    if "openai-port" not in names:
        new.append("--openai-port=9000")
    if "enable-kserve-frontends" not in names:
        new += ["--allow-http=false", "--allow-grpc=false"]
    report.add(lines[0] if lines else 0, "metrics", "/metrics", Verdict.DIFFERS, "on port 8002 only", "docs/metrics.md")
    _check(new, lines[0] if lines else 0, report)
    command = " ".join(("headrace serve", *(f'"{word}"' if has_variable(word) else shlex.quote(word) for word in new)))
    return command, [flag.values[0] for flag in flags if flag.name == "model-repository"]


def _check(new: Sequence[str], line: int, report: Report) -> None:
    """Report why ``headrace serve`` refuses the flags ``new``, if it does. Those of headrace-openai are not checked."""
    checked = [word for word in new if not word.startswith("--openai-") and not has_variable(word)]
    try:
        parse_options([*BASE, *checked])
    except ConfigError as error:
        detail = f"the server does not start: {error.message.splitlines()[-1]}"
        report.add(line, "flags", shlex.join(checked), Verdict.NOT_THERE, detail, "docs/flags.md")


def _flags(words: Sequence[str], lines: Sequence[int], report: Report) -> Iterator[_Flag]:
    """Yield the flags in ``words``, as Python's argparse reads them. Report on all other words."""
    at = 0
    while at < len(words):
        word, line = words[at], lines[at]
        at += 1
        name, equals, value = word.removeprefix("--").partition("=")
        values = [value] if equals else []
        while not equals and at < len(words) and not words[at].startswith("--"):
            values.append(words[at])
            at += 1
        shown = word if equals else " ".join((word, *values))
        matching = [known for known in _KNOWN if known.startswith(name)] if name not in _KNOWN else [name]
        count = _COUNTS.get(matching[0], 1) if matching else 0
        if not word.startswith("--") or len(matching) != 1:
            detail = "this flag of Triton's OpenAI frontend is not known; left out"
            report.add(line, "flag", shown, Verdict.NOT_THERE, detail, PAGE)
        elif len(values) != count:
            detail = f"it has {len(values)} values, expected {count}; left out"
            report.add(line, "flag", shown, Verdict.NOT_THERE, detail, PAGE)
        else:
            yield _Flag(matching[0], values, line, shown)


def _renamed(flag: _Flag, report: Report) -> list[str]:
    """Report on ``flag``. Return what the new command has for it."""
    if flag.name in _SAME:
        own = f"--{_SAME[flag.name]}={flag.values[0]}"
    elif flag.name == "host":
        own = f"--http-address={flag.values[0]}"
    elif flag.name == "openai-restricted-api":
        return _restricted(flag, report)
    elif flag.name == "enable-kserve-frontends":
        report.add(flag.line, "flag", flag.shown, Verdict.CHANGED, "left out: the default", PAGE)
        return []
    else:
        verdict, detail = _elsewhere(flag)
        report.add(flag.line, "flag", flag.shown, verdict, detail, PAGE)
        return []
    if own == flag.shown.replace(" ", "=", 1):
        report.add(flag.line, "flag", flag.shown, Verdict.AS_IT_IS, "", PAGE)
    else:
        report.add(flag.line, "flag", flag.shown, Verdict.CHANGED, f"now {own}", PAGE)
    return [own, f"--grpc-address={flag.values[0]}"] if flag.name == "host" else [own]


def _elsewhere(flag: _Flag) -> tuple[Verdict, str]:
    if flag.name != "backend":
        return _ELSEWHERE[flag.name]
    if flag.values[0] == "vllm":
        return Verdict.CHANGED, "left out: the model's config names the backend"
    return Verdict.NOT_THERE, f"the backend '{flag.values[0]}' has no distribution yet; left out"


def _restricted(flag: _Flag, report: Report) -> list[str]:
    """Return ``--http-restricted-api`` for the categories, a header and its value."""
    wanted, header, value = flag.values
    known = [_CATEGORIES[each] for each in wanted.split(",") if each in _CATEGORIES]
    for each in wanted.split(","):
        if each not in _CATEGORIES:
            detail = f"'{each}' cannot be restricted by a header"
            report.add(flag.line, "flag", flag.shown, Verdict.DIFFERS, detail, "docs/access.md")
    if not known:
        return []
    own = f"--http-restricted-api={','.join(known)}:{header}={value}"
    report.add(flag.line, "flag", flag.shown, Verdict.CHANGED, f"now {own}", PAGE)
    return [own]
