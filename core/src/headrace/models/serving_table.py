"""Finds the loaded model for a request by one dictionary look-up (docs/spec/behaviours.md section 1.3)."""

from __future__ import annotations

from collections.abc import Callable

from headrace.errors import HeadraceError, InvalidArgument, NotFound, Unavailable
from headrace.models.served import ServedModel
from headrace.models.states import ModelRecord
from headrace.models.view import ModelView

#: The refusal before the models are loaded, in Triton's words and ours.
LOADING = "Server not ready: its models are still being loaded"


class ServingTable:
    """Finds models by name and version. The lifecycle rebuilds it; every request reads it.

    Until it is `open`, requests from outside are refused with ``refusal``. Models find each other from the start. A
    request that finds its model pays nothing for this.
    """

    def __init__(self) -> None:
        self.refusal = LOADING
        self._is_open = False
        #: The models for requests from outside: empty at first, then the same as ``_views``.
        self._open: dict[tuple[str, str | int], ModelView] = {}
        self._views: dict[tuple[str, str | int], ModelView] = {}
        self._loaded: dict[tuple[str, str | int], ServedModel] = {}
        self._records: dict[str, ModelRecord] = {}
        #: The keys of each model in the tables.
        self._keys: dict[str, tuple[tuple[str, str | int], ...]] = {}
        #: Called after each change.
        self.changed: Callable[[], None] = lambda: None

    def open(self) -> None:
        """Let requests from outside find the loaded models from now on."""
        self._is_open, self._open = True, self._views

    def require_open(self) -> None:
        """Raise `Unavailable` with the ``refusal`` until it is `open`."""
        if not self._is_open:
            raise Unavailable(self.refusal)

    def update(self, records: dict[str, ModelRecord], name: str) -> None:
        """Serve the ready versions of ``name``, whose record in ``records`` has changed. The tables are replaced, so a
        reader sees either the old or the new ones."""
        served: dict[tuple[str, str | int], ServedModel] = {}
        versions = records[name].versions if name in records else {}
        for version in sorted(versions):
            model = versions[version].served
            if model is not None:
                served[name, str(version)] = served[name, ""] = model
        loaded, views = self._loaded.copy(), self._views.copy()
        for key in self._keys.pop(name, ()):
            del loaded[key], views[key]
        if served:
            self._keys[name] = tuple(served)
        self._records, self._loaded = records, loaded | served
        self._views = views | {key: model.view for key, model in served.items()}
        if self._is_open:
            self.open()
        self.changed()

    def resolve(self, name: str, version: str | int = "") -> ModelView:
        """Return the model for ``name`` and ``version`` (empty: the latest ready one), for requests from outside.

        A program may pass a number as version. Raises `InvalidArgument` for a version that is not a number, `NotFound`
        or `Unavailable`.
        """
        view = self._open.get((name, version))
        if view is None:
            self.require_open()
            return self._search(name, version).view
        return view

    def resolve_loaded(self, name: str, version: str | int = "") -> ModelView:
        """Do as `resolve` for models and for the program that runs the server: works before `open`, too."""
        return self._views.get((name, version)) or self._search(name, version).view

    def served(self, name: str, version: str | int = "") -> ServedModel:
        """Return the model of the view that `resolve` returns. Raises as it does."""
        self.require_open()
        return self._loaded.get((name, version)) or self._search(name, version)

    def served_loaded(self, name: str, version: str | int = "") -> ServedModel:
        """Return the model of the view that `resolve_loaded` returns. Raises as it does."""
        return self._loaded.get((name, version)) or self._search(name, version)

    async def is_ready(self, find: Callable[[str, str | int], ServedModel], name: str, version: str | int) -> bool:
        """True if that version (empty: the latest) would take requests; False if there is none.

        ``find`` is `served` or `served_loaded`. Raises `InvalidArgument` for a version that is not a number.
        """
        try:
            model = find(name, version)
        except (NotFound, Unavailable):
            return False
        return await model.check_ready()

    def all_ready(self) -> list[ServedModel]:
        """Return every model version that takes requests, by name and version."""
        return [self._loaded[key] for key in sorted(self._loaded, key=_sort_key) if key[1]]

    def ready_versions(self, name: str) -> list[int]:
        """Return the versions of ``name`` that take requests, ascending."""
        return sorted(model.version for (known, version), model in self._loaded.items() if known == name and version)

    def for_statistics(self, name: str, version: str | int) -> list[ServedModel]:
        """Return the versions for a statistics request.

        Raises with the texts of docs/spec/behaviours.md section 1.6.
        """
        if version != "":
            number = parse_version(version)
            model = self._loaded.get((name, str(number)))
            if model is None and (name, "") in self._loaded:
                raise InvalidArgument(f"requested model version is not available for model '{name}'")
            models = [model] if model is not None else []
        else:
            models = [self._loaded[name, str(number)] for number in self.ready_versions(name)]
        if not models:
            raise InvalidArgument(f"requested model '{name}' is not available")
        return models

    def _search(self, name: str, version: str | int) -> ServedModel:
        """Find a version written unlike ``str(version)``, or raise the refusal. The slow path."""
        model = self._loaded.get((name, str(parse_version(version)))) if version != "" else None
        if model is None:
            raise self._explain(name, version)
        return model

    def _explain(self, name: str, version: str | int) -> HeadraceError:
        prefix = f"Request for unknown model: '{name}'"
        number = parse_version(version) if version != "" else None
        record = self._records.get(name)
        if record is None or not (record.versions or record.counts):  # its config could not be read either
            return NotFound(f"{prefix} is not found")
        if number is None:
            return NotFound(f"{prefix} has no available versions")
        known = record.versions.get(number)
        if known is None:
            return NotFound(f"{prefix} version {number} is not found")
        return Unavailable(f"{prefix} version {number} is not at ready state")


def parse_version(version: str | int) -> int:
    """Return the number in ``version``. Raises `InvalidArgument` in Triton's words."""
    text = str(version)
    if text.isascii() and text.isdigit() and len(text) < 19:
        return int(text)
    try:
        number = int(text)
    except ValueError:
        raise InvalidArgument(
            f"failed to get model version from specified version string '{text}' (details: not an integer), version "
            "should be an integral value > 0"
        ) from None
    raise InvalidArgument(
        f"invalid model version specified '{text}' , version should be an integral value > 0"
        if number < 0
        else f"failed to get model version from specified version string '{text}' (details: out of range), version "
        "should be an integral value > 0"
    )


def _sort_key(key: tuple[str, str | int]) -> tuple[str, int]:
    return key[0], int(key[1] or -1)
