from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from headrace import ConfigError, LoadError, Model, ModelConfig


@pytest.fixture
def model(tmp_path: Path) -> Model:
    (tmp_path / "m" / "1").mkdir(parents=True)
    return Model("m", 1, tmp_path / "m" / "1", ModelConfig())


def test_a_file_of_the_version_takes_precedence_over_that_of_all_versions(model: Model) -> None:
    (model.path.parent / "labels.so").touch()
    assert model.resource_or_above("labels.so").resolve() == model.path.parent / "labels.so"
    (model.path / "labels.so").touch()
    assert model.resource_or_above("labels.so") == model.path / "labels.so"


@pytest.mark.parametrize("name", ["missing.so", "../../other/labels.so", "/etc/passwd"])
def test_a_file_that_is_not_there_or_lies_elsewhere_is_refused(model: Model, name: str) -> None:
    other = model.path.parent.parent / "other"
    other.mkdir()
    (other / "labels.so").touch()
    with pytest.raises(LoadError, match=r"(of|for) model 'm'"):
        model.resource_or_above(name)


def test_repository_only_setting_is_refused_in_a_load_request(model: Model) -> None:
    model.refuse_if_sent("parameter 'trust'")
    with pytest.raises(
        ConfigError,
        match=r"^parameter 'trust' of model 'm' came with a load request: it counts in the repository only",
    ) as refused:
        replace(model, is_sent=True).refuse_if_sent("parameter 'trust'", "parameters['trust']")
    assert refused.value.field == "parameters['trust']"
