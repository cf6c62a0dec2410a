"""A chain of agents: a model with an encrypted archive and a digest in its config."""

from __future__ import annotations

import asyncio
import hashlib
import io
import tarfile
from base64 import b64encode
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import HeadraceError, Server
from headrace_decrypt.file_format import Header, encrypt, new_package_id

KEY = bytes(range(32))
CONFIG = """
backend: "identity" max_batch_size: 8
input {{ name: "x" data_type: TYPE_FP32 dims: 1 }} output {{ name: "y" data_type: TYPE_FP32 dims: 1 }}
model_repository_agents {{ agents [
    {{ name: "checksum" parameters {{ key: "SHA256:m.tar.gz.enc" value: "{digest}" }} }},
    {{ name: "decrypt" parameters {{ key: "key_env" value: "MODEL_KEYS" }} }},
    {{ name: "archive" }}
] }}
"""


def write(model: Path, weights: bytes) -> Path:
    """Write an encrypted archive with version 1 to ``model``. Return its path."""
    packed, sealed = io.BytesIO(), io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        info = tarfile.TarInfo("1/weights")
        info.size = len(weights)
        archive.addfile(info, io.BytesIO(weights))
    packed.seek(0)
    encrypt(packed, sealed, Header.create(KEY, "default", new_package_id()), KEY, "m.tar.gz")
    model.mkdir(parents=True, exist_ok=True)
    (model / "m.tar.gz.enc").write_bytes(sealed.getvalue())
    digest = hashlib.sha256(sealed.getvalue()).hexdigest()
    (model / "config.pbtxt").write_text(CONFIG.format(digest=digest))
    return model / "m.tar.gz.enc"


def test_each_agent_reads_the_result_of_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL_KEYS", b64encode(KEY).decode())
    repository = tmp_path / "models"
    write(repository / "m", b"first")

    def weights(server: Server) -> bytes:
        x = np.ones((1, 1), np.float32)
        np.testing.assert_array_equal(np.asarray(server.infer("m", {"x": x}).outputs["y"]), x)
        (served,) = server.served("m")
        return (served.model.path / "weights").read_bytes()

    def load(server: Server) -> Any:
        return asyncio.run_coroutine_threadsafe(server.load("m"), server.loop).result(60)

    with Server(repository, model_control_mode="explicit", load_model=("m",)) as server:
        assert weights(server) == b"first"
        sealed = write(repository / "m", b"second")
        load(server)
        assert weights(server) == b"second"
        place = server.served("m")[0].model.path
        private = place.parents[2]
        for change, why in (
            (lambda: sealed.write_bytes(sealed.read_bytes() + b"x"), "Mismatched SHA256 hash for file m.tar.gz.enc"),
            (lambda: monkeypatch.setenv("MODEL_KEYS", b64encode(bytes(32)).decode()), "with another key 'default'"),
        ):
            write(repository / "m", b"third")
            change()
            with pytest.raises(HeadraceError, match=why):
                load(server)
            assert weights(server) == b"second"
            assert {path.parent.name for path in private.glob("*/m")} == {place.parents[1].name, *decrypted(private)}
    assert not private.exists()


def decrypted(private: Path) -> set[str]:
    """Return the one directory that has the decrypted archive."""
    (found,) = private.glob("*/m/m.tar.gz")
    return {found.parents[1].name}
