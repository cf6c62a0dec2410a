"""Measure the CPU of a server with 0, 1 and 10 open pages of the dashboard in a real Chromium.

    python benchmarks/dashboard.py [--pages 0,1,10] [--models 1,100,1000] [--seconds 30]

Each page shows the details of a model, and polls like a visible page. Exits with 1 if a page costs 1 % of a core or
more, or if a page does not show the current state of the server at the end.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import machine
import servers
from playwright.sync_api import Browser, sync_playwright

MOST = 0.01
CONFIG = """
backend: "identity" max_batch_size: 4
input { name: "text" data_type: TYPE_STRING dims: 1 } output { name: "text" data_type: TYPE_STRING dims: 1 }
"""


def measure(browser: Browser, models: int, pages: int, seconds: float) -> float:
    """Return the share of a core that the server uses."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        for number in range(models):
            (Path(folder) / f"echo{number}/1").mkdir(parents=True)
            (Path(folder) / f"echo{number}/config.pbtxt").write_text(CONFIG)
        server = stack.enter_context(servers.headrace(Path(folder)))
        opened = []
        for _ in range(pages):
            page = stack.enter_context(browser.new_context()).new_page()
            page.goto(f"http://127.0.0.1:{server.http}/dashboard")
            page.get_by_role("button", name="echo0", exact=True).click()
            page.get_by_text(f"{models} of {models} ready").wait_for()
            opened.append(page)
        time.sleep(3)
        began, before = time.monotonic(), machine.read(server.pid).tree_s
        if opened:
            opened[0].wait_for_timeout(1000 * seconds)
        else:
            time.sleep(seconds)
        part = (machine.read(server.pid).tree_s - before) / (time.monotonic() - began)
        for page in opened:
            if page.get_by_role("status").inner_text() != f"{models} of {models} ready":
                raise SystemExit("a page does not show the state any more")
        return part


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", default="0,1,10")
    parser.add_argument("--models", default="1,100,1000")
    parser.add_argument("--seconds", type=float, default=30)
    arguments = parser.parse_args()
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    is_good = True
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        for models in map(int, arguments.models.split(",")):
            idle = 0.0
            for pages in map(int, arguments.pages.split(",")):
                part = measure(browser, models, pages, arguments.seconds)
                idle = idle if pages else part
                each = (part - idle) / max(pages, 1)
                is_good = is_good and each < MOST
                print(f"{models} models, {pages} pages: {part:.2%} of a core, {each:.2%} per page", flush=True)
        browser.close()
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
