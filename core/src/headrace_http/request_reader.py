"""Takes requests from the bytes that one connection receives, one after the other.

::

    HEAD --its empty line--> BODY --its last byte--> HEAD ...

Bodies of known length are received into the memory from which their tensors are read.
"""

from __future__ import annotations

from headrace.errors import OutOfMemory
from headrace.off_loop import UNBOUNDED
from headrace_hosts.inflating import Take, new_memory
from headrace_http.caller_limits import HttpLimits, larger_than_memory, too_many_chunks
from headrace_http.message import HEADER_LENGTH
from headrace_http.request_body import DIRECT_BYTES, ChunkedBody, DirectBody
from headrace_http.request_head import (
    CHUNKED,
    END,
    HTTP_2,
    HeadSearch,
    Http2Refused,
    Malformed,
    Refused,
    RequestHead,
    RequestHeadCache,
    parse_head,
)

_NO_BODY = memoryview(b"")
#: A chunked body asks for memory in steps of at least 1 MiB.
_STEP_BYTES = 1 << 20


class RequestReader:
    """The requests that have arrived and are not taken yet. Event loop only."""

    __slots__ = (
        *("_chunked", "_keep_head", "_limits", "_most_bytes", "_moved_bytes", "_search", "_take"),
        *("direct", "expects", "find_head", "head", "rest"),
    )

    def __init__(
        self,
        limits: HttpLimits,
        head_cache: RequestHeadCache,
        most_bytes: int = UNBOUNDED,
        take: Take = new_memory,
    ) -> None:
        """``most_bytes`` is the memory of all requests together. ``take`` returns memory for large bodies."""
        self._limits, self._most_bytes, self._take = limits, most_bytes, take
        self.find_head, self._keep_head = head_cache.find, head_cache.keep
        #: Received, and not taken yet.
        self.rest = bytearray()
        #: Of the request whose body is arriving.
        self.head: RequestHead | None = None
        #: The memory for the rest of a body.
        self.direct: DirectBody | None = None
        #: Set if the caller waits for a ``100 Continue`` before it sends the body.
        self.expects = False
        self._search = HeadSearch(limits.head_bytes)
        self._chunked: ChunkedBody | None = None
        self._moved_bytes = 0  # of chunked bodies

    @property
    def is_empty(self) -> bool:
        """True if nothing is arriving."""
        return not self.rest and self.head is None

    @property
    def body_bytes(self) -> int:
        """The received bytes of the body. Only differences count."""
        return self._moved_bytes if self.direct is None else self.direct.received_bytes

    @property
    def held_bytes(self) -> int:
        """The received bytes of the arriving body that are kept."""
        if self.direct is not None:
            return self.direct.held_bytes
        return 0 if self._chunked is None else len(self._chunked.body)

    @property
    def missing_bytes(self) -> int:
        """The bytes of the arriving body that have not arrived; of one in chunks, as many as the next step may be."""
        if self.direct is not None:
            return self.direct.missing_bytes
        return 0 if self._chunked is None else max(_STEP_BYTES, len(self._chunked.body))

    @property
    def has_more(self) -> bool:
        """True if there are more chunks than one turn of the event loop may take."""
        return self._chunked is not None and self._chunked.has_more

    def take(self) -> tuple[RequestHead, memoryview] | None:
        """Return the request at the front, if it is complete. Raises `Malformed` and `Refused`."""
        head = self.head
        if head is None:
            head = self._take_head()
            if head is None:
                return None
            if not head.body_bytes:
                return head, _NO_BODY
            self._expect_body(head)
            if not self.rest or self.direct is not None:
                return None
        body = self._take_body(head)
        if body is None:
            return None
        self.head = None
        return head, body

    def read_head(self, raw: bytes) -> RequestHead | None:
        """Return the head in ``raw``; None if it is not exactly one head."""
        head = self.find_head(raw)
        if head is None and len(END) < len(raw) <= self._limits.head_bytes:
            try:
                head = parse_head(raw, self._limits.headers)
            except (Malformed, Refused):
                return None  # `take` reports the error, in the order of arrival
            self._keep_head(raw, head)
        return head

    def forget(self) -> None:
        """Drop the received bytes."""
        self.rest.clear()
        self.head = self.direct = self._chunked = None
        self.expects = False
        self._search.begin()

    def _take_head(self) -> RequestHead | None:
        self._search.drop_empty_lines(self.rest)
        raw = self._search.take(self.rest)
        if raw is None:
            return None
        if raw == HTTP_2:
            raise Http2Refused
        head = self.find_head(raw)
        if head is None:
            head = parse_head(raw, self._limits.headers)
            self._keep_head(raw, head)
        return head

    def _expect_body(self, head: RequestHead) -> None:
        """Allocate memory for a body, or refuse it."""
        size, limit = head.body_bytes, 0
        self.head = head  # also of a refused one, to report which request is refused
        if size > DIRECT_BYTES or size == CHUNKED:
            limit = self._limits.body_limit(head.path, head.headers)
            self._bound(size, limit, head)
        self.expects = head.waits and not self.rest
        if size == CHUNKED:
            self._chunked = ChunkedBody(
                self._limits, lambda size, chunks: self._judge_chunks(size, chunks, limit, head)
            )
        elif size > DIRECT_BYTES and size > len(self.rest):
            self._receive_directly(head)

    def _judge_chunks(self, size: int, chunks: int, limit: int, head: RequestHead) -> None:
        if chunks > self._limits.chunks:
            raise Refused(too_many_chunks(self._limits.chunks))
        self._bound(size, limit, head)

    def _bound(self, size: int, limit: int, head: RequestHead) -> None:
        """Refuse a body of ``size`` bytes if it is larger than ``limit``, or than the memory of all requests."""
        if size > limit:
            raise Refused(self._limits.body_refusal(size, head.path, head.headers))
        if size > self._most_bytes:
            raise Refused(larger_than_memory(size, self._most_bytes))

    def _take_body(self, head: RequestHead) -> memoryview | None:
        rest = self.rest
        if self._chunked is not None:
            before, chunked = len(rest), self._chunked
            is_whole = chunked.feed(rest)
            self._moved_bytes += before - len(rest)
            if not is_whole:
                return None
            self._chunked = None
            return memoryview(chunked.body)
        if len(rest) < head.body_bytes:
            self._receive_directly(head)
            return None
        whole = bytes(rest[: head.body_bytes])
        del rest[: head.body_bytes]
        return memoryview(whole)

    def _receive_directly(self, head: RequestHead) -> None:
        """Let the socket write the rest of the body to its final memory."""
        text = head.headers.get(HEADER_LENGTH, b"0")
        json_bytes = int(text) if text.isdigit() and len(text) < 12 else 0
        try:
            direct = DirectBody(head.body_bytes, json_bytes, self._take)
        except MemoryError:
            raise Refused(
                OutOfMemory(f"no memory for a request body of {head.body_bytes} bytes", retry_after_s=1)
            ) from None
        direct.append(self.rest)
        self.rest.clear()
        self.direct = direct
