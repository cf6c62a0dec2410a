"""Models with their own environments, and python-based backends, with the stock client."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tritonclient.http as http
from tritonclient.utils import InferenceServerException

Serve = Callable[..., Any]

#: Completes its own config; answers with a word of its environment and its interpreter's prefix.
WORD = """
import sys
import numpy as np
import triton_python_backend_utils as pb_utils
from colour import NAME

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.set_max_batch_size(0)
        config.add_input({"name": "IN", "data_type": "TYPE_FP32", "dims": [1]})
        config.add_output({"name": "OUT", "data_type": "TYPE_STRING", "dims": [2]})
        return config
    def execute(self, requests):
        out = pb_utils.Tensor("OUT", np.array([NAME, sys.prefix], np.object_))
        return [pb_utils.InferenceResponse([out]) for _ in requests]
"""
#: Multiplies by the factor that each model's version has in a file.
FACTOR = """
import json
from pathlib import Path
import triton_python_backend_utils as pb_utils
from rules import read

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        for kind, name in (("input", "IN"), ("output", "OUT")):
            getattr(config, f"add_{kind}")({"name": name, "data_type": "TYPE_FP32", "dims": [-1]})
        config.set_max_batch_size(4)
        config.set_dynamic_batching()
        return config
    def initialize(self, args):
        self.factor = read(Path(args["model_repository"]) / args["model_version"] / "model.json")
    def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(request, "IN").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", value * self.factor)]) for value in inputs]
"""
RULES = "import json\ndef read(path):\n    return json.loads(path.read_text())['factor']\n"


def write(folder: Path, code: str, config: str, name: str = "model.py") -> None:
    (folder / "1").mkdir(parents=True)
    (folder / "1" / name).write_text(code)
    (folder / "config.pbtxt").write_text(config)


def parameter(value: str) -> str:
    return f'parameters {{ key: "EXECUTION_ENV_PATH" value {{ string_value: "{value}" }} }}'


def ask(port: int, model: str, *values: float, batched: bool = False) -> Any:
    array = np.array([values] if batched else values, np.float32)
    tensor = http.InferInput("IN", list(array.shape), "FP32").set_data_from_numpy(array)
    with http.InferenceServerClient(f"127.0.0.1:{port}") as client:
        return client.infer(model, [tensor]).as_numpy("OUT")


def test_each_model_runs_in_its_environment(
    tmp_path: Path, cache: Path, serve: Serve, virtual_environment: Path, packed_environment: Path
) -> None:
    write(tmp_path / "models/there", WORD, f'backend: "python" {parameter(str(virtual_environment))}')
    shutil.copy(packed_environment, tmp_path / "models/there/env.tar.gz")
    config = f'backend: "python" {parameter("$$TRITON_MODEL_DIRECTORY/env.tar.gz")}'
    write(tmp_path / "models/packed", WORD, config)
    shutil.copy(packed_environment, tmp_path / "models/packed/env.tar.gz")
    # A default for all models; one with an environment has a process anyway.
    server = serve(f"--model-repository={tmp_path}/models", "--backend-config=python,isolation=thread")
    assert ask(server.http, "there", 1).tolist() == [b"blue", str(virtual_environment).encode()]
    word, prefix = ask(server.http, "packed", 1).tolist()
    assert word == b"blue"
    assert Path(prefix.decode()).is_relative_to(cache)


@pytest.fixture
def index(tmp_path: Path) -> None:
    """A package index for pip."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--retries=0", "--timeout=5", "-d"]
    if subprocess.run([*command, tmp_path / "download", "colorama"], capture_output=True, check=False).returncode:
        pytest.skip("pip reaches no package index")


@pytest.mark.usefixtures("index")
def test_requirements_beside_the_config_are_installed(tmp_path: Path, cache: Path, serve: Serve) -> None:
    code = WORD.replace("from colour import NAME", "from colorama import __name__ as NAME")
    write(tmp_path / "models/m", code, f'backend: "python" {parameter("$$TRITON_MODEL_DIRECTORY/requirements.txt")}')
    (tmp_path / "models/m/requirements.txt").write_text("colorama\n")
    server = serve(f"--model-repository={tmp_path}/models")
    word, prefix = ask(server.http, "m", 1).tolist()
    assert word == b"colorama"
    assert Path(prefix.decode()).is_relative_to(cache)
    assert "this is done once" in server.log


def test_an_environment_in_a_thread_is_refused(tmp_path: Path, run_headrace: Serve, virtual_environment: Path) -> None:
    thread = 'parameters { key: "isolation" value { string_value: "thread" } }'
    write(tmp_path / "m", WORD, f'backend: "python" {thread} {parameter(str(virtual_environment))}')
    server = run_headrace(f"--model-repository={tmp_path}")
    server.wait_for_line(r"model 'm' has EXECUTION_ENV_PATH, which needs a process: isolation is 'thread'")
    assert server.finish() == 1


def test_the_error_for_a_missing_environment_is_tritons(tmp_path: Path, run_headrace: Serve) -> None:
    write(tmp_path / "m", WORD, f'backend: "python" {parameter("/no/such/environment")}')
    server = run_headrace(f"--model-repository={tmp_path}")
    server.wait_for_line(r"Failed to get the canonical path for /no/such/environment\.")
    assert server.finish() == 1


