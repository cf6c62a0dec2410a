"""Checks pickles before PyTorch reads them, for values that crash or block its readers.

The reader of TorchScript allocates any length, and any place in its memo, up to 64 GiB, before it checks how much there
is. The reader of weights words its refusals by patterns that are quadratic in the length of a name: minutes for 70 KiB.
Both hold the interpreter's lock meanwhile, so the server stands still. PyTorch, and `headrace_torch.script_code`, check
which names a pickle may have.
"""

from __future__ import annotations

import io
import pickletools

from headrace import one_line

#: Characters of a name, and of any text without a space in it.
_MOST_CHARACTERS = 4096


def damage(content: bytes, count: int = 1) -> str:
    """Return the fault of the first pickles in ``content``, at most ``count``; empty if there is none."""
    stream = io.BytesIO(content)
    for _ in range(count):
        if stream.tell() == len(content) > 0:
            break
        try:
            for operation, argument, at in pickletools.genops(stream):
                if operation.name == "LONG_BINPUT" and int(argument or 0) > len(content):
                    return f"at byte {at}, it remembers more objects than it has bytes"
                words = argument.split() if isinstance(argument, str | bytes) else ()
                if max(map(len, words), default=0) > _MOST_CHARACTERS:
                    return f"at byte {at}, it has a name of more than {_MOST_CHARACTERS} characters"
        except ValueError as error:
            return one_line(str(error))
    return ""
