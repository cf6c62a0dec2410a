"""A command that starts ``tritonserver``: its program, its flags, and the words to leave out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import PurePosixPath

from headrace_migrate.openai_frontend import PAGE, frontend_at, review_frontend
from headrace_migrate.report import Report, Verdict
from headrace_migrate.server_flags import FlagReview
from headrace_migrate.shell_commands import PROGRAM, program_at
from headrace_migrate.text_edits import TextEdits

#: NVIDIA's own entry point, which an image of Headrace does not have.
_ENTRY_POINT = "nvidia_entrypoint.sh"
#: The paths of the program in images of Triton and of Headrace.
_PATH = "/opt/tritonserver/bin/tritonserver"
#: Programs of Triton's images that start a server in another way.
_OTHER_STARTERS = ("launch_triton_server.py", "run_server.sh", "nvidia-pytriton")
_LAUNCHERS = ("mpirun", "mpiexec", "orterun")


@dataclass(frozen=True, slots=True)
class PlacedWord:
    """A word of a command, its line from 1, and its place in the text: None if it is not written there as it is."""

    text: str
    line: int
    span: tuple[int, int] | None


class ServerCommands:
    """Reads commands into ``report``."""

    def __init__(self, report: Report, edits: TextEdits) -> None:
        self._report, self._edits = report, edits
        self._flags = FlagReview(report)
        #: The repositories that were named, as they are written.
        self.repositories: list[str] = []
        #: The number of commands of Triton's program so far.
        self.found = 0

    def read(self, words: Sequence[PlacedWord]) -> list[int]:
        """Report on a command. Return the indices of the words that a new command leaves out."""
        texts = [word.text for word in words]
        at = program_at(texts)
        if at is None:
            self._read_other(words)
            return []
        self.found += 1
        program = words[at]
        self._read_program(program)
        dropped = self.read_entry_points(words[:at])
        for word in words[:at]:
            if PurePosixPath(word.text).name in _LAUNCHERS:
                detail = "one model in several processes by MPI: the engine TensorRT-LLM is not there"
                self._report.add(word.line, "program", word.text, Verdict.NOT_THERE, detail, "docs/backends.md")
            elif "=" in word.text:
                self.read_variable(*word.text.partition("=")[::2], word.line)
        rest = words[at + 1 :]
        reviewed = self._flags.read([word.text for word in rest], [word.line for word in rest])
        self.repositories += reviewed.repositories
        return dropped + [at + 1 + index for index in sorted(reviewed.dropped)]

    def read_entry_points(self, words: Sequence[PlacedWord]) -> list[int]:
        """Report on NVIDIA's entry points in ``words``. Return their indices, to leave out."""
        found = [index for index, word in enumerate(words) if self.is_entry_point(word)]
        for word in (words[index] for index in found):
            detail = "NVIDIA's entry point prints and checks drivers; left out"
            self._report.add(word.line, "program", word.text, Verdict.CHANGED, detail, "docs/containers.md")
        return found

    @staticmethod
    def is_entry_point(word: PlacedWord) -> bool:
        """True if ``word`` is NVIDIA's entry point, or a path to it."""
        return PurePosixPath(word.text).name == _ENTRY_POINT

    def _read_program(self, program: PlacedWord) -> None:
        """Report on the program; a path below Triton's working directory, ``bin/tritonserver``, becomes a whole one."""
        name, verdict, detail = program.text, Verdict.AS_IT_IS, ""
        if "/" in name and name[0] not in "/$":
            verdict, detail = Verdict.CHANGED, f"now {_PATH}: the image has another working directory"
            if program.span is None or not self._edits.replace_all(name, _PATH, *program.span):
                verdict, detail = Verdict.DIFFERS, f"write {_PATH}: the image has another working directory"
        self._report.add(program.line, "program", name, verdict, detail, "docs/tritonserver.md")

    def read_flags(self, words: Sequence[PlacedWord]) -> list[int]:
        """Report on flags without their program. Return the indices to leave out."""
        self.found += 1
        reviewed = self._flags.read([word.text for word in words], [word.line for word in words])
        self.repositories += reviewed.repositories
        return sorted(reviewed.dropped)

    def _read_other(self, words: Sequence[PlacedWord]) -> None:
        at = frontend_at([word.text for word in words])
        if at is not None:
            self._read_openai_frontend(words, at)
            return
        for word in words:
            if PurePosixPath(word.text).name in _OTHER_STARTERS:
                self.found += 1
                detail = "starts another server than Triton's program"
                self._report.add(word.line, "program", word.text, Verdict.NOT_THERE, detail, "docs/tritonserver.md")
            elif PROGRAM in word.text and not word.text.startswith("/opt/tritonserver"):
                detail = "not read: a text with the name of the program"
                self._report.add(word.line, "word", word.text, Verdict.DIFFERS, detail, "docs/migrating.md#limits")

    def _read_openai_frontend(self, words: Sequence[PlacedWord], at: int) -> None:
        """Report on Triton's OpenAI frontend, and replace it by ``headrace serve`` in a text for a shell."""
        self.found += 1
        rest = words[at + 1 :]
        new, repositories = review_frontend([word.text for word in rest], [word.line for word in rest], self._report)
        self.repositories += repositories
        first = at - 1 if at and PurePosixPath(words[at - 1].text).name.startswith("python") else at
        start, end = words[first].span, words[-1].span
        verdict, detail = Verdict.DIFFERS, f"write {new}"
        if start is not None and end is not None and self._is_shell_text(words[first:]):
            self._edits.replace(start[0], end[1], new)
            verdict, detail = Verdict.CHANGED, "now headrace serve, with headrace-openai"
        self._report.add(words[at].line, "program", words[at].text, verdict, detail, PAGE)

    def _is_shell_text(self, words: Sequence[PlacedWord]) -> bool:
        """True if only blanks and continued lines are between ``words``."""
        spans = [word.span for word in words if word.span is not None]
        between = (self._edits.text[one[1] : other[0]] for one, other in pairwise(spans))
        return len(spans) == len(words) and not any(text.strip(" \t\r\n\\") for text in between)

    def read_variable(self, name: str, value: str, line: int) -> None:
        """Report on a variable of the environment, if the server or its engines read it."""
        add = self._report.add
        if name == "LD_PRELOAD":
            detail = "a model names its library of operators in its config"
            page = "docs/from-triton.md#what-differs-on-purpose"
            add(line, "variable", f"{name}={value}", Verdict.DIFFERS, detail, page)
        elif name in ("LD_LIBRARY_PATH", "PYTHONPATH") and "/opt/tritonserver" in value:
            detail = "nothing of Triton's is in this directory"
            add(line, "variable", f"{name}={value}", Verdict.DIFFERS, detail, "docs/containers.md#what-the-image-is")
        elif name == "TRITON_CLOUD_CREDENTIAL_PATH" or name.startswith(("AWS_", "AZURE_STORAGE_", "GOOGLE_APPL")):
            add(line, "variable", name, Verdict.AS_IT_IS, "", "docs/cloud-storage.md#say-who-asks")
        elif name.startswith("OTEL_"):
            self._report.need(line, "variable", name, "headrace-trace", "docs/tracing.md")
        elif name in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "OMP_NUM_THREADS"):
            add(line, "variable", name, Verdict.AS_IT_IS)
