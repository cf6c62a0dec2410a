"""Images of Triton, by their names in NVIDIA's registry and in mirrors of it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

_NAME = re.compile(r"(?P<path>(?:[\w.-]+(?::\d+)?/)*tritonserver)(?::(?P<tag>[\w.${}-]+))?(?:@sha256:[0-9a-f]+)?")
_ENDS = {
    "-sdk": "client",
    "-min": "base",
    "-vllm-python-py3": "headrace-vllm[cuda]",
    "-trtllm-python-py3": "tensorrtllm",
    "-pyt-python-py3": "headrace-torch",
    "-tf2-python-py3": "headrace-tf",
}


class ImageKind(Enum):
    """The purpose of an image of Triton."""

    SERVER = "the server"
    CLIENT = "the clients"
    BASE = "a base without backends"
    ENGINE = "a server for one engine"


@dataclass(frozen=True, slots=True)
class TritonImage:
    """An image of Triton. ``distribution`` is that of its only framework, or empty for all of Triton's."""

    name: str
    kind: ImageKind
    engine: str = ""
    distribution: str = ""


def triton_image(name: str) -> TritonImage | None:
    """Return what the image ``name`` is; None if it is none of Triton's."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    tag = found["tag"] or ""
    what = next((what for end, what in _ENDS.items() if tag.endswith(end)), "")
    if what == "client":
        return TritonImage(name, ImageKind.CLIENT)
    if what == "base":
        return TritonImage(name, ImageKind.BASE)
    if what.startswith("headrace-"):
        return TritonImage(name, ImageKind.SERVER, distribution=what)
    if what:
        return TritonImage(name, ImageKind.ENGINE, engine=what)
    return TritonImage(name, ImageKind.SERVER)
