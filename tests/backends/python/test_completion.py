"""``auto_complete_config`` runs in a process that lives no longer than the call."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import psutil
import pytest

from headrace.backends.base import Model
from headrace.config.model_config_pb2 import ModelConfig
from headrace.config.parse import parse_text
from headrace.errors import LoadError
from headrace_python import completion
from headrace_python.backend import PythonBackend
from headrace_python.completion import complete

HEAD = """
import os, sys, threading, time
import numpy as np
import triton_python_backend_utils as pb_utils
"""
Completes = Callable[..., ModelConfig]


@pytest.fixture
def completes(tmp_path: Path) -> Completes:
    """Writes a model whose auto_complete_config has a body, and completes its config."""

    def run(body: str, config: str = "", timeout_s: float = 30.0, before: str = "", **options: Any) -> ModelConfig:
        folder = tmp_path / "m" / "1"
        folder.mkdir(parents=True)
        method = f"    @staticmethod\n    def auto_complete_config(config):\n{indent(dedent(body), ' ' * 8)}"
        (folder / "model.py").write_text(f"{HEAD}\n{before}\nclass TritonPythonModel:\n{method}")
        model = Model("m", 1, folder, parse_text(f'name: "m" backend: "python" {config}'))
        complete(model, folder / "model.py", timeout_s=timeout_s, **options)
        return model.config

    return run


ALL = """
config.set_max_batch_size(8)
config.set_dynamic_batching()
config.add_input({"name": "A", "data_type": "TYPE_FP32", "dims": [4]})
config.add_input({"name": "B", "data_type": "TYPE_STRING", "dims": [-1], "optional": True})
config.add_output({"name": "C", "data_type": "TYPE_INT64", "dims": [-1, 2]})
config.set_model_transaction_policy({"decoupled": True})
return config
"""
COMPLETED = """
max_batch_size: 8 dynamic_batching {}
input { name: "A" data_type: TYPE_FP32 dims: [4] }
input { name: "B" data_type: TYPE_STRING dims: [-1] optional: true }
output { name: "C" data_type: TYPE_INT64 dims: [-1, 2] }
model_transaction_policy { decoupled: true }
"""


def test_a_model_completes_batching_inputs_outputs_and_policy(completes: Completes) -> None:
    assert completes(ALL) == parse_text(f'name: "m" backend: "python" {COMPLETED}')


def test_fields_of_the_config_are_not_overwritten(completes: Completes) -> None:
    written = (
        'parameters { key: "k" value { string_value: "v" } } version_policy { specific { versions: [1] } } '
        'dynamic_batching { max_queue_delay_microseconds: 500 } input { name: "A" data_type: TYPE_FP32 dims: [4] }'
    )
    config = completes(ALL, written)
    assert config.parameters["k"].string_value == "v"
    assert list(config.version_policy.specific.versions) == [1]
    assert config.dynamic_batching.max_queue_delay_microseconds == 500
    assert [each.name for each in config.input] == ["A", "B"]


def test_only_the_fields_that_triton_completes_are_used(completes: Completes) -> None:
    config = completes(
        "config.as_dict().update(name='other', backend='identity', default_model_filename='x')\n"
        "config.as_dict()['instance_group'] = [{'count': 50}]\nreturn config"
    )
    assert config == parse_text('name: "m" backend: "python"')


def test_the_config_of_a_model_without_the_method_is_unchanged(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("class TritonPythonModel: pass")
    written = 'name: "m" backend: "python" max_batch_size: 3 input { name: "A" data_type: TYPE_FP32 dims: [4] }'
    model = Model("m", 1, tmp_path, parse_text(written))
    complete(model, tmp_path / "model.py")
    assert model.config == parse_text(written)


@pytest.mark.parametrize("base", ["", "(dict)"])
def test_a_file_that_shows_that_it_has_no_method_is_not_run(tmp_path: Path, base: str) -> None:
    (tmp_path / "model.py").write_text(f"open({str(tmp_path / 'seen')!r}, 'w')\nclass TritonPythonModel{base}: pass\n")
    complete(Model("m", 1, tmp_path, parse_text('name: "m" backend: "python"')), tmp_path / "model.py")
    assert (tmp_path / "seen").exists() is bool(base)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("return None", "auto_complete_config function in model 'm' must return a valid pb.ModelConfig object."),
        ("return config.as_dict()", "must return a valid pb.ModelConfig object."),
        ("config.set_max_batch_size(1)\nreturn config", "configuration specified max_batch_size 2"),
        ("raise KeyError('lost')", "KeyError: 'lost'"),
        ("sys.exit(4)", "SystemExit: 4"),
        ("os._exit(4)", "auto_complete_config of model 'm' exited with status 4"),
        ("os.abort()", "auto_complete_config of model 'm' was killed by SIGABRT"),
        ("import ctypes; ctypes.string_at(0)", "was killed by SIGSEGV"),
        ("config.as_dict()['input'] = [{'name': 'A', 'data_type': 'FP32'}]\nreturn config", "returned no valid config"),
        ("config.as_dict()['max_batch_size'] = object()\nreturn config", "TypeError: Object of type object is not"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
    ],
)
def test_a_failure_is_explained_and_does_not_change_the_config(completes: Completes, body: str, error: str) -> None:
    with pytest.raises(LoadError) as raised:
        completes(body, "max_batch_size: 2")
    assert error in raised.value.message


def test_an_exception_shows_where_it_was_raised(completes: Completes) -> None:
    with pytest.raises(LoadError) as raised:
        completes("raise KeyError('lost')")
    assert "At:\n  1/model.py(" in raised.value.message
    assert "): auto_complete_config\n" in raised.value.message


def test_code_that_does_not_return_is_killed_with_all_it_started(
    completes: Completes, tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    body = f"""
    import subprocess
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    open({str(tmp_path / "pids")!r}, "w").write(f"{{os.getpid()}} {{child.pid}}")
    time.sleep(100)
    """
    with pytest.raises(LoadError, match=r"auto_complete_config of model 'm' did not return within 2 s \(stub-timeout"):
        completes(body, timeout_s=2)
    for pid in (tmp_path / "pids").read_text().split():
        wait_until(lambda pid=pid: _is_gone(int(pid)), f"{pid} has ended")


def test_importing_does_not_count(completes: Completes) -> None:
    assert completes("return config", "max_batch_size: 2", timeout_s=1, before="time.sleep(2)").max_batch_size == 2


def test_importing_has_a_bound_of_its_own(completes: Completes) -> None:
    expected = (
        r"file of model 'm' was not imported within 1 s \(parameter 'load_timeout_seconds', or load-timeout-seconds"
    )
    with pytest.raises(LoadError, match=expected):
        completes("return config", before="time.sleep(100)", import_timeout_s=1)


def test_no_more_are_started_at_once_than_there_are_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each model logs its begin and end. With one core, one ends before the next begins."""
    monkeypatch.setattr(completion, "_STARTS", threading.Semaphore(1))
    (tmp_path / "model.py").write_text(
        f"import time\nfile = open({str(tmp_path / 'seen')!r}, 'a', buffering=1)\n"
        "file.write('begin\\n')\ntime.sleep(0.2)\nfile.write('end\\n')\nclass TritonPythonModel: pass\n"
        "# A file that does not name auto_complete_config is not run."
    )
    models = [Model("m", 1, tmp_path, parse_text('name: "m" backend: "python"')) for _ in range(3)]
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda model: complete(model, tmp_path / "model.py"), models))
    assert (tmp_path / "seen").read_text().split() == ["begin", "end"] * 3


