"""Sources of keys, permissions of key files, and errors, which never contain a part of a key."""

from __future__ import annotations

import os
from base64 import b64encode
from pathlib import Path

import pytest

from headrace import ConfigError, LoadError
from headrace_decrypt.model_keys import Keys, KeySource

A, B = bytes(range(32)), bytes(range(32, 64))
TEXT_A, TEXT_B = b64encode(A).decode(), b64encode(B).decode()


def keys_of(text: str, tmp_path: Path, mode: int = 0o600) -> Keys:
    path = tmp_path / "keys"
    path.write_text(text)
    path.chmod(mode)
    return KeySource("key_file", str(path)).read()


def test_each_line_is_a_key_and_the_first_encrypts(tmp_path: Path) -> None:
    found = keys_of(f"# of the models\n\n2026-11  {TEXT_A}\nold.1 {TEXT_B}\n", tmp_path)
    assert found.by_id == {"2026-11": A, "old.1": B}
    assert next(iter(found.by_id)) == "2026-11"
    assert found.get("old.1") == B
    assert keys_of(TEXT_A, tmp_path).by_id == {"default": A}
    with pytest.raises(LoadError, match=r"key file '.*/keys' has no key 'new', only '2026-11', 'old.1'$"):
        found.get("new")


def test_an_environment_variable_has_the_same_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    source = KeySource("key_env", "MODEL_KEYS")
    with pytest.raises(LoadError, match=r"^environment variable 'MODEL_KEYS' is not set$"):
        source.read()
    monkeypatch.setenv("MODEL_KEYS", f"a {TEXT_A}\nb {TEXT_B}")
    assert source.read().by_id == {"a": A, "b": B}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "has no key: expected a key id, a blank and 32 bytes in base64"),
        ("# nothing\n", "has no key"),
        (f"a {TEXT_A[:-4]}", "line 1 is no key"),
        (f"a {TEXT_A}AAAA", "line 1 is no key"),
        (f"a {TEXT_A[:-2]}*=", "line 1 is no key"),
        (f"{TEXT_A} {TEXT_B} x", "line 1 is no key"),
        (f"a/b {TEXT_A}", "line 1 is no key"),
        (f"{'a' * 65} {TEXT_A}", "line 1 is no key"),
        (f"# x\nä {TEXT_A}", "line 2 is no key"),
        (f"a {TEXT_A}\na {TEXT_B}", "line 2 has the id of an earlier key"),
        (f"a {TEXT_A}\n" + "#" * 65536, "has more than 65536 bytes"),
    ],
)
def test_an_invalid_key_is_named_by_its_line_without_its_content(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(LoadError) as caught:
        keys_of(text, tmp_path)
    assert caught.value.message.startswith(f"key file '{tmp_path}/keys'")
    assert why in caught.value.message
    for secret in (TEXT_A, TEXT_B):
        assert not any(secret[n : n + 6] in caught.value.message for n in range(len(secret) - 6))


def test_keys_are_not_shown(tmp_path: Path) -> None:
    assert TEXT_A[:8] not in repr(keys_of(TEXT_A, tmp_path))
    assert "\\x01" not in repr(keys_of(TEXT_A, tmp_path))


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644, 0o601])
def test_a_key_file_that_others_may_read_is_refused(tmp_path: Path, mode: int, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "keys"
    path.write_text(TEXT_A)
    found = os.stat_result((0o100000 | mode, 0, 0, 1, 1234, 0, 50, 0, 0, 0))
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    monkeypatch.setattr(os, "fstat", lambda descriptor: found)
    with pytest.raises(LoadError, match=rf"is open to other users \(mode {mode:04o}\): chmod 600$"):
        KeySource("key_file", str(path)).read()


@pytest.mark.parametrize(("owner", "mode", "is_read"), [(0, 0o640, True), (0, 0o644, False), (1235, 0o600, False)])
def test_a_key_file_of_root_may_be_readable_by_its_group(
    tmp_path: Path, owner: int, mode: int, is_read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Kubernetes mounts a secret. Source: PostgreSQL's rule for private keys."""
    path = tmp_path / "keys"
    path.write_text(TEXT_A)
    found = os.stat_result((0o100000 | mode, 0, 0, 1, owner, 0, 50, 0, 0, 0))
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    monkeypatch.setattr(os, "fstat", lambda descriptor: found)
    if is_read:
        assert KeySource("key_file", str(path)).read().by_id == {"default": A}
    else:
        with pytest.raises(LoadError, match=r"belongs to another user|is open to other users"):
            KeySource("key_file", str(path)).read()


def test_a_missing_or_special_key_file_does_not_block(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="cannot be read: No such file or directory"):
        KeySource("key_file", str(tmp_path / "none")).read()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(LoadError, match=r"key file '.*/pipe' cannot be read"):
        KeySource("key_file", str(tmp_path / "pipe")).read()


@pytest.mark.parametrize(
    ("parameters", "why"),
    [
        ({}, "must say where the keys are; neither is set"),
        ({"key_file": "/a", "key_env": "B"}, "must say where the keys are; both are set"),
        ({"key_file": "keys"}, "'key_file' must be an absolute path"),
        ({"key_file": "/a\0b"}, "'key_file' must be an absolute path"),
        ({"key_env": "A=B"}, "'key_env' must be the name of an environment variable"),
        ({"key_env": ""}, "'key_env' must be the name of an environment variable"),
    ],
)
def test_an_invalid_key_source_is_refused(parameters: dict[str, str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        KeySource.parse(parameters)
