"""The HTTP session to a collector. It reads only a limited part of an answer."""

from __future__ import annotations

import io
from typing import Any

import requests

#: The largest answer of a collector. The answer to an export has a few bytes.
MAX_ANSWER_BYTES = 64 * 1024


class CollectorSession(requests.Session):
    """Refuses answers of more than `MAX_ANSWER_BYTES`, and redirections: the spans would be lost."""

    def send(self, request: requests.PreparedRequest, **kwargs: Any) -> requests.Response:
        """Send ``request``. Raises `requests.RequestException` for an answer that is refused."""
        kwargs |= {"stream": True, "allow_redirects": False}
        response = super().send(request, **kwargs)
        body = response.raw.read(MAX_ANSWER_BYTES + 1, decode_content=True)
        if len(body) > MAX_ANSWER_BYTES or 300 <= response.status_code < 400:
            response.close()
            raise requests.RequestException(f"the collector's answer {response.status_code} is too large, or elsewhere")
        response.raw = io.BytesIO(body)
        return response
