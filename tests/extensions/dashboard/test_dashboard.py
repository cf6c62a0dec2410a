"""The dashboard in a real Chromium, against a real server. The oracle of its answers is the stock client."""

from __future__ import annotations

import json
import re
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import psutil
import pytest
import tritonclient.http
from playwright.sync_api import Page, expect
from tritonclient.utils import InferenceServerException

from .conftest import CHROMIUM

if TYPE_CHECKING:
    from tests.conftest import Headrace

EXAMPLES = Path(__file__).parents[3] / "examples/models"
#: A model name with markup, which the browser must show as text.
MARKUP = "<img src=x onerror=alert(1)>"
CONFIG = """
backend: "identity" max_batch_size: 4
input { name: "text" data_type: TYPE_STRING dims: 1 } output { name: "text" data_type: TYPE_STRING dims: 1 }
"""
NUMBERS = """
backend: "identity" input [{ name: "n" data_type: TYPE_INT64 dims: 2 }, { name: "x" data_type: TYPE_FP32 dims: 1 }]
output [{ name: "n" data_type: TYPE_INT64 dims: 2 }, { name: "x" data_type: TYPE_FP32 dims: 1 }]
"""
APART = CONFIG + 'parameters { key: "isolation" value { string_value: "process" } }'
#: The text of the page for a missing number.
NONE = "\N{EN DASH}"
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")


@pytest.fixture(scope="module")
def server(keep_serving: Callable[..., Headrace], tmp_path_factory: pytest.TempPathFactory) -> Headrace:
    models = tmp_path_factory.mktemp("models")
    shutil.copytree(EXAMPLES / "digits", models / "digits")
    configs = {MARKUP: CONFIG, "echo": CONFIG, "numbers": NUMBERS, "apart": APART, "broken": 'backend: "nope"'}
    for name, config in configs.items():
        (models / name / "1").mkdir(parents=True)
        (models / name / "config.pbtxt").write_text(config)
    loads = [
        "--model-control-mode=explicit",
        *(f"--load-model={name}" for name in ("digits", "echo", "numbers", "apart", MARKUP)),
    ]
    server = keep_serving(f"--model-repository={models}", *loads)
    with (
        tritonclient.http.InferenceServerClient(f"127.0.0.1:{server.http}") as client,
        pytest.raises(InferenceServerException, match="nope"),
    ):
        client.load_model("broken")
    return server


@pytest.fixture
def open_page(new_page: Callable[[Headrace], Page]) -> Callable[[Headrace], Page]:
    """Return a function that opens the dashboard."""

    def open_page(server: Headrace) -> Page:
        page = new_page(server)
        page.goto(f"http://127.0.0.1:{server.http}/dashboard")
        return page

    return open_page


