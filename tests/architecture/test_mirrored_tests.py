"""Every module of core with logic has a test module of its own, or one that this table names.

The module ``headrace/models/loader.py`` is tested by ``tests/core/models/test_loader.py``, or by several modules
``test_loader_<subject>.py``. ``headrace_http/routes.py`` is tested by ``tests/core/headrace_http/test_routes.py``.
Modules whose functions have fewer than 10 statements are declarations.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

import headrace

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "core/src"
PACKAGES = (
    *("headrace", "headrace_http", "headrace_grpc", "headrace_processes", "headrace_cli"),
    *("headrace_engines", "headrace_harnesses", "headrace_hosts", "headrace_loading", "headrace_locations"),
)
LOGIC = 10

#: Modules that are tested together, because one is not used without the others, by the test module that does so.
TOGETHER = {
    # Every rule of a config is one case of one table.
    "config/test_validation.py": "headrace.config.validation.",
    # A peer that speaks HTTP/2 frame by frame: the halves of a connection are only seen together.
    "headrace_grpc/http2/test_conformance.py": """headrace_grpc.http2.control_frames
        headrace_grpc.http2.receiving headrace_grpc.http2.stream headrace_grpc.http2.connections""",
    "headrace_grpc/http2/test_flow_control.py": "headrace_grpc.http2.sending",
    "headrace_grpc/http2/test_abuse.py": "headrace_grpc.http2.lifetime",
    # The calls of stock clients and of raw peers to one gRPC port.
    "headrace_grpc/test_native_calls.py": """headrace_grpc.single_calls headrace_grpc.stream_calls headrace_grpc.calls
        headrace_grpc.call_headers""",
    "headrace_grpc/test_infer.py": "headrace_grpc.stream_infer",
    "headrace_grpc/test_decode.py": "headrace_grpc.infer_parameters",
    "headrace_grpc/test_rpc_table.py": """headrace_grpc.control_plane headrace_grpc.own_methods
        headrace_grpc.absent_methods""",
    "models/test_admission.py": """headrace_grpc.admitted_calls headrace_http.admitted_requests
        headrace.models.interceptors headrace.models.submission headrace.messages.caller""",
    "test_harnesses.py": "headrace_harnesses",
    "models/test_control_mode.py": "headrace_loading.load_control",
    "frontends/test_extension.py": "headrace_grpc.plugin_methods headrace_http.absent_routes",
    "headrace_locations/test_tensor_locations.py": "headrace_grpc.located_messages headrace_http.located_tensors",
    # Bytes in, bytes out: the parser, the order of answers and the limits of one connection.
    "headrace_http/test_protocol.py": """headrace_http.request_reader headrace_http.message
        headrace_http.caller_limits""",
    "headrace_http/test_plugin_routes.py": "headrace_http.exchanges",
    "headrace_http/test_inference.py": "headrace_http.request_body headrace_http.inputs headrace_hosts.answering",
    "headrace_http/test_infer_request.py": "headrace_http.request_layouts",
    "headrace_http/test_large_documents.py": "headrace_http.structure",
    "headrace_http/test_routes.py": "headrace_http.route_handlers",
    "headrace_http/test_http_port.py": "headrace_http.http_host",
    # Real processes: the parts of a child and of its supervision run in other processes.
    "headrace_processes/test_process_executor.py": """headrace_processes.child
        headrace_processes.launch headrace_processes.process_kind
        headrace_processes.supervision.child_process headrace_processes.supervision.orphan_reaper""",
    "headrace_processes/test_remote_services.py": "headrace_processes.handshake",
    "headrace_processes/ipc/test_codec.py": """headrace_processes.ipc.tensors
        headrace_processes.ipc.json_parts headrace_processes.ipc.framing""",
    "headrace_processes/ipc/test_device_memory.py": "headrace_processes.ipc.reclaimer",
    "headrace_processes/supervision/test_process_set.py": "headrace_processes.supervision.supervised_process",
    "headrace_cli/test_flags.py": "headrace_cli.flag_values headrace.config.support",
    "headrace_cli/test_command_line.py": "headrace.config.option_groups",
    "headrace_cli/test_serve.py": "headrace_cli headrace_cli.startup headrace.command",
    # The interfaces of parts, and what is composed of them.
    "test_plugins.py": "headrace.builtins",
    "test_services.py": "headrace.backends.services",
    "test_server.py": "headrace.models.opened_model headrace.models.executor_factory",
    "executors/test_runner.py": "headrace.backends.base headrace.messages.request",
    "models/test_executor_kinds.py": "headrace.executors.thread_kind",
    "models/test_lifecycle.py": "headrace.models.dependencies headrace.models.served",
    "schedulers/test_model_queue.py": "headrace.schedulers.base",
    "schedulers/test_caching_queue.py": """headrace.caches.model_cache headrace.caches.kept_responses
        headrace.models.cache_identity""",
    "schedulers/test_dynamic_reasons.py": "headrace.telemetry.batch_history",
    "schedulers/test_response_tracker.py": "headrace.telemetry.response_statistics",
    "storage/test_local_storage.py": "headrace.storage.local_directory",
    "telemetry/test_custom.py": "headrace.telemetry.series",
    "telemetry/test_executions.py": "headrace.telemetry.statistics",
}
#: The import is not seen: modules whose users are plugins with tests of their own, and modules that run in processes
#: which these tests start.
ELSEWHERE = {
    "tests/schedulers/ensemble/test_served.py": "headrace_cli.inspection.model_dependencies",
    "tests/schedulers/sequence/test_iterative.py": "headrace.schedulers.rescheduling_queue",
    "tests/commands/inspect/test_check.py": "headrace_cli.inspection.inspector",
    "tests/commands/inspect/test_security.py": "headrace_cli.security.review",
    "tests/backends/onnx/test_graph_config_completion.py": "headrace_engines.graph_config",
    "tests/commands/inspect/test_explain.py": "headrace_cli.server_command",
    "tests/frontends/hypercorn/test_frontend.py": "headrace_http.strict_requests",
    "tests/protocol/test_http.py": "headrace_http.request_log",
    "tests/architecture/test_backends_page.py": "headrace_cli.backend_table",
    "tests/core/headrace_processes/test_process_executor.py": "headrace_processes.child_main",
    "tests/backends/python/test_device_tensors_of_models.py": """headrace_processes.device_child
        headrace_processes.device_process""",
    "tests/core/headrace_processes/supervision/test_process_set.py": "headrace_processes.supervision.parent_channel",
    "tests/e2e/test_workers.py": """headrace_cli.server_processes.supervisor
        headrace_cli.server_processes.server_process headrace_cli.server_processes.server_program
        headrace_processes.ipc.json_calls""",
}
NAMED = {
    module: path
    for table, folder in ((TOGETHER, "tests/core/"), (ELSEWHERE, ""))
    for test, modules in table.items()
    for module, path in dict.fromkeys(modules.split(), folder + test).items()
}
APART = {row for modules in ELSEWHERE.values() for row in modules.split()}


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def logic(path: Path) -> int:
    """Return the number of statements in the functions of the module at ``path``."""
    functions = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    documented = sum(ast.get_docstring(function) is not None for function in functions)
    nested = {id(inner) for node in functions for inner in ast.walk(node) if inner is not node}
    outer = [function for function in functions if id(function) not in nested]
    return sum(isinstance(node, ast.stmt) for each in outer for node in ast.walk(each)) - len(outer) - documented


MODULES = {
    module_of(path): path
    for package in PACKAGES
    for path in sorted((SOURCE / package).rglob("*.py"))
    if not path.stem.endswith("_pb2")
}


def mirrors(module: str) -> list[Path]:
    """Return the test modules with the name of ``module``."""
    package, *folders, name = module.split(".") if "." in module else (module, module)
    folder = ROOT / "tests/core" / ("" if package == "headrace" else package) / "/".join(folders)
    return sorted(folder.glob(f"test_{name}.py")) + sorted(folder.glob(f"test_{name}_*.py"))


def rows(module: str) -> list[str]:
    """Return the rows of the tables that name ``module``, or its package with a dot behind it."""
    return [row for row in NAMED if row == module or (row.endswith(".") and module.startswith(row))]


@pytest.mark.parametrize("module", [name for name, path in MODULES.items() if logic(path) >= LOGIC])
def test_a_module_with_logic_has_a_test_module(module: str) -> None:
    assert mirrors(module) or rows(module), "it has neither a mirrored test module nor a row in the tables above"


@pytest.mark.parametrize("row", NAMED)
def test_a_row_is_needed_and_its_test_module_reaches_the_module(row: str) -> None:
    modules = [name for name in MODULES if name == row or (row.endswith(".") and name.startswith(row))]
    assert modules, "no such module"
    assert not [name for name in modules if mirrors(name)], "it has a mirrored test module now: remove the row"
    assert [name for name in modules if logic(MODULES[name]) >= LOGIC], "it has too little logic to need a row"
    test = ROOT / NAMED[row]
    assert test.exists(), f"there is no {NAMED[row]}"
    if row not in APART:
        assert not set(modules) - reachable(test), f"{NAMED[row]} does not even import it"


@cache
def imported(path: Path) -> frozenset[str]:
    """Return the modules of core and of the tests that the module at ``path`` imports, in functions, too."""
    found = set[str]()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
            if node.module == "headrace":
                found |= {headrace._HOME.get(each.name, "") for each in node.names}
    return frozenset(found)


def reachable(test: Path) -> set[str]:
    """Return the modules of core that ``test`` imports, also by its fixtures, and those that these import.

    A server finds the plugins of its distribution by their entry points, which counts as an import.
    """
    fixtures = [folder / "conftest.py" for folder in test.parents if ROOT in folder.parents]
    waiting, seen = [test, *(path for path in fixtures if path.exists())], set[Path]()
    found = set[str]()
    while waiting:
        if (path := waiting.pop()) in seen:
            continue
        seen.add(path)
        names = set(imported(path))
        if "headrace.plugins" in names or "headrace.server" in names:
            names |= {"headrace_http", "headrace_http.frontend", "headrace_grpc", "headrace_grpc.frontend"}
            names |= {"headrace_processes.plugin", "headrace_cli.commands"}
        for name in names:
            if name in MODULES:
                found.add(name)
                waiting.append(MODULES[name])
            elif name.startswith("tests.") and (helper := ROOT / (name.replace(".", "/") + ".py")).exists():
                waiting.append(helper)
    return found
