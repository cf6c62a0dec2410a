"""The format of an encrypted file: a header, then chunks that are encrypted and authenticated one by one.

| Offset | Bytes | |
|---|---|---|
| 0 | 8 | ``HRDCRYP1`` |
| 8 | 32 | package id: random, the same in all files of one run of ``headrace encrypt`` |
| 40 | 16 | check value of the key: it tells a wrong key from a damaged file |
| 56 | 4 | plaintext bytes of a chunk, little endian, from 4 KiB to 16 MiB |
| 60 | 1 | length of the key id, 1 to 64 |
| 61 | | key id, ASCII |

Each chunk is the ciphertext of AES-256-GCM (NIST SP 800-38D) and its tag of 16 bytes. All chunks but the last have the
full size; an empty file has one empty chunk. This is the STREAM construction of Hoang, Reyhanitabar, Rogaway and Vizar
(Online Authenticated-Encryption and its Nonce-Reuse Misuse-Resistance, 2015):

- key of a file: HKDF-SHA256 (RFC 5869) of the key, salt = package id, info = ``headrace-decrypt file`` NUL path
- check value: HKDF-SHA256 of the key, salt = package id, info = ``headrace-decrypt check``, 16 bytes
- nonce: 3 zero bytes, the index of the chunk (8 bytes, big endian), and 1 for the last chunk, else 0
- associated data: the header, the nonce, and the path of the plaintext file below the model's directory, in UTF-8

So a file that is truncated, extended, renamed or put together from others does not decrypt.
"""

from __future__ import annotations

import hmac
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

from headrace_decrypt.model_keys import KEY_BYTES, KEY_ID

if TYPE_CHECKING:  # every server imports this module
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

MAGIC = b"HRDCRYP1"
CHUNK_BYTES = 1 << 20
TAG_BYTES = 16
PACKAGE_BYTES = 32
_CHECK_BYTES = 16
_FIXED = struct.Struct(f"<8s{PACKAGE_BYTES}s{_CHECK_BYTES}sIB")
_CHUNK_ALLOWED = range(1 << 12, (1 << 24) + 1)


class DamagedFile(Exception):
    """The file is not one that `encrypt` has written for this path."""


class WrongKey(Exception):
    """The key is not the one that encrypted the file."""


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a file. ``encoded`` is its bytes, which every chunk authenticates."""

    package_id: bytes
    check: bytes
    chunk_bytes: int
    key_id: str
    encoded: bytes

    @classmethod
    def create(cls, key: bytes, key_id: str, package_id: bytes, chunk_bytes: int = CHUNK_BYTES) -> Header:
        check = _derive(key, package_id, b"headrace-decrypt check", _CHECK_BYTES)
        fixed = _FIXED.pack(MAGIC, package_id, check, chunk_bytes, len(key_id))
        return cls(package_id, check, chunk_bytes, key_id, fixed + key_id.encode("ascii"))

    @classmethod
    def read(cls, source: BinaryIO) -> Header:
        """Read the header at the beginning of ``source``. Raises `DamagedFile`."""
        fixed = source.read(_FIXED.size)
        if len(fixed) < _FIXED.size or not fixed.startswith(MAGIC):
            raise DamagedFile("it is not a file of headrace encrypt")
        _, package_id, check, chunk_bytes, id_bytes = _FIXED.unpack(fixed)
        written = source.read(id_bytes)
        key_id = written.decode("ascii", "replace")
        if len(written) < id_bytes or not KEY_ID.fullmatch(key_id) or chunk_bytes not in _CHUNK_ALLOWED:
            raise DamagedFile("its header is damaged")
        return cls(package_id, check, chunk_bytes, key_id, fixed + written)

    def require(self, key: bytes) -> None:
        """Raise `WrongKey` unless ``key`` is the key of the file."""
        if not hmac.compare_digest(_derive(key, self.package_id, b"headrace-decrypt check", _CHECK_BYTES), self.check):
            raise WrongKey


def new_package_id() -> bytes:
    """Return the random id of one run of ``headrace encrypt``. It must never be used for a second one."""
    return os.urandom(PACKAGE_BYTES)


def encrypt(source: BinaryIO, target: BinaryIO, header: Header, key: bytes, path: str) -> None:
    """Write ``source`` to ``target``, encrypted as the file ``path`` of a model. Holds two chunks in memory."""
    cipher = _cipher(key, header, path)
    target.write(header.encoded)
    for index, chunk, is_last in _chunks(source, header.chunk_bytes):
        nonce = _nonce(index, is_last)
        target.write(cipher.encrypt(nonce, chunk, header.encoded + nonce + _encoded(path)))


def decrypt(source: BinaryIO, target: BinaryIO, header: Header, key: bytes, path: str) -> None:
    """Write ``source``, whose ``header`` was read, to ``target``. Holds two chunks in memory.

    Raises `WrongKey`, or `DamagedFile` at the first chunk that is not authentic. What was written is then a true
    beginning of the file.
    """
    from cryptography.exceptions import InvalidTag

    header.require(key)
    cipher = _cipher(key, header, path)
    for index, chunk, is_last in _chunks(source, header.chunk_bytes + TAG_BYTES):
        nonce = _nonce(index, is_last)
        try:
            target.write(cipher.decrypt(nonce, chunk, header.encoded + nonce + _encoded(path)))
        except InvalidTag:
            raise DamagedFile(f"chunk {index} is not authentic: the file was changed, cut off, or renamed") from None


def _chunks(source: BinaryIO, size: int) -> Iterator[tuple[int, bytes, bool]]:
    """Yield the index of each chunk of ``source``, its bytes, and whether it is the last. There is at least one."""
    index, chunk = 0, source.read(size)
    while following := source.read(size):
        yield index, chunk, False
        index, chunk = index + 1, following
    yield index, chunk, True


def _cipher(key: bytes, header: Header, path: str) -> AESGCM:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(_derive(key, header.package_id, b"headrace-decrypt file\0" + _encoded(path), KEY_BYTES))


def _encoded(path: str) -> bytes:
    return path.encode("utf-8", "surrogateescape")  # a name that is not UTF-8 stays as it is on the disk


def _derive(key: bytes, salt: bytes, info: bytes, length: int) -> bytes:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(SHA256(), length, salt, info).derive(key)


def _nonce(index: int, is_last: bool) -> bytes:
    return struct.pack(">3xQB", index, is_last)
