"""Models that were written by ``headrace encrypt``: what is loaded of them, and what is refused."""

from __future__ import annotations

import io
import os
import resource
import stat
from base64 import b64encode
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from headrace import ConfigError, Server
from headrace_decrypt import Decrypt
from headrace_decrypt.encrypt_command import Encrypt
from headrace_decrypt.file_format import Header, encrypt, new_package_id
from headrace_testing import AgentConformance, CommandConformance
from tests.agents.loading import Loader, files_of, lock_directories, write, write_volume

KEY = bytes(range(32))
LINE = f"2026-11 {b64encode(KEY).decode()}"
OTHER_LINE = f"2026-11 {b64encode(bytes(32)).decode()}"
CONFIG = 'backend: "identity" max_batch_size: 8 ' + "".join(
    f'{kind} {{ name: "{name}" data_type: TYPE_FP32 dims: 1 }} ' for kind, name in (("input", "x"), ("output", "y"))
)


@pytest.fixture(autouse=True)
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MODEL_KEYS", LINE)
    path = tmp_path / "keys"
    path.write_text(LINE)
    path.chmod(0o600)
    return path


def encrypted(files: Mapping[str, bytes], line: bytes = KEY) -> dict[str, bytes]:
    """Return ``files`` as one run of ``headrace encrypt`` writes them."""
    header, encrypted_files = Header.create(line, "2026-11", new_package_id()), {}
    for path, content in files.items():
        target = io.BytesIO()
        encrypt(io.BytesIO(content), target, header, line, path)
        encrypted_files[f"{path}.enc"] = target.getvalue()
    return encrypted_files


class TestDecrypt(AgentConformance):
    plugin, agent = "headrace_decrypt", "decrypt"

    def prepare(self, files: Mapping[str, bytes]) -> tuple[Mapping[str, bytes], Mapping[str, str]]:
        return encrypted(files), {"key_env": "MODEL_KEYS"}

    def damage(self, files: Mapping[str, bytes]) -> tuple[Mapping[str, bytes], Mapping[str, str]]:
        encrypted_files = encrypted(files)
        encrypted_files["2/weights.enc"] = encrypted_files["2/weights.enc"][:-1]
        return encrypted_files, {"key_env": "MODEL_KEYS"}

    def wrong_parameters(self) -> Mapping[str, str]:
        return {"key_file": "keys-of-the-model"}


class TestEncrypt(CommandConformance):
    plugin, command = "headrace_decrypt", "encrypt"
    bad = ("/nowhere", "/nowhere/either", "--key-file", "/nowhere/keys")


@pytest.fixture
def load(tmp_path: Path) -> Loader:
    return Loader(Decrypt, tmp_path)


def run(*words: str) -> int:
    command = Encrypt()
    return command.run(command.parse(words))


def test_the_command_writes_what_the_agent_reads(
    tmp_path: Path, keys: Path, load: Loader, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = bytes(range(256)) * 8192 + b"."  # two chunks and a byte
    latin = os.fsdecode(b"1/gr\xfcn")  # the name is not UTF-8
    files = {"config.pbtxt": b"a", "configs/b.pbtxt": b"b", "1/w": weights, "1/code.py": b"", "labels.txt": b"l"}
    files[latin] = b"g"
    model, target = write(tmp_path / "plain", files), tmp_path / "secret"
    (model / "1/code.py").chmod(0o755)
    (model / "3").mkdir()  # as that of an ensemble
    assert run(str(model), str(target), "--key-file", str(keys), "--plain", "labels.txt") == 0
    stdout = capsys.readouterr().out
    assert f"3 files of '{model}' encrypted with key '2026-11'" in stdout
    assert f'parameters {{ key: "key_file" value: "{keys}" }}' in stdout
    found = files_of(target)
    assert set(found) == {"config.pbtxt", "configs/b.pbtxt", "1/w.enc", "1/code.py.enc", f"{latin}.enc", "labels.txt"}
    assert all(weights[:64] not in content for content in found.values())
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    clear = load(found, key_file=str(keys), plain="labels.txt")
    assert files_of(clear) == files
    assert isinstance(clear, Path)
    (target / "3").rmdir()
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in clear.rglob("*")}
    assert modes == {"config.pbtxt": 0o600, "configs": 0o700, "b.pbtxt": 0o600, "1": 0o700, "w": 0o600,
                     latin.removeprefix("1/"): 0o600, "code.py": 0o600, "labels.txt": 0o600}  # fmt: skip


