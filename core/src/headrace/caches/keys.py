"""The keys of cached responses: a digest of everything that a response depends on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from hashlib import sha256
from math import inf
from typing import Any

from headrace.errors import InvalidArgument
from headrace.messages.request import InferRequest
from headrace.messages.tensor import wire_bytes

#: A request with this parameter bypasses the cache: it is not answered from it, and its response is not stored.
BYPASS = "bypass_response_cache"
#: The most input headers that are cached. Clients choose shapes: there may be many.
_MOST_REMEMBERED = 1024
#: The most characters of a value in a message.
_SHOWN = 100


def _large_digest() -> Callable[[bytes | memoryview], Any] | None:
    """Return the hash for large tensors, blake3, if the extra of that name is installed: three to six times as fast."""
    try:
        from blake3 import blake3
    except ImportError:
        return None
    digest: Callable[[bytes | memoryview], Any] = blake3
    return digest


_LARGE_DIGEST = _large_digest()
#: A tensor of this many bytes or more is hashed with it; for smaller tensors it is slower.
_LARGE_BYTES = inf if _LARGE_DIGEST is None else 8192


class CacheKeys:
    """Makes the keys for one version of a model. ``identity`` differs for every model, version and state of its files.

    A key depends on the content of a request: the name, data type, shape and bytes of each input, in any order; the
    requested outputs; and the parameters, which the model can read. It does not depend on id, priority and timeout. The
    digest has 256 bits: no request can be forged to get the response to another one.
    """

    def __init__(self, identity: bytes, outputs: Iterable[str]) -> None:
        # Processors have instructions for SHA-256: here it is three times as fast as other hashes.
        self._started = sha256(identity)
        self._all = frozenset(outputs)
        self._headers: dict[Any, bytes] = {}

    def key(self, request: InferRequest) -> bytes:
        """Return the key of ``request``. Its inputs must have passed the check of the model's signature."""
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
        if request.outputs and len(requested := frozenset(request.outputs)) < len(self._all):
            digest.update(_listed("outputs", sorted(requested)))
        if request.parameters and (counted_parameters := _counting(request.parameters)):
            digest.update(_listed("parameters", counted_parameters))
        return digest.digest()

    def _header(self, name: str, tensor: Any) -> bytes:
        """Return the bytes that are hashed before the content of an input. They are cached by name, shape and size: the
        inputs have been checked, so an input always has the same data type."""
        kind = getattr(tensor, "dtype", "bytes")
        header = _listed("input", [name, str(kind), tuple(tensor.shape), tensor.nbytes])
        if len(self._headers) >= _MOST_REMEMBERED:
            self._headers.clear()
        self._headers[name, tensor.shape, tensor.nbytes] = header
        return header


def bypasses(request: InferRequest) -> bool:
    """True if ``request`` bypasses the cache, by its parameter or because it is in a sequence.

    Raises `InvalidArgument` for a parameter that is neither true nor false.
    """
    bypass = request.parameters.get(BYPASS, False)
    if not isinstance(bypass, bool):
        raise InvalidArgument(
            f"{request.log_id}parameter '{BYPASS}' is '{str(bypass)[:_SHOWN]}', expected true or false"
        )
    return bypass or request.is_in_sequence


def _counting(parameters: Mapping[str, Any]) -> list[tuple[str, str, Any]]:
    """Return the parameters that the key depends on, each with its type: a model can distinguish 1 from true."""
    return [(name, type(value).__name__, value) for name, value in sorted(parameters.items()) if name != BYPASS]


def _listed(what: str, values: list[Any]) -> bytes:
    """Encode ``values`` unambiguously: their length is in front, so they cannot merge with the bytes that follow."""
    text = repr((what, values)).encode("utf-8", "surrogatepass")
    return len(text).to_bytes(8, "little") + text
