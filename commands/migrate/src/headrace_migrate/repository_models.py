"""The models of a repository: which distributions they need, and what of their configs differs."""

from __future__ import annotations

import logging
from pathlib import Path

from headrace import HeadraceError, Inspector, ModelConfig, ServerOptions, distribution_of
from headrace_migrate.report import BadInput, Report, Verdict

_PAGE = "docs/check.md"


def review_models(repository: Path, report: Report) -> None:
    """Add the models of ``repository`` to ``report``. No engine is started and no model is loaded.

    Raises `BadInput` for a directory that is no repository.
    """
    logging.disable(logging.CRITICAL)  # the report has all that matters of the log
    try:
        with Inspector(ServerOptions(model_repository=(str(repository),))) as inspector:
            for name in inspector.models():
                _review_model(name, inspector, report)
    except HeadraceError as error:
        raise BadInput(f"{repository}: {error.message}") from error
    finally:
        logging.disable(logging.NOTSET)


def _review_model(name: str, inspector: Inspector, report: Report) -> None:
    try:
        with inspector.open(name) as model:
            findings = model.check(has_engines=False)
    except HeadraceError as error:
        report.add(0, "model", name, Verdict.DIFFERS, error.message, _PAGE)
        return
    needed = _distributions(findings.config)
    report.distributions.update(needed)
    problems = [each for each in findings.problems if "pip install headrace-" not in each.message]
    for problem in problems:
        report.add(0, "model", f"{name}: {problem.field}", Verdict.DIFFERS, problem.message.strip(), _PAGE)
    for note in findings.notes:
        report.add(0, "model", f"{name}: {note.field}", Verdict.DIFFERS, note.message.strip(), _PAGE)
    for own in sorted(needed):
        report.need(0, "model", name, own, "docs/backends.md")
    if not (problems or needed):
        report.add(0, "model", name, Verdict.AS_IT_IS, "", _PAGE)


def _distributions(config: ModelConfig) -> set[str]:
    """Return the distributions that a model with ``config`` needs beside core."""
    parts: list[tuple[str, str]] = [("scheduler", config.WhichOneof("scheduling_choice") or "")]
    parts += [("agent", agent.name) for agent in config.model_repository_agents.agents]
    parts.append(("backend", config.backend))
    return {own for kind, name in parts if (own := distribution_of(kind, name))}
