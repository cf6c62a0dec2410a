"""One broken cache per check. That check must fail. `LocalCache` is the sound one."""

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


class ReturnsNewest(LocalCache):
    """Returns the newest response for every key."""

    def get(self, key: bytes) -> CachedResponse | None:
        return next(reversed(self._entries.values()), None)


class Casts(LocalCache):
    def put(self, key: bytes, response: CachedResponse) -> None:
        outputs = {name: np.asarray(x).astype(np.float64, copy=True) for name, x in response.outputs.items()}
        super().put(key, CachedResponse(outputs, response.parameters, response.size_bytes))


class MakesTexts(LocalCache):
    def put(self, key: bytes, response: CachedResponse) -> None:
        texts = {name: str(value) for name, value in response.parameters.items()}
        super().put(key, CachedResponse(response.outputs, texts, response.size_bytes))


class ShortensKeys(LocalCache):
    def get(self, key: bytes) -> CachedResponse | None:
        return super().get(key[:1])

    def put(self, key: bytes, response: CachedResponse) -> None:
        super().put(key[:1], response)


class LosesSecondPut(LocalCache):
    def put(self, key: bytes, response: CachedResponse) -> None:
        if key in self._entries:
            del self._entries[key]
            return
        super().put(key, response)


class ReturnsWritable(LocalCache):
    def get(self, key: bytes) -> CachedResponse | None:
        found = super().get(key)
        if found is None:
            return None
        return CachedResponse({name: np.array(x) for name, x in found.outputs.items()}, found.parameters)


class CountsDown(LocalCache):
    """Declares a counter that decreases."""

    metrics = (PublishedMetric("headrace_down_entries_total", "Number of responses", "counter"),)

    def measure(self) -> Mapping[str, float]:
        return {"headrace_down_entries_total": -len(self)}


class Forgets(LocalCache):
    """Clears itself on every `get`."""

    def get(self, key: bytes) -> CachedResponse | None:
        self._entries.clear()
        return None


class Mixes(LocalCache):
    """Stores the key of one call where another thread overwrites it."""

    is_remote = True

    def put(self, key: bytes, response: CachedResponse) -> None:
        self.key = key
        time.sleep(1e-4)  # until another thread runs
        super().put(self.key, response)


@pytest.mark.parametrize(
    ("kind", "check", "arguments"),
    [
        (ReturnsNewest, "a_missing_key_returns_none", {}),
        (Casts, "tensors_of_every_data_type_round_trip", {"datatype": "INT32"}),
        (MakesTexts, "parameters_round_trip_with_their_types", {}),
        (ShortensKeys, "each_key_has_its_own_response", {}),
        (LosesSecondPut, "a_key_put_twice_has_one_of_both_responses", {}),
        (ReturnsWritable, "returned_tensors_are_read_only", {}),
        (CountsDown, "metrics_can_be_read_at_any_time", {}),
        (Mixes, "a_remote_cache_serves_threads_at_once", {}),
    ],
)
def test_the_check_fails(kind: type[ResponseCache], check: str, arguments: dict[str, Any]) -> None:
    switching, cache = sys.getswitchinterval(), kind(LocalCache.Parameters(1_000_000))
    sys.setswitchinterval(1e-6)
    try:
        with pytest.raises((AssertionError, KeyError)):
            getattr(TestLocal(), f"test_{check}")(cache, **arguments)
    finally:
        sys.setswitchinterval(switching)


def test_a_cache_without_an_entry_point_fails_with_the_entry_point(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    class Hidden(TestLocal):
        cache = "hidden"

    with pytest.raises(AssertionError, match=r"brings cache 'hidden'.*: hidden = \"headrace.builtins\""):
        Hidden().test_a_server_finds_it_and_answers_from_it(tmp_path_factory)


def test_a_cache_without_hits_is_caught(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalCache, "get", Forgets.get)
    with pytest.raises(AssertionError, match="none of 1000 equal requests is answered from the cache"):
        TestLocal().test_a_server_finds_it_and_answers_from_it(tmp_path_factory)
