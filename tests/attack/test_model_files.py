"""Files of models that an attacker, a bad disk or a careless tool has changed: whatever they hold, the server goes on.

``mutations.py`` makes of each number a change to the files of a small net in each format (``seeds.py``), and a process
(``loader.py``) loads them one after the other. A plain run tries few of each; ``nox -s attack`` tries
``--mutants`` of each, from ``--first-mutant`` on, and prints what became of them.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import tritonclient.http
from tritonclient.utils import InferenceServerException

from tests.attack.conftest import MUTANTS
from tests.attack.model_files import seeds
from tests.attack.model_files.mutations import mutate
from tests.attack.model_files.victim import ROOT, Outcome, Victim

if TYPE_CHECKING:
    from tests.conftest import Headrace

#: Of each format in a plain run.
FEW = 8
#: The formats that a plain run also puts into a process. The same code guards all of them.
IN_A_PROCESS = ("onnx", "openvino")
#: The engine of a format that is always in a process: changed files may end it.
ALWAYS_IN_A_PROCESS = "xllamacpp"
#: Beyond what an engine takes to begin with. A mutant that asks for more than there is is refused by the engine.
MOST_GROWN_BYTES = 1 << 30
#: The event loop may be late by that much; a plain run is patient, since the machine is busy with other tests.
LATE_MS, PATIENCE_MS = 1000.0, 5000.0
#: Formats whose readers do not come to an end on some files, in the engine, which backends/openvino/README.md tells of.
ENDLESS = {"openvino_onnx", "openvino_graphdef"}
#: Files that are programs, or are not read.
LEFT_ALONE = ("model.py", "fingerprint.pb")


@dataclass
class Seed:
    """A model in one format: its config, and the files of its version."""

    name: str
    engine: str
    config: str
    files: dict[str, bytes]
    kept: dict[str, bytes] = field(default_factory=dict)


@pytest.fixture(scope="module", params=list(seeds.ENGINES))
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Seed]:
    """The formats of one engine."""
    engine: str = request.param
    if find_spec(engine) is None:
        pytest.skip(f"{engine} is not installed")
    root = tmp_path_factory.mktemp("seeds")
    done = subprocess.run(
        [sys.executable, "-m", "tests.attack.model_files.seeds", engine, str(root)],
        cwd=ROOT, capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [read_seed(model, engine) for model in sorted(root.iterdir())]


def read_seed(model: Path, engine: str) -> Seed:
    version = model / "1"
    found = {str(path.relative_to(version)): path.read_bytes() for path in version.rglob("*") if path.is_file()}
    kept = {name: found.pop(name) for name in tuple(found) if name.endswith(LEFT_ALONE)}
    return Seed(model.name, engine, (model / "config.pbtxt").read_text(), found, kept)


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Victim]:
    victim = Victim(tmp_path)
    yield victim
    victim.close()


def numbers(config: pytest.Config) -> range:
    first: int = config.getoption("--first-mutant", 0)
    return range(first, first + (config.getoption("--mutants", None) or FEW))


# What is tried is bounded by the number of mutants, of which none takes longer than `HANGS_S`.
@pytest.mark.timeout(0)
def test_mutants_end_nothing_and_touch_nothing(models: list[Seed], victim: Victim, pytestconfig: pytest.Config) -> None:
    if models[0].engine == ALWAYS_IN_A_PROCESS:
        pytest.skip("the process of a model is one of the deeds that are looked for")
    is_patient = pytestconfig.getoption("--mutants", None) is None
    wrong, counts = [], pytestconfig.stash.setdefault(MUTANTS, {})
    for seed in models:
        begun = victim.load(seed.config, {**seed.files, **seed.kept})
        assert begun.outcome == "answered", begun  # what the engine's own import does is not looked at
        found: Counter[str] = counts.setdefault(seed.name, Counter())
        for number in numbers(pytestconfig):
            mutation = mutate(seed.files, number, victim.words)
            outcome = victim.load(seed.config, {**mutation.files, **seed.kept})
            found[outcome.outcome] += 1
            if reason := why_wrong(seed.name, outcome, PATIENCE_MS if is_patient else LATE_MS):
                wrong.append(f"{seed.name} {mutation.told}: {reason}: {outcome}")
    assert not wrong, "\n".join(wrong)


def why_wrong(name: str, outcome: Outcome, most_late_ms: float) -> str:
    if outcome.outcome in ("crashed", "hung") and not (outcome.outcome == "hung" and name in ENDLESS):
        return outcome.outcome
    if outcome.did:
        return "it did what no model may"
    if outcome.late_ms > most_late_ms:
        return "the event loop was late"
    return "it took much memory" if outcome.grown_bytes > MOST_GROWN_BYTES else ""


def test_the_frame_sees_what_a_mutant_does(victim: Victim) -> None:
    """By a model that does it all: what it runs, what it reads, what it leaves, how it ends, and who waits for it."""
    config = f'backend: "python" {seeds.TENSORS} parameters {{ key: "isolation" value {{ string_value: "thread" }} }}'
    code = """
