"""vLLM itself, with real weights, in a real server. Judges: transformers' own tokens, and the stock tritonclient.

For the session `vllm` of noxfile.py: `conftest` leaves it out where vLLM is not installed.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import queue
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from headrace import Server
from headrace_llm import read_logprobs, token_bytes
from headrace_llm.engine_kit import check_engine

if TYPE_CHECKING:
    from tests.conftest import Headrace

PROMPT = "The capital of France is"
CHAT = [{"role": "user", "content": "What is the capital of France?"}]
LONG_S = 240
RANK, SCALE = 8, 2


def model_json(weights: Path, **more: Any) -> str:
    usual = {"dtype": "float32", "max_model_len": 1024, "enforce_eager": True}
    return json.dumps({"model": str(weights), **usual, "max_num_seqs": 16, **more})


def write_model(repository: Path, name: str, text: str, config: str = "") -> None:
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "1" / "model.json").write_text(text)
    (repository / name / "config.pbtxt").write_text(f'backend: "vllm"\n{config}')


def parameter(key: str, value: str) -> str:
    return f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'


def adapter() -> dict[str, tuple[Any, Any]]:
    """The matrices A f32[rank, inputs] and B f32[outputs, rank] of an adapter, by the name of their layer."""
    rng = np.random.default_rng(7)
    return {
        f"model.layers.{number}.self_attn.{name}": (
            rng.normal(size=(RANK, 576), scale=0.2).astype(np.float32),
            rng.normal(size=(outputs, RANK), scale=0.2).astype(np.float32),
        )
        for number in range(30)
        for name, outputs in (("q_proj", 576), ("v_proj", 192))
    }


def write_adapter(folder: Path) -> None:
    from safetensors.numpy import save_file

    folder.mkdir()
    about = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK * SCALE, "target_modules": ["q_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps({**about, "bias": "none", "task_type": "CAUSAL_LM"}))
    matrices = {
        f"base_model.model.{layer}.lora_{name}.weight": matrix
        for layer, pair in adapter().items()
        for name, matrix in zip("AB", pair, strict=True)
    }
    save_file(matrices, folder / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory, keep_serving: Callable[..., Headrace]) -> Headrace:
    repository = tmp_path_factory.mktemp("models")
    config = parameter("REPORT_CUSTOM_METRICS", "true") + parameter("tool_parser", "hermes")
    text = model_json(smollm2, scheduling_policy="priority", enable_lora=True, max_lora_rank=RANK)
    write_model(repository, "smol", text, config)
    write_adapter(repository / "smol" / "1" / "loud")
    (repository / "smol" / "1" / "multi_lora.json").write_text('{"loud": "loud"}')
    words = (f"--model-repository={repository}", "--model-control-mode=explicit", "--load-model=smol")
    return keep_serving(*words, environ={"VLLM_CPU_KVCACHE_SPACE": "1"})


def generate(server: Headrace, **inputs: Any) -> dict[str, Any]:
    """Return the one response to ``inputs``, by tritonclient over gRPC. Raises `InferenceServerException`."""
    responses = stream(server, **inputs)
    assert len(responses) == 1
    return responses[0]


def stream(server: Headrace, **inputs: Any) -> list[dict[str, Any]]:
    """Return all responses, with their outputs as lists."""
    found: queue.Queue[Any] = queue.Queue()
    with grpcclient.InferenceServerClient(f"127.0.0.1:{server.grpc}") as client:
        client.start_stream(lambda result, error: found.put(error or result))
        client.async_stream_infer("smol", tensors(**inputs), enable_empty_final_response=True)
        responses = []
        while True:
            result = found.get(timeout=LONG_S)
            if isinstance(result, Exception):
                raise result
            response = result.get_response()
            if response.outputs:
                responses.append({each.name: result.as_numpy(each.name).tolist() for each in response.outputs})
            if response.parameters["triton_final_response"].bool_param:
                return responses


def tensors(**inputs: Any) -> list[Any]:
    made = []
    for name, value in inputs.items():
        if isinstance(value, bool):
            array, datatype = np.array([value]), "BOOL"
        elif name == "input_ids":
            array, datatype = np.array(value, np.int32), "INT32"
        else:
            text = value if isinstance(value, str) else json.dumps(value)
            array, datatype = np.array([text.encode()], object), "BYTES"
        made.append(grpcclient.InferInput(name, list(array.shape), datatype))
        made[-1].set_data_from_numpy(array)
    return made


def sampling(**members: Any) -> dict[str, Any]:
    return {"sampling_parameters": {"temperature": 0, "max_tokens": 12, **members}}


def test_greedy_tokens_are_those_of_transformers(server: Headrace, smollm2: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
    net = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    prompts = {"text_input": PROMPT, "messages": CHAT}
    for name, prompt in prompts.items():
        if name == "messages":
            ids = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
        else:
            ids = tokenizer(prompt)["input_ids"]
        output = net.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :].tolist()
        for asked in ({name: prompt}, {"input_ids": ids}):
            given = stream(server, stream=True, return_output_ids=True, return_num_input_tokens=True, **asked,
                           **sampling())  # fmt: skip
            assert [token for each in given for token in each["output_ids"]] == output
            assert given[0]["num_input_tokens"] == [len(ids)]
            text = b"".join(each["text_output"][0] for each in given).decode()
            assert text == tokenizer.decode(output, skip_special_tokens=True)


def test_an_adapter_is_what_its_matrices_say(server: Headrace, smollm2: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
    net = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    for name, (a, b) in adapter().items():
        weight = net.get_submodule(name).weight.data
        weight += SCALE * torch.from_numpy(b @ a)
    ids = tokenizer(PROMPT)["input_ids"]
    output = net.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)[0, len(ids) :].tolist()
    asked = {"text_input": PROMPT, "return_output_ids": True}
    assert generate(server, **asked, **sampling(max_tokens=8, lora_name="loud"))["output_ids"] == output
    assert generate(server, **asked, **sampling(max_tokens=8))["output_ids"] != output
    with pytest.raises(InferenceServerException, match=r"LoRA x is not supported, we currently support \['loud'\]"):
        generate(server, **asked, **sampling(lora_name="x"))


def test_triton_s_client_over_http_gets_the_prompt_before_the_text(server: Headrace) -> None:
    given = generate(server, text_input=PROMPT, **sampling(max_tokens=1))
    assert given["text_output"] == [b"The capital of France is Paris"]
    with httpclient.InferenceServerClient(f"127.0.0.1:{server.http}") as client:
        assert client.is_model_ready("smol")
        names = {each["name"] for each in client.get_model_metadata("smol")["outputs"]}
    assert {"text_output", "finish_reason", "logprobs", "num_output_tokens"} <= names


def test_log_probabilities_and_their_sum_are_of_the_new_tokens(server: Headrace) -> None:
    given = stream(server, text_input=PROMPT, stream=True, return_logprobs=True, return_cumulative_logprob=True,
                   **sampling(max_tokens=3, logprobs=2))  # fmt: skip
    for each in given:
        chosen = [next(iter(token.values())) for token in json.loads(each["logprobs"][0])]
        assert all(len(token) == 2 for token in json.loads(each["logprobs"][0]))
        assert [token["rank"] for token in chosen] == [1] * len(chosen)
        assert each["cumulative_logprob"][0] == pytest.approx(sum(token["logprob"] for token in chosen), abs=1e-5)


def test_the_bytes_of_all_tokens_are_the_text_also_where_a_token_is_no_whole_character(
    server: Headrace, smollm2: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    text = "\U0001f9e6\u20ac"  # each of several tokens
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
    ids = tokenizer(text)["input_ids"]
    assert len(ids) > 2
    asked = sampling(max_tokens=20, structured_outputs={"choice": [text]})
    given = generate(server, text_input=PROMPT, exclude_input_in_output=True, return_logprobs=True,
                     return_output_ids=True, **asked)  # fmt: skip
    assert given["text_output"] == [text.encode()]
    tokens = read_logprobs(given["logprobs"][0])
    assert [each.id for each in tokens if each.text != tokenizer.eos_token] == [
        each for each in given["output_ids"] if each != tokenizer.eos_token_id
    ]
    data = [token_bytes(each.text) for each in tokens if each.id != tokenizer.eos_token_id]
    assert b"".join(data) == text.encode()
    assert any("\ufffd" in each.decode(errors="replace") for each in data)


@pytest.mark.parametrize(
    ("constraint", "expected"),
    [
        ({"choice": [" London", " Paris"]}, " Paris"),
        ({"regex": " P[a-z]{4}"}, " Paris"),
        ({"grammar": 'root ::= " Paris"'}, " Paris"),
    ],
)
def test_structured_outputs(server: Headrace, constraint: dict[str, Any], expected: str) -> None:
    given = generate(server, text_input=PROMPT, exclude_input_in_output=True,
                     **sampling(structured_outputs=constraint))  # fmt: skip
    assert given["text_output"] == [expected.encode()]


def test_a_schema_is_kept(server: Headrace) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"],
        "additionalProperties": False,
    }
    given = generate(server, messages=CHAT, **sampling(max_tokens=60, structured_outputs={"json": schema}))
    assert list(json.loads(given["text_output"][0])) == ["city"]


def test_a_tool_that_is_required_is_called(server: Headrace) -> None:
    schema = {"type": "object", "properties": {"city": {"enum": ["Paris", "London"]}}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "weather", "strict": True, "parameters": schema}}
    given = stream(server, messages=CHAT, tools=[tool], tool_choice='"required"', stream=True,
                   return_finish_reason=True, **sampling(max_tokens=80))  # fmt: skip
    parts = [part for each in given for text in each.get("tool_calls", ()) for part in json.loads(text)]
    assert [part["function"]["name"] for part in parts if part["function"].get("name")] == ["weather"]
    arguments = "".join(part["function"].get("arguments") or "" for part in parts)
    assert json.loads(arguments)["city"] in ("Paris", "London")
    assert given[-1]["finish_reason"] == [b"tool_calls"]


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"text_input": "a b " * 3000}, "maximum context length is 1024 tokens"),
        ({"input_ids": [49152]}, "out of vocabulary"),
        ({"text_input": "a", **sampling(logit_bias={"49152": 1})}, "out-of-vocab"),
        ({"text_input": "a", **sampling(structured_outputs={"regex": "((("})}, "(?i)regex"),
        ({"text_input": "a", **sampling(structured_outputs={"json": {"type": "objekt"}})}, "objekt"),
        ({"messages": [{"role": "user"}, {"rolle": 7}]}, "the chat is not valid: messages.1"),
        ({"messages": CHAT, "tools": [{"type": "x"}]}, "the chat is not valid: tools"),
        ({"messages": CHAT, **sampling(chat_template_kwargs={"chat_template": "x"})}, "template is the model's own"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a/"}}]}]},
            "only data: is allowed",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,a"}}]}]},
            "not a multimodal model",
        ),
        ({"text_input": "a", "image": "aGk="}, "takes no images"),
    ],
)
def test_a_wrong_request_is_the_callers_fault_and_disturbs_nobody(
    server: Headrace, asked: dict[str, Any], told: str
) -> None:
    with pytest.raises(InferenceServerException, match=told) as refusal:
        generate(server, **asked)
    assert refusal.value.status() in ("StatusCode.INVALID_ARGUMENT", "StatusCode.NOT_FOUND", None)
    assert server.get("/v2/models/smol/ready")[0] == 200


def test_vllms_metrics_are_on_the_page(server: Headrace, wait_until: Callable[..., None]) -> None:
    before = server.metric("vllm:generation_tokens_total", "smol")
    generate(server, text_input=PROMPT, **sampling(max_tokens=5, ignore_eos=True))
    wait_until(lambda: server.metric("vllm:generation_tokens_total", "smol") == before + 5, "five tokens are counted")
    assert server.metric("vllm:request_success_total", "smol", model_name="smol", finished_reason="length") >= 1
    assert server.metric("vllm:time_to_first_token_seconds_count", "smol", engine="0") >= 1


def test_the_time_in_the_queue_and_the_use_of_the_cache_are_on_the_page(
    server: Headrace, wait_until: Callable[..., None]
) -> None:
    """More requests than run at once: the last ones wait. vLLM's own histogram is the judge of how long."""
    ours, theirs = "nv_llm_queue_time_ms_sum", "vllm:request_queue_time_seconds_sum"
    seen = [server.metric(ours, "smol"), server.metric(theirs, "smol", engine="0")]
    count = server.metric("nv_llm_queue_time_ms_count", "smol")

    def ask() -> None:
        generate(server, text_input=PROMPT, **sampling(max_tokens=24, ignore_eos=True))

    threads = [threading.Thread(target=ask) for _ in range(20)]  # 16 run
    for thread in threads:
        thread.start()
    wait_until(lambda: server.metric("vllm:num_requests_running", "smol") > 0, "vLLM runs some")
    wait_until(lambda: server.metric("nv_llm_cache_usage_ratio", "smol") > 0, "some of the cache is used")
    for thread in threads:
        thread.join()
    wait_until(lambda: server.metric("nv_llm_queue_time_ms_count", "smol") == count + 20, "all are counted")
    waited = server.metric(ours, "smol") - seen[0], 1000 * (server.metric(theirs, "smol", engine="0") - seen[1])
    assert waited[1] > 100  # four have waited for an answer
    assert waited[1] <= waited[0] < waited[1] + 20 * 250  # vLLM counts from when the prompt is read


