"""The flags of model repositories in a cloud, and the directory of the cache."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from headrace import ConfigError, OptionGroup

#: Triton's variables for the directories of local copies.
MOUNT_VARIABLES = {
    "s3": "TRITON_AWS_MOUNT_DIRECTORY",
    "gs": "TRITON_GCS_MOUNT_DIRECTORY",
    "as": "TRITON_AZURE_MOUNT_DIRECTORY",
}


@dataclass(frozen=True)
class CloudStorageOptions(OptionGroup):
    """Model repositories in a cloud: s3://, gs://, as://, and others that are allowed."""

    name: ClassVar[str] = "cloud"
    schemes: str = field(
        default="",
        metadata={"help": "Further schemes that may be read, besides s3, gs and as, such as hf,https."},
    )
    cache_directory: str = field(
        default="",
        metadata={"help": "Directory of the cache of downloaded files. Empty: below the temporary directory."},
    )
    cache_size_mb: int = field(default=20_480, metadata={"help": "Maximum size of the cache in MiB. 0: no cache."})
    parallel: int = field(default=8, metadata={"help": "Parts of a large file that one load downloads at once."})
    timeout_s: float = field(default=30.0, metadata={"help": "Timeout in seconds of a request to the storage."})
    settle_s: float = field(
        default=5.0,
        metadata={
            "help": "With --model-control-mode=poll: seconds without a further change before a change is loaded."
        },
    )
    ready_file: str = field(
        default="",
        metadata={"help": "A file, such as _READY, that is written last to each complete model. Empty: none."},
    )
    s3_addressing: Literal["auto", "path", "virtual"] = field(
        default="auto",
        metadata={"help": "Place of the bucket in S3 requests. auto: the host for Amazon, otherwise the path."},
    )
    ca_file: str = field(default="", metadata={"help": "Certificates of authorities to trust, in PEM."})

    def __post_init__(self) -> None:
        if self.cache_size_mb < 0:
            raise ValueError(f"--cloud-cache-size-mb is {self.cache_size_mb}; the least is 0, which keeps nothing")
        if not 1 <= self.parallel <= 64:
            raise ValueError(f"--cloud-parallel is {self.parallel}, not 1 to 64")
        for name in ("timeout_s", "settle_s"):
            if not 0 <= getattr(self, name) <= 3600:
                raise ValueError(f"--cloud-{name.replace('_', '-')} is {getattr(self, name)}, not 0 to 3600")
        if self.timeout_s < 0.1:
            raise ValueError(f"--cloud-timeout-s is {self.timeout_s}; the least is 0.1")
        if "/" in self.ready_file or self.ready_file in (".", ".."):
            raise ValueError(f"--cloud-ready-file is '{self.ready_file}', a path; it is the name of a file")

    @property
    def allowed_schemes(self) -> frozenset[str]:
        """The schemes of ``--cloud-schemes``, in lower case."""
        return frozenset(word.strip().lower() for word in self.schemes.split(",") if word.strip())

    def cache_path(self, scheme: str) -> Path:
        """Return the directory of the cache for ``scheme``.

        Raises `ConfigError` if a variable of Triton names a directory that does not exist.
        """
        if self.cache_directory:
            return Path(self.cache_directory)
        variable = MOUNT_VARIABLES.get(scheme, "")
        mounted = os.environ.get(variable, "")
        if mounted and not Path(mounted).is_dir():
            raise ConfigError(f"{variable} names '{mounted}', which is not a directory")
        return Path(mounted or tempfile.gettempdir())
