"""Digests from elsewhere: from ``md5sum`` and ``sha256sum``."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from headrace import ConfigError, HeadraceError
from headrace_checksum import Checksum
from headrace_testing import AgentConformance


def digest_of(program: str, content: bytes) -> str:
    return subprocess.run([program], input=content, capture_output=True, check=True).stdout.split()[0].decode()


def parameters_of(files: Mapping[str, bytes], kind: str = "MD5") -> dict[str, str]:
    program = {"MD5": "md5sum", "SHA256": "sha256sum"}[kind]
    return {f"{kind}:{file}": digest_of(program, content) for file, content in files.items()}


class TestMd5(AgentConformance):
    plugin, agent = "headrace_checksum", "checksum"
    kind = "MD5"

    def prepare(self, files: Mapping[str, bytes]) -> tuple[Mapping[str, bytes], Mapping[str, str]]:
        return files, parameters_of(files, self.kind)

    def damage(self, files: Mapping[str, bytes]) -> tuple[Mapping[str, bytes], Mapping[str, str]]:
        return {**files, "2/weights": b"others"}, parameters_of(files, self.kind)

    def wrong_parameters(self) -> Mapping[str, str]:
        return {f"{self.kind}:../other/config.pbtxt": "0" * 32}


class TestSha256(TestMd5):
    kind = "SHA256"


def load(directory: Path, parameters: Mapping[str, str]) -> str:
    """Return why the model in ``directory`` is refused; empty if it is not."""
    try:
        assert Checksum("m", parameters).load(directory, lambda: pytest.fail("it needs no directory")) == directory
    except HeadraceError as error:
        return error.message
    return ""


@pytest.mark.parametrize("kind", ["MD5", "SHA256"])
def test_a_mismatch_names_the_file_and_both_digests(tmp_path: Path, kind: str) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "weights").write_bytes(b"other")
    ((key, expected),) = parameters_of({"1/weights": b"content"}, kind).items()
    (found,) = parameters_of({"1/weights": b"other"}, kind).values()
    assert load(tmp_path, {key: expected}) == (
        f"Mismatched {kind} hash for file 1/weights, expect: {expected}, got: {found}"
    )
    assert load(tmp_path, {key: found}) == ""
    assert load(tmp_path, {key: found.upper()}) == ""


def test_a_file_that_is_missing_or_special_is_named(tmp_path: Path) -> None:
    parameters = parameters_of({"1/weights": b""})
    assert load(tmp_path, parameters) == (
        "agent 'checksum' cannot read file '1/weights' of model 'm': No such file or directory"
    )
    (tmp_path / "1" / "weights").mkdir(parents=True)
    assert load(tmp_path, parameters).endswith("cannot read file '1/weights' of model 'm': Is a directory")


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("1/weights", "0" * 32, r"'1/weights' is not known: expected MD5:<file> or SHA256:<file>"),
        ("SHA1:w", "0" * 40, r"'SHA1:w' is not known"),
        ("md5:w", "0" * 32, r"'md5:w' is not known"),
        ("MD5:", "0" * 32, r"must name a file of the model: it names none"),
        ("MD5:../w", "0" * 32, r"must name a file of the model: it climbs out"),
        ("MD5:/etc/hostname", "0" * 32, r"must name a file of the model: it is absolute"),
        ("MD5:w", "0" * 64, r"expected 32 hexadecimal digits"),
        ("SHA256:w", "0" * 32, r"expected 64 hexadecimal digits"),
        ("MD5:w", "g" * 32, r"expected 32 hexadecimal digits"),
    ],
)
def test_an_invalid_parameter_is_refused(key: str, value: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Checksum("m", {key: value})