def infer(server: Headrace, image: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> list[float]:
    with tritonclient.http.InferenceServerClient(f"127.0.0.1:{server.http}") as client:
        image_input = tritonclient.http.InferInput("image", list(image.shape), "UINT8")
        image_input.set_data_from_numpy(image)
        found: list[float] = client.infer("digits", [image_input]).as_numpy("probabilities").ravel().tolist()
        return found


def answer(page: Page) -> list[float]:
    """Return the numbers of the answer that is shown."""
    shown = page.get_by_label("Answer")
    expect(shown).to_contain_text("probabilities FP32 [1, 10]")
    return list(json.loads(shown.inner_text().splitlines()[-1]))


@needs_chromium
def test_models_are_listed_with_their_state_and_its_reason(
    server: Headrace, open_page: Callable[[Headrace], Page]
) -> None:
    page = open_page(server)
    expect(page.get_by_role("status")).to_have_text("5 of 6 ready")
    rows = page.locator("#rows tr")
    expect(rows.filter(has_text="broken")).to_contain_text("unable to find backend library for backend 'nope'")
    expect(rows.filter(has_text="digits")).to_contain_text("READY")
    expect(page.get_by_role("button", name=MARKUP, exact=True)).to_be_visible()
    page.get_by_label("Filter").fill("DIG")
    expect(rows.filter(visible=True)).to_have_count(1)
    page.get_by_label("Filter").fill("1")  # the version of all, and in the name of one
    assert rows.filter(visible=True).count() == 1
    page.get_by_label("Filter").fill("12")
    assert page.get_by_text("No model matches.").is_visible()


@needs_chromium
def test_memory_is_shown_if_it_is_measured(server: Headrace, open_page: Callable[[Headrace], Page]) -> None:
    children = psutil.Process(server.process.pid).children(recursive=True)
    (child,) = [each for each in children if any("apart" in word for word in each.cmdline())]
    page = open_page(server)
    row = page.locator("#rows tr").filter(has=page.get_by_role("button", name="apart", exact=True))
    cell = row.locator("td").nth(8)
    expect(cell).to_have_text(re.compile(r"^[0-9.]+ MiB$"))
    shown_mib = float(cell.inner_text().split()[0])
    assert shown_mib == pytest.approx(child.memory_full_info().pss / 2**20, rel=0.25)
    expect(page.get_by_text(f"{shown_mib} MiB + 4 unknown")).to_be_visible()
    page.get_by_role("button", name="apart", exact=True).click()
    expect(page.locator("#instances")).to_contain_text(re.compile(r"memory, host[0-9.]+ MiB"))
    page.get_by_role("button", name="echo", exact=True).click()
    expect(page.locator("#instances")).to_contain_text("memory, hostunknown")
    page.get_by_label("Show").select_option("not loaded")
    assert page.locator("#rows tr").filter(visible=True).all_inner_texts()[0].startswith("broken")
    assert page.locator("#rows tr").filter(visible=True).locator("td").nth(8).inner_text() == NONE


@needs_chromium
def test_the_charge_of_an_on_demand_model_is_an_estimate(
    keep_serving: Callable[..., Headrace], open_page: Callable[[Headrace], Page], tmp_path: Path
) -> None:
    (tmp_path / "echo/1").mkdir(parents=True)
    (tmp_path / "echo/config.pbtxt").write_text(CONFIG)
    (tmp_path / "echo/1/weights").write_bytes(bytes(2 << 20))  # it is charged its files at least
    server = keep_serving(f"--model-repository={tmp_path}", "--model-control-mode=on-demand")
    page = open_page(server)
    cell = page.locator("#rows tr td").nth(8)
    expect(cell).to_have_text(NONE)
    with tritonclient.http.InferenceServerClient(f"127.0.0.1:{server.http}") as client:
        client.load_model("echo")
        page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        expect(cell).to_have_text(re.compile(r"^≈ [0-9.]+ MiB$"))
        (entry,) = client.get_model_repository_index()
    (loaded,) = json.loads(server.get("/dashboard/models.json")[1])["models"]
    assert loaded["memory"][0]["bytes"] == pytest.approx(entry["memory_bytes"], rel=0.2)


@needs_chromium
def test_nothing_is_asked_about_a_model_that_is_not_ready(
    server: Headrace, open_page: Callable[[Headrace], Page]
) -> None:
    page = open_page(server)
    requested: list[str] = []
    page.on("request", lambda request: requested.append(request.url))
    page.get_by_role("button", name="broken", exact=True).click()
    expect(page.get_by_text("The state is UNAVAILABLE. The page shows more when the model is READY.")).to_be_visible()
    expect(page.get_by_role("button", name="Send")).not_to_be_visible()
    page.get_by_role("button", name=MARKUP, exact=True).click()
    expect(page.get_by_label("Answer")).to_contain_text("is not found")  # a URL cannot name it, as in Triton
    with page.expect_request("**/models.json"), page.expect_response("**/log.json*"):
        pass
    page.wait_for_timeout(50)
    assert len([each for each in requested if re.search("/models/(broken|%3C)", each)]) == 2, "the second, once"


@needs_chromium
@pytest.mark.parametrize("width", [420, 1280])
def test_no_address_beyond_a_region_is_valid(
    server: Headrace, open_page: Callable[[Headrace], Page], width: int
) -> None:
    page = open_page(server)
    page.set_viewport_size({"width": width, "height": 900})
    expect(page.get_by_role("button", name="Unload digits")).to_have_count(1)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    if width > 1000:
        assert page.evaluate("(each => each.scrollWidth - each.clientWidth)(document.querySelector('.scroll'))") == 0


@needs_chromium
def test_the_form_sends_the_request_of_the_stock_client(
    server: Headrace, open_page: Callable[[Headrace], Page], tmp_path: Path
) -> None:
    page = open_page(server)
    # Keyboard order: the first link, the filter, the models by name.
    page.get_by_label("Filter").focus()
    for _ in range(20):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.textContent") == "digits":
            break
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="digits, version 1")).to_be_visible()
    page.get_by_role("button", name="Send").click()
    assert answer(page) == pytest.approx(infer(server, np.zeros((1, 8, 8), np.uint8)), abs=1e-6)

    image = np.tile(np.arange(0, 16, 2, dtype=np.uint8), (8, 1))
    (tmp_path / "image.png").write_bytes(png(image))
    page.get_by_label("or an image file").set_input_files(tmp_path / "image.png")
    expect(page.get_by_label("JSON: numbers in lists")).to_have_value(
        json.dumps([image.tolist()], separators=(",", ":"))
    )
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_label("Answer")).not_to_have_text("asking")
    assert answer(page) == pytest.approx(infer(server, image[np.newaxis]), abs=1e-6)

    page.get_by_label("JSON: numbers in lists").fill("[[1]]")
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_label("Answer")).to_contain_text("unexpected shape for input 'image'")
    expect(page.locator("#instances")).to_contain_text("digits_0")
    expect(page.locator("#reasons")).to_contain_text("delay")
    expect(page.get_by_label("Config")).to_contain_text("dynamic_batching")


