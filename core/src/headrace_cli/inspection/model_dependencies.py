"""Checks a config against the models that it depends on, by their configs, without loading them."""

from __future__ import annotations

from headrace.config.derive import derive
from headrace.config.model_config_pb2 import ModelConfig
from headrace.config.option_parts import ConfigOptions
from headrace.errors import ConfigError, HeadraceError, InvalidArgument
from headrace.messages import dtypes
from headrace.models.configuring import (
    Parts,
    complete_with,
    dependencies,
    find_scheduler,
    kind_of,
    needs_backend,
    parse,
)
from headrace.models.signature import Signature
from headrace.models.versions import files_of
from headrace.schedulers.base import Dependency, OtherModel
from headrace.storage.repositories import Repositories


class ModelDependencies:
    """Looks up models in ``repositories``, without loading them."""

    def __init__(self, repositories: Repositories, options: ConfigOptions, schedulers: Parts) -> None:
        self._repositories, self._options, self._schedulers = repositories, options, schedulers

    def complete(self, config: ModelConfig, path: tuple[str, ...] = ()) -> None:
        """Check ``config`` against the models that it depends on, and complete it in place.

        ``path`` names the models that depend on it. A dependency whose config is wrong or incomplete is ignored. Raises
        `HeadraceError`.
        """
        path = (*path, config.name)
        scheduler = find_scheduler(config, self._schedulers)
        needed = dependencies(config, scheduler)
        missing = sorted({each.model for each in needed if self._repositories.find(each.model) is None})
        if missing:
            names = ", ".join(missing)
            raise InvalidArgument(
                f"{kind_of(config)} {config.name} contains models that are not available or ambiguous: {names}"
            )
        models = {each: self._find(each, path) for each in sorted(needed)}
        complete_with(config, scheduler, {each: other for each, other in models.items() if other is not None})

    def _find(self, needed: Dependency, path: tuple[str, ...]) -> OtherModel | None:
        if needed.model in path:
            raise ConfigError(
                f"circular dependency between ensembles: {needed.model} -> ... -> {path[-1]} -> {needed.model}"
            )
        entry = self._repositories.find(needed.model)
        if entry is None:
            return None
        try:
            files = entry.fingerprint().files
            with entry.fetch(files_of(files)) as directory:
                config = parse(directory.path, self._options)
            has_backend = needs_backend(config, self._schedulers)
            derive(config, entry.name, files, needs_backend=has_backend)
            if not self._is_complete(config, has_backend):
                return None
            signature = Signature(config.name, config)
        except HeadraceError:  # the report on that model has the problem
            return None
        if not has_backend:
            try:
                self.complete(config, path)
            except HeadraceError as error:
                if "circular dependency" in error.message:
                    raise
                return None
        return OtherModel(config, max(needed.version, 0), signature.inputs, signature.outputs)

    def _is_complete(self, config: ModelConfig, has_backend: bool) -> bool:
        """True if a load would not change the tensors and batch sizes of ``config``."""
        tensors = ((each.data_type, each.dims) for io in (config.input, config.output) for each in io)
        is_whole = bool(config.input and config.output) and all(
            datatype in dtypes.BY_CONFIG_VALUE and dims for datatype, dims in tensors
        )
        is_final = config.max_batch_size > 0 or not has_backend or self._options.disable_auto_complete_config
        return is_whole and (is_final or config.backend == "identity")
