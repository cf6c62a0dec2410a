"""The files of sentence-transformers beside a model: how its vectors and scores are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace import Code, LoadError, one_line, why_path_leaves
from headrace_transformers.model_files import HuggingFaceFiles

#: ``pooling_mode_*`` of a pooling's config, and the poolings of `headrace_transformers.parameters.POOLINGS`.
_MODES = {"mean_tokens": "mean", "cls_token": "cls", "lasttoken": "last", "max_tokens": "max"}


@dataclass(frozen=True, slots=True)
class SentenceFiles:
    """The settings in these files. The defaults are those of a directory without the files."""

    pooling: str = "mean"
    normalizes: bool = False
    max_length: int = 0
    lowers: bool = False
    activation: str = ""  # empty: not in the files

    @classmethod
    def of(cls, files: HuggingFaceFiles) -> SentenceFiles:
        """Return the settings in ``files``. Raises `LoadError` for a module or a pooling that is not supported."""
        modules, pooling, normalizes = files.json("modules.json"), "mean", False
        for module in modules if type(modules) is list else ():
            kind, path = (str(module.get(name, "")) for name in ("type", "path"))
            kind = kind.rpartition(".")[2]
            if kind == "Pooling" and not why_path_leaves(path):
                pooling = _pooling(files, f"{path}/config.json")
            elif kind == "Normalize":
                normalizes = True
            elif kind != "Transformer":
                raise LoadError(
                    f"{files.folder / 'modules.json'} has the module '{one_line(kind)}', expected Transformer, "
                    "Pooling or Normalize",
                    Code.UNSUPPORTED,
                )
        settings = files.json("sentence_bert_config.json")
        settings = settings if isinstance(settings, Mapping) else {}
        length = settings.get("max_seq_length")
        return cls(
            pooling,
            normalizes,
            length if type(length) is int else 0,
            bool(settings.get("do_lower_case")),
            _activation(files.config),
        )


def _pooling(files: HuggingFaceFiles, name: str) -> str:
    config = files.json(name)
    config = config if isinstance(config, Mapping) else {}
    on = [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
    modes = [_MODES.get(key.removeprefix("pooling_mode_"), "") for key in on]
    if len(modes) > 1 or "" in modes:
        expected = f"expected one of {', '.join(_MODES)}"
        raise LoadError(f"{files.folder / name} has {' and '.join(map(one_line, on))}, {expected}", Code.UNSUPPORTED)
    return modes[0] if modes else "mean"


def _activation(config: Mapping[str, Any]) -> str:
    """Return the activation of a cross-encoder, where its config names one."""
    settings = config.get("sentence_transformers")
    name = settings.get("activation_fn") if isinstance(settings, Mapping) else None
    name = str(name or config.get("sbert_ce_default_activation_function") or "").rpartition(".")[2]
    return {"Identity": "none", "Sigmoid": "sigmoid"}.get(name, "")
