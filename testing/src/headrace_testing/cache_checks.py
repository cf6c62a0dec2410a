"""Checks of a response cache: what was stored is found, and nothing else."""

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
from headrace_testing.driving import part_of
from headrace_testing.example import NAME, bytes_of, copy_of, write_model
from headrace_testing.metrics import measured

_THREADS, _PUTS = 8, 25
#: A server gets the same request at most this often.
_ASKED = 1000
_CACHED = f"""name: "{NAME}" backend: "identity" max_batch_size: 8 response_cache {{ enable: true }}
    input {{ name: "x" data_type: TYPE_FP32 dims: 3 }} output {{ name: "y" data_type: TYPE_FP32 dims: 3 }}"""


class CacheChecks:
    """A subclass sets ``plugin``, the module of the entry point, and ``cache``, the name in ``--cache-config``.

    ``settings`` are the other settings there. The cache is empty at first, and has room for a few hundred small
    responses.
    """

    plugin: ClassVar[str]
    cache: ClassVar[str]

    def settings(self) -> Mapping[str, str]:
        """Return the settings in ``--cache-config``."""
        return {}

    @pytest.fixture
    def kept(self) -> Iterator[ResponseCache]:
        """Yield the cache, created as by a server."""
        kind: type[ResponseCache] = part_of(self.plugin, "cache", self.cache)
        given = ModelConfig().parameters
        for key, value in self.settings().items():
            given[key].string_value = value
        found = kind(parse_parameters(kind.Parameters, given))
        yield found
        found.close()

    def test_what_was_not_put_is_not_there(self, kept: ResponseCache) -> None:
        kept.put(_key(1), _answer(1))
        assert kept.get(_key(2)) is None

    @pytest.mark.parametrize("datatype", sorted(dtypes.BY_NAME))
    def test_tensors_of_every_data_type_come_back_as_they_were(self, kept: ResponseCache, datatype: str) -> None:
        for number, shape in enumerate(((2, 3), (0, 4), ())):
            sent = _tensor(datatype, shape)
            kept.put(_key(number), _response({"y": sent, "z": sent}))
            found = _found(kept, number)
            assert list(found.outputs) == ["y", "z"], "outputs keep their order"
            for came in found.outputs.values():
                assert came.shape == sent.shape
                assert bytes_of(came) == bytes_of(sent)
                assert isinstance(came, BytesTensor) or came.dtype == np.asarray(sent).dtype

    def test_parameters_come_back_with_their_types(self, kept: ResponseCache) -> None:
        sent: dict[str, str | int | float | bool] = {"text": "é", "number": 1, "true": True, "half": 0.5}
        kept.put(_key(0), _response({}, sent))
        found = _found(kept, 0).parameters
        assert {name: (type(value), value) for name, value in found.items()} == {
            name: (type(value), value) for name, value in sent.items()
        }

    def test_each_key_has_its_own_answer(self, kept: ResponseCache) -> None:
        for number in range(100):
            kept.put(_key(number), _answer(number))
        assert [_number(_found(kept, number)) for number in range(100)] == list(range(100))

    def test_what_is_put_twice_is_one_of_both(self, kept: ResponseCache) -> None:
        """Two servers, or two requests, may store the same key at the same time."""
        kept.put(_key(0), _answer(1))
        kept.put(_key(0), _answer(2))
        assert _number(_found(kept, 0)) in (1, 2)
        kept.put(_key(3), _answer(3))
        assert _number(_found(kept, 3)) == 3

    def test_nobody_can_write_into_what_comes_back(self, kept: ResponseCache) -> None:
        kept.put(_key(0), _answer(5))
        array = np.asarray(_found(kept, 0).outputs["y"])
        assert not array.flags.writeable, "many callers are given the same tensors"

    def test_its_metrics_can_be_read_at_any_time(self, kept: ResponseCache) -> None:
        if not kept.metrics:
            pytest.skip("it declares no metrics")
        seen = {metric.name: 0.0 for metric in kept.metrics}
        for number in range(50):
            for metric, value in measured(kept):
                if metric.kind == "counter":
                    assert value >= seen[metric.name], f"counter '{metric.name}' went down to {value:g}"
                seen[metric.name] = value
            kept.put(_key(number), _answer(number))
            kept.get(_key(number // 2))
        kept.close()
        measured(kept)

    def test_a_remote_cache_serves_threads_at_once(self, kept: ResponseCache) -> None:
        if not kept.is_remote:
            pytest.skip("it is asked on the event loop only")

        def put_and_get(thread: int) -> list[int]:
            numbers = range(thread * 1000, thread * 1000 + _PUTS)
            for number in numbers:
                kept.put(_key(number), _answer(number))
            return [_number(_found(kept, number)) - number for number in numbers]

        with ThreadPoolExecutor(_THREADS) as pool:
            assert list(pool.map(put_and_get, range(_THREADS))) == [[0] * _PUTS] * _THREADS

    def test_a_server_finds_it_and_answers_from_it(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        repository = tmp_path_factory.mktemp("repository")
        write_model(repository, _CACHED)
        x = np.ones((1, 3), np.float32)
        server = Server(repository, cache_config={self.cache: dict(self.settings())})
        names = server.plugins.caches.names()
        assert self.cache in names, (
            f"no installed distribution brings cache '{self.cache}', only {', '.join(names)}; add an entry "
            f'point of the group headrace: {self.cache} = "{self.plugin}"'
        )
        with server:
            (model,) = server.served(NAME)
            for _ in range(_ASKED):  # a response may be stored after its caller got it
                outputs = server.infer(NAME, {"x": x}).outputs
                np.testing.assert_array_equal(np.asarray(outputs["y"]), x)
                if model.snapshot().cache_hit.count:
                    return
        raise AssertionError(f"of {_ASKED} requests that ask the same none is answered from the cache")


def _key(number: int) -> bytes:
    return sha256(b"%d" % number).digest()


def _answer(number: int) -> CachedResponse:
    return _response({"y": np.full((1, 4), number, np.int32)})


def _response(outputs: Mapping[str, Tensor], parameters: Mapping[str, Any] = MappingProxyType({})) -> CachedResponse:
    """Return a stored response as a server makes it: read-only copies, and their size in memory."""
    kept = {name: copy_of(tensor) for name, tensor in outputs.items()}
    for tensor in kept.values():
        if not isinstance(tensor, BytesTensor):
            tensor.flags.writeable = False
    return CachedResponse(kept, dict(parameters), 1000 + sum(tensor.nbytes for tensor in kept.values()))


def _found(cache: ResponseCache, number: int) -> CachedResponse:
    found = cache.get(_key(number))
    assert found is not None, "it was put a moment ago, and there is room"
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
