from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from headrace.backends.base import NoParameters
from headrace.config.model_config_pb2 import ModelConfig, ModelParameter
from headrace.config.parameters import check, parse_parameters, read_isolation, unknown
from headrace.errors import ConfigError, PluginError


@dataclass(frozen=True, slots=True)
class Parameters:
    threads: int = 1
    ratio: float = 0.5
    fast: bool = False
    mode: str = "a"
    limit: int | None = None
    arena: str = field(default="", metadata={"key": "memory.arena"})
    session: Mapping[str, str] = field(default_factory=dict, metadata={"prefix": "session."})


def parse(**texts: str) -> Parameters:
    return parse_parameters(Parameters, given_map(texts))


def given_map(texts: Mapping[str, str]) -> Mapping[str, ModelParameter]:
    config = ModelConfig()
    for key, value in texts.items():
        config.parameters[key].string_value = value
    return config.parameters


def test_absent_parameters_are_the_defaults() -> None:
    assert parse() == Parameters()


def test_values_are_converted_to_the_types_of_the_fields() -> None:
    parameters = parse(threads="4", ratio="1e-3", fast="true", mode=" b ", limit="-7")
    assert parameters == Parameters(threads=4, ratio=0.001, fast=True, mode=" b ", limit=-7)


@pytest.mark.parametrize(
    ("text", "value"), [("true", True), ("True", True), ("1", True), ("OFF", False), ("no", False)]
)
def test_booleans_are_spelled_in_several_ways(text: str, value: bool) -> None:
    assert parse(fast=text).fast is value


def test_a_field_may_have_a_key_that_is_no_name() -> None:
    assert parse(**{"memory.arena": "cpu:0"}).arena == "cpu:0"
    assert parse(arena="cpu:0").arena == parse().arena


def test_a_prefix_takes_a_whole_family_under_its_full_names() -> None:
    parameters = parse(**{"session.a": "1", "session.b.c": "x"})
    assert parameters.session == {"session.a": "1", "session.b.c": "x"}


def test_an_unknown_key_is_ignored_and_reported_with_the_known_ones_and_the_nearest() -> None:
    assert parse(thread="4") == parse()
    (problem,) = unknown(Parameters, given_map({"thread": "4"}))
    assert problem.field == "parameters['thread']"
    assert problem.message == (
        "unknown parameter 'thread'; did you mean 'threads'? "
        "known: fast, limit, memory.arena, mode, ratio, session.*, threads"
    )


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ({"threads": "four"}, "parameter 'threads' is 'four', expected a whole number"),
        ({"threads": ""}, "parameter 'threads' is '', expected a whole number"),
        ({"limit": "1.5"}, "parameter 'limit' is '1.5', expected a whole number"),
        ({"threads": "1" * 5000}, f"parameter 'threads' is '{'1' * 60}...', expected a whole number"),
        ({"ratio": "half"}, "parameter 'ratio' is 'half', expected a number"),
        ({"fast": "2"}, "parameter 'fast' is '2', expected true or false"),
    ],
)
def test_a_bad_value_names_key_value_and_type(texts: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(**texts)
    assert caught.value.message == message


def test_core_keys_pass_every_backend() -> None:
    assert parse(TRITON_BATCH_STRATEGY_PATH="batch.so") == Parameters()


def test_a_backend_without_parameters_takes_any_and_reads_none() -> None:
    assert parse_parameters(NoParameters, given_map({"anything": "goes"})) == NoParameters()


def test_error_of_the_parameters_class_is_a_config_error() -> None:
    @dataclass(frozen=True)
    class Positive:
        threads: int = 1

        def __post_init__(self) -> None:
            if self.threads < 1:
                raise ValueError(f"threads is {self.threads}, expected 1 or more")

    with pytest.raises(ConfigError, match=r"^parameters: threads is 0, expected 1 or more$"):
        parse_parameters(Positive, given_map({"threads": "0"}))


def test_a_field_of_another_type_is_the_plugins_fault() -> None:
    with pytest.raises(PluginError, match=r"Odd\.sizes is list\[int\], expected str, int, float or bool$"):
        parse_parameters(Odd, given_map({}))


@dataclass(frozen=True)
class Odd:
    sizes: list[int] = field(default_factory=list)


@pytest.mark.parametrize("kind", ["process", "thread", "elsewhere"])
def test_isolation_is_a_parameter_of_any_model(kind: str) -> None:
    parameters = given_map({"isolation": kind})
    assert read_isolation(parameters) == kind
    assert parse_parameters(Parameters, parameters) == Parameters()
    assert check(Parameters, parameters) == []


def test_without_the_parameter_isolation_is_the_backends_choice() -> None:
    assert read_isolation(given_map({"threads": "1"})) is None