def test_permission_to_execute_is_kept(tmp_path: Path, keys: Path) -> None:
    model = write(tmp_path / "plain", {"config.pbtxt": b"a", "1/tool": b"t", "1/w": b"w"})
    (model / "1/tool").chmod(0o755)
    assert run(str(model), str(tmp_path / "secret"), "--key-file", str(keys)) == 0
    (tmp_path / "clear").mkdir()
    clear = Decrypt("m", {"key_file": str(keys)}).load(tmp_path / "secret", lambda: tmp_path / "clear")
    assert [stat.S_IMODE((clear / f"1/{name}").stat().st_mode) for name in ("tool", "w")] == [0o700, 0o600]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("plain", "there"), "'there' exists already"),
        (("plain", "plain/inside"), "'plain/inside' is inside of the model"),
        (("empty", "new"), "'empty' has no config.pbtxt"),
        (("twice", "new"), "file '1/w.enc' of the model ends with .enc: is it encrypted already?"),
        (("plain", "new", "--key-id", "x"), "has no key 'x', only '2026-11'"),
        (("plain", "nowhere/new"), "the directory 'nowhere' of the target does not exist"),
        (("linked", "new"), "Is a directory"),
    ],
)
def test_a_failed_command_leaves_no_files(
    tmp_path: Path,
    keys: Path,
    words: tuple[str, ...],
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "plain", {"config.pbtxt": b"", "1/w": b"w"})
    write(tmp_path / "twice", {"config.pbtxt": b"", "1/w.enc": b"w"})
    write(tmp_path / "linked", {"config.pbtxt": b"", "a": b""})
    (tmp_path / "linked/1").symlink_to(tmp_path / "plain/1")
    for name in ("there", "empty"):
        (tmp_path / name).mkdir()
    before = sorted(tmp_path.rglob("*"))
    assert run(*words, "--key-file", str(keys)) == 1
    assert why in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_full_disk_is_named_with_the_target(tmp_path: Path, keys: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write(tmp_path / "plain", {"config.pbtxt": b"", "1/w": bytes(1000)})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        assert run(str(model), str(tmp_path / "new"), "--key-file", str(keys)) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert capsys.readouterr().err == f"headrace encrypt: {tmp_path}/new: File too large\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["keys", "plain"]


def test_a_wrong_key_error_names_model_file_and_source_without_secrets(load: Loader, keys: Path) -> None:
    files = {"config.pbtxt": b"", **encrypted({"1/w": b"secret"})}
    keys.write_text(OTHER_LINE)
    assert load(files, key_file=str(keys)) == (
        "agent 'decrypt' of model 'm': file '1/w.enc' was encrypted with another key '2026-11' than that of key file "
        f"'{keys}'"
    )
    keys.write_text(LINE.replace("2026-11", "2026-12"))
    assert load(files, key_file=str(keys)) == (
        f"agent 'decrypt' of model 'm': file '1/w.enc': key file '{keys}' has no key '2026-11', only '2026-12'"
    )
    keys.write_text(f"{LINE.replace('2026-11', '2026-12')}\n{LINE}")  # the key was changed, and the old one is kept
    assert isinstance(load(files, key_file=str(keys)), Path)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda files: {**files, "1/model.py": b"import os"}, "file '1/model.py' is not encrypted"),
        (lambda files: {**files, "1/w2.enc": files["1/w.enc"]}, "file '1/w2.enc' cannot be decrypted: chunk 0"),
        (lambda files: {**files, **encrypted({"2/w": b"older"})}, "'2/w.enc' was encrypted by another run"),
        (lambda files: {**files, "1/w.enc": b"short"}, "'1/w.enc' cannot be decrypted: it is not a file of headrace"),
        (lambda files: {"config.pbtxt": b""}, "the model has no file whose name ends with .enc"),
    ],
)
def test_files_that_do_not_belong_to_the_model_are_refused(
    load: Loader, change: Callable[[dict[str, bytes]], dict[str, bytes]], why: str
) -> None:
    files = {"config.pbtxt": b"", **encrypted({"1/w": b"content"})}
    assert isinstance(load(files, key_env="MODEL_KEYS"), Path)
    result = load(change(files), key_env="MODEL_KEYS", plain="labels.txt")
    assert isinstance(result, str)
    assert why in result


