"""Pickles, looked through before PyTorch reads them, for what its readers do not bear.

That of TorchScript makes room for whatever length and whatever place in its memo a file tells, up to 64 GiB, before it
looks whether so much is there. That of weights words its refusals by patterns which take the square of the length of a
name: minutes for 70 KiB. Both hold the interpreter's lock meanwhile, so that the server stands still. What a pickle may
name is PyTorch's to judge, and `headrace_torch.script_code`'s.
"""

from __future__ import annotations

import io
import pickletools

from headrace import one_line

#: Characters of a name, and of any text without a space in it.
_MOST_CHARACTERS = 4096


def damage(content: bytes, count: int = 1) -> str:
    """What is wrong with the pickles that ``content`` begins with, ``count`` at most; empty if nothing is."""
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
