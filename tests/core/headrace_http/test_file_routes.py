"""Routes that answer with a file of their package."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from headrace import FileRoute

if TYPE_CHECKING:
    from headrace import HttpCall


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the package `with_files`."""
    (tmp_path / "with_files/page").mkdir(parents=True)
    (tmp_path / "with_files/__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "with_files", raising=False)
    return tmp_path / "with_files"


def route(file: str) -> type[FileRoute]:
    return type("Page", (FileRoute,), {"__module__": "with_files.routes", "name": "GET /page", "file": file})


@pytest.mark.parametrize(
    ("ending", "media_type"),
    [(".html", b"text/html; charset=utf-8"), (".js", b"text/javascript; charset=utf-8"), (".svg", b"image/svg+xml")],
)
def test_a_file_is_answered_as_what_it_is_and_as_nothing_else(folder: Path, ending: str, media_type: bytes) -> None:
    (folder / f"page/a{ending}").write_bytes(b"\0content")
    page = route(f"page/a{ending}")
    page.check()
    (folder / f"page/a{ending}").unlink()  # it was read
    reply = asyncio.run(page(SimpleNamespace(engine=None)).answer(cast("HttpCall", None)))
    headers = dict(reply.headers)
    assert (reply.status, b"".join(map(bytes, reply.parts)), headers[b"Content-Type"]) == (
        200,
        b"\0content",
        media_type,
    )
    assert headers[b"X-Content-Type-Options"] == b"nosniff"
    policy = headers.get(b"Content-Security-Policy", b"")
    assert (b"default-src 'none'" in policy and b"frame-ancestors 'none'" in policy) == (ending == ".html")


def test_a_file_that_cannot_be_answered_is_named(folder: Path) -> None:
    with pytest.raises(TypeError, match=r"the file 'page/none.js' of route 'GET /page': No such file or directory"):
        route("page/none.js").check()
    with pytest.raises(TypeError, match=r"'page/a.exe' of route 'GET /page' ends in '.exe'; it is .html, .js, .css"):
        route("page/a.exe").check()
