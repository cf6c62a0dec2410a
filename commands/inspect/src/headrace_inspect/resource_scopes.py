"""Finds rate limiter resources that one model declares per device and another as global. Such models cannot be loaded
together; the load of a single model does not show that."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from headrace import HeadraceError, Inspector, ModelConfig, Problem, ServerOptions


class ResourceScopes:
    """The resources in the configs of ``models``, and the models that declare them. Empty without a rate limit."""

    def __init__(self, inspector: Inspector, models: Iterable[str], options: ServerOptions) -> None:
        #: The models that declare a resource, by its name and whether it is global.
        self._named: dict[tuple[str, bool], list[str]] = {}
        for name in models if options.rate_limit == "execution_count" else ():
            try:
                with inspector.open(name) as model:
                    config = model.read()
            except HeadraceError:  # the report on that model has the problem
                continue
            for _, resource, is_global in _resources(config):
                self._named.setdefault((resource, is_global), []).append(name)

    def problems(self, config: ModelConfig) -> Iterator[Problem]:
        """Yield a problem for each resource of ``config`` that is declared in the other way elsewhere."""
        for field, resource, is_global in _resources(config):
            if others := self._named.get((resource, not is_global)):
                other = f"model '{others[0]}' has it {'per device' if is_global else 'global'}"
                yield Problem(
                    field,
                    f'Resource "{resource}" is present as both global and device-specific resource in the model '
                    f"configuration. Here it is {'global' if is_global else 'per device'}, and {other}",
                )


def _resources(config: ModelConfig) -> Iterator[tuple[str, str, bool]]:
    """Yield each resource of the instances of ``config``: its field, its name, and whether it is global."""
    for index, group in enumerate(config.instance_group):
        for number, resource in enumerate(() if group.passive else group.rate_limiter.resources):
            field = f"instance_group[{index}].rate_limiter.resources[{number}]"
            yield field, resource.name, getattr(resource, "global")
