"""The import of ``model.py`` and its modules, alone in an interpreter and with other models."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

from headrace.errors import LoadError
from headrace_python.module import IsolatedModules, model_file
from triton_python_backend_utils.runtime import Runtime, current


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes the files of a version; ``model.py`` of it."""

    def write_files(name: str, **files: str) -> Path:
        for file, text in files.items():
            path = tmp_path / name / "1" / f"{file.replace('__', '/')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(dedent(text))
        return tmp_path / name / "1" / "model.py"

    return write_files


CLASS = "\nclass TritonPythonModel: pass\n"


def value_of(file: Path) -> object:
    """SAID of the class of ``file``, loaded beside other models."""
    return IsolatedModules(file, Runtime("m")).load_class(1).SAID


def test_modules_of_the_same_name_belong_each_to_its_model(write: Callable[..., Path]) -> None:
    code = "import helper\nfrom .helper import X as Y\n\nclass TritonPythonModel:\n    SAID = (helper.X, Y)\n"
    assert value_of(write("a", model=code, helper="X = 1")) == (1, 1)
    assert value_of(write("b", model=code, helper="X = 2")) == (2, 2)
    assert "helper" not in sys.modules


def test_an_import_inside_a_function_finds_the_models_own_module(write: Callable[..., Path]) -> None:
    code = """
    class TritonPythonModel:
        def say(self):
            import helper
            from package import inner
            import package.inner as same
            return helper.X, inner.X, same is inner
    """
    models = [
        IsolatedModules(write(str(n), model=code, helper=f"X = {n}", package__inner=f"X = {n}"), Runtime("m"))
        for n in range(2)
    ]
    classes = [modules.load_class(1) for modules in models]
    assert [each().say() for each in classes] == [(0, 0, True), (1, 1, True)]


def test_two_instances_of_a_model_share_no_module(write: Callable[..., Path]) -> None:
    file = write("a", model="import helper\nclass TritonPythonModel:\n    SAID = helper.SEEN", helper="SEEN = []")
    first, second = value_of(file), value_of(file)
    assert first == second
    assert first is not second


