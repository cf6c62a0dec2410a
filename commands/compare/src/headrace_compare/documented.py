"""Differences between Triton and Headrace that the documentation tells: they are listed, and do not count."""

from __future__ import annotations

from headrace_compare.answer_differences import ABSENT, NOTHING, AnswerDifference

#: Kind and beginning of the field, and the page.
_PAGES = {
    ("statistics", "model_stats[].response_stats"): "docs/from-triton.md#python-models",
    ("statistics", "model_stats[].batch_stats"): "docs/from-triton.md#python-models",
}
_EXTENSIONS = "docs/migrating.md#documented-differences"


def page_of(difference: AnswerDifference) -> str:
    """Return the page that tells ``difference``; empty if none does."""
    if difference.kind == "extensions":
        return _EXTENSIONS if NOTHING in (difference.first, difference.second) else ""
    if ABSENT not in (difference.first, difference.second):
        return ""
    for (kind, field), page in _PAGES.items():
        if difference.kind == kind and difference.field.startswith(field):
            return page
    return ""
