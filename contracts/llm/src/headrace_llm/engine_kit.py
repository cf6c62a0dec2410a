"""A conformance check for engines: ``await check_engine(server, "model")`` in a test of the engine's author.

::

    def test_the_contract(tmp_path):
        async def main():
            async with Server(repository_of(tmp_path)) as server:
                await check_engine(server, "model")

        asyncio.run(main())
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson

from headrace import BytesTensor, HeadraceError, InferRequest, InferResponse, InvalidArgument, Server, Unavailable

#: The place of a disconnected caller must be free after this time, in seconds. An engine may finish its step first.
FREE_S = 5.0
_ENDS = ("stop", "length", "tool_calls")


@dataclass
class _GivenText:
    """The text that a caller has received, in parts, and the other outputs of each response."""

    parts: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    tokens: int = 0

    @property
    def text(self) -> str:
        return "".join(self.parts)

    def take(self, response: InferResponse) -> None:
        self.parts.append(_string(response, "text_output"))
        self.reasons.append(_string(response, "finish_reason"))
        self.tokens += int(np.asarray(response.outputs["num_output_tokens"]).sum())


async def check_engine(
    server: Server,
    model: str,
    *,
    prompt: str = "Once upon a time",
    max_tokens: int = 12,
    is_exact: bool = True,
    sampling: Mapping[str, Any] | None = None,
) -> None:
    """Check that ``model`` of the running ``server`` keeps the contract. Raises `AssertionError` with the broken rule.

    Every request asks for the likeliest tokens, with ``sampling`` besides. The answer to ``prompt`` must have at least
    three tokens and not end before ``max_tokens``. ``is_exact``: the same request has the same answer, also beside
    others; false for engines whose numbers depend on the batch. Takes about ten answers. Call it on the loop of
    ``server``, while no other caller uses ``model``.
    """
    kit = _EngineKit(server, model, prompt, {"temperature": 0, "max_tokens": max_tokens, **(sampling or {})}, is_exact)
    streamed = await kit.check_stream(max_tokens)
    await kit.check_gathered(streamed)
    await kit.check_stop(streamed)
    await kit.check_slow_reader(streamed)
    await kit.check_cancellation()
    await kit.check_refusals()


class _EngineKit:
    def __init__(self, server: Server, model: str, prompt: str, sampling: dict[str, Any], is_exact: bool) -> None:
        self._server, self._model, self._prompt, self._sampling = server, model, prompt, sampling
        self._is_exact = is_exact

    async def check_stream(self, max_tokens: int) -> _GivenText:
        given = await self._ask(stream=True)
        _require(len(given.parts) >= 3, f"a stream of {max_tokens} tokens must have parts, got {given.parts}")
        _require(given.reasons[-1] in _ENDS, f"the last finish_reason must be one of {_ENDS}, got {given.reasons[-1]}")
        early = [reason for reason in given.reasons[:-1] if reason != "None"]
        _require(not early, f"finish_reason must be None before the last response, got {early}")
        _require(1 <= given.tokens <= max_tokens, f"num_output_tokens must be at most {max_tokens}, got {given.tokens}")
        return given

    async def check_gathered(self, streamed: _GivenText) -> None:
        given = await self._ask()
        _require(len(given.parts) == 1, f"without stream there must be one response, got {len(given.parts)}")
        if self._is_exact:
            _require(given.text == streamed.text, f"the text is {given.text!r}, but {streamed.text!r} in a stream")
            _require(
                given.tokens == streamed.tokens, f"it has {given.tokens} tokens, but {streamed.tokens} in a stream"
            )
        echoed = await self._ask(exclude_input_in_output=False)
        _require(echoed.text.startswith(self._prompt), f"the text must begin with the prompt, got {echoed.text!r}")

    async def check_stop(self, streamed: _GivenText) -> None:
        """A stop string ends the text, is not part of it, and may lie across tokens."""
        text = streamed.text
        half = len(text) // 2
        stop = text[half - 1 : half + 2]
        if not self._is_exact or not stop.strip():
            return
        given = await self._ask(stream=True, stop=[stop])
        before = text[: text.index(stop)]
        _require(given.text == before, f"with the stop string {stop!r} the text must be {before!r}, got {given.text!r}")
        _require(given.reasons[-1] == "stop", f"finish_reason must be stop, got {given.reasons[-1]}")

    async def check_slow_reader(self, streamed: _GivenText) -> None:
        responses = self._server.engine.responses(self._request(stream=True))
        slow = _GivenText()
        slow.take(await anext(responses))
        other = await self._ask()  # a caller that does not read stops no other
        _require(bool(other.text), "a request beside a slow reader must be answered")
        async for response in responses:
            slow.take(response)
        _require(slow.reasons[-1] in _ENDS, f"a slow reader must get the end, got {slow.reasons[-1]}")
        if self._is_exact:
            _require(slow.text == streamed.text, f"a slow reader must get {streamed.text!r}, got {slow.text!r}")

    async def check_cancellation(self) -> None:
        responses = self._server.engine.responses(self._request(stream=True, max_tokens=4096, ignore_eos=True))
        async for _ in responses:
            if self._open_streams():  # the metric is written every 100 ms
                break
        await responses.aclose()  # type: ignore[attr-defined]  # it is an asynchronous generator
        for _ in range(int(FREE_S / 0.01)):
            await asyncio.sleep(0.01)
            if self._open_streams() == 0:
                break
        else:
            raise AssertionError(f"the request of a caller that disconnects must end within {FREE_S:g} s")
        _require(bool((await self._ask()).text), "after a caller has disconnected, other requests must be answered")

    async def check_refusals(self) -> None:
        for what, name, request in (
            ("an unknown sampling parameter", "no_such_member", self._request(no_such_member=1)),
            ("a wrong sampling parameter", "temperature", self._request(temperature="hot")),
            ("an empty prompt", "text_input", self._request("")),
        ):
            error = await self._error(request)
            _require(isinstance(error, InvalidArgument), f"{what} must be an InvalidArgument, got {error!r}")
            _require(name in str(error), f"the error for {what} must name {name}, got {error}")
        error = await self._error(self._request(max_tokens=4096, ignore_eos=True, timeout_us=1000))
        _require(isinstance(error, Unavailable), f"a request whose time is over must be Unavailable, got {error!r}")

    async def _ask(self, **wanted: Any) -> _GivenText:
        given = _GivenText()
        async for response in self._server.engine.responses(self._request(**wanted)):
            given.take(response)
        return given

    async def _error(self, request: InferRequest) -> HeadraceError | None:
        try:
            async for _ in self._server.engine.responses(request):
                pass
        except HeadraceError as error:
            return error
        return None

    def _request(
        self,
        prompt: str | None = None,
        *,
        stream: bool = False,
        exclude_input_in_output: bool = True,
        timeout_us: int = 0,
        **sampling: Any,
    ) -> InferRequest:
        text = self._prompt if prompt is None else prompt
        inputs: dict[str, Any] = {
            "text_input": np.array([text.encode()], object),
            "stream": np.array([stream]),
            "exclude_input_in_output": np.array([exclude_input_in_output]),
            "sampling_parameters": np.array([orjson.dumps({**self._sampling, **sampling})], object),
            "return_finish_reason": np.array([True]),
            "return_num_output_tokens": np.array([True]),
        }
        return InferRequest(self._model, inputs, timeout_us=timeout_us)

    def _open_streams(self) -> float:
        families = [family for family in self._server.engine.collect() if family.name == "nv_llm_streams"]
        samples = [sample for family in families for sample in family.samples]
        return sum(sample.value for sample in samples if sample.labels["model"] == self._model)


def _string(response: InferResponse, name: str) -> str:
    tensor = response.outputs.get(name)
    if not isinstance(tensor, BytesTensor):
        raise AssertionError(f"a response must have the output {name} of type BYTES, got {list(response.outputs)}")
    return b"".join(tensor.items()).decode()


def _require(is_kept: bool, rule: str) -> None:
    if not is_kept:
        raise AssertionError(rule)