def test_a_completion_that_hangs_does_not_delay_others(completes: Completes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completion, "_STARTS", threading.Semaphore(0))
    assert completes("return config", "max_batch_size: 2", timeout_s=1).max_batch_size == 2


def test_processes_of_the_code_are_ended(completes: Completes, tmp_path: Path, wait_until: Callable[..., None]) -> None:
    body = f"""
    threading.Thread(target=time.sleep, args=(100,)).start()
    if (pid := os.fork()) == 0:
        time.sleep(100)
    open({str(tmp_path / "pid")!r}, "w").write(str(pid))
    return config
    """
    completes(body)
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: _is_gone(pid), f"{pid} has ended")


def test_printed_text_is_no_part_of_the_answer(completes: Completes, capfd: pytest.CaptureFixture[str]) -> None:
    config = completes("print('{\"completed\": 1}')\npb_utils.Logger.log_info('logged')\n" + ALL)
    assert config.max_batch_size == 8
    out, err = capfd.readouterr()
    assert out == ""
    assert '{"completed": 1}' in err
    assert "logged" in err


def test_a_name_never_reaches_a_shell(tmp_path: Path) -> None:
    name = f"-m;touch {tmp_path.name};`touch x`$(touch y)\n"
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "model.py").write_text(
        f"{HEAD}\nclass TritonPythonModel:\n    auto_complete_config = lambda config: config"
    )
    complete(Model(name, 1, folder, ModelConfig(name=name, backend="python")), folder / "model.py")
    assert not [name for name in (tmp_path.name, "x", "y") if Path(name).exists()]
    assert set(tmp_path.iterdir()) == {folder}


def _is_gone(pid: int) -> bool:
    """Return True if the process has ended. A zombie counts as ended."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_the_limit_of_the_model_is_that_of_its_import(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "model.py").write_text("import time\ntime.sleep(100)\n")
    limit = 'parameters { key: "load_timeout_seconds" value { string_value: "1" } }'
    model = Model("m", 1, tmp_path / "1", parse_text(f'name: "m" backend: "python" {limit}'))
    with pytest.raises(LoadError, match="file of model 'm' was not imported within 1 s"):
        PythonBackend({}).complete_config(model)
