"""Models of a repository that is registered while the server runs, under other names."""

from __future__ import annotations

from pathlib import Path

from tests.core.conftest import local_repositories


def test_a_model_has_the_files_and_the_size_of_its_directory(tmp_path: Path) -> None:
    root, other = tmp_path / "root", tmp_path / "other"
    for folder in (root, other / "own/1", other / "unnamed/1"):
        folder.mkdir(parents=True)
    (other / "own/1/weights").write_bytes(b"12345")
    repositories = local_repositories(root)
    repositories.scan()
    repositories.add(str(other), {"served": "own"})
    assert list(repositories.scan()) == ["served"]
    entry = repositories.find("served")
    assert entry is not None
    assert "1/weights" in entry.fingerprint().files
    assert entry.size(["1/weights", "2/weights"], [1]) == 5
    with entry.fetch(["1/weights"]) as directory:
        assert (directory.path / "1/weights").read_bytes() == b"12345"
