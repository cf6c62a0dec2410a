"""The identity of a model version for a response cache, so that no version gets the responses of another."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path
from secrets import token_bytes

from headrace.backends.base import Model
from headrace.config.model_config_pb2 import ModelConfig
from headrace.config.regular_files import open_regular
from headrace.models.versions import fingerprint_of_version
from headrace.storage.local_storage import files_below

_CHUNK_BYTES = 1 << 20


def identity_of(model: Model, *, is_shared: bool) -> bytes:
    """Return the identity of ``model``, whose config is complete. Blocks.

    Without ``is_shared``, it is new for each load: responses from before the load are never found. If other servers
    share the cache (``is_shared``), it is a digest of the contents: name, version, config, and every file that counts
    for the version. Raises `OSError` for a file that cannot be read.
    """
    if not is_shared:
        return token_bytes(32)
    config = ModelConfig.FromString(model.config.SerializeToString())
    # These fields decide where and when it runs, and do not change its answers.
    config.ClearField("version_policy")
    config.ClearField("instance_group")
    config.ClearField("model_warmup")
    digest = blake2b(digest_size=32)
    for part in (model.name.encode(), str(model.version).encode(), config.SerializeToString(deterministic=True)):
        digest.update(len(part).to_bytes(8, "little") + part)
    folder = model.path.parent
    for name in sorted(fingerprint_of_version("", files_below(folder), model.version, config).files):
        if (file := folder / name).is_file():
            digest.update(_of_file(file, name))
    return digest.digest()


def _of_file(path: Path, name: str) -> bytes:
    digest = blake2b(name.encode("utf-8", "surrogateescape"), digest_size=32, person=b"file")
    digest.update(b"\0")
    with open_regular(path) as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.digest()
