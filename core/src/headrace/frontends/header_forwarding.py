"""Header forwarding: headers of an inference become parameters of its request, which the model can read.

For ``--http-header-forward-pattern`` and ``--grpc-header-forward-pattern`` (docs/spec/behaviours.md section 1.3).
"""

from __future__ import annotations

from collections.abc import Iterable

from headrace.config.options import ServerOptions, header_pattern
from headrace.engine import AnyOperation, Caller, Interceptor, ModelView
from headrace.errors import InvalidArgument, OperatorError
from headrace.frontends.request_parameters import MEANT, RESERVED
from headrace.messages.request import InferRequest


class ForwardedHeaders(Interceptor):
    """Gives each inference its headers as parameters."""

    name = "forwarded-headers"

    def __init__(self, options: ServerOptions) -> None:
        super().__init__(options)
        patterns = {"http": options.http_header_forward_pattern, "grpc": options.grpc_header_forward_pattern}
        self._forwarding = {transport: HeaderForwarding(pattern) for transport, pattern in patterns.items() if pattern}

    @property
    def enabled(self) -> bool:
        return bool(self._forwarding)

    def admit(self, caller: Caller, operation: AnyOperation, model: str) -> None:
        """Allow every operation."""

    def allowed_callers(self, operation: AnyOperation, transport: str) -> str:
        return ""

    def intercept(self, request: InferRequest, model: ModelView, caller: Caller) -> InferRequest | None:
        forwarding = self._forwarding.get(caller.transport)
        chosen = forwarding.parameters(caller.headers()) if forwarding is not None else None
        return request.with_parameters({**request.parameters, **chosen}) if chosen else None


class HeaderForwarding:
    """Selects the headers, or entries of metadata, that become parameters: the operator's pattern must match their
    name.

    An empty pattern forwards nothing. Raises `OperatorError` if the pattern is malformed.
    """

    def __init__(self, pattern: str) -> None:
        try:
            self._finds = header_pattern(pattern) if pattern else None
        except ValueError as error:
            raise OperatorError(f"headers cannot be forwarded: {error}") from None

    def __bool__(self) -> bool:
        return self._finds is not None

    def parameters(self, headers: Iterable[tuple[str, str]]) -> dict[str, str]:
        """Return the parameters from ``headers``. Raises `InvalidArgument` for a reserved name."""
        if self._finds is None:
            return {}
        chosen = {name: value for name, value in headers if self._finds(name)}
        for name in chosen:
            if name.lower() in MEANT or name.lower().startswith(RESERVED):
                raise InvalidArgument(f"Header '{name}' is reserved for Triton usage and cannot be forwarded.")
        return chosen
