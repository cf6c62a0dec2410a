"""All our wheels are pure Python: one wheel for every machine, aarch64 among them."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
#: Ends of files that exist for one kind of machine, or that a compiler has to read.
COMPILED = {".so", ".pyd", ".dylib", ".a", ".o", ".c", ".cc", ".cpp", ".pyx", ".rs", ".cu"}


def test_no_distribution_builds_or_has_machine_code() -> None:
    """hatchling tags a wheel py3-none-any, unless a build hook says otherwise (its documentation, "Wheel builder")."""
    projects = [
        path for path in ROOT.glob("*/**/pyproject.toml") if not path.relative_to(ROOT).parts[0].startswith(".")
    ]
    assert len(projects) > 30
    for project in projects:
        text = project.read_text(encoding="utf-8")
        assert 'build-backend = "hatchling.build"' in text, project
        assert "hooks" not in text, f"{project}: a build hook may make the wheel one of a machine"
        compiled = [path for path in (project.parent / "src").rglob("*") if path.suffix in COMPILED]
        assert compiled == [], project
