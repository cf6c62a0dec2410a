"""The header ``endpoint-load-metrics``: the used part of a language model's cache of keys and values.

Load balancers with ORCA request it by ``endpoint-load-metrics-format``. Source: docs/spec/behaviours.md section
12.8.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from headrace import rate_limited_logger

log = rate_limited_logger(__name__)

_FAMILY, _LABEL = "nv_trt_llm_kv_cache_block_metrics", "kv_cache_block_type"
#: The part that is used, from 0 to 1, of engines on headrace-llm. Each model has a cache of its own.
_USAGE = "nv_llm_cache_usage_ratio"


def load_metrics(wanted: bytes, families: Iterable[Any]) -> bytes | None:
    """Return the value of the header in the format ``wanted``: ``json`` or ``text``.

    ``families`` are the metrics of the server, as of prometheus-client. None, with a line in the log, for another
    format, or if no model has these metrics.
    """
    if wanted not in (b"json", b"text"):
        log.error("endpoint-load-metrics-format %r is neither 'json' nor 'text'", wanted.decode("latin-1"))
        return None
    samples = {family.name: family.samples for family in families if family.name in (_FAMILY, _USAGE)}
    blocks = {sample.labels.get(_LABEL): sample.value for sample in samples.get(_FAMILY, ())}
    named: dict[str, float] = {}
    if blocks.keys() >= {"used", "max", "tokens_per"}:
        used, most, size = blocks["used"], blocks["max"], blocks["tokens_per"]
        named = {"kv_cache_utilization": used / most if most else 0.0, "max_token_capacity": int(most * size)}
    elif usages := [sample.value for sample in samples.get(_USAGE, ())]:
        named = {"kv_cache_utilization": max(usages)}
    else:
        log.error("no model has a metric %s or %s, which endpoint-load-metrics is made of", _FAMILY, _USAGE)
        return None
    if wanted == b"json":
        return b"JSON " + json.dumps({"named_metrics": named}, separators=(",", ":")).encode()
    return b"TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in named.items()).encode()
