"""The command ``headrace trace``: a summary of trace files for each model, and one request as a waterfall."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headrace import Command, HeadraceError, InvalidArgument

if TYPE_CHECKING:
    from headrace_trace.trace_reading import ReadCall


class TraceCommand(Command):
    name = "trace"
    help = "summarise trace files, and draw the slowest request"
    synopsis = "<file> ..."
    example = "headrace trace trace.json --svg=slowest.svg"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("file", nargs="+", help="a trace file of Headrace or Triton; with --workers, several")
        parser.add_argument("--model", default="", help="only requests to this model")
        parser.add_argument("--request", default="", help="draw this request, by its id or the id of its trace")
        parser.add_argument("--svg", default="", metavar="PATH", help="also write the drawing to this file")

    def run(self, arguments: argparse.Namespace) -> int:
        from headrace_trace.trace_reading import read_traces
        from headrace_trace.trace_summary import summary
        from headrace_trace.waterfall import as_svg, as_text

        try:
            roots = [root for file in arguments.file for root in read_traces(file)]
            if arguments.model:
                roots = [root for root in roots if root.model == arguments.model]
            if not roots:
                files = ", ".join(f"'{file}'" for file in arguments.file)
                verb = "has" if len(arguments.file) == 1 else "have"
                raise InvalidArgument(
                    f"{files} {verb} no request" + (f" to model '{arguments.model}'" if arguments.model else "")
                )
            chosen = _chosen(roots, arguments.request)
        except HeadraceError as error:
            print(error.message, file=sys.stderr)
            return 1
        print(summary(roots), end="")
        print(as_text(chosen), end="")
        if arguments.svg:
            try:
                Path(arguments.svg).write_text(as_svg(chosen), encoding="utf-8")
            except OSError as error:
                print(f"'{arguments.svg}' can not be written: {error.strerror}", file=sys.stderr)
                return 1
        return 0


def _chosen(roots: Sequence[ReadCall], request: str) -> ReadCall:
    from headrace_trace.waterfall import slowest

    if not request:
        return slowest(roots)
    for root in roots:
        if request in (root.request_id, str(root.id)):
            return root
    raise InvalidArgument(f"no request has the id '{request}'")
