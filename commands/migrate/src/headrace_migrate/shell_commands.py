"""Programs in the commands of a shell: ``tritonserver``, and ``docker run`` with its options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from headrace_migrate.shell_words import Word

PROGRAM = "tritonserver"
_CONTAINER_PROGRAMS = ("docker", "podman", "nerdctl")
#: Options of ``docker run`` without a value.
_SWITCHES = frozenset(
    (
        *("--rm", "--detach", "--interactive", "--tty", "--init", "--privileged", "--read-only", "--no-healthcheck"),
        *("--publish-all", "--oom-kill-disable", "--sig-proxy", "--quiet"),
    )
)
_SHORT_SWITCHES = frozenset("ditPq")


@dataclass(frozen=True, slots=True)
class ContainerCall:
    """``docker run``: its options as name, value and line; the image, and the command in the container."""

    options: Sequence[tuple[str, str, int]]
    image: Word | None
    command: Sequence[Word]


def program_at(words: Sequence[str], name: str = PROGRAM) -> int | None:
    """Return the index of the word that is the program ``name`` or a path to it; None without one."""
    return next((at for at, word in enumerate(words) if PurePosixPath(word).name == name), None)


def container_call(words: Sequence[Word]) -> ContainerCall | None:
    """Return what ``docker run`` runs; None if ``words`` are another command."""
    texts = [word.text for word in words]
    start = next((at for at, text in enumerate(texts[:-1]) if text in _CONTAINER_PROGRAMS), None)
    if start is None or texts[start + 1] != "run":
        return None
    options, at = list[tuple[str, str, int]](), start + 2
    while at < len(words) and texts[at].startswith("-"):
        word = words[at]
        at += 1
        name, equals, value = word.text.partition("=")
        if not name.startswith("--") and len(name) > 2 and not set(name[1:]) <= _SHORT_SWITCHES:
            name, value = word.text[:2], word.text[2:]  # -p8000:8000
        elif not equals and name not in _SWITCHES and (name.startswith("--") or not set(name[1:]) <= _SHORT_SWITCHES):
            value = texts[at] if at < len(words) else ""
            at += 1
        options.append((name, value, word.line))
    image = words[at] if at < len(words) else None
    return ContainerCall(options, image, words[at + 1 :])
