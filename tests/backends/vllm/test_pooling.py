"""Embeddings and scores by vLLM itself, in a real server. Judges: transformers, tritonclient, and the openai client.

For the session `vllm` of noxfile.py: `conftest` leaves it out where vLLM is not installed.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

if TYPE_CHECKING:
    from tests.conftest import Headrace

QUERY = "What is the capital of France?"
TEXTS = ["The capital of France is Paris.", "Bread is baked from flour.", "Paris"]
ARGUMENTS = {"dtype": "float32", "max_model_len": 256, "enforce_eager": True, "max_num_seqs": 16}
LONG_S = 240


@pytest.fixture(scope="module")
def ranker(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 with a head of one label, of random weights."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    torch.manual_seed(7)
    made = tmp_path_factory.mktemp("ranker")
    net = transformers.AutoModelForSequenceClassification.from_pretrained(smollm2, num_labels=1, dtype=torch.float32)
    torch.nn.init.normal_(net.score.weight, std=0.1)
    net.save_pretrained(made)
    transformers.AutoTokenizer.from_pretrained(smollm2).save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def server(
    smollm2: Path, ranker: Path, tmp_path_factory: pytest.TempPathFactory, keep_serving: Callable[..., Headrace]
) -> Headrace:
    repository = tmp_path_factory.mktemp("models")
    write_model(repository, "embed", {"model": str(smollm2), "runner": "pooling"}, "max_batch_size: 8\n")
    task = 'parameters { key: "task" value { string_value: "reranking" } }\n'
    write_model(repository, "rank", {"model": str(ranker)}, task)
    return keep_serving(f"--model-repository={repository}", environ={"VLLM_CPU_KVCACHE_SPACE": "1"})


def write_model(repository: Path, name: str, members: dict[str, Any], config: str) -> None:
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "1/model.json").write_text(json.dumps({**ARGUMENTS, **members}))
    (repository / name / "config.pbtxt").write_text(f'backend: "vllm"\n{config}')


def infer(server: Headrace, model: str, **inputs: npt.NDArray[Any]) -> dict[str, Any]:
    """Return the outputs, by tritonclient over HTTP. Raises `InferenceServerException`."""
    with httpclient.InferenceServerClient(f"127.0.0.1:{server.http}", network_timeout=LONG_S) as client:
        asked = []
        for name, array in inputs.items():
            datatype = "BYTES" if array.dtype == object else "INT32"
            asked.append(httpclient.InferInput(name, list(array.shape), datatype))
            asked[-1].set_data_from_numpy(array)
        result = client.infer(model, asked)
        return {each["name"]: result.as_numpy(each["name"]) for each in result.get_response()["outputs"]}


def strings(*texts: str) -> npt.NDArray[np.object_]:
    return np.array([text.encode() for text in texts], object)


def vectors_of(smollm2: Path, rows: Sequence[Sequence[int]]) -> npt.NDArray[np.float32]:
    """Return transformers' own vectors f32[rows, width]: the state of the last token, of length 1."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    net = transformers.AutoModel.from_pretrained(smollm2, dtype=torch.float32)
    with torch.inference_mode():
        last = torch.stack([net(torch.tensor([row])).last_hidden_state[0, -1] for row in rows])
        return np.asarray(torch.nn.functional.normalize(last, dim=1).numpy())


def test_vectors_are_those_of_transformers(server: Headrace, smollm2: Path) -> None:
    tokenizer = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(smollm2)
    rows = [tokenizer(text)["input_ids"] for text in TEXTS]
    expected = vectors_of(smollm2, rows)
    given = infer(server, "embed", text=strings(*TEXTS).reshape(-1, 1))
    np.testing.assert_allclose(given["embedding"], expected, atol=2e-4)
    assert given["num_input_tokens"].tolist() == [[len(row)] for row in rows]
    tokens = infer(server, "embed", input_ids=np.array([rows[0]], np.int32))
    np.testing.assert_allclose(tokens["embedding"], expected[:1], atol=2e-4)


def test_the_openai_client_gets_vectors(server: Headrace, smollm2: Path) -> None:
    openai = pytest.importorskip("openai")
    tokenizer = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(smollm2)
    rows = [tokenizer(text)["input_ids"] for text in TEXTS]
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.http}/v1", api_key="none") as client:
        answers = [client.embeddings.create(model="embed", input=each) for each in (TEXTS, rows)]
    for answer in answers:
        assert [each.index for each in answer.data] == [0, 1, 2]
        np.testing.assert_allclose([each.embedding for each in answer.data], vectors_of(smollm2, rows), atol=2e-4)
        assert answer.usage.prompt_tokens == sum(map(len, rows))


