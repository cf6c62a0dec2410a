"""The models that OpenAI's routes serve, and what each can do: found once per loaded version."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import time
from typing import TYPE_CHECKING

from headrace import Engine, HeadraceError, ModelView, NotFound, one_line
from headrace_llm import Contract, Task
from headrace_openai.chat_templates import LoadedTemplates
from headrace_openai.openai_errors import BadMember

if TYPE_CHECKING:
    from headrace_openai.text_models import TextModel


@dataclass(frozen=True, slots=True, eq=False)
class LanguageModel:
    """A model with a task, as the routes use it. ``found_s`` is when it was found, in seconds since 1970.

    ``text_model`` is None if it does not generate text.
    """

    view: ModelView
    contract: Contract
    found_s: int
    text_model: TextModel | None

    @property
    def name(self) -> str:
        return self.view.name

    @property
    def task(self) -> Task:
        return self.contract.task


class ModelCatalog:
    """Finds models by name. Event loop only, but for `forget`."""

    def __init__(self, engine: Engine, lora_separator: str) -> None:
        self._engine, self._separator = engine, lora_separator
        #: By name, the view that was found and what it is; None for no language model.
        self._kept: dict[str, tuple[ModelView, LanguageModel | None]] = {}
        #: The templates of loaded versions.
        self.templates = LoadedTemplates()

    def split(self, name: str) -> tuple[str, str]:
        """Return the model and the adapter that a caller names. The adapter is empty without one."""
        if not self._separator:
            return name, ""
        model, _, adapter = name.partition(self._separator)
        return model, adapter

    def find(self, name: str, *tasks: Task) -> LanguageModel:
        """Return the model ``name``, which does one of ``tasks``; any if there are none.

        Raises `NotFound`, `Unavailable`, or `BadMember` for a model with another task.
        """
        model = self._look_up(name)
        if model is None:
            raise NotFound(
                f"model '{one_line(name)}' is no language model: it has no inputs and outputs of text, and no "
                "parameter 'task'"
            )
        if tasks and model.task not in tasks:
            wanted = " or ".join(task.value for task in tasks)
            raise BadMember("model", f"model '{one_line(name)}' does {model.task.value}, this path is for {wanted}")
        return model

    def all(self) -> Sequence[LanguageModel]:
        """Return all models that are ready, by name."""
        found = []
        for name in dict.fromkeys(entry.name for entry in self._engine.index(ready_only=True)):
            try:
                model = self._look_up(name)
            except HeadraceError:  # it is being unloaded, or what it declares is wrong
                continue
            if model is not None:
                found.append(model)
        return found

    def forget(self, name: str) -> None:
        """Remove what is kept of the model ``name``. Any thread."""
        self._kept.pop(name, None)

    def _look_up(self, name: str) -> LanguageModel | None:
        view = self._engine.resolve(name)
        kept = self._kept.get(name)
        if kept is None or kept[0] is not view:
            kept = self._kept[name] = view, self._language_model(view)
        return kept[1]

    def _language_model(self, view: ModelView) -> LanguageModel | None:
        contract = Contract.of(view)
        if contract is None:
            return None
        text_model = None
        if contract.task is Task.GENERATION:
            from headrace_openai.text_models import TextModel

            text_model = TextModel(view, contract, self.templates.of(view))
        return LanguageModel(view, contract, int(time()), text_model)
