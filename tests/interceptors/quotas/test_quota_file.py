"""The quota file and its command: validity, limits of principals, and places of errors."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from headrace import ConfigError
from headrace_quotas import QuotasCommand
from headrace_quotas.quota_file import QuotaBook, QuotaLimits, Sharing


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "quotas.json"


def read(path: Path, document: Any) -> QuotaBook:
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return QuotaBook.read(path)


def quotas(*words: str) -> tuple[int, str, str]:
    """Run ``headrace quotas`` in this process. Return its exit code, stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = QuotasCommand().run(QuotasCommand().parse(words))
    return code, out.getvalue(), err.getvalue()


def test_an_empty_file_limits_nothing(path: Path) -> None:
    book = read(path, {})
    assert book.of_principal("alice").limits == book.anonymous.limits == QuotaLimits()
    assert book.of_principal("alice").of_model("digits") is None
    assert book.sharing_of("digits") is None


def test_missing_limits_come_from_the_defaults(path: Path) -> None:
    book = read(
        path,
        {
            "defaults": {"requests_per_second": 5, "burst": 9, "in_flight": 2, "weight": 3, "models": {"*": {}}},
            "principals": {
                "same": {},
                "faster": {"requests_per_second": 50},
                "burstier": {"burst": 90},
                "free": {"requests_per_second": None, "in_flight": None, "weight": 0.5},
            },
        },
    )
    assert book.of_principal("same").limits == book.of_principal("unknown").limits == QuotaLimits(5, 9, 2)
    assert book.of_principal("faster").limits == QuotaLimits(50, None, 2)  # a burst belongs to its rate
    assert book.of_principal("burstier").limits == QuotaLimits(5, 90, 2)
    assert book.of_principal("free").limits == QuotaLimits()
    assert [book.of_principal(name).weight for name in ("same", "free")] == [3, 0.5]


def test_the_models_of_a_principal_come_before_those_of_the_defaults(path: Path) -> None:
    own = {"llm*": {"in_flight": 1}}
    book = read(
        path,
        {"defaults": {"models": {"*": {"in_flight": 9}}}, "principals": {"alice": {"models": own}}},
    )
    alice = book.of_principal("alice")
    assert alice.of_model("llm_a") == ("llm*", QuotaLimits(in_flight=1))
    assert alice.of_model("digits") == ("*", QuotaLimits(in_flight=9))
    assert book.of_principal("bob").of_model("llm_a") == ("*", QuotaLimits(in_flight=9))


def test_the_first_pattern_of_a_shared_model_applies(path: Path) -> None:
    book = read(path, {"sharing": {"llm*": {"in_flight": 4, "max_wait_seconds": 0.5}, "*": {}}})
    assert book.sharing_of("llm_a") == Sharing(in_flight=4, max_wait_seconds=0.5)
    assert book.sharing_of("digits") == Sharing()


def test_each_rate_has_a_burst_of_its_time(path: Path) -> None:
    limits = read(
        path,
        {"defaults": {"requests_per_second": 0.5, "input_bytes_per_second": 7, "output_tokens_per_minute": 600}},
    ).defaults.limits
    assert limits.rates() == [
        ("requests_per_second", 0.5, 1.0),
        ("input_bytes_per_second", 7, 7),
        ("output_tokens_per_minute", 10, 600),
    ]


