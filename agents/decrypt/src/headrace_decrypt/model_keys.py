"""Keys of models: read from a file that is private to the server, or from an environment variable.

Both have one key per line: its id, a blank, and 32 bytes in base64. A line with base64 only is the key ``default``.
Empty lines, and lines that begin with ``#``, are ignored. Messages never contain any part of such a line.
"""

from __future__ import annotations

import binascii
import os
import re
import stat
from base64 import b64decode
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from headrace import ConfigError, LoadError, open_regular

KEY_BYTES = 32
#: Of a line that has a key only.
DEFAULT_ID = "default"
KEY_ID = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)
_MAX_BYTES = 64 * 1024
_LINE_EXPECTED = "expected a key id, a blank and 32 bytes in base64"
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class KeySource:
    """The place of keys: ``kind`` is ``key_file`` or ``key_env``, and ``name`` the path or the variable."""

    kind: str
    name: str

    @classmethod
    def parse(cls, parameters: Mapping[str, str]) -> KeySource:
        """Return the source that ``parameters`` name. Raises `ConfigError` unless they name exactly one."""
        named = [key for key in ("key_file", "key_env") if key in parameters]
        if len(named) != 1:
            found = "both are set" if named else "neither is set"
            raise ConfigError(f"parameter 'key_file' or 'key_env' must say where the keys are; {found}")
        kind, name = named[0], parameters[named[0]]
        if kind == "key_file" and (not name.startswith("/") or "\0" in name):
            raise ConfigError("parameter 'key_file' must be an absolute path")
        if kind == "key_env" and not _VARIABLE.fullmatch(name):
            raise ConfigError("parameter 'key_env' must be the name of an environment variable")
        return cls(kind, name)

    def __str__(self) -> str:
        return f"key file '{self.name}'" if self.kind == "key_file" else f"environment variable '{self.name}'"

    def read(self) -> Keys:
        """Return the keys. Blocks. Raises `LoadError` with the source, and never with what it contains."""
        if self.kind == "key_env":
            if self.name not in os.environ:
                raise LoadError(f"{self} is not set")
            return self._parse(os.environ[self.name].encode("utf-8", "surrogateescape"))
        try:
            with open_regular(Path(self.name)) as file:
                if why := _why_not_private(file):
                    raise LoadError(f"{self} {why}")
                content = file.read(_MAX_BYTES + 1)
        except OSError as error:
            raise LoadError(f"{self} cannot be read: {error.strerror}") from error
        return self._parse(content)

    def _parse(self, content: bytes) -> Keys:
        if len(content) > _MAX_BYTES:
            raise LoadError(f"{self} has more than {_MAX_BYTES} bytes")
        keys: dict[str, bytes] = {}
        for number, line in enumerate(content.splitlines(), 1):
            words = line.split()
            if not words or words[0].startswith(b"#"):
                continue
            key_id = words[0].decode("ascii", "replace") if len(words) > 1 else DEFAULT_ID
            try:
                key = b64decode(words[-1], validate=True)
            except binascii.Error:
                key = b""
            if len(words) > 2 or len(key) != KEY_BYTES or not KEY_ID.fullmatch(key_id):
                raise LoadError(f"{self}: line {number} is no key: {_LINE_EXPECTED}") from None
            if key_id in keys:
                raise LoadError(f"{self}: line {number} has the id of an earlier key")
            keys[key_id] = key
        if not keys:
            raise LoadError(f"{self} has no key: {_LINE_EXPECTED}")
        return Keys(self, keys)


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one source, by id, in the order of their lines. The first one encrypts."""

    source: KeySource
    by_id: Mapping[str, bytes] = field(repr=False)

    def get(self, key_id: str) -> bytes:
        """Return the key ``key_id``. Raises `LoadError`."""
        key = self.by_id.get(key_id)
        if key is None:
            raise LoadError(f"{self.source} has no key '{key_id}', only {', '.join(map(repr, self.by_id))}")
        return key


def _why_not_private(file: BinaryIO) -> str:
    """Return why the key file is not private; empty if it is.

    The rule is PostgreSQL's for private keys (``ssl_key_file``): a file of the server's user is closed to all others;
    a file of root may be read by its group.
    """
    found = os.fstat(file.fileno())
    if found.st_uid not in (os.geteuid(), 0):
        return "belongs to another user than the server's and root"
    if found.st_mode & (0o037 if found.st_uid == 0 else 0o077):
        return f"is open to other users (mode {stat.S_IMODE(found.st_mode):04o}): chmod 600"
    return ""
