"""One broken cache per check, each to be caught by the check that is meant for it; `LocalCache` is the sound one."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from headrace.caches.base import CachedResponse, ResponseCache
from headrace.caches.local import LocalCache
from headrace.telemetry.published import PublishedMetric
from headrace_testing import CacheConformance


class TestLocal(CacheConformance):
    plugin, cache = "headrace.builtins", "local"

    def settings(self) -> Mapping[str, str]:
        return {"size": "1000000"}


class Answers(LocalCache):
    """Whatever was put last."""

    def get(self, key: bytes) -> CachedResponse | None:
        return next(reversed(self._entries.values()), None)


class Casts(LocalCache):
    def put(self, key: bytes, response: CachedResponse) -> None:
        outputs = {name: np.asarray(x).astype(np.float64, copy=True) for name, x in response.outputs.items()}
        super().put(key, CachedResponse(outputs, response.parameters, response.size_bytes))


class Spells(LocalCache):
    def put(self, key: bytes, response: CachedResponse) -> None:
        texts = {name: str(value) for name, value in response.parameters.items()}
        super().put(key, CachedResponse(response.outputs, texts, response.size_bytes))


class Shortens(LocalCache):
    def get(self, key: bytes) -> CachedResponse | None:
        return super().get(key[:1])

    def put(self, key: bytes, response: CachedResponse) -> None:
        super().put(key[:1], response)


class Trips(LocalCache):
    def put(self, key: bytes, response: CachedResponse) -> None:
        if key in self._entries:
            del self._entries[key]
            return
        super().put(key, response)


class Lends(LocalCache):
    def get(self, key: bytes) -> CachedResponse | None:
        found = super().get(key)
        if found is None:
            return None
        return CachedResponse({name: np.array(x) for name, x in found.outputs.items()}, found.parameters)


class Grows(LocalCache):
    """Declares a counter of what it has, which may become less."""

    metrics = (PublishedMetric("headrace_grows_entries_total", "Number of responses", "counter"),)

    def measure(self) -> Mapping[str, float]:
        return {"headrace_grows_entries_total": -len(self)}


class Forgets(LocalCache):
    """Keeps everything until it is asked."""

    def get(self, key: bytes) -> CachedResponse | None:
        self._entries.clear()
        return None


class Mixes(LocalCache):
    """Keeps between two calls what belongs to one."""

    is_remote = True

    def put(self, key: bytes, response: CachedResponse) -> None:
        self.key = key
        time.sleep(1e-4)  # so that another thread has its turn, however busy the machine is
        super().put(self.key, response)


@pytest.mark.parametrize(
    ("kind", "check", "arguments"),
    [
        (Answers, "what_was_not_put_is_not_there", {}),
        (Casts, "tensors_of_every_data_type_come_back_as_they_were", {"datatype": "INT32"}),
        (Spells, "parameters_come_back_with_their_types", {}),
        (Shortens, "each_key_has_its_own_answer", {}),
        (Trips, "what_is_put_twice_is_one_of_both", {}),
        (Lends, "nobody_can_write_into_what_comes_back", {}),
        (Grows, "its_metrics_can_be_read_at_any_time", {}),
        (Mixes, "a_remote_cache_serves_threads_at_once", {}),
    ],
)
def test_the_check_catches_it(kind: type[ResponseCache], check: str, arguments: dict[str, Any]) -> None:
    switching, made = sys.getswitchinterval(), kind(LocalCache.Parameters(1_000_000))
    sys.setswitchinterval(1e-6)
    try:
        with pytest.raises((AssertionError, KeyError)):
            getattr(TestLocal(), f"test_{check}")(made, **arguments)
    finally:
        sys.setswitchinterval(switching)


def test_a_cache_that_no_server_would_find_is_told_of_its_entry_point(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    class Hidden(TestLocal):
        cache = "hidden"

    with pytest.raises(AssertionError, match=r"brings cache 'hidden'.*: hidden = \"headrace.builtins\""):
        Hidden().test_a_server_finds_it_and_answers_from_it(tmp_path_factory)


def test_a_cache_from_which_no_server_answers_is_caught(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalCache, "get", Forgets.get)
    with pytest.raises(AssertionError, match="none is answered from the cache"):
        TestLocal().test_a_server_finds_it_and_answers_from_it(tmp_path_factory)
