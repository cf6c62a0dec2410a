"""A model without a config, in a process of its own: what it listens on, its death, and models for other tasks."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import InvalidArgument, Server, Unavailable
from headrace_llm import Contract, Task
from headrace_testing.serving import infer, on_loop, serve
from tests.backends.llamacpp.gguf_files import write_tiny
from tests.backends.llamacpp.smol import TINY, ask, put_model, request, responses, text


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """``tiny`` without a config, and ``vectors``, which makes embeddings in a thread."""
    repository = tmp_path_factory.mktemp("models")
    write_tiny(put_model(repository, "tiny", None, {}) / "a-tiny-model.Q4_1.gguf", 256)
    vectors = {**TINY, "task": "embedding", "context": "64", "pooling": "mean", "isolation": "thread"}
    write_tiny(put_model(repository, "vectors", None, vectors) / "model.gguf")
    write_tiny(put_model(repository, "ranks", None, {**vectors, "task": "reranking"}) / "model.gguf")
    with serve(repository) as server:
        yield server


def children() -> set[int]:
    tasks = Path("/proc/self/task").iterdir()
    return {int(pid) for task in tasks for pid in (task / "children").read_text().split()}


def engine_process() -> int:
    """Return the child of this process that has loaded llama.cpp, and not to run templates first."""
    (pid,) = [
        pid
        for pid in children()
        if "xllamacpp" in Path(f"/proc/{pid}/maps").read_text()
        and b"run_templates" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    return pid


def listening(pid: int) -> list[str]:
    """Return the TCP ports and Unix sockets on which the process ``pid`` listens."""
    own = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            own.add(str(link.readlink()))
        except OSError:
            continue
    found = []
    for kind in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{kind}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                found.append(fields[1])
    for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "00010000" and f"socket:[{fields[6]}]" in own:
            found += fields[7:]
    return found


def test_a_model_without_a_config_is_served_in_a_process(served: Server) -> None:
    given = ask(served, "Once upon a time", "stream", model="tiny", sampling={"max_tokens": 3})
    assert text(given)
    config = served.resolve("tiny").config
    assert (config.backend, config.model_transaction_policy.decoupled) == ("llamacpp", True)
    assert {"messages", "tools"} <= set(served.resolve("tiny").inputs)
    assert "image" not in served.resolve("tiny").inputs  # it has no projector
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    with pytest.raises(InvalidArgument, match="takes no tools: its chat template has none"):
        ask(served, "", model="tiny", messages=[{"role": "user", "content": "Hi"}], tools=tools)


def test_llama_cpp_s_own_server_has_no_door(served: Server) -> None:
    """It listens on a socket that is in no directory any more."""
    (door,) = listening(engine_process())
    assert door.endswith("/closed.sock")
    assert not Path(door).parent.exists()
    with socket.socket(socket.AF_UNIX) as client, pytest.raises(FileNotFoundError):
        client.connect(door)


def test_the_death_of_the_process_ends_its_requests_with_an_error_and_it_comes_back(served: Server) -> None:
    async def scenario() -> None:
        long: dict[str, Any] = {"max_tokens": 2000, "ignore_eos": True}
        streams = [served.engine.responses(request("Hi", "stream", model="tiny", sampling=long)) for _ in range(8)]
        running = [asyncio.ensure_future(_last(stream)) for stream in streams]
        await asyncio.sleep(0.3)
        os.kill(engine_process(), signal.SIGKILL)
        errors = await asyncio.gather(*running, return_exceptions=True)
        assert [type(error) for error in errors] == [Unavailable] * 8
        again = request("Hi", "stream", model="tiny", sampling={"max_tokens": 2})
        assert text(await responses(served, again))

    async def _last(stream: Any) -> Any:
        async for response in stream:
            last = response
        return last

    on_loop(served, scenario())


def test_a_model_for_embeddings_takes_text_or_tokens(served: Server) -> None:
    contract = Contract.of(served.engine.resolve("vectors"))
    assert contract is not None
    assert contract.task is Task.EMBEDDING
    words = _embedding(served, "The cat sleeps.")
    assert words.shape == (64,)
    assert np.linalg.norm(words) == pytest.approx(1, abs=1e-3)
    assert not np.allclose(words, _embedding(served, "The cat slept."), atol=1e-3)
    given = infer(served, "vectors", {"input_ids": np.array([100, 101, 102, 103], np.int32)})
    assert np.asarray(given["num_input_tokens"]).tolist() == [4]
    with pytest.raises(InvalidArgument, match="64"):
        _embedding(served, "word " * 100)
    with pytest.raises(InvalidArgument, match="either text or input_ids"):
        infer(served, "vectors", {})


def test_a_model_that_ranks_gives_a_score(served: Server) -> None:
    query, document = np.array(["cat"], object), np.array(["kitten"], object)
    given = infer(served, "ranks", {"query": query, "document": document})
    assert np.isfinite(np.asarray(given["score"])).all()
    assert np.asarray(given["num_input_tokens"]).tolist() == [12]
    with pytest.raises(InvalidArgument, match="input 'query' is empty"):
        infer(served, "ranks", {"query": np.array([""], object), "document": document})


def _embedding(server: Server, words: str) -> Any:
    return infer(server, "vectors", {"text": np.array([words], object)})["embedding"]
