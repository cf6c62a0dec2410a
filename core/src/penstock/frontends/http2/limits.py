"""What a peer may do before the connection ends (security.md C14).

Far from anything a gRPC client does. Rates are counted from one sweep to the next; a sweep comes
every `SWEEP_SECONDS`, or more often.
"""

from __future__ import annotations

from dataclasses import dataclass

SWEEP_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on one connection.

    Unread, a connection makes the server hold ``streams`` times ``stream_window`` bytes, and of
    each stream the message that is arriving, as far as it has arrived.
    """

    #: Streams whose call has not ended, those included that were reset and still run.
    streams: int = 1024
    #: Bytes of a stream that may come before somebody wants them.
    stream_window: int = 256 * 1024
    #: Bytes of all streams between two credits. They are taken from the socket at once.
    connection_window: int = 16 * 1024 * 1024
    frame_bytes: int = 1024 * 1024
    #: Of frames other than DATA; what is incomplete waits in memory.
    control_bytes: int = 32 * 1024
    #: What a list of headers may add up to, unpacked, as RFC 9113 counts (section 6.5.2).
    header_list_bytes: int = 16 * 1024
    #: Beyond it the list is not even unpacked.
    header_list_hard_bytes: int = 64 * 1024
    #: One HEADERS frame and its CONTINUATIONs, packed.
    header_block_bytes: int = 32 * 1024
    continuations: int = 16
    settings: int = 64

    #: Streams that the peer, or a fault of its, ends early: "rapid reset" (CVE-2023-44487, CVE-2025-8671).
    #: Those that still run count among ``streams`` anyhow; this bounds the work of opening them, and is
    #: beyond what a busy client does whose calls all run into their deadlines.
    resets: int = 10_000
    #: Frames that cost work and do nothing: pings, settings, empty data, priorities (CVE-2019-9511 to 9518).
    idle_frames: int = 10_000
    #: Bytes of control frames that wait while the peer does not read; then it is not read either.
    backlog_bytes: int = 64 * 1024

    #: For the preface, a frame other than DATA, or a header block, once begun.
    head_seconds: float = 20.0
    #: For a peer that reads nothing at all of what it asked for.
    unread_seconds: float = 300.0
