"""The interface of an extension: a part of a plugin that adds routes, methods and tensor locations to the protocols.

::

    class Ticks(Extension):
        name = "ticks"
        adds = (TickRoute, TickMethod)

What is added is a class of its own kind, an `Addition`. The frontend that serves a kind takes it from
`Engine.additions`. Each kind is defined by the code that serves it: HTTP routes by the HTTP frontend, gRPC methods by
the gRPC frontend, and tensor locations by `headrace_locations.tensor_locations`, because both frontends serve them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import iscoroutinefunction, unwrap
from typing import TYPE_CHECKING, Any, ClassVar

from headrace.config.option_parts import RESTRICTED_CATEGORIES
from headrace.messages.operation import ExtensionOperation, Operation

if TYPE_CHECKING:
    from headrace.config.option_groups import OptionGroup
    from headrace.engine import Engine
    from headrace.telemetry.published import Measured, PublishedMetric


class Extension:
    """A part that adds to the protocols. One object per server, made on the event loop's thread. Its methods that are
    marked `hookimpl`, such as ``model_unloaded``, are called for this server."""

    name: ClassVar[str]
    #: The names that the server metadata lists while this extension is enabled.
    announces: ClassVar[Sequence[str]] = ()
    #: The classes of its additions to the protocols. One object of each is made per server.
    adds: ClassVar[Sequence[type[Addition]]] = ()
    #: Its groups of flags, as `add_options` returns them.
    options: ClassVar[Sequence[type[OptionGroup]]] = ()
    #: Keys of a model's ``parameters`` that it reads, whatever the backend is.
    model_parameters: ClassVar[Sequence[str]] = ()
    #: The metrics that `measure` returns a value for.
    metrics: ClassVar[Sequence[PublishedMetric]] = ()

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @property
    def enabled(self) -> bool:
        """True if the options enable it. An extension that is not enabled adds nothing."""
        return True

    def measure(self) -> Mapping[str, Measured]:
        """Return the value of each of ``metrics`` by name. Called on the event loop, once per scrape."""
        return {}

    async def apply(self, change: Any) -> None:
        """Apply ``change``, which was given to `Engine.share` here or in another worker. Raises `HeadraceError`."""
        raise NotImplementedError(f"extension '{self.name}' shares a change and has no method 'apply'")

    def close(self) -> None:
        """Release what the extension holds. Called once, on the event loop, after the frontends have stopped."""


class Addition:
    """Something that an extension adds to a protocol. A subclass of one kind sets ``name`` and ``operation``."""

    #: The word for the kind, as in "route GET /v2".
    kind: ClassVar[str] = "addition"
    name: ClassVar[str]
    #: The end of the error for a class that clashes with one of Headrace: the rule of the kind.
    _clash_rule: ClassVar[str] = ""

    def __init__(self, extension: Any) -> None:
        """``extension`` has the ``engine``: it is the extension, or the frontend with a port of its own."""
        self.extension = extension
        self.engine: Engine = extension.engine

    @classmethod
    def check(cls) -> None:
        """Raise TypeError with the rule that the class breaks. Called once, when the plugin is found."""

    @classmethod
    def clashes_with(cls, other: type[Addition]) -> bool:
        """True if a caller could mean this class and ``other`` by the same words."""
        return cls.kind == other.kind and cls.name == other.name


def require_async(addition: type[Addition], method: str) -> None:
    """Raise TypeError if ``method`` of ``addition`` is not a coroutine function."""
    if not iscoroutinefunction(unwrap(getattr(addition, method))):
        raise TypeError(f"'{method}' of {addition.kind} '{addition.name}' is not async")


def check_operation(addition: type[Addition], operation: object) -> None:
    """Raise TypeError if the operation of ``addition`` is undefined: interceptors need it."""
    named = f"{addition.kind} '{addition.name}'"
    if not isinstance(operation, Operation | ExtensionOperation):
        raise TypeError(
            f"the operation of {named} is {operation!r}, which is neither an Operation nor an ExtensionOperation"
        )
    if operation.category not in ("", *RESTRICTED_CATEGORIES):
        known = ", ".join(RESTRICTED_CATEGORIES)
        raise TypeError(f"the category of operation '{operation}' is {operation.category!r}, which is none of {known}")
