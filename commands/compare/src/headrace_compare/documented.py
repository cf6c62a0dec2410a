"""Documented differences between Triton and Headrace. They are listed but not counted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace_compare.answer_differences import NOTHING, AnswerDifference

_EXTENSIONS = "docs/migrating.md#documented-differences"
_PYTHON_MODELS = "docs/from-triton.md#python-models"


def page_of(difference: AnswerDifference) -> str:
    """Return the page that documents ``difference``, or empty."""
    is_of_one = NOTHING in (difference.first, difference.second)
    return _EXTENSIONS if difference.kind == "extensions" and is_of_one else ""


def page_of_absent_statistics(path: str, config: Mapping[str, Any], statistics: Any) -> str:
    """Return the page that documents why ``statistics`` of a model with ``config`` lack ``path``, or empty.

    Only for Python models. Triton has no ``response_stats`` of them; Headrace has, if they are decoupled. Headrace has
    no ``batch_stats`` of a model that has only returned errors, which Triton counts as successes.
    """
    if config.get("backend") != "python":
        return ""
    if path.startswith("model_stats[].response_stats"):
        policy = config.get("model_transaction_policy")
        return _PYTHON_MODELS if isinstance(policy, Mapping) and policy.get("decoupled") else ""
    if path.startswith("model_stats[].batch_stats"):
        return _PYTHON_MODELS if _has_only_failed(statistics) else ""
    return ""


def _has_only_failed(statistics: Any) -> bool:
    """True if each version has failed requests, and none that was answered without an error."""
    try:
        counts = [each["inference_stats"] for each in statistics["model_stats"]]
        return bool(counts) and all(int(each["fail"]["count"]) > int(each["success"]["count"]) == 0 for each in counts)
    except (LookupError, TypeError, ValueError):
        return False