def test_a_caller_that_leaves_frees_its_place(server: Headrace, wait_until: Callable[..., None]) -> None:
    first = threading.Event()
    with grpcclient.InferenceServerClient(f"127.0.0.1:{server.grpc}") as client:
        client.start_stream(lambda result, error: first.set())
        asked = tensors(text_input=PROMPT, stream=True, **sampling(max_tokens=900, ignore_eos=True))
        client.async_stream_infer("smol", asked)
        assert first.wait(LONG_S)
        assert server.metric("vllm:num_requests_running", "smol") == 1
        client.stop_stream(cancel_requests=True)
    wait_until(lambda: server.metric("vllm:num_requests_running", "smol") == 0, "vLLM runs nothing", 10)


def test_the_prompt_is_counted_before_its_first_token(server: Headrace, wait_until: Callable[..., None]) -> None:
    """A quota charges it to a caller that leaves meanwhile. The 1,000 tokens take a second."""
    before, answered = server.metric("nv_llm_input_tokens", "smol"), threading.Event()
    with grpcclient.InferenceServerClient(f"127.0.0.1:{server.grpc}") as client:
        client.start_stream(lambda result, error: answered.set())
        client.async_stream_infer("smol", tensors(input_ids=[7] * 1000, **sampling(max_tokens=1)))
        wait_until(lambda: server.metric("nv_llm_input_tokens", "smol") == before + 1000, "the prompt is counted")
        assert not answered.is_set()
        client.stop_stream(cancel_requests=True)
    wait_until(lambda: server.metric("vllm:num_requests_running", "smol") == 0, "vLLM runs nothing", 10)


