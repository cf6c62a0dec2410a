"""By what an answer is kept: a digest of all that it depends on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from hashlib import sha256
from math import inf
from typing import Any

from headrace.errors import InvalidArgument
from headrace.messages.request import InferRequest
from headrace.messages.tensor import wire_bytes

#: The parameter by which a request goes past the cache: it is neither answered from it nor kept in it.
BYPASS = "bypass_response_cache"
#: Different shapes that are remembered. Clients choose them.
_MOST_REMEMBERED = 1024
#: Of a value that a message shows.
_SHOWN = 100


def _large_digest() -> Callable[[bytes | memoryview], Any] | None:
    """What digests tensors that are large, if the extra ``blake3`` is installed: three to six times as fast."""
    try:
        from blake3 import blake3
    except ImportError:
        return None
    digest: Callable[[bytes | memoryview], Any] = blake3
    return digest


_LARGE_DIGEST = _large_digest()
#: Tensors from here on are digested by it; for smaller ones it costs more.
_LARGE_BYTES = inf if _LARGE_DIGEST is None else 8192


class CacheKeys:
    """Makes the keys of one version of a model. ``identity`` tells it from all others, and from what it was before.

    What counts is the content of a request: its inputs by name, whatever their order, each with data type, shape and
    bytes; the outputs that it wants; and its parameters, which its model can read. Its id, priority and timeout do not.
    A digest of 256 bits cannot be forged, so that nobody gets an answer that is another's.
    """

    def __init__(self, identity: bytes, outputs: Iterable[str]) -> None:
        # Processors have instructions for this one: it is three times as fast as the others here.
        self._started = sha256(identity)
        self._all = frozenset(outputs)
        self._headers: dict[Any, bytes] = {}

    def key(self, request: InferRequest) -> bytes:
        """The key of ``request``, whose inputs have been checked."""
        digest = self._started.copy()
        inputs, headers = request.inputs, self._headers
        for name, tensor in sorted(inputs.items()) if len(inputs) > 1 else inputs.items():
            shape, size = tensor.shape, tensor.nbytes  # type: ignore[union-attr]
            header = headers.get((name, shape, size))
            if header is None:
                header = self._header(name, tensor)
            digest.update(header)
            content = wire_bytes(tensor)  # type: ignore[arg-type]
            if size >= _LARGE_BYTES and _LARGE_DIGEST is not None:
                content = _LARGE_DIGEST(content).digest()
            digest.update(content)
        if request.outputs and len(wanted := frozenset(request.outputs)) < len(self._all):
            digest.update(_listed("outputs", sorted(wanted)))
        if request.parameters and (told := _counting(request.parameters)):
            digest.update(_listed("parameters", told))
        return digest.digest()

    def _header(self, name: str, tensor: Any) -> bytes:
        """What stands before the bytes of an input. Its data type is the config's: the inputs have been checked."""
        kind = getattr(tensor, "dtype", "bytes")
        header = _listed("input", [name, str(kind), tuple(tensor.shape), tensor.nbytes])
        if len(self._headers) >= _MOST_REMEMBERED:
            self._headers.clear()
        self._headers[name, tensor.shape, tensor.nbytes] = header
        return header


def bypasses(request: InferRequest) -> bool:
    """Whether ``request`` goes past the cache, by its parameter or because it belongs to a sequence.

    Raises `InvalidArgument` for a parameter that is neither true nor false.
    """
    asked = request.parameters.get(BYPASS, False)
    if not isinstance(asked, bool):
        raise InvalidArgument(
            f"{request.log_id}parameter '{BYPASS}' is '{str(asked)[:_SHOWN]}', expected true or false"
        )
    return asked or request.is_in_sequence


def _counting(parameters: Mapping[str, Any]) -> list[tuple[str, str, Any]]:
    """The type counts, too: a model can tell 1 from true."""
    return [(name, type(value).__name__, value) for name, value in sorted(parameters.items()) if name != BYPASS]


def _listed(what: str, values: list[Any]) -> bytes:
    """Values that cannot run into each other, or into the bytes of a tensor: their length stands in front."""
    text = repr((what, values)).encode("utf-8", "surrogatepass")
    return len(text).to_bytes(8, "little") + text
