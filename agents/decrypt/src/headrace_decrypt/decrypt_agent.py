"""The repository agent ``decrypt``."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from headrace import ConfigError, LoadError, RepositoryAgent, one_line, open_regular

if TYPE_CHECKING:
    from headrace_decrypt.file_format import Header
    from headrace_decrypt.model_keys import Keys

#: The suffix of an encrypted file.
SUFFIX = ".enc"
#: Files that are never encrypted, because the server reads them before it calls an agent.
CONFIGS = ("config.pbtxt", "configs/*.pbtxt")
_KNOWN = ("key_env", "key_file", "plain")


class Decrypt(RepositoryAgent):
    """Decrypts every file whose name ends with ``.enc``, and refuses other files.

    Parameters: ``key_file`` or ``key_env`` is the source of the keys, and ``plain`` has patterns of unencrypted files
    besides the config, such as ``labels.txt,*.md``.
    """

    name = "decrypt"

    def __init__(self, model: str, parameters: Mapping[str, str]) -> None:
        from headrace_decrypt.model_keys import KeySource

        super().__init__(model, parameters)
        for key in sorted(parameters.keys() - set(_KNOWN)):
            raise ConfigError(f"{self._who}: parameter '{one_line(key)}' is not known: expected {', '.join(_KNOWN)}")
        try:
            self._source = KeySource.parse(parameters)
        except ConfigError as error:
            raise ConfigError(f"{self._who}: {error.message}") from error
        self._plain = plain_patterns(parameters.get("plain", ""))

    @property
    def _who(self) -> str:
        return f"agent 'decrypt' of model '{self.model}'"

    def load(self, directory: Path, new_directory: Callable[[], Path]) -> Path:
        keys = self._read_keys()  # at each load, so that keys are changed without a restart
        clear, package_id = new_directory(), b""
        for path in make_folders(directory, clear):
            if not path.endswith(SUFFIX):
                self._copy(directory, clear, path)
                continue
            header = self._decrypt(directory / path, clear, path.removesuffix(SUFFIX), keys)
            if package_id not in (b"", header.package_id):
                raise LoadError(f"{self._who}: file '{path}' was encrypted by another run of headrace encrypt")
            package_id = header.package_id
        if not package_id:
            raise LoadError(f"{self._who}: the model has no file whose name ends with {SUFFIX}: run headrace encrypt")
        return clear

    def _read_keys(self) -> Keys:
        try:
            return self._source.read()
        except LoadError as error:
            raise LoadError(f"{self._who}: {error.message}") from error

    def _decrypt(self, encrypted: Path, clear: Path, path: str, keys: Keys) -> Header:
        """Decrypt one file to ``path`` below ``clear``. Return its header. Raises `LoadError`."""
        from headrace_decrypt.file_format import DamagedFile, Header, WrongKey, decrypt

        where = f"{self._who}: file '{one_line(path)}{SUFFIX}'"
        try:
            with open_regular(encrypted) as source:
                header = Header.read(source)
                key = keys.get(header.key_id)
                with create(clear / path, source) as target:
                    decrypt(source, target, header, key, path)
        except DamagedFile as error:
            raise LoadError(f"{where} cannot be decrypted: {error}") from error
        except WrongKey:
            raise LoadError(
                f"{where} was encrypted with another key '{header.key_id}' than that of {keys.source}"
            ) from None
        except LoadError as error:
            raise LoadError(f"{where}: {error.message}") from error
        except FileExistsError as error:
            raise LoadError(f"{where}: the model has '{one_line(path)}', too, which is not encrypted") from error
        except OSError as error:
            raise LoadError(f"{where} cannot be decrypted: {error.strerror}") from error
        return header

    def _copy(self, directory: Path, clear: Path, path: str) -> None:
        """Copy a file that is not encrypted. A hidden one is left out; any other must be allowed by ``plain``."""
        if is_hidden(path):
            return
        if not is_plain(path, self._plain):
            raise LoadError(
                f"{self._who}: file '{one_line(path)}' is not encrypted; if it may be so, add it to parameter 'plain'"
            )
        try:
            with open_regular(directory / path) as source, create(clear / path, source) as target:
                shutil.copyfileobj(source, target)
        except OSError as error:
            raise LoadError(f"{self._who}: file '{one_line(path)}' cannot be copied: {error.strerror}") from error


def plain_patterns(listed: str) -> tuple[str, ...]:
    """Return the patterns of files that are not encrypted: those of all models, and those in ``listed``."""
    return (*CONFIGS, *(pattern.strip() for pattern in listed.split(",") if pattern.strip()))


def is_plain(path: str, patterns: tuple[str, ...]) -> bool:
    """True if the file ``path`` of a model matches one of ``patterns``. ``*`` does not match a slash."""
    parts = path.split("/")
    for pattern in patterns:
        wanted = pattern.split("/")
        if len(wanted) == len(parts) and all(map(fnmatchcase, parts, wanted)):
            return True
    return False


def is_hidden(path: str) -> bool:
    """True if a part of ``path`` begins with a dot, or is Python's cache: Headrace ignores such files."""
    return any(part.startswith(".") or part == "__pycache__" for part in path.split("/"))


def make_folders(directory: Path, target: Path) -> Iterator[str]:
    """Create the directories of ``directory`` in ``target``. Yield the path of each file after its directory exists.

    Hidden directories are created, too, except those of a Kubernetes volume: it has each file in ``..data``, and a link
    to it. Another link to a directory is yielded as a file, which cannot be opened.
    """
    for folder, folders, files in os.walk(directory, onerror=_fail):
        below = Path(folder).relative_to(directory)
        (target / below).mkdir(mode=0o700, exist_ok=True)
        folders[:] = [name for name in folders if not name.startswith("..")]
        links = [name for name in folders if (Path(folder) / name).is_symlink()]
        folders[:] = sorted(name for name in folders if name not in links)
        yield from (str(below / name) for name in sorted([*files, *links]))


def _fail(error: OSError) -> None:
    """Fail for a directory that cannot be read, instead of leaving it out."""
    raise error


def create(path: Path, source: BinaryIO) -> BinaryIO:
    """Create the new file ``path``, for this user only, and open it for writing.

    The user may execute it if he may execute ``source``.
    """
    mode = 0o600 | os.fstat(source.fileno()).st_mode & 0o100
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb")
