"""Which models run code of their own files, and if the server's process runs it: without a load, as a load decides."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from headrace import ModelConfig, Server
from headrace.backends.identity import Identity
from headrace_cli.command_line import read_options
from headrace_cli.security.model_code import ModelCode, UnreadModel, model_code
from headrace_cli.security.profile_words import with_profile
from headrace_cli.security.profiles import enforce
from headrace_cli.security.review import SecurityReview
from headrace_cli.serve import find_plugins
from tests.core.headrace_cli.security.test_profiles import HEADERS, PUBLIC, TLS


def code(isolation: str = "") -> str:
    """A config whose model is code, with the parameter ``isolation``."""
    parameter = f' parameters {{ key: "isolation" value {{ string_value: "{isolation}" }} }}' if isolation else ""
    return f'backend: "identity" default_model_filename: "a.py"{parameter}'


CONFIGS = {
    "absent": 'backend: "nowhere"',
    "broken": "backend:",
    "data": 'backend: "identity"',
    "elsewhere": code("somewhere"),
    "inside": code(),
    "native": 'backend: "identity" model_operations { op_library_filename: ["liba.so", "lib\\nb.so"] }',
    "outside": code("process"),
    "pinned": code("thread"),
}


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A repository of models of a backend whose file ``default_model_filename`` is code."""

    def repository_code(self: Identity, config: ModelConfig) -> str:
        return config.default_model_filename

    monkeypatch.setattr(Identity, "repository_code", repository_code)
    monkeypatch.setattr(Identity, "engine_fields", None)
    for name, config in CONFIGS.items():
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "config.pbtxt").write_text(config)
    return f"--model-repository={tmp_path}"


def composed(*words: str) -> tuple[Server, Sequence[str]]:
    all_words = with_profile(words)
    return Server(read_options(all_words, {}, list(find_plugins(all_words).options))[0]), all_words


def test_each_model_that_runs_code_is_named_with_where(models: str) -> None:
    code = list(model_code(composed(models)[0]))
    assert [each.name for each in code if isinstance(each, UnreadModel)] == ["broken", "elsewhere"]
    assert [each for each in code if isinstance(each, ModelCode)] == [
        ModelCode("inside", "a.py", True),
        ModelCode("native", "liba.so, lib\\nb.so", True),
        ModelCode("outside", "a.py", False),
        ModelCode("pinned", "a.py", True),
    ]


def test_libraries_of_operators_count_only_for_a_backend_that_loads_them(
    models: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for fields, is_named in (((), False), (("model_operations",), True)):
        monkeypatch.setattr(Identity, "engine_fields", fields)
        assert ("native" in {each.name for each in model_code(composed(models)[0])}) is is_named


def test_an_option_of_the_backend_counts_unless_the_config_decides(models: str) -> None:
    server, _ = composed(models, "--backend-config=identity,isolation=thread")
    by_name = {each.name: each for each in model_code(server) if isinstance(each, ModelCode)}
    assert (by_name["inside"].in_server, by_name["inside"].is_flag) == (True, True)
    assert (by_name["pinned"].in_server, by_name["pinned"].is_flag) == (True, False)
    assert not by_name["outside"].in_server


def test_a_repository_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    (unread,) = model_code(composed(f"--model-repository={tmp_path / 'nothing'}")[0])
    assert isinstance(unread, UnreadModel)
    assert unread.name == ""
    (line,) = [each for each in SecurityReview(composed(f"--model-repository={tmp_path / 'nothing'}")[0]).exposures()
               if each.where == "models"]  # fmt: skip
    assert (line.what, line.is_open) == ("all", False)


def test_a_public_server_warns_of_code_in_its_process_and_starts(models: str, caplog: pytest.LogCaptureFixture) -> None:
    enforce(*composed(models, PUBLIC, *TLS, *HEADERS, "--backend-config=identity,isolation=thread"))
    warnings = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert [text.partition("models: ")[2].partition(": runs")[0] for text in warnings] == [
        *("inside, a.py", "native, liba.so, lib\\nb.so", "pinned, a.py"),
    ]
    assert (
        "--backend-config opens: models: inside, a.py: runs code of the repository in the server's process"
        in warnings[0]
    )
    assert warnings[2].endswith('; in its config, parameters { key: "isolation" value { string_value: "process" } }')
