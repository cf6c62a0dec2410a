"""The flags of a command line of ``tritonserver``: the state of each, by the table of ``headrace serve``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches

from headrace import ConfigError, FlagHelp, Serve, distribution_of, parse_options
from headrace_migrate.report import Report, Verdict

_PAGE = "docs/flags.md"
#: Pages with more details on a flag than the table of flags.
_PAGES = {
    "allow-client-shm": "docs/shared-memory.md",
    "allow-sagemaker": "docs/cloud-routes.md",
    "allow-vertex-ai": "docs/cloud-routes.md",
    "backend-directory": "docs/python-environments.md#python-based-backends",
    "cache-config": "docs/response-cache.md",
    "response-cache-byte-size": "docs/response-cache.md",
    "trace-config": "docs/tracing.md",
}
_REPOSITORIES = ("model-repository", "model-store")
#: Values with variables of a shell, Kubernetes, Compose or Helm.
_VARIABLE = re.compile(r"\$[\w{(@*?]|`")
_EXTRA = re.compile(r"Needs (headrace\[\w+\])")
#: Flags that are valid only together with this one.
BASE = ("--model-repository=/",)


def has_variable(word: str) -> bool:
    """True if ``word`` contains a variable, for example of a shell."""
    return _VARIABLE.search(word) is not None


@dataclass(slots=True)
class ReviewedFlags:
    """The parsed words of a command line. ``dropped`` are the indices of words that the new command line omits."""

    dropped: set[int] = field(default_factory=set)
    repositories: list[str] = field(default_factory=list)


class FlagReview:
    """Reads command lines into ``report``."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._flags = {flag.name: flag for flag in Serve.flags()}

    def read(self, words: Sequence[str], lines: Sequence[int]) -> ReviewedFlags:
        """Report on ``words``, what follows the program; ``lines`` has the line of each."""
        found, at, checked = ReviewedFlags(), 0, list[str]()
        while at < len(words):
            word, line, first = words[at], lines[at], at
            at += 1
            flag = self._flag(word, line)
            if flag is None:
                continue
            name, equals, value = word.partition("=")
            if flag.argument and not equals:
                if at == len(words):
                    self._report.add(line, "flag", word, Verdict.NOT_THERE, "the flag requires an argument", _PAGE)
                    continue
                value = words[at]
                at += 1
            option = f"--{flag.name}={value}" if flag.argument else word
            shown = word if equals or not flag.argument else f"{name} {value}"
            if flag.name in _REPOSITORIES:
                found.repositories.append(value)
            if self._check(flag, shown, option, value, line):
                found.dropped.update(range(first, at))
            elif not has_variable(value):
                checked.append(option)
        self._check_together(checked, lines[0] if lines else 0)
        return found

    def _flag(self, word: str, line: int) -> FlagHelp | None:
        """Return the flag that ``word`` is, as GNU getopt_long finds it. Report any other word."""
        name = word[2:].partition("=")[0]
        matching = [flag for other, flag in self._flags.items() if other.startswith(name)]
        exact = self._flags.get(name)
        if word.startswith("--") and name and (exact or len(matching) == 1):
            return exact or matching[0]
        if has_variable(word):
            self._report.add(line, "word", word, Verdict.AS_IT_IS, "a variable: its value is not checked")
        elif not word.startswith("-"):
            detail = "an argument that is no flag: the server does not start"
            self._report.add(line, "word", word, Verdict.NOT_THERE, detail, _PAGE)
        elif matching and name:
            names = ", ".join(f"--{flag.name}" for flag in matching)
            self._report.add(line, "flag", word, Verdict.NOT_THERE, f"ambiguous: {names}", _PAGE)
        else:
            nearest = get_close_matches(name, self._flags, 1)
            hint = f"; did you mean --{nearest[0]}?" if nearest else ""
            detail = f"neither Triton 2.51 nor Headrace has this flag: the server does not start{hint}"
            self._report.add(line, "flag", word, Verdict.NOT_THERE, detail, _PAGE)
        return None

    def _check(self, flag: FlagHelp, shown: str, option: str, value: str, line: int) -> bool:
        """Report on a flag. True if the new command line leaves it out."""
        page, add = _page(flag), self._report.add
        if flag.argument and has_variable(value):
            add(line, "flag", shown, Verdict.AS_IT_IS, "a variable: its value is not checked", page)
            return False
        if flag.name in _REPOSITORIES:
            self._add_repository(shown, value, line)
            return False
        try:
            is_set = parse_options(BASE) != parse_options([*BASE, option])
        except ConfigError as error:
            is_set, reason = True, error.message.partition("\n")[2] or error.message
            if flag.state != "refused" and "requires setting" not in reason:
                add(line, "flag", shown, Verdict.DIFFERS, reason, page)
                return False
        if flag.state == "refused" and is_set:
            add(line, "flag", shown, Verdict.NOT_THERE, f"{flag.reason}; left out", page)
            return True
        if flag.state == "no effect" and is_set:
            add(line, "flag", shown, Verdict.DIFFERS, f"no effect: {flag.reason}", page)
            return False
        distribution = self._distribution(flag, value) if is_set else ""
        if flag.name == "backend-config" and value.startswith("python,shm-"):
            self._report.distributions.add(distribution)
            detail = "no effect: tensors travel in memory that grows as needed"
            add(line, "flag", shown, Verdict.DIFFERS, detail, "docs/from-triton.md#python-models")
        elif distribution:
            self._report.need(line, "flag", shown, distribution, page)
        elif flag.name == "backend-directory" and is_set:
            detail = "python-based backends only: shared libraries are not loaded"
            add(line, "flag", shown, Verdict.DIFFERS, detail, page)
        else:
            add(line, "flag", shown, Verdict.AS_IT_IS, "", page)
        return False

    def _add_repository(self, shown: str, value: str, line: int) -> None:
        scheme, separator, _ = value.partition("://")
        if not separator:
            self._report.add(line, "flag", shown, Verdict.AS_IT_IS, "", f"{_PAGE}#model-repository")
        elif own := distribution_of("storage", scheme):
            self._report.need(line, "flag", shown, own, "docs/cloud-storage.md")
        else:
            detail = f"no storage reads '{scheme}://'"
            self._report.add(line, "flag", shown, Verdict.NOT_THERE, detail, "docs/cloud-storage.md")

    def _distribution(self, flag: FlagHelp, value: str) -> str:
        """Return the distribution that the flag with ``value`` needs; empty if core is enough."""
        if flag.needs:
            return distribution_of("extension", flag.needs)
        part = value.partition(",")[0]
        if flag.name == "cache-config":
            return distribution_of("cache", part)
        if flag.name == "backend-config" and "," in value:
            return distribution_of("backend", part)
        found = _EXTRA.search(flag.text)
        return found[1] if found else ""

    def _check_together(self, options: Sequence[str], line: int) -> None:
        """Report what the flags forbid each other: each alone is in order."""
        try:
            parse_options([*BASE, *options])
        except ConfigError as error:
            reason = error.message.splitlines()[0]
            if "Bad option" not in reason:
                self._report.add(line, "flags", " ".join(options), Verdict.NOT_THERE, reason, _PAGE)


def _page(flag: FlagHelp) -> str:
    if flag.name in _PAGES:
        return _PAGES[flag.name]
    if flag.name.startswith("trace-"):
        return _PAGES["trace-config"]
    return f"{_PAGE}#{re.sub(r'[^a-z0-9 -]', '', flag.group.lower()).replace(' ', '-')}"
