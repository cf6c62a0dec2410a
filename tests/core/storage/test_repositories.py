"""Which models the repositories of a server have."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.errors import HeadraceError
from tests.core.conftest import local_repositories


def make(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).mkdir(parents=True)
    return root


def test_models_are_the_directories_of_all_roots_in_order_of_name(tmp_path: Path) -> None:
    first, second = make(tmp_path / "a", "m2", ".git"), make(tmp_path / "b", "m1")
    (first / "README.md").touch()
    assert list(local_repositories(first, second).scan()) == ["m1", "m2"]


def test_a_name_in_two_roots_is_a_duplicate(tmp_path: Path) -> None:
    found = local_repositories(make(tmp_path / "a", "m"), make(tmp_path / "b", "m")).scan()
    assert found["m"].is_duplicate


@pytest.mark.parametrize("name", ["", ".", "..", "../a", "m/1", "m/", "m\0", ".git", "README.md", "M", "m ", "%6d"])
def test_only_the_exact_name_of_a_model_finds_it(tmp_path: Path, name: str) -> None:
    root = make(tmp_path / "a", "m", ".git")
    (root / "README.md").touch()
    repositories = local_repositories(root)
    assert repositories.find("m") == repositories.scan()["m"]
    assert repositories.find(name) is None


def test_a_root_that_is_no_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(HeadraceError, match=r"nowhere.*not a valid directory"):
        local_repositories(tmp_path / "nowhere").scan()
