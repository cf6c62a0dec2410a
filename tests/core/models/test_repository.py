from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import text_format

from headrace.config.model_config_pb2 import ModelVersionPolicy
from headrace.errors import HeadraceError, OperatorError
from headrace.models.repository import Repository, available_versions, select_versions, versions_to_serve


def make(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).mkdir(parents=True)
    return root


def policy(text: str) -> ModelVersionPolicy:
    return text_format.Parse(text, ModelVersionPolicy())


def test_models_are_the_directories_of_all_roots_in_order_of_name(tmp_path: Path) -> None:
    first, second = make(tmp_path / "a", "m2", ".git"), make(tmp_path / "b", "m1")
    (first / "README.md").touch()
    assert list(Repository([first, second]).scan()) == ["m1", "m2"]


def test_a_name_in_two_roots_is_a_duplicate(tmp_path: Path) -> None:
    found = Repository([make(tmp_path / "a", "m"), make(tmp_path / "b", "m")]).scan()
    assert found["m"].is_duplicate


@pytest.mark.parametrize("name", ["", ".", "..", "../a", "m/1", "m/", "m\0", ".git", "README.md", "M", "m ", "%6d"])
def test_only_the_exact_name_of_a_model_finds_it(tmp_path: Path, name: str) -> None:
    root = make(tmp_path / "a", "m", ".git")
    (root / "README.md").touch()
    assert Repository([root]).find("m") == Repository([root]).scan()["m"]
    assert Repository([root]).find(name) is None


def test_a_root_that_is_no_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(HeadraceError, match=r"nowhere.*not a valid directory"):
        Repository([tmp_path / "nowhere"]).scan()


def test_versions_are_decimal_names_without_leading_zeros(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make(tmp_path, "10", "2", "0", "03", "x1", "warmup", "configs", "initial_state", "²")
    assert available_versions(tmp_path) == [0, 2, 10]
    assert sorted(caplog.messages) == [
        "ignore version directory '03' which contains leading zeros in its directory name",
        "ignore version directory 'x1' which fails to convert to integral number",
        "ignore version directory '²' which fails to convert to integral number",
    ]


@pytest.mark.parametrize(
    ("text", "selected"),
    [
        ("", [7]),
        ("latest { num_versions: 2 }", [3, 7]),
        ("latest { num_versions: 9 }", [1, 3, 7]),
        ("all { }", [1, 3, 7]),
        ("specific { versions: [1, 7, 9] }", [1, 7]),
    ],
)
def test_the_policy_selects_versions(text: str, selected: list[int]) -> None:
    assert select_versions("m", policy(text), [1, 3, 7]) == selected


def test_no_version_left_is_an_error_that_names_the_model() -> None:
    with pytest.raises(
        OperatorError, match="at least one version must be available under the version policy of model 'm'"
    ):
        select_versions("m", policy("specific { versions: [2] }"), [1])


@pytest.mark.parametrize(
    ("folders", "text", "why"),
    [
        (
            "",
            "",
            "It has no version directory, such as '1', which holds the model's files, and is empty for an ensemble",
        ),
        ("configs warmup .git", "", "It has no version directory, such as '1'"),
        ("v1", "", "Its directory 'v1' is no version: a version is a number without leading zeros, such as '1'"),
        ("01", "all { }", "Its directory '01' is no version: a version is a number without leading zeros, such as '1'"),
        ("1 2", "specific { versions: [7, 9] }", "It has version 1, 2, and its version policy asks for 7, 9"),
    ],
)
def test_no_version_left_says_what_there_is_instead(tmp_path: Path, folders: str, text: str, why: str) -> None:
    (tmp_path / "model.py").touch()
    for folder in folders.split():
        (tmp_path / folder).mkdir()
    with pytest.raises(OperatorError) as refusal:
        versions_to_serve("m", tmp_path, policy(text))
    said = "at least one version must be available under the version policy of model 'm'. "
    assert refusal.value.message.startswith(said + why)
