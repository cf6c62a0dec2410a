"""From a response of a model to one JSON object: its outputs, its parameters, and who answers, sorted by name."""

from __future__ import annotations

import json
from functools import lru_cache

from headrace import HttpCall, InferResponse


async def print_response(call: HttpCall, response: InferResponse, request_id: str) -> bytes:
    """Return ``response`` as a line of JSON. An output with one element is that element, any other a flat array.

    Raises `HeadraceError` for an output that has no JSON form.
    """
    members = {name: _text(value) for name, value in response.parameters.items()}
    members["model_name"], members["model_version"] = _usual(response.model_name), _usual(response.model_version)
    if request_id:
        members["id"] = _text(request_id)
    for name, values in (await call.print_tensors(response)).items():
        members[name] = values[1:-1] if response.outputs[name].size == 1 else values
    return b"{%b}" % b",".join([b"%b:%b" % (_usual(name), members[name]) for name in sorted(members)])


def _text(value: object) -> bytes:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    try:
        return text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can only escape
        return json.dumps(value).encode()


#: Of names, which are few and repeat in each response.
_usual = lru_cache(1024)(_text)
