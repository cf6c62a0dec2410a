"""A path that leads out of the model repository is not loaded. A link that stays inside works as a file does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.config.options import ServerOptions
from headrace.errors import HeadraceError
from headrace.server import Server
from headrace.storage.local_storage import check_files, is_model
from tests.core.conftest import inspect, local_repositories

CONFIG = """
backend: "identity" max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [1] }
output { name: "y" data_type: TYPE_FP32 dims: [1] label_filename: "labels.txt" }
model_warmup { name: "w" batch_size: 1 inputs { key: "x" value {
  data_type: TYPE_FP32 dims: 1 input_data_file: "data" } } }
"""


def write(folder: Path) -> Path:
    """A model with every kind of file, in ``folder``."""
    (folder / "1").mkdir(parents=True)
    (folder / "warmup").mkdir()
    (folder / "config.pbtxt").write_text(CONFIG)
    (folder / "labels.txt").write_text("a\n")
    (folder / "warmup" / "data").write_bytes(bytes(4))
    (folder / "1" / "weights").write_bytes(b"w")
    return folder


def serves(make_server: Callable[..., Any], **options: Any) -> np.ndarray[Any, Any]:
    with make_server(**options) as server:
        answer: np.ndarray[Any, Any] = server.infer("m", {"x": np.ones((1, 1), np.float32)}).outputs["y"]
        return answer


def move(path: Path, to: Path) -> None:
    """Put ``path`` elsewhere, and a link in its place."""
    path.rename(to)
    path.symlink_to(to)


@pytest.mark.parametrize(("place", "name"), [("models", "m"), ("models/other", "m"), ("repository", "other")])
def test_a_directory_that_is_one_model_has_the_name_of_its_url(tmp_path: Path, place: str, name: str) -> None:
    """KServe puts what ``storageUri`` names into one directory: a model, or a repository."""
    model = write(tmp_path / place / ("" if name == "m" else "m"))
    (model / "config.pbtxt").write_text(f'name: "{model.name}"' + CONFIG)
    with Server(f"file://{tmp_path / place}#{name}") as server:
        answer = server.infer("m", {"x": np.ones((1, 1), np.float32)})
        assert answer.outputs["y"] == 1


@pytest.mark.parametrize("what", ["", "1", "config.pbtxt", "labels.txt", "warmup", "warmup/data", "1/weights"])
def test_a_link_out_of_the_repository_is_refused_without_the_flag(
    what: str,
    repository: Path,
    tmp_path: Path,
    make_server: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    write(repository / "m")
    move(repository / "m" / what, tmp_path / "elsewhere")
    refusal = f"'{Path('m') / what}' is a link that leads out of the model repository; "
    with pytest.raises(HeadraceError, match="failed to load all models"):
        serves(make_server)
    # The reason is shown to clients, and names no directory of the machine.
    assert f"failed to load 'm': {refusal}--allow-external-links=true permits it" in caplog.messages
    assert serves(make_server, allow_external_links=True).tolist() == [[1.0]]


def test_a_link_behind_a_link_that_stays_and_one_that_leads_nowhere_are_refused(
    repository: Path, tmp_path: Path
) -> None:
    model = write(repository / "m")
    (repository / ".shared").mkdir()
    (repository / ".shared" / "secret").symlink_to("/etc/hostname")
    (model / "1" / "deep").symlink_to(repository / ".shared")
    with pytest.raises(HeadraceError, match="'m/1/deep/secret' is a link"):
        check_files(model, (), allow_external_links=False)
    (repository / ".shared" / "secret").unlink()
    check_files(model, (), allow_external_links=False)
    (model / "1" / "later").symlink_to(tmp_path / "nothing there yet")
    with pytest.raises(HeadraceError, match="'m/1/later' is a link"):
        check_files(model, (), allow_external_links=False)


def test_a_directory_whose_name_begins_like_the_repository_s_is_outside(repository: Path) -> None:
    model = write(repository / "m")
    beside = repository.with_name(repository.name + "-secret")
    beside.write_text("x")
    (model / "1" / "w").symlink_to(beside)
    with pytest.raises(HeadraceError, match="'m/1/w' is a link"):
        check_files(model, (), allow_external_links=False)


def test_links_inside_work_as_a_kubernetes_volume_makes_them(repository: Path, make_server: Callable[..., Any]) -> None:
    """A volume's files are links to ``..data/<file>``, and ``..data`` is a link to a directory with a date."""
    write(repository / "..2026_11_22" / "m")
    (repository / "..data").symlink_to("..2026_11_22")
    (repository / "m").symlink_to("..data/m")
    assert serves(make_server).tolist() == [[1.0]]


def test_a_volume_mounted_as_one_model_works(repository: Path, make_server: Callable[..., Any]) -> None:
    model = repository / "m"
    write(model / "..2026_11_22")
    (model / "..data").symlink_to("..2026_11_22")
    for name in ("1", "warmup", "config.pbtxt", "labels.txt"):
        (model / name).symlink_to(f"..data/{name}")
    assert serves(make_server).tolist() == [[1.0]]


def test_a_repository_may_be_a_link_and_its_models_links_into_another(tmp_path: Path) -> None:
    model = write(tmp_path / "disk" / "m")
    (tmp_path / "mounted").symlink_to(tmp_path / "disk")
    check_files(tmp_path / "mounted" / "m", (), allow_external_links=False)
    (tmp_path / "second").mkdir()
    (tmp_path / "second" / "n").symlink_to(model)
    check_files(tmp_path / "second" / "n", [tmp_path / "mounted"], allow_external_links=False)
    with pytest.raises(HeadraceError, match="'n' is a link"):
        check_files(tmp_path / "second" / "n", (), allow_external_links=False)


def test_links_in_circles_end_and_environments_keep_their_interpreter(repository: Path) -> None:
    model = write(repository / "m")
    (model / "again").symlink_to(model)
    (model / "itself").symlink_to(model / "itself")
    (model / "env" / "bin").mkdir(parents=True)
    (model / "env" / "pyvenv.cfg").write_text("home = /usr/bin\n")
    (model / "env" / "bin" / "python").symlink_to("/usr/bin/env")
    check_files(model, (), allow_external_links=False)


def test_an_inspection_reports_the_same(repository: Path, tmp_path: Path) -> None:
    write(tmp_path / "elsewhere")
    (repository / "m").symlink_to(tmp_path / "elsewhere")
    (problem,) = inspect(repository)
    assert problem.startswith("'m' is a link that leads out of the model repository")
    assert inspect(repository, allow_external_links=True) == []


def test_the_flag_is_off_by_default(repository: Path) -> None:
    assert not ServerOptions(model_repository=(str(repository),)).allow_external_links
    assert local_repositories(repository).scan() == {}


@pytest.mark.parametrize(
    ("files", "is_one"),
    [
        (["config.pbtxt"], True),
        (["1/model.onnx"], True),
        (["1/model.onnx", "2/model.onnx", "labels.txt"], True),
        (["echo/config.pbtxt", "echo/1/x"], False),
        (["1/config.pbtxt", "1/1/x"], False),  # a model called 1
        (["2024/1/model.onnx"], False),
        ([], False),
    ],
)
def test_a_path_to_a_model_is_recognized_as_no_repository(files: list[str], is_one: bool, tmp_path: Path) -> None:
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    assert is_model(tmp_path) is is_one
    assert not is_model(tmp_path / "nowhere")