def test_an_engine_that_is_killed_fails_all_streams_and_comes_back(
    server: Headrace, wait_until: Callable[..., None]
) -> None:
    errors: queue.Queue[Any] = queue.Queue()
    begun = [threading.Event() for _ in range(8)]

    def ask(number: int) -> None:
        def heard(result: Any, error: Any) -> None:
            begun[number].set()
            if error:
                errors.put(error)

        with grpcclient.InferenceServerClient(f"127.0.0.1:{server.grpc}") as client:
            client.start_stream(heard)
            asked = tensors(text_input=PROMPT, stream=True, **sampling(max_tokens=900, ignore_eos=True))
            client.async_stream_infer("smol", asked)
            client.stop_stream()

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    assert all(each.wait(LONG_S) for each in begun)
    os.kill(engine_process(server.process.pid), signal.SIGKILL)
    for _ in range(8):
        assert "has died; it is being started again" in str(errors.get(timeout=30))
    for thread in threads:
        thread.join()
    assert server.get("/v2/models/smol/ready")[0] == 400
    assert server.get("/v2/health/live")[0] == 200
    wait_until(lambda: server.get("/v2/models/smol/ready")[0] == 200, "the engine has started again", LONG_S)
    given = generate(server, text_input=PROMPT, exclude_input_in_output=True, **sampling(max_tokens=1))
    assert given["text_output"] == [b" Paris"]