def png(grey: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> bytes:
    """Return an image file of grey pixels."""

    def part(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    height, width = grey.shape
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    lines = b"".join(b"\0" + line.tobytes() for line in grey)
    return b"\x89PNG\r\n\x1a\n" + part(b"IHDR", head) + part(b"IDAT", zlib.compress(lines)) + part(b"IEND", b"")


@needs_chromium
def test_markup_is_shown_as_text(server: Headrace, open_page: Callable[[Headrace], Page]) -> None:
    page = open_page(server)
    page.get_by_role("button", name=MARKUP, exact=True).click()
    expect(page.get_by_label("Answer")).to_contain_text("is not found")  # a URL cannot name it, as in Triton
    page.get_by_role("button", name="echo", exact=True).click()
    page.get_by_label("JSON: text, or lists of text").fill("<b>so</b>")
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_label("Answer")).to_contain_text('["<b>so</b>"]')
    assert page.locator("main img, main b").count() == 0


@needs_chromium
def test_values_round_trip_as_they_are_written(server: Headrace, open_page: Callable[[Headrace], Page]) -> None:
    page = open_page(server)
    page.get_by_role("button", name="numbers", exact=True).click()
    fields = page.get_by_label("JSON: numbers in lists")
    fields.nth(0).fill("[9007199254740993, -9223372036854775807]")
    fields.nth(1).fill("1e39")  # more than FP32 has, and not in a list
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_label("Answer")).to_contain_text("[9007199254740993,-9223372036854775807]")
    expect(page.get_by_label("Answer")).to_contain_text('["Infinity"]')
    page.get_by_role("button", name="echo", exact=True).click()
    for text in ("123", '{"a":[1]}', "null"):
        page.get_by_label("JSON: text, or lists of text").fill(text)
        page.get_by_role("button", name="Send").click()
        expect(page.get_by_label("Answer")).to_contain_text(f"[{json.dumps(text)}]")


@needs_chromium
def test_a_model_is_unloaded_and_loaded(server: Headrace, open_page: Callable[[Headrace], Page]) -> None:
    page = open_page(server)
    row = page.locator("#rows tr").filter(has_text="digits")
    page.get_by_role("button", name="Unload digits").click()
    expect(row).to_contain_text("UNAVAILABLE")
    assert server.get("/v2/models/digits/ready")[0] == 404
    page.get_by_role("button", name="Load digits", exact=True).click()
    expect(row).to_contain_text("READY")
    page.get_by_role("button", name="Load broken", exact=True).click()
    expect(page.get_by_role("alert")).to_contain_text("load broken: ")
    expect(page.get_by_role("list", name="Log")).to_contain_text("successfully unloaded 'digits'")
    page.get_by_label("Level").select_option("ERROR")
    expect(page.get_by_role("listitem").filter(has_text="successfully unloaded 'digits'").first).not_to_be_visible()


