"""No name reaches a shell, and no received byte reaches a loader that can run code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for each in ("core", "testing", "backends/*") for path in ROOT.glob(f"{each}/src/**/*.py"))

MODULES = {"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"}
CALLS = {
    "compile",
    "eval",
    "exec",
    "os.popen",
    "os.system",
    "subprocess.getoutput",
    "subprocess.getstatusoutput",
    "asyncio.create_subprocess_shell",
    "yaml.full_load",
    "yaml.load",
    "yaml.unsafe_load",
}
#: A keyword that makes any call dangerous, and the only value it may have.
KEYWORDS = {"shell": False, "allow_pickle": False, "weights_only": True}
#: A call that is safe only with this keyword written out.
NEEDED = {"torch.load": "weights_only"}
#: The only function of the tree in which a pickle may run, by its file; and what must be true where it is called.
UNPICKLER = "_run_pickle"
UNPICKLES = ROOT / "backends/torch/src/headrace_torch/weights.py"
TRUSTED = "is_trusted(model)"


def banned(source: str, unpickler: str = "") -> list[str]:
    """Return the banned calls of ``source``, each with its line.

    The function ``unpickler`` may load any pickle. It may be named only where it is called, in the body of an ``if``
    whose condition is trust alone."""
    tree = ast.parse(source)
    free: set[ast.AST] = set()
    if unpickler:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name == unpickler:
                free.update(ast.walk(node))
            elif isinstance(node, ast.If) and ast.unparse(node.test) == TRUSTED:
                free.update(name for each in node.body for name in ast.walk(each) if isinstance(name, ast.Name))
    return [f"line {line}: {what}" for line, what in _findings(tree, unpickler, free)]


def _findings(tree: ast.AST, unpickler: str, free: set[ast.AST]) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if node in free:
            continue
        if isinstance(node, ast.Name) and node.id == unpickler:
            yield node.lineno, f"{unpickler} without {TRUSTED}"
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from ((node.lineno, name) for name in names if name in CALLS or name.split(".")[0] in MODULES)
        elif isinstance(node, ast.Call):
            yield from _call_findings(node)


def _call_findings(call: ast.Call) -> Iterator[tuple[int, str]]:
    name = ast.unparse(call.func)
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    if name in CALLS or NEEDED.get(name) not in {None, *keywords}:
        yield call.lineno, name
    for keyword, only in KEYWORDS.items():
        value = keywords.get(keyword)
        if value is not None and not (isinstance(value, ast.Constant) and value.value is only):
            yield call.lineno, f"{name}({keyword}={ast.unparse(value)})"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_module_calls_no_shell_and_no_unsafe_loader(path: Path) -> None:
    assert banned(path.read_text(), UNPICKLER if path == UNPICKLES else "") == []


def test_a_pickle_runs_only_for_a_model_that_is_trusted() -> None:
    loads = "def _run_pickle(torch, path):\n    return torch.load(path, weights_only=False)\n"
    sound = "def read(torch, path, model):\n    if is_trusted(model):\n        return _run_pickle(torch, path)\n"
    assert banned(loads + sound, UNPICKLER) == []
    assert len(banned(loads + sound)) == 1  # in any other file
    for broken in (
        sound.replace("is_trusted(model)", "True"),
        sound.replace("is_trusted(model)", "is_trusted(model) or True"),
        sound.replace("return _run_pickle(torch, path)", "pass") + "    else:\n        _run_pickle(torch, path)\n",
        sound.replace("_run_pickle(torch, path)", "torch.load(path, weights_only=False)"),
        "run = _run_pickle\n",
    ):
        assert len(banned(loads + broken, UNPICKLER)) == 1, broken


@pytest.mark.parametrize(
    "source",
    [
        "os.system('ls')",
        "from os import system",
        "subprocess.run(command, shell=True)",
        "subprocess.Popen(command, shell=flag)",
        "import pickle",
        "from marshal import loads",
        "np.load(path, allow_pickle=True)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "yaml.load(text)",
        "eval(text)",
        "asyncio.create_subprocess_shell(command)",
    ],
)
def test_a_banned_call_is_found(source: str) -> None:
    assert len(banned(source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "subprocess.run(['ls'])",
        "re.compile(text)",
        "torch.load(path, weights_only=True)",
        "model.eval()",
        "yaml.safe_load(text)",
    ],
)
def test_a_safe_call_is_let_through(source: str) -> None:
    assert banned(source) == []


#: Files of tests that may call ``time.sleep``, with the reason. What a model's source text does, as a model, is not a
#: call of the test.
SLEEPERS = {
    "tests/core/headrace_processes/trial_backend.py": "models in processes that hang, and that wait for files",
    "tests/core/headrace_processes/test_at_once.py": "a model that holds the loop until an alarm has gone off",
    "tests/core/headrace_processes/test_batch_channel.py": "how often a process has looked, or has not, after a time",
    "tests/core/headrace_processes/ipc/test_busy_poll.py": "a peer that sends while the process looks, and in pieces",
    "tests/frontends/hypercorn/test_web_sockets.py": "clients that are slow or quiet, against limits in seconds",
    "tests/testing/test_cache_saboteurs.py": "gives another thread its turn between two statements of a broken cache",
    "tests/testing/test_interceptor_saboteurs.py": "an interceptor that keeps the event loop, which the check finds",
}


def sleeps(source: str) -> list[int]:
    """Return the lines on which ``source`` sleeps for a time that it has chosen."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            names = [ast.unparse(node.func)]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        if "time.sleep" in names:
            found.append(node.lineno)
    return found


def test_no_test_sleeps_for_a_time_that_it_has_chosen() -> None:
    """It would be too long on a quiet machine and too short on a busy one: `wait_until` waits for a condition."""
    paths = [path for folder in ("tests", "testing/src") for path in (ROOT / folder).rglob("*.py")]
    found = {str(path.relative_to(ROOT)) for path in paths if sleeps(path.read_text(encoding="utf-8"))}
    assert found == set(SLEEPERS)


@pytest.mark.parametrize("source", ["import time\ntime.sleep(1)", "from time import monotonic, sleep"])
def test_a_sleep_is_found(source: str) -> None:
    assert sleeps(source)


@pytest.mark.parametrize("source", ["await asyncio.sleep(0)", "MODEL = 'time.sleep(1)'", "from time import monotonic"])
def test_what_is_no_sleep_is_let_through(source: str) -> None:
    assert not sleeps(source)
