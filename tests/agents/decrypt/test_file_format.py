"""The format, against a second implementation of its description: HKDF by hmac, and GCM by another interface."""

from __future__ import annotations

import hashlib
import hmac
import io
import struct

import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from headrace_decrypt.file_format import DamagedFile, Header, WrongKey, decrypt, encrypt, new_package_id

KEY = bytes(range(32))
CHUNK = 4096
TAG = 16


def written(content: bytes, path: str = "1/model.onnx", package_id: bytes = b"p" * 32) -> bytes:
    target = io.BytesIO()
    encrypt(io.BytesIO(content), target, Header.create(KEY, "a", package_id, CHUNK), KEY, path)
    return target.getvalue()


def read(file: bytes, path: str = "1/model.onnx", key: bytes = KEY) -> bytes:
    source, target = io.BytesIO(file), io.BytesIO()
    decrypt(source, target, Header.read(source), key, path)
    return target.getvalue()


def hkdf(salt: bytes, info: bytes, length: int) -> bytes:
    """RFC 5869, for at most 32 bytes."""
    extracted = hmac.digest(salt, KEY, hashlib.sha256)
    return hmac.digest(extracted, info + b"\1", hashlib.sha256)[:length]


def described(file: bytes, path: str) -> bytes:
    """Decrypt ``file`` by the table in `headrace_decrypt.file_format`."""
    magic, package_id, check, chunk, id_bytes = struct.unpack_from("<8s32s16sIB", file)
    header = file[: 61 + id_bytes]
    assert (magic, header[61:], chunk) == (b"HRDCRYP1", b"a", CHUNK)
    assert check == hkdf(package_id, b"headrace-decrypt check", 16)
    key = hkdf(package_id, b"headrace-decrypt file\0" + path.encode(), 32)
    body, found = file[len(header) :], b""
    count = max(1, -(-len(body) // (CHUNK + TAG)))
    for index in range(count):
        sealed = body[index * (CHUNK + TAG) :][: CHUNK + TAG]
        nonce = bytes(3) + index.to_bytes(8, "big") + bytes([index == count - 1])
        opened = Cipher(algorithms.AES(key), modes.GCM(nonce, sealed[-TAG:])).decryptor()
        opened.authenticate_additional_data(header + nonce + path.encode())
        found += opened.update(sealed[:-TAG]) + opened.finalize()
    return found


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 3 * CHUNK + 5])
def test_a_file_of_any_size_is_written_as_described_and_read_back(size: int) -> None:
    content = hashlib.shake_128(b"%d" % size).digest(size)
    file = written(content, "1/größe")
    assert described(file, "1/größe") == content
    assert read(file, "1/größe") == content
    assert len(file) == 62 + size + TAG * max(1, -(-size // CHUNK))


def test_every_byte_is_authenticated() -> None:
    file = written(b"content")
    for place in range(len(file)):
        for bit in (1, 128):
            changed = bytearray(file)
            changed[place] ^= bit
            with pytest.raises((DamagedFile, WrongKey)):
                read(bytes(changed))


@pytest.mark.parametrize("size", [0, CHUNK, 2 * CHUNK, 2 * CHUNK + 1])
def test_a_file_that_ends_early_or_late_is_damaged(size: int) -> None:
    file = written(bytes(size))
    body = len(file) - size - TAG * max(1, -(-size // CHUNK))
    for length in {*range(body + 1), *range(body, len(file), 509), len(file) - 1, body + CHUNK + TAG} - {len(file)}:
        if length < len(file):
            with pytest.raises(DamagedFile):
                read(file[:length])
    for more in (b"\0", bytes(CHUNK + TAG), file):
        with pytest.raises(DamagedFile):
            read(file + more)


def test_chunks_cannot_be_reordered() -> None:
    file = written(bytes(4 * CHUNK))
    start = len(file) - 4 * (CHUNK + TAG)
    header, chunks = file[:start], [file[start + n * (CHUNK + TAG) :][: CHUNK + TAG] for n in range(4)]
    assert read(header + b"".join(chunks)) == bytes(4 * CHUNK)
    for order in ((1, 0, 2, 3), (0, 1, 1, 3), (0, 2, 3), (0, 1, 2), (0, 1, 2, 3, 3), (3,)):
        with pytest.raises(DamagedFile, match="is not authentic: the file was changed, cut off, or renamed"):
            read(header + b"".join(chunks[n] for n in order))


def test_an_encrypted_file_is_bound_to_its_name_and_package() -> None:
    file = written(b"content", "1/model.onnx")
    with pytest.raises(DamagedFile, match="chunk 0"):
        read(file, "2/model.onnx")
    other = written(b"another", "1/model.onnx", b"q" * 32)
    with pytest.raises(DamagedFile, match="chunk 0"):
        read(file[:62] + other[62:])


def test_a_wrong_key_is_distinguished_from_a_damaged_file() -> None:
    with pytest.raises(WrongKey):
        read(written(b"content"), key=bytes(32))


def test_no_two_files_have_the_same_ciphertext() -> None:
    """Nonces count, so the key of a file must be its own."""
    assert len({new_package_id() for _ in range(100)}) == 100
    sealed = {written(b"content", path, package)[62:] for path in ("a", "b") for package in (b"p" * 32, b"q" * 32)}
    assert len(sealed) == 4


class Counted(io.BytesIO):
    """A file that records the most bytes that are read or written at once."""

    most = 0

    def read(self, size: int | None = -1, /) -> bytes:
        assert size is not None
        assert size >= 0, "it reads the whole file"
        self.most = max(self.most, size)
        return super().read(size)

    def write(self, data: bytes, /) -> int:  # type: ignore[override]
        self.most = max(self.most, len(data))
        return super().write(data)


def test_a_large_file_needs_little_memory() -> None:
    source, middle, target = Counted(bytes(100 * CHUNK)), Counted(), Counted()
    header = Header.create(KEY, "a", b"p" * 32, CHUNK)
    encrypt(source, middle, header, KEY, "w")
    middle.seek(0)
    decrypt(middle, target, Header.read(middle), KEY, "w")
    assert target.getvalue() == source.getvalue()
    assert max(source.most, middle.most, target.most) <= CHUNK + TAG


@pytest.mark.parametrize("chunk", [0, 1, CHUNK - 1, (1 << 24) + 1, (1 << 32) - 1])
def test_a_header_cannot_ask_for_memory(chunk: int) -> None:
    with pytest.raises(DamagedFile, match="its header is damaged"):
        Header.read(io.BytesIO(Header.create(KEY, "a", b"p" * 32, chunk).encoded))