WRONG = [
    ("[]", ": the file is []; expected an object"),
    ("{", " is no JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
    ("\xff", None),
    ("[" * 100_000, None),
    ('{"a": 1, "a": 2}', ": the member 'a' appears twice in one object"),
    ({"default": {}}, ": the file: unknown member 'default'; known: defaults, principals, anonymous, sharing"),
    ({"defaults": 3}, ": defaults is 3; expected an object"),
    (
        {"defaults": {"in_flight": 0}},
        ": defaults.in_flight is 0; expected a whole number from 1 to 1e+15",
    ),
    ({"defaults": {"in_flight": 1.5}}, ": defaults.in_flight is 1.5; expected a whole number from 1 to 1e+15"),
    ({"defaults": {"in_flight": True}}, ": defaults.in_flight is true; expected a whole number from 1 to 1e+15"),
    (
        {"defaults": {"requests_per_second": -1}},
        ": defaults.requests_per_second is -1; expected a number from 1e-06 to 1e+15",
    ),
    (
        '{"defaults": {"requests_per_second": NaN}}',
        ": defaults.requests_per_second is NaN; expected a number from 1e-06 to 1e+15",
    ),
    ('{"defaults": {"burst": 1' + "0" * 5000 + "}}", None),
    ({"defaults": {"burst": 5}}, ": defaults.burst needs requests_per_second"),
    (
        {"principals": {"alice": {"models": {"m": {"weight": 2}}}}},
        ": principals.alice.models.m: unknown member 'weight'; known: requests_per_second, burst, in_flight, "
        "input_bytes_per_second, input_bytes_burst, output_tokens_per_minute, output_tokens_burst",
    ),
    (
        {"principals": {"a\nb": {"weight": "2"}}},
        ': principals.a\\nb.weight is "2"; expected a number from 0.001 to 1000',
    ),
    ({"principals": {"": {}}}, ": principals: a name or pattern has 1 to 256 characters, not 0"),
    (
        {"sharing": {"m": {"max_wait_seconds": 0}}},
        ": sharing.m.max_wait_seconds is 0; expected a number from 0.001 to 86400",
    ),
    ({"sharing": {"m": []}}, ": sharing.m is []; expected an object"),
]


@pytest.mark.parametrize(("document", "message"), WRONG, ids=range(len(WRONG)))
def test_errors_are_refused_with_their_place(path: Path, document: Any, message: str | None) -> None:
    if isinstance(document, str):
        path.write_bytes(document.encode("latin-1"))
        document = None
    with pytest.raises(ConfigError) as raised:
        QuotaBook.read(path) if document is None else read(path, document)
    assert raised.value.message.startswith(f"quota file '{path}'")
    assert "\n" not in raised.value.message
    assert len(raised.value.message) < 400 + len(str(path))
    if message is not None:
        assert raised.value.message == f"quota file '{path}'{message}"
    assert quotas("check", str(path)) == (1, "", f"headrace quotas: {raised.value.message}\n")


def test_a_missing_or_special_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(ConfigError, match=f"quota file '{path}' cannot be read"):
            QuotaBook.read(path)


def test_ten_thousand_principals_are_read_and_found(path: Path) -> None:
    book = read(path, {"principals": {f"p{number}": {"in_flight": number + 1} for number in range(10_000)}})
    assert book.of_principal("p9999").limits.in_flight == 10_000


def test_the_command_prints_the_limits(path: Path) -> None:
    read(
        path,
        {
            "defaults": {"requests_per_second": 5},
            "principals": {
                "alice": {"in_flight": 4, "weight": 2, "models": {"llm*": {"output_tokens_per_minute": 60}}}
            },
            "anonymous": {"requests_per_second": 1},
            "sharing": {"llm*": {"in_flight": 8}},
        },
    )
    assert quotas("check", str(path)) == (
        0,
        f"'{path}' is valid: 1 principals, 0 patterns of principals, 1 patterns of shared models\n",
        "",
    )
    code, stdout, _ = quotas("check", str(path), "--principal", "alice", "--model", "llm_7b")
    assert code == 0
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in stdout.splitlines() if "|" in line]
    assert lines[1:] == [
        ["all models", "5 requests per second, 5 at once", "principals.alice"],
        ["all models", "4 requests in flight", "principals.alice"],
        ["model 'llm_7b'", "60 output tokens per minute, 60 at once", "models.llm*"],
        ["model 'llm_7b'", "shared, with the weight 2", "sharing"],
        ["model 'llm_7b'", "8 requests at once", "sharing"],
        ["model 'llm_7b'", "at most 1000 requests with 268435456 bytes wait, each for 30 s", "sharing"],
    ]
    assert "1 requests per second" in quotas("check", str(path), "--anonymous")[1]
    assert "2.5 requests per second" in quotas("check", str(path), "--principal", "bob", "--workers", "2")[1]
    assert "not shared" in quotas("check", str(path), "--principal", "bob", "--model", "digits")[1]
    assert quotas("check", str(path), "--workers", "0")[0] == 1
