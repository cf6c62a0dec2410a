"""Parses the command line into `ServerOptions`, by the rules of docs/spec/behaviours.md section 8.

Flags are parsed as by GNU getopt_long: ``--flag value``, ``--flag=value``, and any unambiguous prefix of a flag.
The remaining words are parsed as options of plugins.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from headrace.config import support
from headrace.config.option_groups import OptionGroup, group_flags, read_groups
from headrace.config.options import ServerOptions
from headrace.distributions import missing
from headrace.errors import ConfigError
from headrace.models.control_mode import check_control_mode
from headrace.models.interceptors import Interceptor
from headrace_cli.flags import FLAGS, Flag
from headrace_cli.port_checks import check_ports
from headrace_cli.secret_values import without_value, without_values
from headrace_cli.server_processes.refusals import refuse as refuse_with_workers


def wants_help(words: Sequence[str]) -> bool:
    return not {"--help", "-h"}.isdisjoint(words)


def allowed_plugins(words: Sequence[str]) -> tuple[str, ...] | None:
    """Return the value of ``--plugins``, or None. It is parsed first, because it selects the plugins whose options are
    valid.
    """
    plugin_flags = [one for one in split(words)[0] if one.flag.name == "plugins"]
    return _read(plugin_flags[-1]) if plugin_flags else None


class WordError(ConfigError):
    """A word of the command line that is no flag, or a flag without its argument: what getopt_long refuses."""


@dataclass(frozen=True, slots=True)
class GivenFlag:
    """A flag on the command line, with the text of its value."""

    flag: Flag
    text: str


def read_options(
    words: Sequence[str],
    environ: Mapping[str, str],
    groups: Sequence[type[OptionGroup]] = (),
    modes: Iterable[type[Interceptor]] | None = None,
) -> tuple[ServerOptions, list[str]]:
    """Return the options, and warnings about the flags. Raises `ConfigError` with Triton's text.

    ``modes`` has the control modes of plugins; If it is None, only the server checks the mode.
    """
    flags, rest = split(words)
    _check_groups(groups)
    try:
        plugin_options, rest = read_groups(groups, rest)
    except ConfigError as error:
        raise ConfigError(without_values(error, rest)) from None
    if rest:
        before = words[max(0, list(words).index(rest[0]) - 1)]
        raise _explain(rest[0], groups, before)
    _check_cache(flags)
    chosen = _values(flags)
    repository = chosen.get("model_repository") or tuple(filter(None, [environ.get("AIP_STORAGE_URI")]))
    fields = _environment(environ) | chosen | {"model_repository": repository, "plugin_options": plugin_options}
    options = ServerOptions(**fields)
    if modes is not None:
        check_control_mode(options.model_control_mode, modes)
    check(options)
    return options, _warnings(flags)


def parse_options(words: Sequence[str]) -> ServerOptions:
    """Return the options that the flags ``words`` give ``headrace serve``: ``["--model-repository=models"]``.

    Neither the environment nor options of plugins are read. Raises `ConfigError` with Triton's text.
    """
    return read_options(words, {})[0]


def split(words: Sequence[str]) -> tuple[list[GivenFlag], list[str]]:
    """Return the flags of Headrace with their texts, and the other words."""
    read_flags: list[GivenFlag] = []
    rest: list[str] = []
    waiting = iter(words)
    for word in waiting:
        if word == "--":  # the end of the flags
            rest.extend(waiting)
            break
        flags = _matches(word)
        if len(flags) != 1:
            rest.append(word)
            continue
        flag = flags[0]
        _, equals, text = word.partition("=")
        if flag.read is None and equals:
            raise WordError(f"option '--{flag.name}' doesn't allow an argument")
        if flag.read is not None and not equals:
            text = _next(waiting, flag)
        read_flags.append(GivenFlag(flag, text))
    return read_flags, rest


def check(options: ServerOptions) -> None:
    """Raise `ConfigError` for options that contradict each other, or that need a part that is not built."""
    if options.load_model and options.model_control_mode != "explicit":
        raise ConfigError("Error: Use of '--load-model' requires setting '--model-control-mode=explicit' as well.")
    check_ports(options)
    if not options.model_repository:
        raise ConfigError("--model-repository must be specified")
    support.refuse(options)
    if options.workers:
        refuse_with_workers(options)


def _matches(word: str) -> list[Flag]:
    if not word.startswith("--") or word == "--":
        return []
    name = word[2:].partition("=")[0]
    if name in FLAGS:
        return [FLAGS[name]]
    return [flag for other, flag in FLAGS.items() if other.startswith(name)]


def _next(words: Any, flag: Flag) -> str:
    text = next(words, None)
    if text is None:
        raise WordError(f"option '--{flag.name}' requires an argument")
    return str(text)


def _check_groups(groups: Sequence[type[OptionGroup]]) -> None:
    """Raise `ConfigError` if a flag of a plugin is a prefix of one of ours: it would never reach the plugin."""
    for flag in _flags_of(groups):
        for name in FLAGS:
            if f"--{name}".startswith(flag):
                raise ConfigError(f"the option '{flag}' of a plugin is a prefix of '--{name}': see headrace plugins")


def _flags_of(groups: Sequence[type[OptionGroup]]) -> list[str]:
    return [flag.text for kind in groups for flag in group_flags(kind)]


def _explain(word: str, groups: Sequence[type[OptionGroup]], before: str) -> ConfigError:
    """Return the error for ``word``, which stands behind ``before`` and is no flag."""
    name, flags = word.partition("=")[0], _matches(word)
    if flags:
        flag_names = " ".join(f"'--{flag.name}'" for flag in flags)
        return WordError(f"option '{name}' is ambiguous; possibilities: {flag_names}")
    if not word.startswith("-"):
        value = without_value(word, before, word)
        return ConfigError(f"Unexpected argument: {value}; did you mean --model-repository={value}?")
    known = [*FLAGS, *(flag[2:] for flag in _flags_of(groups))]
    words = name.lstrip("-").split("-")
    for part in ("-".join(words[:2]), words[0]):
        if (hint := missing("flag", part)) and part not in {kind.name for kind in groups}:
            return WordError(f"unrecognized option '{name}'. {hint}")
    nearest = ["workers"] if name == "--frontend-processes" else get_close_matches(name.lstrip("-"), known, 1)
    return WordError(f"unrecognized option '{name}'" + (f"; did you mean '--{nearest[0]}'?" if nearest else ""))


def _values(flags: Sequence[GivenFlag]) -> dict[str, Any]:
    """Return the value of each field. A deprecated flag is ignored if its replacement is given."""
    current = {one.flag.option for one in flags if not one.flag.deprecated}
    by_field: dict[str, list[GivenFlag]] = {}
    for one in flags:
        if not (one.flag.deprecated and one.flag.option in current):
            by_field.setdefault(one.flag.option, []).append(one)
    return {field: _combine(group) for field, group in by_field.items()}


def _combine(group: Sequence[GivenFlag]) -> Any:
    flag = group[0].flag
    values = [_read(one) for one in group]
    try:
        return flag.gather(values) if flag.gather else values[-1]
    except ValueError as error:
        raise _bad(flag, error, group[-1].text) from error


def _read(one: GivenFlag) -> Any:
    try:
        return one.flag.read(one.text) if one.flag.read else True
    except ValueError as error:
        raise _bad(one.flag, error, one.text) from error


def _bad(flag: Flag, error: ValueError, value: str) -> ConfigError:
    return ConfigError(f'Bad option: "--{flag.name}".\n{without_value(error, flag.name, value)}')


def _environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the defaults that Vertex AI sets by environment variables."""
    values: dict[str, Any] = {}
    if port := environ.get("AIP_HTTP_PORT"):
        try:
            values["vertex_ai_port"] = FLAGS["vertex-ai-port"].read(port)  # type: ignore[misc]  # it has an argument
        except ValueError as error:
            raise ConfigError(f"AIP_HTTP_PORT: {error}") from error
    if environ.get("AIP_MODE") == "PREDICTION":
        values |= {"allow_http": False, "allow_grpc": False, "allow_vertex_ai": True}
    return values


