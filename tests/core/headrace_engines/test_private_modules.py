"""The imports of a ``model.py`` are its own, beside other models of the process."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from textwrap import dedent
from types import ModuleType

import numpy as np
import psutil
import pytest

from headrace_engines import PrivateModules

Load = Callable[..., ModuleType]


@pytest.fixture
def load_model(tmp_path: Path) -> Iterator[Load]:
    """Writes the files of a version and loads its ``model.py``; everything is forgotten afterwards."""
    with ExitStack() as stack:

        def load(name: str, **files: str) -> ModuleType:
            folder = tmp_path / name / "1"
            for file, text in files.items():
                path = folder / f"{file.replace('__', '/').replace('/init', '/__init__')}.py"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(dedent(text))
            modules = PrivateModules((folder, folder.parent), {"pytest"}, {"OWNER": name})
            stack.callback(modules.close)
            return modules.load(folder / "model.py")

        yield load


@pytest.fixture
def byte_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python writes byte code, as by default."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)


def test_modules_of_the_same_name_belong_each_to_its_model(load_model: Load) -> None:
    code = "import helper\nfrom .helper import X as Y\nSAID = (helper.X, Y)"
    assert load_model("a", model=code, helper="X = 1").SAID == (1, 1)
    assert load_model("b", model=code, helper="X = 2").SAID == (2, 2)
    assert "helper" not in sys.modules


def test_an_import_inside_a_function_finds_the_models_own_module(load_model: Load) -> None:
    code = """
    def say():
        import helper
        from package import inner
        import package.inner as same
        return helper.X, inner.X, same is inner
    """
    models = [
        load_model(str(n), model=code, helper=f"X = {n}", package__init="", package__inner=f"X = {n}") for n in range(2)
    ]
    assert [each.say() for each in models] == [(0, 0, True), (1, 1, True)]


@pytest.mark.usefixtures("byte_code")
def test_a_reload_within_the_same_second_finds_the_new_text_and_nothing_is_written(
    load_model: Load, tmp_path: Path
) -> None:
    code = "import helper\nSAID = helper.X"
    assert [load_model("a", model=code, helper=f"X = {n}").SAID for n in range(3)] == [0, 1, 2]
    assert sorted(path.name for path in (tmp_path / "a" / "1").iterdir()) == ["helper.py", "model.py"]


def test_a_module_that_another_model_has_put_on_the_path_is_not_taken(
    load_model: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "helper.py").write_text("X = 'the other'")
    monkeypatch.syspath_prepend(tmp_path / "elsewhere")
    assert load_model("a", model="import helper\nSAID = helper.X", helper="X = 'mine'").SAID == "mine"


def test_a_file_beside_the_model_hides_neither_python_nor_reserved_modules(load_model: Load) -> None:
    code = "import json, pytest\nSAID = json.dumps([]), pytest.raises"
    assert ("[]", pytest.raises) == load_model("a", model=code, json="", pytest="").SAID


def test_every_module_has_the_names_that_its_owner_sets(load_model: Load) -> None:
    code = "import helper\nSAID = OWNER, helper.SAID"
    assert [load_model(name, model=code, helper="SAID = OWNER").SAID for name in "ab"] == [("a", "a"), ("b", "b")]


def test_a_folder_without_an_init_is_a_package_where_nothing_installed_has_its_name(load_model: Load) -> None:
    code = "from parts.inner import X\nSAID = X"
    assert load_model("a", model=code, parts__inner="X = 1").SAID == 1


def test_a_folder_of_data_hides_no_installed_package(load_model: Load) -> None:
    assert load_model("a", model="import numpy\nSAID = numpy.array", numpy__part="").SAID is np.array
    assert load_model("b", model="import psutil\nSAID = psutil.Process", psutil__part="").SAID is psutil.Process


def test_a_missing_module_is_named_as_it_was_imported(load_model: Load) -> None:
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'package\.nothing'$"):
        load_model("a", model="import package.nothing", package__init="")


def test_closed_modules_are_removed(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("import helper")
    (tmp_path / "helper.py").write_text("X = 1")
    modules = PrivateModules((tmp_path,))
    modules.load(tmp_path / "model.py")
    assert len([name for name in sys.modules if modules.has(name)]) == 3
    modules.close()
    assert not [name for name in sys.modules if modules.has(name)]


def test_closed_modules_are_freed(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("")
    modules = PrivateModules((tmp_path,))
    modules.load(tmp_path / "model.py")
    modules.close()
    modules_ref = weakref.ref(modules)
    del modules
    gc.collect()
    assert modules_ref() is None
