"""The command ``headrace bundle``."""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from headrace import Command, HeadraceError, InvalidArgument, one_line

if TYPE_CHECKING:
    from headrace_bundle.progress_line import ProgressLine

#: Exit code after Ctrl-C, as of a shell.
INTERRUPTED = 130
#: Lines of differences that are printed.
_SHOWN = 20
_HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


class BundleCommand(Command):
    """Makes a bundle, verifies one, or collects wheels."""

    name = "bundle"
    help = "put server, backends and models into one archive"
    synopsis = "[make | wheels] --model-repository DIR --output PATH [options] | verify [PATH]"
    description = (
        "make (default): write an archive with the server, the installed plugins, the engines that "
        "the models need, and the models. It is unpacked anywhere and needs the system's Python only: "
        "./NAME/headrace serve. wheels: write a folder of wheels for pip install --no-index. verify: compare a "
        "bundle, or its archive, with its manifest."
    )
    example = "headrace bundle --model-repository=models --output=digits.tar.gz"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        self._parser = parser
        add = parser.add_argument
        add(
            "action",
            nargs="?",
            default="make",
            choices=("make", "wheels", "verify"),
            metavar="action",
            help="see above",
        )
        add("path", nargs="?", type=Path, help="for verify: a bundle or an archive; default: the running bundle")
        add("--model-repository", action="append", default=[], metavar="DIR", help="may be repeated")
        add("--output", type=Path, metavar="PATH", help="FILE.tar.gz, .tar or .tar.zst; for wheels: a new folder")
        add("--overwrite", action="store_true", help="replace the output if it exists")
        add(
            "--plugins",
            default=None,
            metavar="A,B",
            help="only these plugins, besides the engines; default: all installed",
        )
        add(
            "--requirements",
            action="append",
            default=[],
            type=Path,
            metavar="FILE",
            help="also install these, as pip -r",
        )
        add("--latest", action="store_true", help="use the latest versions; default: the installed ones")
        add(
            "--platform",
            default="",
            metavar="TAG",
            help="the platform of another machine, such as manylinux_2_28_aarch64",
        )
        add("--python-version", type=_python_version, default=_HERE, metavar="3.N", help=f"default: {_HERE}")

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        arguments = super().parse(words)
        if arguments.action != "verify":
            if arguments.path is not None:
                self._parser.error(f"Unexpected argument: {arguments.path}")
            missing = [f"--{name}" for name in ("model-repository", "output") if not _is_set(arguments, name)]
            if missing:
                self._parser.error(f"the following arguments are required: {', '.join(missing)}")
        return arguments

    def run(self, arguments: argparse.Namespace) -> int:
        from headrace_bundle.progress_line import ProgressLine

        line = ProgressLine()
        try:
            if arguments.action == "verify":
                return _verify(arguments.path, line)
            _make(arguments, line)
        except HeadraceError as error:
            line.end()
            print(error.message, file=sys.stderr)
            return 1
        except OSError as error:
            line.end()
            print(f"cannot read or write '{error.filename}': {error.strerror}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            line.end()
            print("stopped; nothing was written", file=sys.stderr)
            return INTERRUPTED
        return 0


def _make(arguments: argparse.Namespace, line: ProgressLine) -> None:
    from headrace_bundle.archive_files import check_ending
    from headrace_bundle.bundle_tree import make_tree
    from headrace_bundle.bundled_models import read_models
    from headrace_bundle.distribution_choice import choose
    from headrace_bundle.wheelhouse import TargetMachine, collect, pin, publish
    from headrace_bundle.write_bundle import write_bundle

    output: Path = arguments.output
    if arguments.action == "make":
        check_ending(output)
    if output.exists() and not arguments.overwrite:
        raise InvalidArgument(f"'{output}' exists; --overwrite replaces it")
    if not output.parent.is_dir():
        raise InvalidArgument(f"'{output.parent}' is no directory; '{output.name}' cannot be written there")
    line.step("models", "reading configs")
    models = read_models(arguments.model_repository)
    plugins = None if arguments.plugins is None else [name for name in arguments.plugins.split(",") if name]
    choice = choose({model.backend for model in models}, plugins)
    line.step("models", f"{len(models)}, which need {', '.join(choice.engines) or 'no engine'}", is_last=True)
    target = TargetMachine(arguments.python_version, arguments.platform)
    with _scratch(output) as scratch:
        wheels = collect(choice, target, scratch / "wheels", arguments.requirements, not arguments.latest, line.step)
        if arguments.action == "wheels":
            pin(wheels)
            publish(wheels[0].parent, output)
            print(f"pip install --no-index --find-links {output} -r {output / 'requirements.txt'}")
            return
        tree = make_tree(scratch / "tree", wheels, target, line.step)
        digest = write_bundle(tree, target, models, output, line.step)
    print(f"{digest}  {output}")


def _verify(path: Path | None, line: ProgressLine) -> int:
    from headrace_bundle.manifest import verify

    found = verify(Path(sys.prefix) if path is None else path, line.step)
    line.end()
    for text in found.differences[:_SHOWN]:
        print(one_line(text))
    if (rest := len(found.differences) - _SHOWN) > 0:
        print(f"and {rest} more")
    if found.differences:
        return 1
    print(f"{found.files:,} files are as they were made: {found.manifest.summary}")
    return 0


@contextmanager
def _scratch(output: Path) -> Iterator[Path]:
    """Yield a temporary folder beside ``output``, on its file system. It is removed at the end."""
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.") as folder:
        yield Path(folder)


def _is_set(arguments: argparse.Namespace, name: str) -> bool:
    if name == "model-repository" and arguments.action == "wheels":
        return True
    return bool(getattr(arguments, name.replace("-", "_")))


def _python_version(text: str) -> str:
    if not re.fullmatch(r"3\.\d+", text):
        raise argparse.ArgumentTypeError(f"'{one_line(text)}' is no version of Python such as {_HERE}")
    return text
