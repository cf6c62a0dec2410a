"""Rewrite the tables of docs/performance.md from one run:

    python benchmarks/page.py --headrace .venv/bin/headrace
    python benchmarks/page.py --headrace 'headrace=.venv/bin/headrace' \\
        --headrace 'two workers=.venv/bin/headrace --workers=2' --runs 3 --seconds 3

Only the text between ``<!-- NAME -->`` and ``<!-- end -->`` is replaced, and only for the selected tables (``--only``).
The prose of the page stays. The load varies: each request has a unique id, header and values. A constant load is
measured, too. Figures worse than Triton's are bold. Needs the programs of yardsticks.py, and ``wrk``. Takes 75 minutes
with the defaults, 30 of which are for ``--only engines``, which needs neither a real Triton nor ``--headrace``.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import compare
import load
import measure
import python_models
import report
import servers
from batching import batching
from engines import engines, threads
from large_tensors import large_tensors
from measure import Case, Run, median
from models import ENSEMBLES, write_models
from python_build import build_beside
from report import Section, table
from servers import BENCHMARKS, Running
from settings import Missing, Settings, need_wrk
from start_up import start_up
from yardsticks import DEFAULT

PAGE = BENCHMARKS.parent / "docs" / "performance.md"
CONNECTIONS = (1, 16, 64)
LOADS = ("HTTP binary", "HTTP JSON", "gRPC")
#: The models of Headrace, and their inputs. Triton always serves its Python identity.
MODELS = {"identity": "INPUT0", "tiny_add": "INPUT0,INPUT1", "pyident": "INPUT0"}
#: CPU and rate of Triton's identity and ONNX Runtime backends over those of its Python identity, by load: measured once
#: in one series, with all three backends.
FACTORS: Mapping[tuple[str, int], Mapping[str, tuple[float, float]]] = {
    ("HTTP binary", 1): {"identity": (0.54, 1.6), "tiny_add": (0.47, 1.8)},
    ("HTTP binary", 16): {"identity": (0.7, 1.3), "tiny_add": (0.65, 1.4)},
    ("HTTP binary", 64): {"identity": (0.5, 1.7), "tiny_add": (0.65, 1.5)},
    ("HTTP JSON", 16): {"identity": (0.5, 2.4), "tiny_add": (0.65, 2.1)},
    ("gRPC", 1): {"identity": (0.49, 1.9), "tiny_add": (0.41, 2.2)},
    ("gRPC", 16): {"identity": (0.45, 2.1), "tiny_add": (0.5, 1.9)},
    ("gRPC", 64): {"identity": (0.6, 1.6), "tiny_add": (0.63, 1.5)},
}
#: Cases of compare.py whose models both servers have.
SCHEDULERS = r"three_pyidents16/(http|grpc)/c(1|16|64)$|sequences-python/http/c(1|16|64)$|cached-python16/http/c16$"
#: Sections of run.py whose targets are on the page.
WANTED = {"start": start_up, "batching": batching, "large": large_tensors}
#: Sections whose rows are on the page.
ENGINES = {"engines": engines, "threads": threads}
PYTHON = {
    "python-large": python_models.large,
    "python-strings": python_models.strings,
    "python-calls": python_models.calls,
}

Found = dict[str, list[Run]]


def small(settings: Settings, headraces: Sequence[Running], triton: Running) -> dict[tuple[str, int, bool], Found]:
    """Return the runs of Triton, and of each model on each Headrace, by load, connections, and True if constant."""
    variants = [replace(each, name=f"{each.name}: {model}") for each in headraces for model in MODELS]
    found = {}
    for kind in LOADS:
        for connections in CONNECTIONS:
            for is_constant in (False, True):
                case = _case(kind, connections, is_constant)
                try:
                    found[kind, connections, is_constant] = measure.compare(
                        case, [triton, *variants], settings.runs, settings.seconds
                    )
                except load.LoadFailed as failed:
                    print(f"{case.name}: left out, {failed}", file=sys.stderr)
    return found


def _model(server: Running) -> str:
    return server.name.rpartition(": ")[2] if ": " in server.name else "pyident"


def _case(kind: str, connections: int, is_constant: bool) -> Case:
    def put(server: Running, seconds: float) -> load.Seen:
        model = _model(server)
        if kind == "gRPC":
            return load.grpc(server, model, MODELS[model], connections, seconds, is_constant)
        inputs, is_binary = MODELS[model].split(","), kind == "HTTP binary"
        if not is_constant:
            arguments = ("binary",) if is_binary else ()
            return load.wrk(server, load.Body(model, b""), connections, seconds, load.VARIED, 1, arguments)
        if is_binary:
            body = load.binary_body(model, dict.fromkeys(inputs, (1, 16)))
        else:
            body = load.json_body(model, dict.fromkeys(inputs, 16))
        return load.wrk(server, body, connections, seconds)

    return Case(f"{kind} c{connections}{' constant' if is_constant else ''}", _model, put)


def beside_triton(found: Mapping[tuple[str, int, bool], Found], models: Sequence[str], has_factors: bool) -> str:
    """Return a row per load and model on a Headrace, with factors to Triton's own backends, if there are any."""
    columns = ["load", "connections", "model", "CPU µs, Triton's", "CPU", "rate", "p50 µs, Triton's", "p50"]
    if has_factors:
        columns[-2:] = []
    columns += ["CPU, constant load", "rate, constant load"]
    rows: list[Sequence[str]] = []
    for kind in LOADS:
        for connections in CONNECTIONS:
            varied, constant = (found.get((kind, connections, each), {}) for each in (False, True))
            for name, runs in varied.items():
                model = name.rpartition(": ")[2]
                factors = FACTORS.get((kind, connections), {}).get(model) if has_factors else (1.0, 1.0)
                if name == "triton" or model not in models or factors is None:
                    continue
                theirs, cpu, rate = varied["triton"], *factors
                its_us = median(theirs, "server_us") * cpu
                row = [kind, str(connections), name.removeprefix("headrace: ")]
                row += [f"{median(runs, 'server_us'):.0f}, {its_us:.0f}", _lower(median(runs, "server_us") / its_us)]
                row.append(_higher(median(runs, "rps") / median(theirs, "rps") / rate))
                if not has_factors:
                    ours_us, its_us = median(runs, "p50_us"), median(theirs, "p50_us")
                    row += [f"{ours_us:,.0f}, {its_us:,.0f}", _lower(ours_us / its_us)]
                if name in constant:
                    again, its = constant[name], constant["triton"]
                    row.append(_lower(median(again, "server_us") / median(its, "server_us") / cpu))
                    row.append(_higher(median(again, "rps") / median(its, "rps") / rate))
                else:
                    row += ["", ""]
                rows.append(row)
    return table(columns, rows)


