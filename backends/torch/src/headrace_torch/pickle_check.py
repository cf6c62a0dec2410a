"""Pickles, looked through before PyTorch reads them, for what its readers do not bear.

That of TorchScript makes room for whatever length and whatever place in its memo a file tells, up to 64 GiB, before it
looks whether so much is there. That of weights words its refusals by patterns which take the square of the length of a
name: minutes for 70 KiB. Both hold the interpreter's lock meanwhile, so that the server stands still. What a pickle may
name is PyTorch's to judge, and `headrace_torch.script_code`'s.
"""

from __future__ import annotations

from collections.abc import Mapping

#: Bytes behind an operation, in the order of Python's ``pickle``.
_FIXED: Mapping[int, int] = {
    **dict.fromkeys(b"(.012NRbld}eat])suQo\x81\x85\x86\x87\x88\x89\x8f\x90\x91\x92\x93\x94\x97\x98", 0),
    **dict.fromkeys(b"Khq\x80\x82", 1),
    **dict.fromkeys(b"M\x83", 2),
    **dict.fromkeys(b"Jjr\x84", 4),
    **dict.fromkeys(b"G\x95", 8),
}
#: How many lines follow.
_LINES: Mapping[int, int] = {**dict.fromkeys(b"FILSVgpP", 1), **dict.fromkeys(b"ci", 2)}
#: Bytes of the length in front of what follows.
_COUNTED: Mapping[int, int] = {
    **dict.fromkeys(b"U\x8cC\x8a", 1),
    **dict.fromkeys(b"XTB\x8b", 4),
    **dict.fromkeys(b"\x8d\x8e\x96", 8),
}
_STOP, _PUT = b"."[0], b"r"[0]
#: Characters of a name, and of any text without a space in it.
_MOST_CHARACTERS = 4096


def damage(content: bytes, count: int = 1) -> str:
    """What is wrong with the pickles that ``content`` begins with, ``count`` at most; empty if nothing is."""
    at = 0
    for _ in range(count):
        if at == len(content) > 0:
            break
        operation = -1
        while operation != _STOP:
            if at >= len(content):
                return "it ends in the midst of a pickle"
            operation, start = content[at], at + 1
            try:
                at = _end(content, operation, start)
            except ValueError as error:
                return f"at byte {start - 1}, {error}"
            if at > len(content):
                return f"at byte {start - 1}, it tells of {at - start} bytes, and has {len(content) - start}"
            if operation == _PUT and int.from_bytes(content[start:at], "little") > len(content):
                return f"at byte {start - 1}, it remembers more objects than it has bytes"
            if operation not in _FIXED and max(map(len, content[start:at].split()), default=0) > _MOST_CHARACTERS:
                return f"at byte {start - 1}, it has a name of more than {_MOST_CHARACTERS} characters"
    return ""


def _end(content: bytes, operation: int, start: int) -> int:
    """Where what follows ``operation`` ends. Raises `ValueError` for what is none, and for a line without end."""
    if operation in _FIXED:
        return start + _FIXED[operation]
    if operation in _COUNTED:
        width = _COUNTED[operation]
        return start + width + int.from_bytes(content[start : start + width], "little")
    for _ in range(_LINES.get(operation, 0)):
        start = content.index(b"\n", start) + 1
    if operation not in _LINES:
        raise ValueError("it has no operation of a pickle")
    return start
