"""Compares servers under the same load, in turns: two versions of Headrace, or Headrace and a real Triton.

    python benchmarks/compare.py --server before=../old/.venv/bin/headrace --server after=.venv/bin/headrace
    python benchmarks/compare.py --server triton=build/yardsticks/tritonserver --server headrace=.venv/bin/headrace \\
        --only pyident

A server is a name and a program, optionally with flags: `headrace`, or the `tritonserver` of yardsticks.py, which has
the Python models only. Ratios are medians of the last server over those of the first: below 1 is better for latency and
CPU, above 1 for the rate. On each server, a model for sequences alternates with the same model for single requests, and
a cached model with the same model without the cache; the last table has the ratios of these pairs.

Requests of perf_analyzer differ in their values only, since it cannot change more. Requests of loads with ``varied-``
differ in ids and a header, too. Loads with ``constant-``, and JSON, repeat one request. Needs ``wrk``, and
perf_analyzer from yardsticks.py for all but the JSON cases.

    python benchmarks/compare.py --server 'off=.venv/bin/headrace --allow-metrics=false' \\
        --server on=.venv/bin/headrace --only identity16
    python benchmarks/compare.py --server 'triton=build/yardsticks/tritonserver --cache-config=local,size=16777216' \\
        --server 'headrace=.venv/bin/headrace --cache-config=local,size=16777216' --only cached
"""

from __future__ import annotations

import argparse
import contextlib
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import load
import report
import servers
from measure import Case, Run, as_json, compare, median
from models import ENSEMBLES, write_models
from python_build import build_beside
from report import LOAD_COLUMNS, Section, load_row
from servers import BENCHMARKS, Running
from settings import Missing, Settings, need_wrk
from yardsticks import DEFAULT

CONNECTIONS = (1, 4, 16, 64)
_SIXTEEN: Mapping[str, Sequence[int]] = {"INPUT0": (16,)}
#: Name of a load: the model, and the shapes of its inputs.
BINARY: dict[str, tuple[str, Mapping[str, Sequence[int]]]] = {
    "identity16": ("identity", _SIXTEEN),
    "pyident16": ("pyident", _SIXTEEN),
    "three_identities16": ("three_identities", _SIXTEEN),
    "three_pyidents16": ("three_pyidents", _SIXTEEN),
    "two_identities16": ("two_identities", _SIXTEEN),
    "two_pyidents16": ("two_pyidents", _SIXTEEN),
    "tiny_add": ("tiny_add", {"INPUT0": (16,), "INPUT1": (16,)}),
    "mlp": ("mlp", {"INPUT0": (256,)}),
    "pymlp": ("pymlp", {"INPUT0": (256,)}),
    "convnet": ("convnet", {"INPUT0": (3, 224, 224)}),
    "identity1MiB": ("identity", {"INPUT0": (262144,)}),
    "identity16MiB": ("identity", {"INPUT0": (4194304,)}),
}
JSON = {"identity": ("INPUT0",), "pyident": ("INPUT0",), "tiny_add": ("INPUT0", "INPUT1")}
#: Models for sequences, each with the model for single requests to compare with on the same server.
SEQUENCES = {
    "sequences-direct": ("identity_direct", "identity"),
    "sequences-oldest": ("identity_oldest", "identity"),
    "sequences-controls": ("identity_controls", "identity"),
    "sequences-state": ("running_sum", "doubled"),
    "sequences-python": ("pyident_direct", "pyident"),
}
#: Models in the response cache, likewise, with the options of perf_analyzer.
CACHED = {
    "cached16": ("identity_cached", "identity", ("--shape", "INPUT0:16")),
    "cached64KiB": ("identity_cached", "identity", ("--shape", "INPUT0:16384")),
    "cached-python16": ("pyident_cached", "pyident", ("--shape", "INPUT0:16")),
    "cached-python64KiB": ("pyident_cached", "pyident", ("--shape", "INPUT0:16384")),
}
#: Models with a variable shape, which perf_analyzer needs as an option.
OF_ANY_SIZE = {"identity", "pyident", *ENSEMBLES}
PAIRS = {name: pair for name, (*pair, _) in CACHED.items()} | SEQUENCES
MODELS = {model for model, _ in BINARY.values()} | {model for model, _ in PAIRS.values()}
#: The models of the real Triton here, which has only the Python backend.
PYTHON = {"pyident", "pymlp", "three_pyidents", "two_pyidents", "pyident_direct", "pyident_cached"}
#: Models with few connections, since more would take much memory without further insight.
FEW = {"identity1MiB": (1, 4), "identity16MiB": (1, 4)}
#: The suffix of a server's name for the other model of a pair.
PLAIN = ", plain"
RATIOS = ("rps", "p50_us", "p99_us", "server_us")


