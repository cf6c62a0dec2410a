"""Every citation of the specification in sources, tests and pages names a section that exists."""

from __future__ import annotations

import functools
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SPEC = ROOT / "docs/spec"
SECTIONS = set(re.findall(r"^#{2,3} (\d+(?:\.\d+)?)\b", (SPEC / "behaviours.md").read_text(), re.MULTILINE))
CLASSES = set(re.findall(r"^\| (C\d+) \|", (SPEC / "security.md").read_text(), re.MULTILINE))

NUMBER = r"\d+(?:\.\d+)?"
#: ``docs/spec/behaviours.md section 3.2``, ``... sections 4.1, 4.3 to 4.5 and 8``.
SECTION = re.compile(rf"docs/spec/behaviours\.md sections? ({NUMBER}(?:(?:, | and | to |, and ){NUMBER})*)")
#: ``docs/spec/security.md C14``, ``... C2, C3 and C7``.
CLASS = re.compile(r"docs/spec/security\.md (C\d+(?:(?:, | and | to )C\d+)*)")
#: A section of something that is not ours to keep.
FOREIGN = re.compile(r"RFC \d+|its $")


@functools.cache
def texts() -> dict[str, str]:
    """Every tracked file that may cite, its comments and line ends run together."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    skipped = ("docs/spec/", "tests/architecture/test_citations.py")
    return {
        path: re.sub(r"\s+(?:#:? |// )?\s*", " ", (ROOT / path).read_text(encoding="utf-8"))
        for path in listed.splitlines()
        if path.endswith((".py", ".pyi", ".proto", ".md", ".sh", ".lua", ".json"))
        and not path.startswith(skipped)
        and "changelog" not in path.lower()
        and (ROOT / path).exists()
    }


def test_the_specification_has_sections_and_classes() -> None:
    assert len(SECTIONS) > 80
    assert len(CLASSES) > 25
    assert sum(len(SECTION.findall(text)) for text in texts().values()) > 120


@pytest.mark.parametrize(("pattern", "known"), [(SECTION, SECTIONS), (CLASS, CLASSES)], ids=["sections", "classes"])
def test_what_is_cited_exists(pattern: re.Pattern[str], known: set[str]) -> None:
    unknown = [
        f"{path}: {cited}"
        for path, text in texts().items()
        for match in pattern.finditer(text)
        for cited in re.findall(rf"C?{NUMBER}", match[1])
        if cited not in known
    ]
    assert unknown == []


def test_every_citation_has_the_one_form() -> None:
    """The page by its path from the root, then the section or the class; pages may link it, too."""
    odd = []
    for path, text in texts().items():
        plain = CLASS.sub("", SECTION.sub("", text))
        odd += [f"{path}: {text}" for text in re.findall(r"\b[\w./]*(?:behaviours|security)\.md.{0,20}", plain)
                if not re.match(r"spec/\w+\.md\)|[./]*(?:docs/)?security\.md[)#]", text)]  # fmt: skip
        odd += [
            f"{path}: {plain[match.start() - 40 : match.end()]}"
            for match in re.finditer(r"\bsections? \d", plain)
            if not FOREIGN.search(plain[max(0, match.start() - 20) : match.start()])
        ]
    assert odd == []