def test_a_plain_file_replaces_no_encrypted_one(load: Loader) -> None:
    files = {"config.pbtxt": b"", "1/w": b"planted", **encrypted({"1/w": b"content"})}
    result = load(files, key_env="MODEL_KEYS", plain="1/*")
    assert result == "agent 'decrypt' of model 'm': file '1/w.enc': the model has '1/w', too, which is not encrypted"


def test_plain_patterns_match_within_a_directory_and_hidden_files_are_left_out(load: Loader) -> None:
    files = encrypted({"1/w": b"w"})
    plain = {"config.pbtxt": b"", "1/a.md": b"", "labels.txt": b""}
    hidden = {".DS_Store": b"", "1/__pycache__/model.pyc": b"", "1/.b/c": b""}
    clear = load({**files, **plain, **hidden}, key_env="MODEL_KEYS", plain=" labels.txt, 1/*.md,")
    assert isinstance(clear, Path), clear
    assert set(files_of(clear)) == {"1/w", *plain}
    assert isinstance(load({**files, "1/deep/a.md": b""}, key_env="MODEL_KEYS", plain="1/*"), str)


def test_a_volume_of_kubernetes_is_read(tmp_path: Path, keys: Path) -> None:
    plain = write_volume(tmp_path / "plain", {"config.pbtxt": b"", "w": b"w"})
    assert run(str(plain), str(tmp_path / "secret"), "--key-file", str(keys)) == 0
    volume = write_volume(tmp_path / "volume", files_of(tmp_path / "secret"))
    (tmp_path / "clear").mkdir()
    clear = Decrypt("m", {"key_file": str(keys)}).load(volume, lambda: tmp_path / "clear")
    assert files_of(clear) == {"config.pbtxt": b"", "w": b"w"}


def test_an_unknown_parameter_is_refused() -> None:
    with pytest.raises(ConfigError, match="agent 'decrypt' of model 'm': parameter 'key' is not known: expected key_e"):
        Decrypt("m", {"key": "AAAA"})


def test_plaintext_is_private_and_removed_at_the_unload(tmp_path: Path, keys: Path) -> None:
    agent = (
        f'model_repository_agents {{ agents {{ name: "decrypt" parameters {{ key: "key_file" value: "{keys}" }} }} }}'
    )
    model = {"config.pbtxt": f"{CONFIG} {agent}".encode(), **encrypted({"1/weights": b"secret"})}
    write(tmp_path / "models/m", model)
    with Server(tmp_path / "models", model_control_mode="explicit", load_model=("m",)) as server:
        (served,) = server.served("m")
        place = served.model.path
        assert (place / "weights").read_bytes() == b"secret"
        folders = [place, place.parent, *place.parent.parents][:4]
        assert [stat.S_IMODE(folder.stat().st_mode) for folder in folders] == [0o700] * 4
        x = np.ones((1, 1), np.float32)
        np.testing.assert_array_equal(np.asarray(server.infer("m", {"x": x}).outputs["y"]), x)
    assert not place.parent.exists()


def test_a_directory_that_cannot_be_read_is_not_left_out(load: Loader, monkeypatch: pytest.MonkeyPatch) -> None:
    lock_directories(monkeypatch, "locked")
    with pytest.raises(PermissionError):  # core words it
        load({"config.pbtxt": b"", **encrypted({"1/w": b"w", "locked/w": b"w"})}, key_env="MODEL_KEYS")
