"""The source of a model's interpreter."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from headrace.errors import LoadError
from headrace_python.environment import Environment, find

VERSION_38 = "#!/bin/sh\necho '{\"version\": [3, 8]}'\n"


def run(environment: Environment, program: str) -> str:
    environ = {**os.environ, **environment.environ}
    answer = subprocess.run(
        [environment.python, "-c", program], env=environ, capture_output=True, text=True, check=True
    )
    return answer.stdout.strip()


def executable(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def test_a_model_without_an_environment_runs_in_the_servers(tmp_path: Path) -> None:
    assert find("", tmp_path) == Environment()


def test_a_virtual_environment_is_used_where_it_is(virtual_environment: Path, tmp_path: Path) -> None:
    found = find(str(virtual_environment), tmp_path)
    assert run(found, "import colour, numpy, sys; print(colour.NAME, sys.prefix)") == f"blue {virtual_environment}"
    with pytest.raises(subprocess.CalledProcessError):
        run(found, "import headrace")


def test_variables_are_those_of_activate(
    virtual_environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("PYTHONHOME", "/nowhere")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/lib")
    script = f'. {virtual_environment}/bin/activate; echo "$PATH $VIRTUAL_ENV ${{PYTHONHOME-}}"'
    activated = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout.strip()
    environ = find(str(virtual_environment), tmp_path).environ
    assert activated == f"{environ['PATH']} {environ['VIRTUAL_ENV']}"
    assert environ["PYTHONHOME"] == ""
    assert environ["LD_LIBRARY_PATH"] == f"{virtual_environment}/lib:/opt/lib"


def test_the_directory_of_the_model_is_put_in(virtual_environment: Path, tmp_path: Path) -> None:
    (tmp_path / "env").symlink_to(virtual_environment)
    found = find("$$TRITON_MODEL_DIRECTORY/env", tmp_path)
    assert found.python == str(virtual_environment / "bin/python")


def test_an_archive_is_unpacked_and_corrected_once(packed_environment: Path, tmp_path: Path, cache: Path) -> None:
    found = find(str(packed_environment), tmp_path)
    root = Path(found.python).parents[1]
    assert run(found, "import colour, numpy; print(colour.NAME)") == "blue"
    assert root.is_relative_to(cache / "environments")
    assert find(str(packed_environment), tmp_path) == found
    assert (root / "unpacked").read_text() == f"{root} {root}\n"


def test_a_changed_archive_is_unpacked_again(packed_environment: Path, tmp_path: Path, cache: Path) -> None:
    archive = tmp_path / "env.tar.gz"
    shutil.copy(packed_environment, archive)
    first = find(str(archive), tmp_path)
    os.utime(archive, (0, 0))
    assert find(str(archive), tmp_path).python != first.python
    assert Path(first.python).exists()  # another server may run there


def test_environments_are_for_their_user_only(packed_environment: Path, tmp_path: Path, cache: Path) -> None:
    find(str(packed_environment), tmp_path)
    assert (cache / "environments").stat().st_mode & 0o777 == 0o700


def test_a_refused_archive_is_removed(tmp_path: Path, cache: Path) -> None:
    with tarfile.open(tmp_path / "evil.tar", "w") as archive:
        archive.addfile(tarfile.TarInfo("bin/good"))
        archive.addfile(tarfile.TarInfo("../evil"))
    with pytest.raises(LoadError, match=r"member '\.\./evil' climbs out with '\.\.'"):
        find(str(tmp_path / "evil.tar"), tmp_path)
    assert list((cache / "environments").iterdir()) == []


@pytest.mark.parametrize("code", ["raise SystemExit(3)", "raise ValueError('lost')"])
def test_the_files_of_a_failed_conda_unpack_are_removed(
    virtual_environment: Path, tmp_path: Path, cache: Path, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    executable(tmp_path / "root/bin/conda-unpack", code)
    with tarfile.open(tmp_path / "env.tar", "w") as archive:
        archive.add(virtual_environment / "bin", arcname="bin")
        archive.add(virtual_environment / "pyvenv.cfg", arcname="pyvenv.cfg")
        archive.add(tmp_path / "root/bin/conda-unpack", arcname="bin/conda-unpack")
    with pytest.raises(LoadError, match=r"conda-unpack of environment .* exited with status .* in the server's log$"):
        find(str(tmp_path / "env.tar"), tmp_path)
    assert list((cache / "environments").iterdir()) == []
    assert ("ValueError: lost" in caplog.text) == ("lost" in code)


SENT = "EXECUTION_ENV_PATH of a config that comes with a load request must lie in the model's directory"


@pytest.mark.parametrize(
    "setting",
    [
        "/etc/passwd",
        "/no/such/place",
        "$$TRITON_MODEL_DIRECTORY/../env",
        "$$TRITON_MODEL_DIRECTORY/../",
        "$$TRITON_MODEL_DIRECTORY/../model2",
        "$$TRITON_MODEL_DIRECTORYelse/env",
        "$$TRITON_MODEL_DIRECTORY/link/../env",
        "$$TRITON_MODEL_DIRECTORY/link",
        "env",
        "a\0b",
    ],
)
def test_a_config_that_was_sent_names_nothing_outside_the_model(tmp_path: Path, setting: str) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (tmp_path / "env").mkdir()
    (model / "link").symlink_to(tmp_path / "env")
    with pytest.raises(LoadError, match=SENT):
        find(setting, model, is_sent=True)


def test_a_sent_config_may_name_an_environment_of_the_model(virtual_environment: Path, tmp_path: Path) -> None:
    shutil.copytree(virtual_environment, tmp_path / "env", symlinks=True)
    found = find("$$TRITON_MODEL_DIRECTORY/env", tmp_path, is_sent=True)
    assert found == find(str(tmp_path / "env"), tmp_path, is_sent=True) == find(str(tmp_path / "env"), tmp_path)


def test_a_path_without_anything_is_refused_in_tritons_words(tmp_path: Path) -> None:
    with pytest.raises(LoadError) as raised:
        find(f"{tmp_path}/nothing", tmp_path)
    assert raised.value.message == f"Failed to get the canonical path for {tmp_path}/nothing."


def test_a_directory_that_is_no_environment_is_refused_in_tritons_words(tmp_path: Path) -> None:
    with pytest.raises(LoadError) as raised:
        find(str(tmp_path), tmp_path)
    assert raised.value.message == (
        f"Path {tmp_path}/bin/activate does not exist. The Python environment should contain an 'activate' script."
    )


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(LoadError, match="is no directory and no file that can be read"):
        find(str(tmp_path / "pipe"), tmp_path)


@pytest.mark.parametrize(
    ("script", "error"),
    [
        (VERSION_38, r"has Python 3\.8; Headrace needs 3\.10 or newer"),
        ("#!/bin/sh\nexit 7\n", "is no Python that runs: it exited with status 7"),
        ("#!/bin/sh\nkill -9 $$\n", "is no Python that runs: it was killed by SIGKILL"),
        ("#!/no/such/interpreter\n", "cannot be run: No such file or directory"),
    ],
)
def test_an_interpreter_that_cannot_serve_is_refused(tmp_path: Path, script: str, error: str) -> None:
    executable(tmp_path / "bin/activate", "")
    executable(tmp_path / "bin/python", script)
    with pytest.raises(LoadError, match=error):
        find(str(tmp_path), tmp_path)


def test_an_environment_without_numpy_is_refused(virtual_environment: Path, tmp_path: Path) -> None:
    shutil.copytree(virtual_environment, tmp_path / "bare", ignore=shutil.ignore_patterns("numpy*"))
    with pytest.raises(LoadError, match="cannot import numpy, which models need: ModuleNotFoundError: No module named"):
        find(str(tmp_path / "bare"), tmp_path)


def test_a_conda_environment_that_was_never_packed_will_do(virtual_environment: Path, tmp_path: Path) -> None:
    shutil.copytree(virtual_environment / "bin", tmp_path / "bin", ignore=shutil.ignore_patterns("activate*"))
    (tmp_path / "lib").symlink_to(virtual_environment / "lib")
    (tmp_path / "conda-meta").mkdir()
    shutil.copy(virtual_environment / "pyvenv.cfg", tmp_path)
    assert find(str(tmp_path), tmp_path).python == str(tmp_path / "bin/python")


def test_no_part_of_a_path_reaches_a_shell(virtual_environment: Path, tmp_path: Path) -> None:
    room = tmp_path / "room"
    room.mkdir()
    odd = room / "-e;touch a`touch b`$(touch c)\ntouch d"
    odd.symlink_to(virtual_environment)
    shutil.copytree(virtual_environment, room / "-x;touch e\n$(touch f)", ignore=shutil.ignore_patterns("numpy*"))
    assert find(str(odd), room).python == str(virtual_environment / "bin/python")
    with pytest.raises(LoadError, match="cannot import numpy"):
        find(str(room / "-x;touch e\n$(touch f)"), room)
    assert not [name for name in "abcdef" if Path(name).exists()]
    assert len(list(room.iterdir())) == 2