def test_a_module_that_another_model_has_put_on_the_path_is_not_taken(
    write: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import helper\nclass TritonPythonModel:\n    SAID = helper.X\n"
    other = write("other", helper="X = 'the other'").parent
    monkeypatch.syspath_prepend(other)
    assert value_of(write("a", model=code, helper="X = 'mine'")) == "mine"


@pytest.fixture
def byte_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python writes byte code by default."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)


@pytest.mark.usefixtures("byte_code")
def test_a_reload_within_the_same_second_finds_the_new_text(write: Callable[..., Path]) -> None:
    code = "import helper\nclass TritonPythonModel:\n    SAID = helper.X\n"
    assert [value_of(write("a", model=code, helper=f"X = {n}")) for n in range(3)] == [0, 1, 2]


@pytest.mark.usefixtures("byte_code")
def test_nothing_is_written_beside_the_model(write: Callable[..., Path]) -> None:
    file = write("a", model="import helper\nclass TritonPythonModel:\n    SAID = 1", helper="X = 1")
    value_of(file)
    assert sorted(path.name for path in file.parent.iterdir()) == ["helper.py", "model.py"]


def test_a_folder_of_data_hides_no_installed_package(write: Callable[..., Path]) -> None:
    file = write("a", model="import pytest, data.part\nclass TritonPythonModel:\n    SAID = data.part.X, pytest.raises")
    for name in ("pytest", "data"):
        (file.parent / name).mkdir()
    (file.parent / "data" / "part.py").write_text("X = 5")
    assert value_of(file) == (5, pytest.raises)


def test_a_file_beside_the_model_hides_no_module_of_python(write: Callable[..., Path]) -> None:
    file = write("a", model="import json\nclass TritonPythonModel:\n    SAID = json.dumps([])", json="")
    assert value_of(file) == "[]"


def test_the_models_directory_is_searched_too(write: Callable[..., Path]) -> None:
    file = write("a", model="import shared\nclass TritonPythonModel:\n    SAID = shared.X")
    (file.parent.parent / "shared.py").write_text("X = 3")
    assert value_of(file) == 3


def test_a_missing_module_is_named_as_it_was_imported(write: Callable[..., Path]) -> None:
    file = write("a", model="import helper.missing", helper="")
    with pytest.raises(LoadError, match=r"^ModuleNotFoundError: No module named 'helper.missing'"):
        value_of(file)
    with pytest.raises(
        LoadError, match=r"^ModuleNotFoundError: No module named 'nowhere'\n\nAt:\n  .*model.py\(1\): <"
    ):
        value_of(write("b", model="import nowhere"))


def test_the_error_of_a_failed_import_has_its_frames(write: Callable[..., Path]) -> None:
    file = write("a", model="import helper", helper="def go():\n    raise ValueError('no')\ngo()")
    with pytest.raises(LoadError) as caught:
        value_of(file)
    assert caught.value.message == (
        "ValueError: no\n\nAt:\n  1/helper.py(2): go\n  1/helper.py(3): <module>\n  1/model.py(1): <module>\n"
    )


def test_a_file_without_the_class_is_refused_in_tritons_words(write: Callable[..., Path]) -> None:
    with pytest.raises(LoadError, match=r"^AttributeError: module '1.model' has no attribute 'TritonPythonModel'$"):
        value_of(write("a", model="x = 1"))


def test_the_error_for_a_module_of_pytorch_names_its_backend(write: Callable[..., Path]) -> None:
    file = write("a", model="import torch\nclass Net(torch.nn.Module): pass", torch="class nn:\n class Module: pass")
    with pytest.raises(LoadError) as caught:
        value_of(file)
    assert caught.value.message == (
        "AttributeError: module '1.model' has no attribute 'TritonPythonModel'; a torch.nn.Module is served by: "
        'backend: "pytorch" runtime: "model.py"'
    )


def test_a_thread_that_a_model_starts_finds_its_runtime(write: Callable[..., Path]) -> None:
    code = "from triton_python_backend_utils.runtime import current\n"
    code += "class TritonPythonModel:\n    def find(self): return current()\n"
    runtimes = [Runtime("a"), Runtime("b")]
    classes = [IsolatedModules(write("a", model=code), each).load_class(1) for each in runtimes]
    assert [each().find() for each in classes] == runtimes
    assert current() is None


def test_a_closed_model_is_freed_with_its_modules(write: Callable[..., Path]) -> None:
    modules = IsolatedModules(write("a", model="import helper" + CLASS, helper=""), Runtime("m"))
    package, alive = modules.package, weakref.ref(modules.load_class(1))
    assert f"{package}.helper" in sys.modules
    modules.close()
    del modules
    gc.collect()
    assert alive() is None
    assert [name for name in sys.modules if name.partition(".")[0] == package] == []


def test_alone_a_model_is_a_module_of_its_version_in_sys_path(
    write: Callable[..., Path],
) -> None:
    code = """
    import sys
    import helper, json
    from .helper import X

    class TritonPythonModel:
        SAID = (__name__, X, helper is sys.modules["helper"], json.__name__ in sys.stdlib_module_names)
    """
    file = write("a", model=code, helper="X = 4", json="raise ValueError")
    script = f"""
    import sys
    from pathlib import Path
    from headrace_python.module import load_class
    file = Path({str(file)!r})
    print(load_class(file, 1).SAID, sys.path[-2:] == [str(file.parent), str(file.parent.parent)])
    """
    run = subprocess.run([sys.executable, "-c", dedent(script)], capture_output=True, text=True, timeout=60)
    assert run.stdout == "('1.model', 4, True, True) True\n", run.stderr
    assert sorted(path.name for path in file.parent.iterdir()) == ["helper.py", "json.py", "model.py"]


def test_default_model_filename_names_the_file(tmp_path: Path) -> None:
    version = tmp_path / "m" / "1"
    version.mkdir(parents=True)
    (version / "other.py").touch()
    (version / "model.txt").touch()
    (tmp_path / "outside.py").touch()
    assert model_file(version, '{"default_model_filename": "other.py"}') == version / "other.py"
    for config, text in (
        (
            "{}",
            rf"^Python model file not found in '{version / 'model.py'}'\. Its directory has 'other\.py': rename it, or "
            r'set default_model_filename: "other\.py"$',
        ),
        ('{"default_model_filename": "model.txt"}', r'^Model name must end with \'.py\'. Model name is "model.txt".$'),
        ('{"default_model_filename": "../../outside.py"}', "outside the model directory"),
    ):
        with pytest.raises(LoadError, match=text):
            model_file(version, config)


def test_the_instance_imports_nothing_that_a_models_environment_may_lack() -> None:
    script = """
    import sys
    sys.modules.update(dict.fromkeys(["google", "pluggy", "ml_dtypes", "orjson", "grpc"]))
    import headrace_python.instance
    """
    subprocess.run([sys.executable, "-c", dedent(script)], check=True, timeout=60)
