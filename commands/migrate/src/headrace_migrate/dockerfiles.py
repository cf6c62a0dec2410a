"""A Dockerfile: its base images, what it runs, and the command of its last stage."""

from __future__ import annotations

import re
from collections.abc import Sequence

from headrace_migrate.container_parts import ContainerParts
from headrace_migrate.dockerfile_syntax import Instruction
from headrace_migrate.images import ImageKind, TritonImage, triton_image
from headrace_migrate.report import BadInput, Report, Verdict, install_line
from headrace_migrate.server_commands import ServerCommands
from headrace_migrate.shell_words import NotClosed, Word, simple_commands
from headrace_migrate.start_commands import ImageStart, StartCommands

#: The first lines of a stage if no image of Headrace is named.
BASE = "python:3.12-slim-bookworm"
_DIRECTORY = "/opt/tritonserver"
#: The user of Triton's images.
_USER = "triton-server"
_PAGE = "docs/containers.md"
_VARIABLE = re.compile(r"\$\{?(\w+)(?::?-([^}]*))?\}?")


class Dockerfiles:
    """Reads a Dockerfile into ``report``. ``image`` is an image of Headrace, or empty: then each stage of Triton
    becomes one of Python, which installs Headrace."""

    def __init__(self, report: Report, commands: ServerCommands, parts: ContainerParts, image: str) -> None:
        self._report, self._commands, self._parts, self._image = report, commands, parts, image
        self._edits = parts.edits
        #: The start command of each named stage.
        self._starts: dict[str, ImageStart] = {}
        #: The values of ARG before the first FROM, and the places of their values.
        self._arguments: dict[str, tuple[str, tuple[int, int]]] = {}
        self._ends_of_bases = list[int]()
        self._uses_user = False

    def read(self, instructions: Sequence[Instruction]) -> None:
        """Report on all instructions. Raises `BadInput`."""
        start = ImageStart()
        for at, each in enumerate(instructions):
            if each.name == "FROM":
                self._read_from(each)
                start = self._start_of(each)
            elif each.name == "ARG" and not any(other.name == "FROM" for other in instructions[:at]):
                self._read_argument(each)
            elif each.name in ("RUN", "COPY", "ADD"):
                self._read_build_step(each)
            elif each.name == "ENV":
                self._read_environment(each)
            elif each.name == "EXPOSE":
                for port in each.body.split():
                    self._parts.read_port(port, each.line)
            elif each.name == "HEALTHCHECK":
                self._parts.read_probe_command(" ".join(each.body.split()), each.line)
            elif each.name == "USER" and each.body.strip() == _USER:
                self._uses_user = True
                self._report.add(each.line, "user", _USER, Verdict.CHANGED, "made in the new Dockerfile", _PAGE)
            elif each.name in ("ENTRYPOINT", "CMD"):
                start.set(each)
        StartCommands(self._report, self._commands, self._parts).read(start)
        for end in self._ends_of_bases:
            self._edits.replace(end, end, self._installation(end))

    def _read_from(self, each: Instruction) -> None:
        words = [word for word in _words(each) if not word.text.startswith("--")]
        if not words:
            return
        name, span = self._resolve(words[0].text, self._span(each, words[0]))
        found = triton_image(name)
        if found is None:
            return
        if found.kind is not ImageKind.SERVER or self._image:
            self._parts.read_image(found, each.line, span)
            return
        self._replace_base(found, each, span)

    def _start_of(self, each: Instruction) -> ImageStart:
        """Return what the stage that begins here starts: at first, what the stage below starts."""
        texts = [word.text.lower() for word in _words(each) if not word.text.startswith("--")]
        below = self._starts.get(texts[0]) if texts else None
        start = below.above() if below else ImageStart()
        if len(texts) > 2 and texts[1] == "as":
            self._starts[texts[2]] = start
        return start

    def _replace_base(self, found: TritonImage, each: Instruction, span: tuple[int, int] | None) -> None:
        if found.distribution:
            self._report.distributions.add(found.distribution)
        if span is None:
            self._report.add(each.line, "image", found.name, Verdict.DIFFERS, f"put {BASE} here by hand", _PAGE)
            return
        detail = f"now {BASE}, and Headrace by pip"
        self._report.add(each.line, "image", found.name, Verdict.CHANGED, detail, _PAGE)
        self._edits.replace(*span, BASE)
        self._ends_of_bases.append(each.end)

    def _installation(self, end: int) -> str:
        """Return the lines that follow a base: Headrace, and the directory and the user of Triton's images."""
        lines = ["" if self._edits.text[:end].endswith("\n") else "\n"]
        installs = install_line(self._report.distributions).removeprefix("pip install ")
        lines.append(f"RUN pip install --no-cache-dir {installs} \\\n")
        lines.append(f"    && mkdir -p {_DIRECTORY} && ln -s /usr/local/bin {_DIRECTORY}/bin")
        if self._uses_user:
            lines.append(f" \\\n    && useradd --uid 1000 --create-home {_USER}")
        return "".join([*lines, f"\nWORKDIR {_DIRECTORY}\n"])

    def _resolve(self, name: str, span: tuple[int, int]) -> tuple[str, tuple[int, int] | None]:
        """Return ``name`` with the values of ARG, and the place where the whole name is written."""
        whole = _VARIABLE.fullmatch(name)
        if whole is not None and whole[1] in self._arguments:
            return self._arguments[whole[1]]
        value = _VARIABLE.sub(lambda found: self._arguments.get(found[1], (found[2] or found[0],))[0], name)
        return value, span

    def _read_argument(self, each: Instruction) -> None:
        for word in _words(each):
            name, equals, value = word.text.partition("=")
            start, end = self._span(each, word)
            if equals and self._edits.text[start:end].endswith(value):
                self._arguments[name] = value, (end - len(value), end)

    def _read_environment(self, each: Instruction) -> None:
        words = _words(each)
        if words and "=" not in words[0].text:  # ENV NAME VALUE
            self._commands.read_variable(words[0].text, " ".join(word.text for word in words[1:]), each.line)
            return
        for word in words:
            self._commands.read_variable(*word.text.partition("=")[::2], each.line)

    def _read_build_step(self, each: Instruction) -> None:
        """Report on RUN, COPY and ADD."""
        whole = self._edits.text[each.start : each.end]
        shown = " ".join(f"{each.name} {each.body}".split())
        if "apt-get install" in whole or "apt install" in whole:
            detail = "from Debian instead of Ubuntu; a package may have another name"
            self._report.add(each.line, "step", shown, Verdict.AS_IT_IS, detail, _PAGE)
        elif "pip install" in whole or "pip3 install" in whole:
            self._report.add(each.line, "step", shown, Verdict.AS_IT_IS, "", "docs/python-environments.md")
        if f"{_DIRECTORY}/backends" in whole:
            detail = "python-based backends only: shared libraries are not loaded"
            page = "docs/python-environments.md#python-based-backends"
            self._report.add(each.line, "step", shown, Verdict.DIFFERS, detail, page)
        elif _source_of(each) is not None:
            detail = "nothing of Triton's program is in the new image"
            self._report.add(each.line, "step", shown, Verdict.NOT_THERE, detail, "docs/from-triton.md")
        elif each.name == "RUN" and "tritonserver " in whole.replace("tritonserver\n", "tritonserver "):
            detail = "not read: what it writes calls the program"
            self._report.add(each.line, "step", shown, Verdict.DIFFERS, detail, "docs/migrating.md#limits")

    @staticmethod
    def _span(each: Instruction, word: Word) -> tuple[int, int]:
        return each.start + word.start, each.start + word.end


def _words(each: Instruction) -> list[Word]:
    try:
        return [word for words in simple_commands(each.body) for word in words]
    except NotClosed as error:
        raise BadInput(str(error), each.line + error.line - 1) from None


def _source_of(each: Instruction) -> str | None:
    """Return the image of Triton that ``COPY --from`` names; None without one."""
    found = re.match(r"\s*--from=(\S+)", each.body)
    return found[1] if found and each.name == "COPY" and triton_image(found[1]) else None