def cases(settings: Settings) -> dict[str, tuple[str, Case]]:
    """Return the cases by name, such as ``tiny_add/grpc/c16``, each with its model."""
    found = {}
    for name, (model, inputs) in BINARY.items():
        options = [f"{each}:{','.join(map(str, shape))}" for each, shape in inputs.items()]
        shapes = [word for each in options for word in ("--shape", each)] if model in OF_ANY_SIZE else []
        for protocol in ("http", "grpc"):
            for connections in FEW.get(name, CONNECTIONS):
                for kind, varied in (("", inputs), ("constant-", None)):
                    case = _perf_analyzer(
                        f"{name}/{kind}{protocol}/c{connections}",
                        settings, protocol, model, connections, shapes, varied=varied,
                    )  # fmt: skip
                    found[case.name] = (model, case)
    for name, (model, plain, words) in CACHED.items():
        for protocol in ("http", "grpc"):
            for connections in CONNECTIONS:
                case = _perf_analyzer(
                    f"{name}/{protocol}/c{connections}", settings, protocol, model, connections, words, plain
                )
                found[case.name] = (model, case)
    for name, (model, plain) in SEQUENCES.items():
        for connections in CONNECTIONS:
            case = _sequences(f"{name}/http/c{connections}", model, plain, connections)
            found[case.name] = (model, case)
        # perf_analyzer adds ids to requests of sequences only, so its loads would not be comparable.
        lengths = ("--shape", "INPUT0:16", "--sequence-length-variation", "0")
        case = _perf_analyzer(f"{name}/grpc/c64", settings, "grpc", model, 64, lengths, plain)
        found[case.name] = (model, case)
    for model, names in JSON.items():
        body = load.json_body(model, dict.fromkeys(names, 16))
        for connections in CONNECTIONS:
            for case in (
                _wrk(f"{model}/json/c{connections}", body, connections, None),
                _wrk(f"{model}/varied-json/c{connections}", body, connections, load.VARIED),
                _wrk(f"{model}/varied-http/c{connections}", body, connections, load.VARIED, "binary"),
                _varied_grpc(f"{model}/varied-grpc/c{connections}", model, names, connections),
            ):
                found[case.name] = (model, case)
    return found


def _perf_analyzer(
    name: str,
    settings: Settings,
    protocol: str,
    model: str,
    connections: int,
    extra: Sequence[str],
    plain: str = "",
    varied: Mapping[str, Sequence[int]] | None = None,
) -> Case:
    def asked(server: Running) -> str:
        return plain if _is_plain(server) else model

    def put(server: Running, seconds: float) -> load.Seen:
        program = settings.yardstick("perf_analyzer")
        return load.perf_analyzer(program, server, protocol, asked(server), connections, seconds, *extra, varied=varied)

    return Case(name, asked, put)


def _sequences(name: str, model: str, plain: str, connections: int) -> Case:
    """One sequence per connection, or as many single requests, from the same threads."""

    def model_on(server: Running) -> str:
        return plain if _is_plain(server) else model

    def put(server: Running, seconds: float) -> load.Seen:
        need_wrk()
        arguments = () if _is_plain(server) else ("sequences",)
        body = load.Body(model_on(server), b"")
        return load.wrk(server, body, connections, seconds, load.SEQUENCES, connections, arguments)

    return Case(name, model_on, put)


def _is_plain(server: Running) -> bool:
    return server.name.endswith(PLAIN)


def _wrk(name: str, body: load.Body, connections: int, script: Path | None, *arguments: str) -> Case:
    def put(server: Running, seconds: float) -> load.Seen:
        need_wrk()
        return load.wrk(server, body, connections, seconds, script, 1, arguments)

    return Case(name, lambda server: body.model, put)