def _lower(ratio: float) -> str:
    return f"**{ratio:.2f}**" if ratio > 1.005 else f"{ratio:.2f}"


def _higher(ratio: float) -> str:
    return f"**{ratio:.2f}**" if ratio < 0.995 else f"{ratio:.2f}"


def varied_beside_constant(found: Mapping[tuple[str, int, bool], Found]) -> str:
    """Return the CPU that a unique id, header and values add to a request, on each server."""
    columns, rows = ["load", "connections"], list[Sequence[str]]()
    for kind, connections, is_constant in found:
        if is_constant or (kind, connections, True) not in found:
            continue
        varied, constant = found[kind, connections, False], found[kind, connections, True]
        columns[2:] = [name.removeprefix("headrace: ") for name in varied]
        ratios = [median(runs, "server_us") / median(constant[name], "server_us") for name, runs in varied.items()]
        rows.append((kind, str(connections), *(f"{ratio:.2f}" for ratio in ratios)))
    return table(columns, rows)


def tails(found: Mapping[tuple[str, int, bool], Found]) -> str:
    """Return the 99th percentile and the median at the most connections: their ratio shows pauses."""
    columns, rows = ["load", "server", "p50 µs", "p99 µs", "p99 over p50"], list[Sequence[str]]()
    for (kind, connections, is_constant), servers_runs in found.items():
        if is_constant or connections != max(CONNECTIONS):
            continue
        for name, runs in servers_runs.items():
            p50, p99 = median(runs, "p50_us"), median(runs, "p99_us")
            named = "Triton: Python identity" if name == "triton" else name.removeprefix("headrace: ")
            rows.append((kind, named, f"{p50:,.0f}", f"{p99:,.0f}", f"{p99 / p50:.2f}"))
    return table(columns, rows)


def schedulers(settings: Settings, headraces: Sequence[Running], triton: Running) -> str:
    """Return the tables of ensembles, sequences and the response cache, with Python models on both servers."""
    rows: list[Sequence[str]] = []
    for name, (_, case) in compare.cases(settings).items():
        if not re.search(SCHEDULERS, name):
            continue
        try:
            found = measure.compare(case, [triton, *headraces], settings.runs, settings.seconds)
        except load.LoadFailed as failed:
            print(f"{name}: left out, {failed}", file=sys.stderr)
            continue
        theirs = found["triton"]
        for server in headraces:
            runs = found[server.name]
            cpu, rate, p50 = (median(runs, field) / median(theirs, field) for field in ("server_us", "rps", "p50_us"))
            named = name if len(headraces) == 1 else f"{name}, {server.name}"
            both = f"{median(runs, 'server_us'):.0f}, {median(theirs, 'server_us'):.0f}"
            rows.append((named, both, _lower(cpu), _higher(rate), _lower(p50)))
    return table(("case", "CPU µs, Triton's", "CPU", "rate", "p50"), rows)