def is_gone(pid: int) -> bool:
    """Return True if the process has ended. A zombie counts as ended."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def check(*words: str) -> list[dict[str, Any]]:
    command = [str(Path(sys.executable).with_name("headrace")), "check", "--json", *words]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    found: list[dict[str, Any]] = json.loads(answer.stdout)
    return found


@pytest.fixture
def based(tmp_path: Path) -> Path:
    """A directory of backends with ``factor``, and its models, which have only data."""
    (tmp_path / "backends/factor").mkdir(parents=True)
    (tmp_path / "backends/factor/model.py").write_text(FACTOR)
    (tmp_path / "backends/factor/rules.py").write_text(RULES)
    for name, factor in (("double", 2), ("triple", 3)):
        write(tmp_path / "models" / name, json.dumps({"factor": factor}), 'backend: "factor"', "model.json")
    return tmp_path


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_python_based_backend_serves_every_model_of_its_name(based: Path, serve: Serve, isolation: str) -> None:
    server = serve(
        f"--model-repository={based}/models",
        f"--backend-directory={based}/backends",
        f"--backend-config=python,isolation={isolation}",
    )
    assert ask(server.http, "double", 1, 2, batched=True).tolist() == [[2, 4]]
    assert ask(server.http, "triple", 1, 2, batched=True).tolist() == [[3, 6]]
    assert re.search(rf"\| factor +\| {re.escape(str(based))}/backends/factor +\| ", server.log)


def test_a_backend_has_an_environment(based: Path, cache: Path, serve: Serve, packed_environment: Path) -> None:
    (based / "backends/factor/model.py").write_text(WORD)
    shutil.copy(packed_environment, based / "backends/factor/pb_exec_env_model.py.tar.gz")
    shutil.rmtree(based / "models/triple")
    server = serve(f"--model-repository={based}/models", f"--backend-directory={based}/backends")
    word, prefix = ask(server.http, "double", 1).tolist()
    assert word == b"blue"
    assert Path(prefix.decode()).is_relative_to(cache)


def test_another_file_of_the_backend_is_chosen_by_the_runtime(based: Path, serve: Serve) -> None:
    (based / "backends/factor/model.py").rename(based / "backends/factor/other.py")
    for name in ("double", "triple"):
        (based / "models" / name / "config.pbtxt").write_text('backend: "factor" runtime: "other.py"')
    server = serve(f"--model-repository={based}/models", f"--backend-directory={based}/backends")
    assert ask(server.http, "triple", 5, batched=True).tolist() == [[15]]


def test_check_completes_the_config_as_a_server_does(based: Path) -> None:
    found = check(str(based / "models"), f"--backend-directory={based}/backends")
    assert [each["problems"] for each in found] == [[], []]
    completed = {each["field"]: each["value"] for each in found[0]["completed"]}
    assert str(completed["max_batch_size"]) == "4"


def test_check_prints_the_error_of_auto_complete_config(tmp_path: Path) -> None:
    body = "class TritonPythonModel:\n    def auto_complete_config(config): raise KeyError('lost')"
    write(tmp_path / "m", body, 'backend: "python"')
    (report,) = check(str(tmp_path))
    assert "KeyError: 'lost'" in report["problems"][0]["message"]


def test_completion_ends_with_the_server(tmp_path: Path, run_headrace: Serve, wait_until: Callable[..., None]) -> None:
    pid = tmp_path / "pid"
    body = (
        "import os, time\nclass TritonPythonModel:\n    def auto_complete_config(config):\n"
        f"        open({str(pid)!r}, 'w').write(str(os.getpid()))\n        time.sleep(1000)"
    )
    write(tmp_path / "models/m", body, 'backend: "python"')
    server = run_headrace(f"--model-repository={tmp_path}/models")
    wait_until(lambda: pid.exists() and pid.read_text() != "", "the model completes its config")
    server.process.kill()
    wait_until(lambda: is_gone(int(pid.read_text())), "its process has ended")


@pytest.mark.parametrize("name", ["nothing", "empty", "../backends/factor"])
def test_a_backend_without_a_directory_of_python_is_unknown(based: Path, name: str) -> None:
    (based / "backends/empty").mkdir()
    (based / "models/double/config.pbtxt").write_text(f'backend: "{name}"')
    found = check(str(based / "models"), f"--backend-directory={based}/backends")
    assert found[0]["problems"]
    assert not found[1]["problems"]


@pytest.mark.parametrize("runtime", ["../../secret.py", "nothing.py", "rules.txt"])
def test_a_runtime_that_is_no_file_of_the_backend_is_refused(based: Path, runtime: str) -> None:
    for name in ("secret.py", "backends/factor/rules.txt"):
        (based / name).write_text(FACTOR)
    (based / "models/double/config.pbtxt").write_text(f'backend: "factor" runtime: "{runtime}"')
    problems = check(str(based / "models"), f"--backend-directory={based}/backends")[0]["problems"]
    assert any("Python model file not found in" in problem["message"] for problem in problems)


def test_a_sent_config_may_not_name_other_environments(
    tmp_path: Path, virtual_environment: Path, run_headrace: Serve
) -> None:
    """A config in the repository may name the same path."""
    root = tmp_path / "models"
    secret = tmp_path / "secret.txt"
    secret.write_text("hunter2 !\n")
    write(root / "blue", WORD, f'backend: "python" {parameter(str(virtual_environment))}')
    server = run_headrace(f"--model-repository={root}", "--model-control-mode=explicit").wait_until_ready()
    with http.InferenceServerClient(f"127.0.0.1:{server.http}") as client:
        client.load_model("blue")
        for path in (str(secret), f"{virtual_environment}/.", "$$TRITON_MODEL_DIRECTORY/../../secret.txt"):
            sent = {"backend": "python", "parameters": {"EXECUTION_ENV_PATH": {"string_value": path}}}
            with pytest.raises(InferenceServerException) as refused:
                client.load_model("blue", config=json.dumps(sent))
            assert "must lie in the model's directory" in refused.value.message()
            assert "hunter2" not in refused.value.message()
        assert client.is_model_ready("blue")
    server.stop()
