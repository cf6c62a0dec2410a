"""The repository agent ``checksum``: a model is loaded only if its files have the digests in its config."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

from headrace import (
    Code,
    ConfigError,
    LoadError,
    RepositoryAgent,
    hookimpl,
    one_line,
    open_regular,
    why_path_leaves,
)

_CHUNK_BYTES = 1 << 20
#: The prefix of the key of a parameter, and its algorithm.
_ALGORITHMS = {"MD5": "md5", "SHA256": "sha256"}


class Checksum(RepositoryAgent):
    """Each parameter is a file: its key ``MD5:1/model.onnx``, and its value the digest in hexadecimal digits."""

    name = "checksum"

    def __init__(self, model: str, parameters: Mapping[str, str]) -> None:
        super().__init__(model, parameters)
        for key, expected in parameters.items():
            kind, colon, file = key.partition(":")
            where = f"agent 'checksum' of model '{model}': parameter '{one_line(key)}'"
            if not colon or kind not in _ALGORITHMS:
                raise ConfigError(f"{where} is not known: expected MD5:<file> or SHA256:<file>")
            if not file or (why := why_path_leaves(file)):
                raise ConfigError(f"{where} must name a file of the model: {why if file else 'it names none'}")
            digits = hashlib.new(_ALGORITHMS[kind], usedforsecurity=False).digest_size * 2
            if len(expected) != digits or not set(expected) <= set("0123456789abcdefABCDEF"):
                raise ConfigError(f"{where} is '{one_line(expected)}', expected {digits} hexadecimal digits")

    def load(self, directory: Path, new_directory: Callable[[], Path]) -> Path:
        for key, expected in self.parameters.items():
            kind, _, file = key.partition(":")
            found = self._digest(kind, directory, file)
            if found != expected.lower():
                raise LoadError(  # Triton's words
                    f"Mismatched {kind} hash for file {file}, expect: {expected}, got: {found}", Code.INVALID_ARGUMENT
                )
        return directory

    def _digest(self, kind: str, directory: Path, file: str) -> str:
        digest = hashlib.new(_ALGORITHMS[kind], usedforsecurity=False)
        try:
            with open_regular(directory / file) as content:
                while chunk := content.read(_CHUNK_BYTES):
                    digest.update(chunk)
        except OSError as error:
            raise LoadError(
                f"agent 'checksum' cannot read file '{file}' of model '{self.model}': {error.strerror}"
            ) from error
        return digest.hexdigest()


@hookimpl
def register_agents() -> list[type[RepositoryAgent]]:
    return [Checksum]