def _varied_grpc(name: str, model: str, inputs: Sequence[str], connections: int) -> Case:
    def put(server: Running, seconds: float) -> load.Seen:
        return load.grpc(server, model, ",".join(inputs), connections, seconds)

    return Case(name, lambda server: model, put)


def main() -> int:
    options = _parse()
    with tempfile.TemporaryDirectory() as made:
        models = options.models or write_models(Path(made))
        settings = Settings(options.runs, options.seconds, 0, models, options.yardsticks)
        askable = PYTHON if any(path.name == "tritonserver" for _, path, *_ in options.server) else MODELS
        chosen = {
            name: case for name, case in cases(settings).items() if re.search(options.only, name) and case[0] in askable
        }
        if options.list:
            print("\n".join(chosen))
            return 0
        section = Section(f"{' and '.join(name for name, *_ in options.server)} in turns", LOAD_COLUMNS)
        ratios = Section("Ratios, the last to the first", ("case", *RATIOS))
        beside = Section(
            "Sequences beside single requests, and cached beside computed, on the same server",
            ("case", "server", *RATIOS),
        )
        pythons = [build_beside(path) for _, path, _ in options.server]
        with tempfile.TemporaryDirectory() as folder:
            models = {model for model, _ in chosen.values()}
            needed = {each for model in models for each in ENSEMBLES.get(model, ())}
            needed |= {plain for model, plain in PAIRS.values() if model in models}
            repository = settings.repository(Path(folder), *sorted(models | needed))
            with running(options.server, repository) as started:
                for name, (_, case) in chosen.items():
                    is_beside = name.partition("/")[0] in PAIRS
                    both = [replace(each, name=each.name + PLAIN) for each in started] if is_beside else []
                    try:
                        found = compare(case, [*both, *started], options.runs, options.seconds)
                    except Missing as missing:
                        print(f"{name}: skipped, missing {missing}", file=sys.stderr)
                        continue
                    except load.LoadFailed as failed:
                        print(f"{name}: left out, {failed}", file=sys.stderr)
                        continue
                    section.rows += [load_row(name, server, runs) for server, runs in found.items()]
                    section.raw[name] = as_json(found)
                    named = {server.name: found[server.name] for server in started}
                    ratios.rows.append((name, *_ratios(*named.values())))
                    for server, runs in named.items() if is_beside else ():
                        beside.rows.append((name, server, *_ratios(found[server + PLAIN], runs)))
                    report.write([section, ratios, beside], options.out, sys.argv, pythons)
    print(report.markdown([section, ratios, *([beside] if beside.rows else [])], pythons))
    return 0 if section.rows else 1


def _ratios(first: list[Run], *others: list[Run]) -> list[str]:
    last = others[-1] if others else first
    return [f"{median(last, field) / median(first, field):.2f}" for field in RATIOS]


@contextlib.contextmanager
def running(programs: Sequence[tuple[str, Path, list[str]]], repository: Path) -> Iterator[list[Running]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(servers.program(name, path, repository, *flags)) for name, path, flags in programs]


def server(text: str) -> tuple[str, Path, list[str]]:
    name, _, words = text.partition("=")
    path, *flags = shlex.split(words) or [""]
    if not Path(path).is_file():
        raise argparse.ArgumentTypeError(f"'{text}' is not NAME=PROGRAM")
    return name, Path(path).absolute(), flags


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", type=server, action="append", default=[], metavar="NAME=PROGRAM")
    parser.add_argument("--only", default="", metavar="REGEX", help="of the names that --list shows; all unless given")
    parser.add_argument("--list", action="store_true", help="the cases, and no load")
    parser.add_argument("--runs", type=int, default=5, help="per case and server, interleaved")
    parser.add_argument("--seconds", type=float, default=3, help="per run")
    parser.add_argument("--models", type=Path, help="what models.py wrote; made anew unless given")
    parser.add_argument("--yardsticks", type=Path, default=DEFAULT)
    parser.add_argument("--out", type=Path, default=BENCHMARKS.parent / "build" / "compared", help="folder of results")
    options = parser.parse_args()
    if not options.server and not options.list:
        parser.error("name a server at least: --server NAME=PROGRAM")
    return options


if __name__ == "__main__":
    sys.exit(main())