def wanted(settings: Settings, sections: Mapping[str, object]) -> str:
    """Return the targets of sections of run.py. Sections without targets have a table of rows."""
    parts, rows = [], []
    for name, of in sections.items():
        try:
            section: Section = of(settings)  # type: ignore[operator]
        except (Missing, load.LoadFailed) as missing:
            print(f"{name}: left out, {missing}", file=sys.stderr)
            continue
        rows += [
            (each.figure, each.wanted, each.measured if each.is_met else f"**{each.measured}**")
            for each in section.targets
        ]
        if not section.targets:
            parts.append(table(section.columns, section.rows))
    return "\n\n".join([*([table(("figure", "wanted", "measured"), rows)] if rows else []), *parts])


def fill(page: str, tables: Mapping[str, str]) -> str:
    """Return ``page`` with ``tables`` in their places. Raises `SystemExit` if a table has no place."""
    for name, text in tables.items():
        before, begin, rest = page.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        if not end:
            raise SystemExit(f"the page has no place for '{name}': <!-- {name} --> ... <!-- end -->")
        page = f"{before}{begin}\n{text}\n\n{end}{after}"
    return page


def main() -> None:
    options = _parse()
    need_wrk()
    cache = "--cache-config=local,size=67108864"
    tables: dict[str, str] = {}

    def write() -> None:
        options.page.write_text(fill((options.page if options.page.exists() else PAGE).read_text(), tables))

    def runs(only: str = "", pythons: Sequence[str] = ()) -> str:
        words = f"`python benchmarks/page.py{only}`, {options.runs} runs of {options.seconds:g} s."
        return f"{report.machine_line(pythons)}; {words}"

    def show() -> None:
        tables["machine"] = runs(pythons=[build_beside(path) for _, path, _ in options.headrace])
        write()

    if "engines" in options.only:
        # This part needs neither Triton nor the other models, and has its own machine line.
        alone = Settings(options.runs, options.seconds, 0, BENCHMARKS, options.yardsticks)
        for name, of in ENGINES.items():
            section = of(alone)
            tables[name] = f"{runs(' --only engines')}\n\n{table(section.columns, section.rows)}"
            write()
    if options.only == ["engines"]:
        return

    with tempfile.TemporaryDirectory() as made:
        settings = Settings(
            options.runs, options.seconds, 0, options.models or write_models(Path(made)), options.yardsticks
        )
        python = [*("pyident", "pyident_direct", "pyident_cached", "three_pyidents"), *ENSEMBLES["three_pyidents"][1:]]
        ours, theirs = Path(made) / "ours", Path(made) / "theirs"
        settings.repository(theirs, *python)
        settings.repository(ours, *python, "identity", "tiny_add")
        program = settings.yardstick("tritonserver")
        named = [(name, path, [*flags, cache]) for name, path, flags in options.headrace]
        with (
            compare.running(named, ours) as headraces,
            servers.program("triton", program, theirs, cache) as triton,
        ):
            if "small" in options.only:
                found = small(settings, headraces, triton)
                tables["small"] = beside_triton(found, ["identity", "tiny_add"], has_factors=True)
                tables["python"] = beside_triton(found, ["pyident"], has_factors=False)
                tables["varied"] = varied_beside_constant(found)
                tables["tails"] = tails(found)
                show()
            if "schedulers" in options.only:
                tables["schedulers"] = schedulers(settings, headraces, triton)
                show()
        for name, sections in (("wanted", WANTED), ("python-wanted", PYTHON)):
            if name in options.only:
                tables[name] = wanted(settings, sections)
                show()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--headrace", type=_named, action="append", default=[], metavar="[NAME=]PROGRAM [FLAGS]")
    groups = ("small", "schedulers", "wanted", "python-wanted", "engines")
    parser.add_argument("--only", nargs="+", choices=groups, default=groups, help="tables that are made anew")
    parser.add_argument("--runs", type=int, default=3, help="per case and server, interleaved")
    parser.add_argument("--seconds", type=float, default=3, help="per run")
    parser.add_argument("--models", type=Path, help="what models.py wrote; made anew unless given")
    parser.add_argument("--yardsticks", type=Path, default=DEFAULT)
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args()
    if not options.headrace and options.only != ["engines"]:
        parser.error("name the headrace that is measured: --headrace .venv/bin/headrace")
    return options


def _named(text: str) -> tuple[str, Path, list[str]]:
    is_named = "=" in text.split(" ", 1)[0]
    return compare.server(text if is_named else f"headrace={text}")


if __name__ == "__main__":
    main()