@needs_chromium
def test_a_hidden_page_sends_no_requests(server: Headrace, open_page: Callable[[Headrace], Page]) -> None:
    page = open_page(server)
    expect(page.get_by_role("status")).to_have_text(re.compile("ready"))
    page.evaluate("Object.defineProperty(document, 'hidden', {value: true, configurable: true})")
    page.wait_for_timeout(2500)  # the last poll that was planned
    requested: list[str] = []
    page.on("request", lambda request: requested.append(request.url))
    page.wait_for_timeout(2500)
    assert requested == []
    page.evaluate("delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))")
    page.wait_for_timeout(200)
    assert requested


@needs_chromium
def test_a_reader_after_a_day_gets_the_state_and_the_whole_log(
    server: Headrace, open_page: Callable[[Headrace], Page]
) -> None:
    page = open_page(server)
    expect(page.get_by_role("status")).to_have_text(re.compile("ready"))
    page.clock.install()
    page.evaluate("Object.defineProperty(document, 'hidden', {value: true, configurable: true})")
    page.clock.fast_forward("24:00:00")
    with page.expect_response("**/broken/load"):  # logs lines
        page.get_by_role("button", name="Load broken", exact=True).click()
    infer(server, np.zeros((1, 8, 8), np.uint8))
    page.evaluate(
        "delete document.hidden; for (const _ of '123') document.dispatchEvent(new Event('visibilitychange'))"
    )
    expect(page.get_by_role("status")).to_have_text(re.compile("of 6 ready"))
    records = json.loads(server.get("/dashboard/log.json")[1])
    expect(page.get_by_role("list", name="Log").locator("li")).to_have_count(len(records))
    expect(page.locator("#rows tr").filter(has_text="digits")).to_contain_text("READY")
    assert page.get_by_text(re.compile("NaN|Infinity|undefined")).count() == 0


@needs_chromium
def test_a_server_with_keys_asks_for_one(
    keep_serving: Callable[..., Headrace], open_page: Callable[[Headrace], Page], tmp_path: Path
) -> None:
    from headrace_cli import main

    keys = tmp_path / "keys.json"
    assert main(["keys", "add", str(keys), "alice", "--operations=*"]) == 0
    (found,) = json.loads(keys.read_text())["principals"]["alice"]["keys"]
    server = keep_serving(f"--model-repository={EXAMPLES}", f"--access-keys={keys}", "--access-open=health,dashboard")
    page = open_page(server)
    expect(page.get_by_role("alert")).to_contain_text(re.compile("key", re.IGNORECASE))
    page.get_by_label("This server asks for a key:").fill(f"hr_{found}_wrong")
    page.get_by_role("button", name="Use it").click()
    expect(page.get_by_role("status")).to_have_text("refused")
    assert page.locator("#rows tr").count() == 0


def test_routes_answer_what_the_page_reads(server: Headrace) -> None:
    infer(server, np.zeros((1, 8, 8), np.uint8))
    status, body = server.get("/dashboard/models.json")
    assert status == 200
    found = {each["name"]: each for each in json.loads(body)["models"]}
    assert found.keys() == {"digits", "echo", "numbers", "apart", MARKUP}
    assert sum(found["digits"]["latencies"]) == int(server.metric("nv_inference_request_success", "digits"))
    with tritonclient.http.InferenceServerClient(f"127.0.0.1:{server.http}") as client:
        counted = client.get_inference_statistics("digits")["model_stats"][0]
    assert found["digits"]["success"] == counted["inference_stats"]["success"]["count"] > 0
    assert found["digits"]["failed"] == counted["inference_stats"]["fail"]["count"]
    assert (found["digits"]["executions"], found["digits"]["rows"]) == (
        counted["execution_count"],
        counted["inference_count"],
    )
    records = json.loads(server.get("/dashboard/log.json")[1])
    assert [each["number"] for each in records] == list(range(1, len(records) + 1))
    later = json.loads(server.get(f"/dashboard/log.json?after={len(records) - 1}")[1])
    assert [each["text"] for each in later][:1] == [records[-1]["text"]]
    assert not {"backends", "models", "options"} & {each["text"] for each in records}, "headings of tables"
    for wrong in ("x", "-1", "1" * 30, "%00"):
        status, body = server.get(f"/dashboard/log.json?after={wrong}")
        assert (status, b"it is the number of a log record" in body) == (400, True)


def test_it_is_optional(keep_serving: Callable[..., Headrace], tmp_path: Path) -> None:
    server = keep_serving(f"--model-repository={tmp_path}", "--dashboard-enabled=false")
    assert server.get("/dashboard")[0] == 404
