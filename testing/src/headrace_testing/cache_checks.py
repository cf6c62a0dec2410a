"""Checks of a response cache: it returns stored responses, and no others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import pytest

from headrace import (
    BytesTensor,
    CachedResponse,
    ModelConfig,
    ResponseCache,
    Server,
    Tensor,
    dtypes,
    parse_parameters,
)
from headrace_testing.driving import assert_installed, part_of
from headrace_testing.example import NAME, bytes_of, copy_of, write_model
from headrace_testing.metrics import measured
from headrace_testing.plugin import NOT_RUN

_THREADS, _PUTS = 8, 25
#: The maximum number of equal requests until one is answered from the cache.
_MAX_REQUESTS = 1000
_CACHED = f"""name: "{NAME}" backend: "identity" max_batch_size: 8 response_cache {{ enable: true }}
    input {{ name: "x" data_type: TYPE_FP32 dims: 3 }} output {{ name: "y" data_type: TYPE_FP32 dims: 3 }}"""


class CacheChecks:
    """A subclass sets ``plugin``, the module of the entry point, and ``cache``, the name in ``--cache-config``.

    ``settings`` returns the other settings there. The cache must be empty, and have room for a few hundred small
    responses.
    """

    plugin: ClassVar[str]
    cache: ClassVar[str]

    def settings(self) -> Mapping[str, str]:
        """Return the settings in ``--cache-config``."""
        return {}

    @pytest.fixture
    def tested(self) -> Iterator[ResponseCache]:
        """Yield the cache, created as a server does."""
        kind: type[ResponseCache] = part_of(self.plugin, "cache", self.cache)
        parameters = ModelConfig().parameters
        for key, value in self.settings().items():
            parameters[key].string_value = value
        cache = kind(parse_parameters(kind.Parameters, parameters))
        yield cache
        cache.close()

    def test_a_missing_key_returns_none(self, tested: ResponseCache) -> None:
        tested.put(_key(1), _example(1))
        assert tested.get(_key(2)) is None

    @pytest.mark.parametrize("datatype", sorted(dtypes.BY_NAME))
    def test_tensors_of_every_data_type_round_trip(self, tested: ResponseCache, datatype: str) -> None:
        for number, shape in enumerate(((2, 3), (0, 4), ())):
            sent = _tensor(datatype, shape)
            tested.put(_key(number), _response({"y": sent, "z": sent}))
            found = _found(tested, number)
            assert list(found.outputs) == ["y", "z"], "outputs keep their order"
            for returned in found.outputs.values():
                assert returned.shape == sent.shape
                assert bytes_of(returned) == bytes_of(sent)
                assert isinstance(returned, BytesTensor) or returned.dtype == np.asarray(sent).dtype

    def test_parameters_round_trip_with_their_types(self, tested: ResponseCache) -> None:
        sent: dict[str, str | int | float | bool] = {"text": "é", "number": 1, "true": True, "half": 0.5}
        tested.put(_key(0), _response({}, sent))
        found = _found(tested, 0).parameters
        assert {name: (type(value), value) for name, value in found.items()} == {
            name: (type(value), value) for name, value in sent.items()
        }

    def test_each_key_has_its_own_response(self, tested: ResponseCache) -> None:
        for number in range(100):
            tested.put(_key(number), _example(number))
        assert [_number(_found(tested, number)) for number in range(100)] == list(range(100))

    def test_a_key_put_twice_has_one_of_both_responses(self, tested: ResponseCache) -> None:
        """Two servers, or two requests, may store the same key at the same time."""
        tested.put(_key(0), _example(1))
        tested.put(_key(0), _example(2))
        assert _number(_found(tested, 0)) in (1, 2)
        tested.put(_key(3), _example(3))
        assert _number(_found(tested, 3)) == 3

    def test_returned_tensors_are_read_only(self, tested: ResponseCache) -> None:
        tested.put(_key(0), _example(5))
        array = np.asarray(_found(tested, 0).outputs["y"])
        assert not array.flags.writeable, "many callers share the same tensors"

    def test_metrics_can_be_read_at_any_time(self, tested: ResponseCache) -> None:
        if not tested.metrics:
            pytest.skip(f"{NOT_RUN}{self.cache}: it declares no metrics")
        seen = {metric.name: 0.0 for metric in tested.metrics}
        for number in range(50):
            for metric, value in measured(tested):
                if metric.kind == "counter":
                    assert value >= seen[metric.name], f"counter '{metric.name}' went down to {value:g}"
                seen[metric.name] = value
            tested.put(_key(number), _example(number))
            tested.get(_key(number // 2))
        tested.close()
        measured(tested)

    def test_a_remote_cache_serves_threads_at_once(self, tested: ResponseCache) -> None:
        if not tested.is_remote:
            pytest.skip(f"{NOT_RUN}{self.cache}: it is called on the event loop only")

        def put_and_get(thread: int) -> list[int]:
            numbers = range(thread * 1000, thread * 1000 + _PUTS)
            for number in numbers:
                tested.put(_key(number), _example(number))
            return [_number(_found(tested, number)) - number for number in numbers]

        with ThreadPoolExecutor(_THREADS) as pool:
            assert list(pool.map(put_and_get, range(_THREADS))) == [[0] * _PUTS] * _THREADS

    def test_a_server_finds_it_and_answers_from_it(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        repository = tmp_path_factory.mktemp("repository")
        write_model(repository, _CACHED)
        x = np.ones((1, 3), np.float32)
        server = Server(repository, cache_config={self.cache: dict(self.settings())})
        assert_installed("cache", self.cache, self.plugin, server.plugins.caches.names())
        with server:
            (model,) = server.served(NAME)
            for _ in range(_MAX_REQUESTS):  # a response may be stored after its caller got it
                outputs = server.infer(NAME, {"x": x}).outputs
                np.testing.assert_array_equal(np.asarray(outputs["y"]), x)
                if model.snapshot().cache_hit.count:
                    return
        raise AssertionError(f"none of {_MAX_REQUESTS} equal requests is answered from the cache")


def _key(number: int) -> bytes:
    return sha256(b"%d" % number).digest()


def _example(number: int) -> CachedResponse:
    return _response({"y": np.full((1, 4), number, np.int32)})


def _response(outputs: Mapping[str, Tensor], parameters: Mapping[str, Any] = MappingProxyType({})) -> CachedResponse:
    """Return a response as a server stores it: read-only copies, and their size in memory."""
    copies = {name: copy_of(tensor) for name, tensor in outputs.items()}
    for tensor in copies.values():
        if not isinstance(tensor, BytesTensor):
            tensor.flags.writeable = False
    return CachedResponse(copies, dict(parameters), 1000 + sum(tensor.nbytes for tensor in copies.values()))


def _found(cache: ResponseCache, number: int) -> CachedResponse:
    found = cache.get(_key(number))
    assert found is not None, "the key was put, and there is room"
    return found


def _number(response: CachedResponse) -> int:
    return int(np.asarray(response.outputs["y"])[0, 0])


def _tensor(datatype: str, shape: tuple[int, ...]) -> Tensor:
    kind, count = dtypes.BY_NAME[datatype], int(np.prod(shape, dtype=np.int64))
    if kind is dtypes.BYTES:
        return BytesTensor.from_items([b"x" * number for number in range(count)], shape)
    content: Any = np.arange(count * kind.itemsize, dtype=np.uint8) & 1
    array: Tensor = content.view(kind.numpy).reshape(shape)
    return array