def test_unloading_waits_for_the_answers_and_leaves_no_process(
    server: Headrace, wait_until: Callable[..., None]
) -> None:
    given: list[dict[str, Any]] = []
    asked = {"text_input": PROMPT, "stream": True, **sampling(max_tokens=40, ignore_eos=True)}
    thread = threading.Thread(target=lambda: given.extend(stream(server, return_num_output_tokens=True, **asked)))
    thread.start()
    wait_until(lambda: server.metric("nv_llm_streams", "smol") == 1, "the request is in the engine")
    process = engine_process(server.process.pid)
    with httpclient.InferenceServerClient(f"127.0.0.1:{server.http}") as client:
        client.unload_model("smol")
    thread.join(LONG_S)
    assert sum(each["num_output_tokens"][0] for each in given) == 40
    wait_until(lambda: not Path(f"/proc/{process}").exists(), "the process of the engine has ended", 30)
    assert "vllm:" not in server.get("/metrics", server.ports["Metrics Service"])[1].decode()


def engine_process(parent: int) -> int:
    """Return the process of vLLM's engine, a child of ``parent``."""
    children = Path(f"/proc/{parent}/task").glob("*/children")
    found = [int(pid) for each in children for pid in each.read_text().split()]
    (engine,) = [pid for pid in found if "EngineCore" in Path(f"/proc/{pid}/cmdline").read_text()]
    return engine


@pytest.mark.filterwarnings("ignore:.* is deprecated:DeprecationWarning")  # of PyTorch, when vLLM imports it
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a context of ZeroMQ that vLLM leaves
def test_the_contract_is_kept(smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kit of headrace_llm, on a version that holds the model itself, without a config."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    write_model(tmp_path, "smol", model_json(smollm2))

    async def main() -> None:
        async with Server(tmp_path) as server:
            await check_engine(server, "smol")

    asyncio.run(main())
    gc.collect()  # that context


@pytest.mark.filterwarnings("ignore:.* is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_engine_that_needs_more_memory_than_there_is_says_how_much(
    smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    long = {"max_model_len": 1 << 16, "hf_overrides": {"max_position_embeddings": 1 << 16}}
    write_model(tmp_path, "smol", model_json(smollm2, **long))

    async def main() -> None:
        async with Server(tmp_path, exit_on_error=False) as server:
            (found,) = server.engine.index()
            assert "2.81 GiB KV cache is needed" in found.reason
            assert "decreasing `max_model_len`" in found.reason

    asyncio.run(main())
    gc.collect()
