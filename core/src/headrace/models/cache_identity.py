"""What tells a version of a model from all others, for a response cache: answers of another are none of its answers."""

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
    """The identity of ``model``, whose config is complete. Blocks.

    In a cache that no other server shares, that of this load: nothing is left of what was loaded before. In one that
    ``is_shared``, the contents: name, version, config, and every file that counts for the version, which are read.
    Raises `OSError` for one that cannot be.
    """
    if not is_shared:
        return token_bytes(32)
    config = ModelConfig.FromString(model.config.SerializeToString())
    # What decides where and when it runs, and not what it answers.
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
