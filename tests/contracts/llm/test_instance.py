"""An engine on `headrace_llm.GenerationInstance`, in a server: its callers, slow ones and ones that leave."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from time import monotonic_ns
from typing import Any, ClassVar

import numpy as np
import pytest

from headrace import (
    Backend,
    BackendError,
    BytesTensor,
    InferRequest,
    InferResponse,
    InvalidArgument,
    Model,
    ResourceExhausted,
    Server,
    Unavailable,
)
from headrace.messages.ticket import UNREAD
from headrace.registry import PluginInfo
from headrace_llm import Delta, GenerationInstance, GenerationRequest, TokenStream, complete_generation


class Words(Backend):
    """Writes the words of the prompt, one at a time: when ``go`` is set, if the prompt says so."""

    name = "words"
    instances: ClassVar[list[Writer]] = []

    def complete_config(self, model: Model) -> None:
        complete_generation(model.config, "image")

    def load(self, model: Model) -> Writer:
        self.instances.append(Writer(model, most_streams=4))
        return self.instances[-1]


class Writer(GenerationInstance):
    def __init__(self, model: Model, most_streams: int) -> None:
        super().__init__(model, most_streams)
        self.go, self.left = threading.Event(), threading.Event()
        self.written = 0

    def begin(self, request: GenerationRequest, stream: TokenStream) -> None:
        if request.text == "refuse":
            raise InvalidArgument("this engine refuses that")
        if request.text == "break":
            raise RuntimeError("oh no")
        threading.Thread(target=self._write, args=(request, stream), daemon=True).start()

    def cancel(self, stream: TokenStream) -> None:
        self.left.set()

    def _write(self, request: GenerationRequest, stream: TokenStream) -> None:
        words = (request.text or "").split()
        if words[0] == "wait":
            self.go.wait(10)
        if words[0] == "many":
            words = [str(number) for number in range(1000)]
        if words[0] == "pause":
            words = [str(number) for number in range(200)]
        for place, word in enumerate(words[: request.max_tokens]):
            if not stream.write(Delta(text=f" {word}", num_tokens=1, ids=[place], num_input_tokens=7)):
                return
            self.written += 1
        if (request.text or "") == "pause":
            self.go.wait(10)
        stream.finish("stop")


@pytest.fixture
def server(tmp_path: Path) -> Server:
    (tmp_path / "w" / "1").mkdir(parents=True)
    (tmp_path / "w" / "config.pbtxt").write_text('backend: "words"')
    Words.instances.clear()
    server = Server(tmp_path, plugins=(), exit_timeout_secs=5)
    server.plugins.backends.add(Words, PluginInfo("words", "tests", "0"))
    return server


def request(text: str, *asked: str, **more: Any) -> InferRequest:
    inputs: dict[str, Any] = {"text_input": np.array([text], object)}
    inputs |= {name: np.array([True]) for name in asked}
    inputs |= {name: np.array([value], object) for name, value in more.pop("inputs", {}).items()}
    return InferRequest("w", inputs, **more)


async def responses(server: Server, sent: InferRequest) -> list[InferResponse]:
    return [response async for response in server.engine.responses(sent)]


def text(response: InferResponse, name: str = "text_output") -> str:
    tensor = response.outputs[name]
    assert isinstance(tensor, BytesTensor)
    return b"".join(tensor.items()).decode()


def run(server: Server, scenario: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with server:
            await scenario()

    asyncio.run(main())


def test_a_caller_that_streams_gets_a_response_for_each_part(server: Server) -> None:
    async def scenario() -> None:
        given = await responses(server, request("a b c", "stream", "return_finish_reason", "return_num_output_tokens"))
        assert [text(each) for each in given] == [" a", " b", " c", ""]
        assert [text(each, "finish_reason") for each in given] == ["None", "None", "None", "stop"]
        assert sum(int(np.asarray(each.outputs["num_output_tokens"])[0]) for each in given) == 3

    run(server, scenario)


def test_a_caller_that_does_not_stream_gets_one_response_with_the_prompt_before_the_text(server: Server) -> None:
    async def scenario() -> None:
        (given,) = await responses(server, request("a b", "return_num_input_tokens", "return_output_ids"))
        assert text(given) == "a b a b"
        assert set(given.outputs) == {"text_output", "num_input_tokens", "output_ids"}
        assert np.asarray(given.outputs["num_input_tokens"]).tolist() == [7]
        assert np.asarray(given.outputs["output_ids"]).tolist() == [0, 1]
        (given,) = await responses(server, request("a b", "exclude_input_in_output"))
        assert text(given) == " a b"

    run(server, scenario)


def test_sampling_parameters_are_an_input_or_the_parameters_of_the_request(server: Server) -> None:
    async def scenario() -> None:
        words = " ".join("abcdefghijklmnopqrstuvwxyz")
        excluded = ("exclude_input_in_output",)
        (given,) = await responses(server, request(words, *excluded))
        assert len(text(given).split()) == 16  # as in vLLM
        (given,) = await responses(
            server, request(words, *excluded, inputs={"sampling_parameters": '{"max_tokens": 2}'})
        )
        assert text(given) == " a b"
        sent = request(words, *excluded, parameters={"max_tokens": 3, "a header": "that is forwarded"})
        (given,) = await responses(server, sent)
        assert text(given) == " a b c"

    run(server, scenario)


def test_a_request_that_the_engine_refuses_or_breaks_on_hears_why_and_no_other_does(server: Server) -> None:
    async def scenario() -> None:
        for prompt, error, words in (
            ("refuse", InvalidArgument, "refuses that"),
            ("break", BackendError, "model 'w': RuntimeError: oh no"),
        ):
            with pytest.raises(error, match=words):
                await responses(server, request(prompt))
        assert text((await responses(server, request("a", "exclude_input_in_output")))[0]) == " a"
        assert not Words.instances[0]._streams

    run(server, scenario)


def test_no_more_than_the_most_streams_are_taken(server: Server) -> None:
    async def scenario() -> None:
        writer = Words.instances[0]
        waiting = [asyncio.ensure_future(responses(server, request("wait"))) for _ in range(4)]
        while len(writer._streams) < 4:
            await asyncio.sleep(0.001)
        with pytest.raises(ResourceExhausted, match=r"has 4 requests, its limit .* is 4"):
            await responses(server, request("a"))
        writer.go.set()
        assert [text(given) for (given,) in await asyncio.gather(*waiting)] == ["wait wait"] * 4

    run(server, scenario)


def test_an_engine_hears_soon_that_a_caller_has_left(server: Server) -> None:
    async def scenario() -> None:
        writer = Words.instances[0]
        stream = server.engine.responses(request("wait", "stream"))
        first = asyncio.ensure_future(anext(stream))
        while not writer._streams:
            await asyncio.sleep(0.001)
        first.cancel()
        assert await asyncio.to_thread(writer.left.wait, 5)
        writer.go.set()
        while writer._streams:
            await asyncio.sleep(0.001)
        assert writer.written == 0

    run(server, scenario)


def test_a_slow_reader_does_not_stop_the_engine_and_loses_nothing(server: Server) -> None:
    async def scenario() -> None:
        writer = Words.instances[0]
        sampling = {"sampling_parameters": '{"max_tokens": 1000}'}
        stream = server.engine.responses(request("many", "stream", "return_finish_reason", inputs=sampling))
        given = [await anext(stream)]
        while writer.written < 1000:  # though only one response is read
            await asyncio.sleep(0.001)
        given += [each async for each in stream]
        assert "".join(map(text, given)).split() == [str(number) for number in range(1000)]
        assert UNREAD < len(given) < 200  # the rest was joined
        assert text(given[-1], "finish_reason") == "stop"

    run(server, scenario)


def test_a_slow_reader_costs_no_thread_and_gets_the_rest_of_an_engine_that_waits(server: Server) -> None:
    async def scenario() -> None:
        writer = Words.instances[0]
        sampling = {"sampling_parameters": '{"max_tokens": 1000}'}
        stream = server.engine.responses(request("pause", "stream", inputs=sampling))
        given = [await anext(stream)]
        while writer.written < 200:
            await asyncio.sleep(0.001)
        assert not [thread for thread in threading.enumerate() if thread.name == "slow reader"]
        while len("".join(map(text, given)).split()) < 200:  # though the engine writes nothing
            given.append(await asyncio.wait_for(anext(stream), 5))
        writer.go.set()
        async for _ in stream:
            pass

    run(server, scenario)


@pytest.mark.parametrize("limit", ["timeout", "deadline"])
def test_a_request_whose_time_is_over_is_answered_and_its_place_is_free(server: Server, limit: str) -> None:
    async def scenario() -> None:
        writer = Words.instances[0]
        sent = request("wait", "stream", timeout_us=20_000 if limit == "timeout" else 0)
        if limit == "deadline":
            sent.expire_at(monotonic_ns() + 20_000_000)
        with pytest.raises(Unavailable, match="Request timeout expired"):
            await responses(server, sent)
        assert await asyncio.to_thread(writer.left.wait, 5)
        while writer._streams:  # though the engine still waits
            await asyncio.sleep(0.001)
        writer.go.set()

    run(server, scenario)


def test_unloading_ends_the_streams_with_an_error(server: Server) -> None:
    async def scenario() -> None:
        waiting = asyncio.ensure_future(responses(server, request("wait")))
        writer = Words.instances[0]
        while not writer._streams:
            await asyncio.sleep(0.001)
        writer.fail_all(Unavailable("the engine has died"))
        with pytest.raises(Unavailable, match="the engine has died"):
            await waiting
        writer.go.set()

    run(server, scenario)


def test_tokens_are_counted_on_the_page_of_metrics(server: Server) -> None:
    async def scenario() -> None:
        await responses(server, request("a b c", "stream"))
        labels = {"model": "w", "version": "1"}

        def value(name: str) -> float | None:
            samples = [each for family in server.engine.collect() for each in family.samples]
            return next((each.value for each in samples if each.name == name and each.labels == labels), None)

        while value("nv_llm_output_tokens") != 3:
            await asyncio.sleep(0.01)
        assert value("nv_llm_input_tokens") == 7
        assert value("nv_llm_time_to_first_token_ms_count") == 1
        assert value("nv_llm_time_between_tokens_ms_count") == 2

    run(server, scenario)


def test_an_instance_closes_while_its_thread_checks_the_streams(server: Server) -> None:
    async def scenario() -> None:
        (instance,) = Words.instances
        checking = threading.Event()

        def publish(running: int) -> None:
            if not checking.is_set():
                instance._has_streams.clear()
                checking.set()
                instance._has_streams.wait(10)  # until `close` sets it, after `_closed`

        instance.metrics.publish = publish  # type: ignore[assignment]
        await responses(server, request("a"))
        await asyncio.to_thread(checking.wait, 10)

    run(server, scenario)
