"""What a peer may do before the connection ends (docs/spec/security.md C14).

Far from anything a gRPC client does. Rates are counted from one sweep to the next; a sweep comes
every `SWEEP_SECONDS`, or more often.
"""

from __future__ import annotations

from dataclasses import dataclass

SWEEP_SECONDS = 5.0
MESSAGE_PACE = 1024


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on one connection.

    Unread, a connection makes the server hold ``streams`` times ``stream_window`` bytes, of each
    stream the message that is arriving, as far as it has arrived, and ``unread_bytes`` of answers with
    those that were under way when these had gathered.
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
    header_list_hard_bytes: int = 32 * 1024
    #: One HEADERS frame and its CONTINUATIONs, packed.
    header_block_bytes: int = 32 * 1024
    continuations: int = 16
    settings: int = 64

    #: Streams that end early by a fault of the peer's (CVE-2025-8671). Those that it resets itself are not
    #: counted (CVE-2023-44487): a client that cancels fast does the same. They count among ``streams`` for as
    #: long as work for them goes on, and opening them waits for its turn like all else.
    faults: int = 10_000
    #: Frames that cost work and do nothing: pings, settings, empty data, priorities (CVE-2019-9511 to 9518).
    idle_frames: int = 10_000
    #: So many more for each answer, and each stream that the peer resets: grpc's core sends window updates,
    #: a ping and a reset with a call that is cancelled.
    frames_per_answer: int = 8
    #: Bytes of control frames that wait while the peer does not read; then it is not read either.
    backlog_bytes: int = 64 * 1024

    #: For the preface, a frame other than DATA, or a header block, once begun.
    head_seconds: float = 20.0
    #: In which a peer must read what it asked for: a tenth of what waits in a tenth of the time, and so on.
    #: A tenth of it is left to one that has more than ``unread_bytes`` waiting.
    unread_seconds: float = 300.0
    #: Bytes of answers that wait, of all streams. Calls that are opened then begin when some of it has been read.
    unread_bytes: int = 512 * 1024 * 1024
    #: In which a message, once begun, must go on to arrive, at `MESSAGE_PACE` bytes a second at least.
    message_seconds: float = 60.0
