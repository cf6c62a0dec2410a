"""The program ``tritonserver``: ``headrace serve`` with the manners of Triton's own program.

It differs from ``headrace serve`` in what scripts observe: the ports open when the models are loaded, and the help and
the errors of a command line are Triton's (docs/spec/behaviours.md section 8).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from headrace import ConfigError, OptionGroup, Serve, WordError
from headrace_tritonserver.lenient_numbers import read_leniently

#: The exit code for everything that is not a server's orderly end, the help included.
FAILED = 1
_NO_REPOSITORY = "--model-repository must be specified"


class TritonServer(Serve):
    """The program: its defaults, its help and its errors."""

    name = "tritonserver"
    help = "serve the models of a repository as Triton does"
    example = "tritonserver --model-repository=/srv/models"
    default_words = ("--listen-while-loading=false",)

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Return the command line, with numbers as Triton reads them. Print a warning for each that was changed."""
        words, warnings = read_leniently(words)
        for warning in warnings:
            print(warning, file=sys.stderr)
        return super().parse(words)

    def show_help(self, groups: Sequence[type[OptionGroup]]) -> int:
        """Print the usage where Triton prints it, on stderr."""
        self._print_usage(groups)
        return FAILED

    def refuse(self, error: ConfigError, groups: Sequence[type[OptionGroup]]) -> int:
        """Print errors as Triton does: getopt's before the usage, other errors of flags after it.

        A missing repository is an error of the creation of the server, not of a flag.
        """
        if error.message == _NO_REPOSITORY:
            print(f"error: creating server: {error.code.value} - {error.message}", file=sys.stderr)
            return FAILED
        if isinstance(error, WordError):
            print(f"tritonserver: {error.message}", file=sys.stderr)
        self._print_usage(groups)
        # Again in the last line, which is the one in view.
        print(f"tritonserver: {error.message}" if isinstance(error, WordError) else error.message, file=sys.stderr)
        return FAILED

    def _print_usage(self, groups: Sequence[type[OptionGroup]]) -> None:
        from headrace_tritonserver.grouped_help import render

        print(render(self.flags(groups)), file=sys.stderr)


def main() -> int:
    """Run ``tritonserver`` with the arguments of the process. Return its exit code."""
    program = TritonServer()
    try:
        return program.run(program.parse(sys.argv[1:]))
    except BrokenPipeError:  # the reader of the usage has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
        return FAILED
