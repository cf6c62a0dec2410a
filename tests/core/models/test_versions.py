from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import text_format

from headrace.config.model_config_pb2 import ModelVersionPolicy
from headrace.errors import OperatorError
from headrace.models.versions import VersionFingerprint, available_versions, select_versions, versions_to_serve
from headrace.storage.local_storage import files_below


def make(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).mkdir(parents=True)
    return root


def policy(text: str) -> ModelVersionPolicy:
    return text_format.Parse(text, ModelVersionPolicy())


def test_versions_are_decimal_names_without_leading_zeros(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make(tmp_path, "10", "2", "0", "03", "x1", "warmup", "configs", "initial_state", "²")
    assert available_versions(files_below(tmp_path)) == [0, 2, 10]
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
def test_a_policy_without_a_version_is_refused_with_the_existing_ones(
    tmp_path: Path, folders: str, text: str, why: str
) -> None:
    (tmp_path / "model.py").touch()
    for folder in folders.split():
        (tmp_path / folder).mkdir()
    with pytest.raises(OperatorError) as refusal:
        versions_to_serve("m", files_below(tmp_path), policy(text))
    reason = "at least one version must be available under the version policy of model 'm'. "
    assert refusal.value.message.startswith(reason + why)


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (None, False),
        (VersionFingerprint(b"config", "place", {"1/model": 1}, b"one"), False),
        (VersionFingerprint(b"config", "place", {"1/model": 1}, b"two"), True),
        (VersionFingerprint(b"other", "place", {"1/model": 1}, b"two"), False),
        (VersionFingerprint(b"config", "elsewhere", {"1/model": 1}, b"two"), False),
        (VersionFingerprint(b"config", "place", {"1/model": 2}, b"two"), False),
    ],
    ids=["none", "the same", "instances", "instances and config", "instances and place", "instances and a file"],
)
def test_a_version_differs_in_instances_only_if_nothing_else_differs(
    other: VersionFingerprint | None, expected: bool
) -> None:
    fingerprint = VersionFingerprint(b"config", "place", {"1/model": 1}, b"one")
    assert fingerprint.differs_in_instances(other) is expected
