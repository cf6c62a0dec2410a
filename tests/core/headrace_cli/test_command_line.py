"""Reading a command line: GNU getopt_long's rules and Triton's error texts (docs/spec/behaviours.md section 8)."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import pytest

from headrace.config.option_groups import OptionGroup, group_flags
from headrace.config.option_parts import RateLimitResource, Restriction, TraceSetting
from headrace.config.options import ServerOptions
from headrace.errors import ConfigError
from headrace_cli.command_line import allowed_plugins, read_options
from headrace_cli.flags import FLAGS
from headrace_cli.usage import render

REPOSITORY = "--model-repository=/r"


@dataclass(frozen=True)
class ToyOptions(OptionGroup):
    """What to play with.

    No more."""

    name: ClassVar[str] = "toy"
    colour: Literal["red", "blue"] = field(default="red", metadata={"help": "Of all."})
    size: int | None = None
    big: bool = True

    def __post_init__(self) -> None:
        if (self.size or 0) > 9:
            raise ValueError("too large")


def read(*words: str, environ: dict[str, str] | None = None) -> ServerOptions:
    return read_options([REPOSITORY, *words], environ or {})[0]


def refusal(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read(*words)
    return caught.value.message


@pytest.mark.parametrize("words", ["--http-port=9000", "--http-port 9000", "--http-po 9000", "--http-po=9000"])
def test_a_flag_may_be_joined_split_or_shortened(words: str) -> None:
    assert read(*words.split()).http_port == 9000


def test_the_word_after_a_flag_is_its_value_even_if_it_looks_like_a_flag() -> None:
    assert read("--id", "--http-port=1").id == "--http-port=1"


def test_a_value_may_hold_equals_signs_and_be_empty() -> None:
    assert read("--id=a=b").id == "a=b"
    assert read("--id=").id == ""


def test_the_last_of_two_counts() -> None:
    assert read("--http-port=1", "--http-port=2").http_port == 2


@pytest.mark.parametrize("text", ["true", "TRUE", "On", "1"])
def test_yes_has_three_spellings_in_any_case(text: str) -> None:
    assert read(f"--reuse-http-port={text}").reuse_http_port is True


@pytest.mark.parametrize("text", ["false", "False", "OFF", "0"])
def test_no_has_three_spellings_in_any_case(text: str) -> None:
    assert read(f"--allow-http={text}").allow_http is False


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("--allow-http=yes", 'Bad option: "--allow-http".\ninvalid value for bool option: yes'),
        ("--http-port=abc", 'Bad option: "--http-port".\nInvalid option value. Got abc'),
        ("--http-port=8000x", 'Bad option: "--http-port".\nInvalid option value. Got 8000x'),
        ("--http-port=65536", 'Bad option: "--http-port".\nProvided option value is out of bound. Got 65536'),
        (
            "--exit-timeout-secs=2147483648",
            'Bad option: "--exit-timeout-secs".\nProvided option value is out of bound. Got 2147483648',
        ),
        (
            "--http-max-input-size=0",
            'Bad option: "--http-max-input-size".\nError: --http-max-input-size must be greater than 0.',
        ),
        (
            "--grpc-infer-thread-count=1",
            'Bad option: "--grpc-infer-thread-count".\n'
            "invalid argument for --grpc_infer_thread_count. Must be in the range 2 to 128.",
        ),
        ("--http-restricted-api=nope:k=v", "Bad option: \"--http-restricted-api\".\nunknown restricted api 'nope'"),
        (
            "--grpc-restricted-protocol=nope:k=v",
            "Bad option: \"--grpc-restricted-protocol\".\nunknown restricted protocol 'nope'",
        ),
        (
            "--http-restricted-api=health",
            'Bad option: "--http-restricted-api".\n'
            "--http-restricted-api option format is '<config name>:<setting>=<value>'. Got health",
        ),
        ("--load-model=m", "Error: Use of '--load-model' requires setting '--model-control-mode=explicit' as well."),
        ("models", "Unexpected argument: models; did you mean --model-repository=models?"),
        (
            "--metrics-port=8000",
            "The server cannot listen to HTTP requests and metrics requests at the same address and port 0.0.0.0:8000",
        ),
        (
            "--grpc-port=8000",
            "The server cannot listen to HTTP requests and GRPC requests at the same address and port 0.0.0.0:8000",
        ),
    ],
)
def test_refusals_are_tritons_to_the_letter(word: str, text: str) -> None:
    assert refusal(word) == text


@pytest.mark.parametrize(
    ("word", "start"),
    [
        ("--log-format=xml", 'Bad option: "--log-format".\ninvalid argument for --log-format'),
        ("--rate-limit=x", 'Bad option: "--rate-limit".\ninvalid argument for --rate-limit'),
        ("--http-header-forward-pattern=(", 'Bad option: "--http-header-forward-pattern".\ninvalid regular expression'),
        ("--cuda-memory-pool-byte-size=5", 'Bad option: "--cuda-memory-pool-byte-size".\nCannot parse pair option'),
        ("--backend-config=a,b", 'Bad option: "--backend-config".\n--backend-config option format is '),
        ("--backend-config=,a=b", 'Bad option: "--backend-config".\nNo backend specified. '),
        ("--model-repository=", 'Bad option: "--model-repository".\nError: empty argument for --model-repository'),
        ("--model-store=", 'Bad option: "--model-store".\nError: empty argument for --model-store'),
        ("--metrics-config=histograms=5", "--metrics-config: histograms: '5' is not true or false"),
        ("--metrics-config=include=!", "--metrics-config: include: '!' is no pattern of a name"),
        ("--metrics-config=a,b=c", 'Bad option: "--metrics-config".\n--metrics-config option format is '),
        ("--rate-limit-resource=R", 'Bad option: "--rate-limit-resource".\n--rate-limit-resource option format is '),
        ("--model-config-name=", 'Bad option: "--model-config-name".\nError: empty argument'),
        ("--model-load-gpu-limit=0:2", 'Bad option: "--model-load-gpu-limit".\nProvided option value is out of bound'),
        ("--disable-auto-complete-config=1", "option '--disable-auto-complete-config' doesn't allow an argument"),
        ("--http=1", "option '--http' is ambiguous; possibilities: '--http-address' '--http-port'"),
        ("--htpp-port=1", "unrecognized option '--htpp-port'; did you mean '--http-port'?"),
        ("--frontend-processes=2", "unrecognized option '--frontend-processes'; did you mean '--workers'?"),
        ("--id", "option '--id' requires an argument"),
    ],
)
def test_refusals_name_the_flag_and_the_rule(word: str, start: str) -> None:
    assert refusal(word).startswith(start)


def test_a_repository_is_demanded() -> None:
    with pytest.raises(ConfigError, match=r"^--model-repository must be specified$"):
        read_options([], {})


def test_the_store_is_the_repository_and_both_may_be_repeated() -> None:
    assert read("--model-store=/b", "--model-store=/a").model_repository == ("/a", "/b", "/r")


@pytest.mark.parametrize(
    ("word", "field", "value"),
    [
        ("--log-verbose=true", "log_verbose", 1),
        ("--log-verbose=3", "log_verbose", 3),
        ("--log-format=json", "log_format", "json"),
        ("--strict-model-config=true", "disable_auto_complete_config", True),
        ("--disable-auto-complete-config", "disable_auto_complete_config", True),
        ("--grpc-use-ssl-mutual=true", "grpc_use_ssl", True),
        ("--exit-timeout-secs=-3", "exit_timeout_secs", 0),
        ("--model-control-mode=NONE", "model_control_mode", "none"),
        ("--sagemaker-safe-port-range=10-20", "sagemaker_safe_port_range", (10, 20)),
        ("--metrics-config=summary_latencies=true", "metrics_config", {"summary_latencies": "true"}),
        ("--metrics-config=summary_quantiles=0.5:1,0.9:1", "metrics_config", {"summary_quantiles": "0.5:1,0.9:1"}),
        ("--backend-config=onnxruntime,a=b,c", "backend_config", {"onnxruntime": {"a": "b,c"}}),
        ("--backend-config=a=b", "backend_config", {"": {"a": "b"}}),
        ("--rate-limit-resource=R:2:0", "rate_limit_resource", (RateLimitResource("R", 2, 0),)),
        ("--rate-limit-resource=R:2", "rate_limit_resource", (RateLimitResource("R", 2),)),
        ("--host-policy=p,numa-node=0", "host_policy", {"p": {"numa-node": "0"}}),
        ("--cuda-memory-pool-byte-size=1:5", "cuda_memory_pool_byte_size", {1: 5}),
        ("--plugins=a, b", "plugins", ("a", "b")),
        ("--trace-level=OFF", "trace_config", (TraceSetting("", "level", "OFF", is_deprecated=True),)),
        (
            "--http-restricted-api=health,logging:key=v=w",
            "http_restricted_api",
            {"health": Restriction("key", "v=w"), "logging": Restriction("key", "v=w")},
        ),
        (
            "--grpc-restricted-protocol=trace:key=v",
            "grpc_restricted_protocol",
            {"trace": Restriction("triton-grpc-protocol-key", "v")},
        ),
    ],
)
def test_values_are_typed(word: str, field: str, value: Any) -> None:
    assert getattr(read(word), field) == value


def test_settings_of_one_backend_add_up() -> None:
    options = read("--backend-config=o,a=1", "--backend-config=o,b=2", "--backend-config=o,a=3")
    assert options.backend_config == {"o": {"a": "3", "b": "2"}}


def test_a_category_is_restricted_once() -> None:
    text = refusal("--http-restricted-api=health:a=1", "--http-restricted-api=health:b=2")
    assert text.endswith("restricted api 'health' can not be specified in multiple config groups")


def test_one_cache_is_the_limit() -> None:
    text = refusal("--cache-config=local,size=1", "--cache-config=redis,host=h")
    assert "found multiple cache configurations, but only a single cache is currently supported" in text


def test_the_old_and_the_new_cache_flag_exclude_each_other() -> None:
    assert refusal("--cache-config=local,size=1", "--response-cache-byte-size=1") == (
        "Error: Incompatible flags --response-cache-byte-size and --cache-config both provided. "
        "Please provide one or the other."
    )


def test_a_deprecated_flag_is_overridden_with_a_warning() -> None:
    words = [REPOSITORY, "--disable-auto-complete-config", "--strict-model-config=false"]
    options, warnings = read_options(words, {})
    assert options.disable_auto_complete_config
    assert warnings == [
        "Warning: '--strict-model-config' has been deprecated! Please use '--disable-auto-complete-config' instead.",
        "Warning: Overriding deprecated '--strict-model-config' from False to True in favor of "
        "'--disable-auto-complete-config'!",
    ]


def test_old_flags_of_tracing_are_remarked_upon_as_triton_does() -> None:
    """Texts of Triton 2.51."""
    words = [REPOSITORY, "--trace-rate=10", "--trace-file=/tmp/x", "--trace-config=rate=7", "--trace-level=OFF"]
    warnings = read_options(words, {})[1]
    old = "has been deprecated and will be removed in future releases. Please use '--trace-config"
    assert warnings[:4] == [
        f"Warning: '--trace-rate' {old} rate=<rate value> instead.",
        "Warning: Overriding deprecated '--trace-rate' in favor of provided rate value in --trace-config!",
        f"Warning: '--trace-file' {old} triton,file=<filepath> instead.",
        f"Warning: '--trace-level' {old} level=<OFF|TIMESTAMPS|TENSORS> instead.",
    ]


def test_ports_may_be_equal_on_other_addresses_or_when_one_is_off_or_free_to_choose() -> None:
    read("--metrics-port=8000", "--metrics-address=127.0.0.1")
    read("--metrics-port=8000", "--allow-http=false")
    read("--http-port=0", "--grpc-port=0", "--metrics-port=0")


def test_vertex_ai_speaks_through_the_environment() -> None:
    options = read_options([], {"AIP_MODE": "PREDICTION", "AIP_STORAGE_URI": "/models", "AIP_HTTP_PORT": "7080"})[0]
    assert (options.allow_vertex_ai, options.vertex_ai_port, options.allow_http) == (True, 7080, False)
    assert read_options([], {"AIP_STORAGE_URI": "/models"})[0].model_repository == ("/models",)


@pytest.mark.parametrize("word", ["--http-restricted-api=health:key:canary", "--http-restricted-api=health=canary",
                                  "--http-restricted-api=nope:key=canary", "--http=health:key=canary",
                                  "--http-private-key-password=canary", "--my-token=canary"])  # fmt: skip
def test_no_refusal_repeats_a_secret(word: str) -> None:
    assert "canary" not in refusal(word)


def test_a_word_behind_a_flag_of_a_secret_is_not_repeated() -> None:
    assert "Unexpected argument: ***" in refusal("--http-server-key=a", "canary")
    assert "Unexpected argument: stray" in refusal("--http-port=1", "stray")


REFUSED = {
    "--model-namespacing=true",
}


@pytest.mark.parametrize("word", sorted(REFUSED))
def test_a_flag_that_would_be_wrong_to_ignore_stops_the_start(word: str) -> None:
    assert " is refused: " in refusal(word)


REFUSED_EXAMPLES = {
    "load-model",
    "model-namespacing",
}


@pytest.mark.parametrize("flag", FLAGS.values(), ids=lambda flag: flag.name)
def test_the_example_of_every_flag_is_accepted_unless_it_is_refused(flag: Any) -> None:
    word = f"--{flag.name}" + (f"={flag.example}" if flag.example else "")
    if flag.name in REFUSED_EXAMPLES:
        with pytest.raises(ConfigError):
            read(word)
    else:
        assert isinstance(read(word), ServerOptions)


def test_a_new_flag_of_tracing_overrides_the_deprecated_one() -> None:
    new = (TraceSetting("", "level", "OFF"), TraceSetting("triton", "file", "f"))
    words = ["--trace-level=TIMESTAMPS", "--trace-config=level=OFF", "--trace-config=triton,file=f"]
    assert read(*words).trace_config == new
    assert read(words[1], words[0], words[2]).trace_config == new


def test_traces_keep_their_mode() -> None:
    assert FLAGS["trace-config"].read is not None
    assert FLAGS["trace-config"].read("opentelemetry,resource=k=v") == TraceSetting("opentelemetry", "resource", "k=v")


def test_options_of_plugins_stand_beside_ours() -> None:
    options, _ = read_options([REPOSITORY, "--toy-colour", "blue", "--http-port=1", "--toy-big=off"], {}, [ToyOptions])
    assert options.group(ToyOptions) == ToyOptions(colour="blue", big=False)
    assert options.http_port == 1


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("--flavour=x", "unrecognized option '--flavour'"),
        ("--toy-color=x", "unrecognized option '--toy-color'; did you mean '--toy-colour'?"),
        ("--toy-colour=black", 'Bad option: "--toy-colour".\nexpected <red|blue>, got: black'),
        ("--toy-size=7.5", 'Bad option: "--toy-size".\nexpected <integer>, got: 7.5'),
        ("--toy-big=perhaps", 'Bad option: "--toy-big".\nexpected <bool>, got: perhaps'),
        ("--toy-size=10", 'Bad options "--toy-...".\ntoo large'),
        ("--toy-big", "option '--toy-big' requires an argument"),
    ],
)
def test_a_bad_option_of_a_plugin_is_named(word: str, text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        read_options([REPOSITORY, word], {}, [ToyOptions])


def test_an_option_of_a_plugin_that_may_be_a_secret_is_not_repeated() -> None:
    @dataclass(frozen=True)
    class Secretive(OptionGroup):
        name: ClassVar[str] = "toy"
        token: str = ""
        key_size: int = 0

        def __post_init__(self) -> None:
            if self.token:
                raise ValueError(f"no token is like {self.token}")

    for word, text in (("--toy-token=canary", "no token is like ***"), ("--toy-key-size=canary", "got: ***")):
        with pytest.raises(ConfigError, match=re.escape(text)) as caught:
            read_options([REPOSITORY, word], {}, [Secretive])
        assert "canary" not in str(caught.value)


def test_an_option_of_a_plugin_that_ours_would_take_is_refused() -> None:
    @dataclass(frozen=True)
    class Taken(OptionGroup):
        name: ClassVar[str] = "http"
        port: int = 0

    with pytest.raises(ConfigError, match="the option '--http-port' of a plugin is a prefix of '--http-port'"):
        read_options([REPOSITORY], {}, [Taken])


def test_the_help_has_the_options_of_a_plugin_under_its_name() -> None:
    text = render([ToyOptions])
    begin = text.index("Plugin toy: What to play with.")
    assert "--toy-colour=<red|blue>\n        Of all. [red]" in text[begin:]
    assert "--toy-size=<integer>" in text[begin:]


class Plain(OptionGroup):
    name: ClassVar[str] = "plain"


@dataclass(frozen=True)
class Odd(OptionGroup):
    name: ClassVar[str] = "O dd"


@dataclass(frozen=True)
class Deep(OptionGroup):
    name: ClassVar[str] = "deep"
    a: tuple[int, ...] = ()


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Plain, "option group Plain is no frozen dataclass"),
        (Odd, "is named 'O dd', not in"),
        (Deep, "option Deep.a is of type tuple[int, ...], which no flag is read as"),
    ],
)
def test_an_invalid_option_group_is_refused_with_the_reason(kind: type[OptionGroup], reason: str) -> None:
    with pytest.raises(TypeError, match=re.escape(reason)):
        group_flags(kind)


def test_the_allow_list_is_read_before_the_other_flags() -> None:
    assert allowed_plugins(["--colour", "blue", "--plugins=a,b"]) == ("a", "b")
    assert allowed_plugins(["--colour", "blue"]) is None
