"""The findings of a migration, and the report on them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from headrace import draw_table


class Verdict(Enum):
    """The result for one item. The values are the words of the report."""

    AS_IT_IS = "as it is"
    CHANGED = "changed"
    NEEDS = "needs"
    DIFFERS = "differs"
    NOT_THERE = "not there"


#: The verdicts for which the exit code is 1.
_TO_SEE = (Verdict.DIFFERS, Verdict.NOT_THERE)


class BadInput(Exception):
    """The input cannot be read or has an unknown format. Nothing is written.

    ``line`` is the line of the input, from 1; 0 if the message has the place.
    """

    def __init__(self, reason: str, line: int = 0) -> None:
        super().__init__(reason)
        self.line = line


@dataclass(frozen=True, slots=True)
class Finding:
    """A thing that was found: ``line`` from 1, or 0 without a place; ``kind`` as "flag"; ``name`` as it is written.

    ``detail`` completes the verdict. ``docs`` is a page of the documentation, with its anchor.
    """

    line: int
    kind: str
    name: str
    verdict: Verdict
    detail: str = ""
    docs: str = ""


@dataclass(slots=True)
class Report:
    """The findings in ``source``, the distributions that they need, and the new text, if there is one."""

    source: str
    findings: list[Finding] = field(default_factory=list)
    distributions: set[str] = field(default_factory=lambda: {"headrace", "headrace-tritonserver"})
    new: str | None = None
    shows_new: bool = False

    def add(self, line: int, kind: str, name: str, verdict: Verdict, detail: str = "", docs: str = "") -> None:
        """Add a finding, unless it is there already."""
        finding = Finding(line, kind, name, verdict, detail, docs)
        if finding not in self.findings:
            self.findings.append(finding)

    def need(self, line: int, kind: str, name: str, distribution: str, docs: str = "") -> None:
        """Add a finding that needs ``distribution``."""
        self.distributions.add(distribution)
        self.add(line, kind, name, Verdict.NEEDS, install_line([distribution]), docs)

    @property
    def exit_code(self) -> int:
        """1 if anything differs or is missing, else 0."""
        return int(any(finding.verdict in _TO_SEE for finding in self.findings))

    def as_json(self) -> str:
        """Return the report as JSON."""
        return json.dumps(
            {
                "source": self.source,
                "findings": [
                    {
                        "line": each.line,
                        "kind": each.kind,
                        "name": each.name,
                        "verdict": each.verdict.value,
                        "detail": each.detail,
                        "docs": each.docs,
                    }
                    for each in self._sorted()
                ],
                "distributions": sorted(self.distributions),
                "new": self.new,
                "runs_as_it_is": not self.exit_code,
            },
            indent=2,
        )

    def as_text(self) -> str:
        """Return the report as a table, and a sentence."""
        rows = [
            (str(each.line or ""), each.kind, shortened(each.name), _verdict_text(each), each.docs)
            for each in self._sorted()
        ]
        table = draw_table(("Line", "What", "Written", "In Headrace", "Documentation"), rows) if rows else ""
        return table + "\n".join(self._sentences()) + "\n"

    def _sentences(self) -> Iterator[str]:
        yield f"install: {install_line(self.distributions)}"
        count = sum(each.verdict in _TO_SEE for each in self.findings)
        things = "1 thing differs" if count == 1 else f"{count or 'no'} things differ"
        yield f"{self.source}: {things}"

    def _sorted(self) -> list[Finding]:
        return sorted(self.findings, key=lambda each: each.line)


def install_line(distributions: Iterable[str]) -> str:
    """Return the command that installs ``distributions``."""
    quoted = (f'"{name}"' if "[" in name else name for name in sorted(distributions))
    return f"pip install {' '.join(quoted)}"


def shortened(text: str, limit: int = 60) -> str:
    """Return ``text``, at most ``limit`` characters of it."""
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def _verdict_text(finding: Finding) -> str:
    return f"{finding.verdict.value}: {finding.detail}" if finding.detail else finding.verdict.value