def _check_cache(flags: Sequence[GivenFlag]) -> None:
    if {"response-cache-byte-size", "cache-config"} <= {one.flag.name for one in flags}:
        raise ConfigError(
            "Error: Incompatible flags --response-cache-byte-size and --cache-config both provided. "
            "Please provide one or the other."
        )


def _deprecation(old: GivenFlag, flags: Sequence[GivenFlag]) -> Iterator[str]:
    """Yield Triton's warnings for a deprecated flag, and for one that its replacement overrides."""
    flag = old.flag
    if flag.setting:
        yield (
            f"'--{flag.name}' has been deprecated and will be removed in future releases. "
            f"Please use '--{flag.deprecated} {flag.setting} instead."
        )
        key = flag.setting.partition("=")[0].rpartition(",")[2]
        if any(one.flag.name == flag.deprecated and f"{key}=" in one.text for one in flags):
            yield f"Overriding deprecated '--{flag.name}' in favor of provided {key} value in --{flag.deprecated}!"
    elif flag.name == "response-cache-byte-size":
        equivalent = f"--cache-config=local,size={old.text}"
        yield (
            f"'--{flag.name}' has been deprecated! This will default to the 'local' cache implementation with the "
            f"provided byte size for its config. Please use '--{flag.deprecated}' instead. The equivalent "
            f"--{flag.deprecated} CLI args would be: '{equivalent}'"
        )
    else:
        yield f"'--{flag.name}' has been deprecated! Please use '--{flag.deprecated}' instead."
        if not _read(old) and any(one.flag.name == flag.deprecated for one in flags):
            yield f"Overriding deprecated '--{flag.name}' from False to True in favor of '--{flag.deprecated}'!"


def _warnings(flags: Sequence[GivenFlag]) -> list[str]:
    old = {one.flag.name: one for one in flags if one.flag.deprecated}
    return [f"Warning: {line}" for one in old.values() for line in _deprecation(one, flags)]