import os, time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        {deed}

    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", np.ones(3, np.float32))]) for each in requests]
"""

    def outcome(deed: str) -> Outcome:
        return victim.load(config, {"model.py": code.format(deed=deed).encode()})

    assert outcome("pass").outcome == "answered"
    assert outcome("raise ValueError('as it is')").outcome == "refused"
    assert any("os.system" in deed for deed in outcome("os.system('true')").did)
    assert outcome(f"open({str(victim.canary / 'secret')!r}).close()").did[-1] == "read secret"
    assert outcome("open('left', 'w').close()").did[-1] == "wrote work/left"
    assert outcome("(b'x' * (300 << 20)).count(b'y')").grown_bytes > 250 << 20
    # One call that holds the interpreter's lock.
    assert outcome("max(range(20_000_000))").late_ms > 100
    assert "SIGABRT" in outcome("os.abort()").said
    assert outcome("pass").outcome == "answered"


def test_the_same_number_makes_the_same_mutant() -> None:
    files: Mapping[str, bytes] = {"a.onnx": bytes(range(256)), "b.xml": b"<a b='1'/>" * 9}
    made = [mutate(files, number, [b"word"]) for number in range(200)]
    assert made == [mutate(files, number, [b"word"]) for number in range(200)]
    assert sum(each.files == files for each in made) < 20


def test_mutants_in_processes_disturb_nobody(
    models: list[Seed],
    serve_models: Callable[[Path], Headrace],
    tmp_path: Path,
    under_attack: Callable[..., AbstractContextManager[None]],
    pytestconfig: pytest.Config,
) -> None:
    """Loaded by the stock client, with `isolation: process`: the server opens none of these files."""
    seed, repository = models[0], tmp_path / "repository"
    is_only_here = seed.engine == ALWAYS_IN_A_PROCESS
    if not is_only_here and not seed.name.startswith(IN_A_PROCESS) and not pytestconfig.getoption("--mutants", None):
        pytest.skip(f"a plain run puts {' and '.join(IN_A_PROCESS)} into a process")
    limits = {"isolation": "process", "memory_limit_bytes": str(8 << 30)}
    config = seed.config + "".join(
        f' parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, value in limits.items()
    )
    most = (100 if is_only_here else 10) if pytestconfig.getoption("--mutants", None) else FEW if is_only_here else 1
    tried = list(numbers(pytestconfig))[:most]
    for number in tried:
        version = repository / f"m{number}" / "1"
        mutation = mutate(seed.files, number, [b"/etc/passwd"])
        for name, content in {**mutation.files, **seed.kept}.items():
            (version / name).parent.mkdir(parents=True, exist_ok=True)
            (version / name).write_bytes(content)
        (version.parent / "config.pbtxt").write_text(config)
    server = serve_models(repository)
    with (
        under_attack(server, kept_bytes=64 << 20),
        tritonclient.http.InferenceServerClient(f"127.0.0.1:{server.http}", network_timeout=100.0) as client,
    ):
        for number in tried:
            with contextlib.suppress(InferenceServerException):  # which of them load is the other test's matter
                client.load_model(f"m{number}")
                client.unload_model(f"m{number}")
