"""The command ``headrace batch``."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from headrace import Command, HeadraceError

if TYPE_CHECKING:
    from headrace_batch.batch_job import JobProgress

#: The endings of files, as `headrace_batch.row_files.KINDS` has them. Every server imports this module, and that one
#: imports pyarrow.
ENDINGS = (".parquet", ".arrow", ".csv", ".jsonl", ".npy")
#: The exit code if some rows failed. The result names them.
SOME_FAILED = 3
#: Exit code after Ctrl-C, as of a shell.
INTERRUPTED = 130


class BatchCommand(Command):
    """Infers every row of a file with a model, without a port."""

    name = "batch"
    help = "infer every row of a file"
    synopsis = "--model-repository DIR --model NAME --input FILE --output FILE [options]"
    description = (
        "Infer every row of a file with a model, and write a file with the same number of rows. No port is opened. "
        f"The ending of a file gives its format: {', '.join(ENDINGS)}. Repeat the command to resume a stopped job."
    )
    example = "headrace batch --model-repository=models --model=digits --input=in.parquet --output=out.parquet"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("--model-repository", action="append", required=True, metavar="DIR", help="may be repeated")
        add("--model", required=True, metavar="NAME", help="the model")
        add("--model-version", default="", metavar="N", help="the version; default: the latest")
        add("--input", type=Path, required=True, metavar="FILE", help="the rows")
        add("--output", type=Path, required=True, metavar="FILE", help="the result")
        add(
            "--map",
            action="append",
            default=[],
            metavar="INPUT=COLUMN",
            help="the column of an input, or a pattern such as 'pixel_*' for several; default: the column of its name",
        )
        add("--outputs", default="", metavar="A,B", help="the outputs in the result; default: all")
        add("--keep", default=None, metavar="A,B", help="the columns to copy; default: all except inputs")
        add("--stop-on-error", action="store_true", help="end at the first failed row; default: record its error")
        add("--overwrite", action="store_true", help="replace the result if it exists")
        add("--restart", action="store_true", help="discard the finished parts of an earlier run")
        add("--in-flight", type=_positive, default=0, metavar="N", help="requests in flight; default: 2 per instance")
        add("--chunk", type=_positive, default=4096, metavar="ROWS", help="rows in memory per chunk; default: 4096")

    def run(self, arguments: argparse.Namespace) -> int:
        from headrace_batch.batch_job import BatchJob, run

        inputs = dict(word.partition("=")[::2] for word in arguments.map)
        job = BatchJob(
            arguments.model_repository,
            arguments.model,
            arguments.input,
            arguments.output,
            inputs,
            [name for name in arguments.outputs.split(",") if name],
            None if arguments.keep is None else [name for name in arguments.keep.split(",") if name],
            version=arguments.model_version,
            in_flight=arguments.in_flight,
            chunk_rows=arguments.chunk,
            stops_at_error=arguments.stop_on_error,
            overwrites=arguments.overwrite,
            restarts=arguments.restart,
        )
        display = Display()
        try:
            progress = asyncio.run(run(job, display.show))
        except HeadraceError as error:
            display.end()
            cause = error.__cause__  # why the model is not loaded
            is_told = not isinstance(cause, HeadraceError) or cause.message in error.message
            print(error.message if is_told else f"{error.message}: {cause}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            display.end()
            print("stopped; the same command goes on from here", file=sys.stderr)
            return INTERRUPTED
        display.show(progress, is_last=True)
        if progress.errors:
            first = "" if progress.first_error is None else "; the first: row {}: {}".format(*progress.first_error)
            print(f"{progress.errors:,} rows failed{first}", file=sys.stderr)
        return SOME_FAILED if progress.errors else 0


class Display:
    """A line on stderr: rewritten twice a second on a terminal, a new one every 10 s elsewhere."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._began = self._shown = time.monotonic()

    def show(self, progress: JobProgress, is_last: bool = False) -> None:
        now = time.monotonic()
        if not is_last and now - self._shown < (0.5 if self._is_terminal else 10):
            return
        self._shown = now
        rate = (progress.rows - progress.resumed) / max(now - self._began, 1e-3)
        text = f"{progress.rows:,}"
        if progress.total is not None:
            text += f" of {progress.total:,}"
        text += f" rows, {rate:,.0f} rows/s, {progress.errors:,} failed"
        if progress.total and rate and not is_last:
            text += f", {(progress.total - progress.rows) / rate:,.0f} s left"
        if progress.resumed and is_last:
            text += f", {progress.resumed:,} by an earlier run"
        print(f"\r\033[K{text}" if self._is_terminal else text, end="" if self._is_terminal else "\n", file=sys.stderr)
        if is_last:
            self.end()

    def end(self) -> None:
        if self._is_terminal:
            print(file=sys.stderr)


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"'{text}' is no whole number from 1 on")
    return int(text)