def scores_of(ranker: Path) -> list[float]:
    """Return transformers' own scores of `TEXTS`: the query and the text as a pair, and the sigmoid of the head."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    tokenizer = transformers.AutoTokenizer.from_pretrained(ranker)
    net = transformers.AutoModelForSequenceClassification.from_pretrained(ranker, dtype=torch.float32)
    with torch.inference_mode():
        logits = [net(torch.tensor([tokenizer(QUERY + text)["input_ids"]])).logits for text in TEXTS]
        return [float(each.sigmoid()) for each in logits]


def test_documents_have_the_scores_of_transformers_and_their_order(server: Headrace, ranker: Path) -> None:
    expected = scores_of(ranker)
    assert max(expected) - min(expected) > 0.05
    given = infer(server, "rank", query=strings(QUERY), document=strings(TEXTS[0]))
    assert given["score"] == pytest.approx(expected[:1], abs=2e-4)
    assert given["num_input_tokens"][0] > 5
    answer = post(server, "/v1/rerank", {"model": "rank", "query": QUERY, "documents": TEXTS})
    assert [each["index"] for each in answer["results"]] == np.argsort(expected)[::-1].tolist()
    assert [each["relevance_score"] for each in answer["results"]] == pytest.approx(sorted(expected)[::-1], abs=2e-4)


def post(server: Headrace, path: str, body: dict[str, Any]) -> Any:
    with closing(http.client.HTTPConnection("127.0.0.1", server.http, timeout=LONG_S)) as connection:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = json.loads(response.read())
    assert response.status == 200, answer
    return answer


@pytest.mark.parametrize(
    ("model", "inputs", "told"),
    [
        ("embed", {"text": strings("")}, "input 'text' is empty"),
        ("embed", {"text": np.array([b"\xff"], object)}, "input 'text' is not UTF-8: byte 0 is 0xff"),
        ("embed", {"text": strings("word " * 300)}, "maximum (context|model) length|maximum input length"),
        ("embed", {"input_ids": np.array([49152], np.int32)}, "out of vocabulary"),
        ("embed", {"input_ids": np.array([-1], np.int32)}, "has the token -1"),
        ("embed", {"input_ids": np.array([1] * 257, np.int32)}, "256"),
        ("embed", {"text": strings("a"), "input_ids": np.array([1], np.int32)}, "either text or input_ids"),
        ("rank", {"query": strings(QUERY), "document": strings("")}, "input 'document' is empty"),
        ("rank", {"query": strings(QUERY), "document": strings("word " * 300)}, "256"),
    ],
)
def test_a_wrong_row_is_refused_and_disturbs_nobody(
    server: Headrace, model: str, inputs: dict[str, npt.NDArray[Any]], told: str
) -> None:
    if model == "embed":  # with a batch axis
        inputs = {name: array[None] for name, array in inputs.items()}
    with pytest.raises(InferenceServerException, match=told) as refusal:
        infer(server, model, **inputs)
    assert refusal.value.status() in ("400", "StatusCode.INVALID_ARGUMENT")
    assert server.get(f"/v2/models/{model}/ready")[0] == 200


def test_many_callers_get_their_own_vectors(server: Headrace, smollm2: Path) -> None:
    alone = infer(server, "embed", text=strings(*TEXTS).reshape(-1, 1))["embedding"]
    given: dict[int, Any] = {}

    def ask(number: int) -> None:
        given[number] = infer(server, "embed", text=strings(TEXTS[number % 3]).reshape(1, 1))["embedding"]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    for number in range(40):
        np.testing.assert_allclose(given[number], alone[number % 3][None], atol=1e-3)


def test_an_engine_that_is_killed_comes_back(server: Headrace, wait_until: Callable[..., None]) -> None:
    children = Path(f"/proc/{server.process.pid}/task").glob("*/children")
    engines = [int(pid) for each in children for pid in each.read_text().split()]
    engines = [pid for pid in engines if "EngineCore" in Path(f"/proc/{pid}/cmdline").read_text()]
    assert len(engines) == 2
    os.kill(engines[0], signal.SIGKILL)
    models = [f"/v2/models/{name}/ready" for name in ("embed", "rank")]
    wait_until(lambda: {server.get(path)[0] for path in models} == {200, 400}, "one of them has died", 10)
    wait_until(lambda: {server.get(path)[0] for path in models} == {200}, "it has started again", LONG_S)
    infer(server, "embed", text=strings("a").reshape(1, 1))
    infer(server, "rank", query=strings("a"), document=strings("a"))
