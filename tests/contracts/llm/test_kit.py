"""The conformance check for engines, on an engine that keeps the contract and on ones that do not."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace import Server
from headrace.messages.ticket import UNREAD
from headrace_llm.engine_kit import check_engine

README = Path(__file__).parents[3] / "contracts/llm/README.md"


@pytest.fixture
def check(install_echo: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Checks the model ``thread`` or ``process`` of the engine, with ``old`` replaced by ``new`` in its code."""

    def check(model: str, old: str = "", new: str = "", max_tokens: int = 12, code: str = "") -> None:
        site = install_echo(tmp_path, old, new)
        if code:
            (site / "echo_engine.py").write_text(code)
        monkeypatch.syspath_prepend(str(site))
        monkeypatch.setenv("PYTHONPATH", str(site))
        monkeypatch.delitem(sys.modules, "echo_engine", raising=False)

        async def main() -> None:
            options: dict[str, Any] = {"model_control_mode": "explicit", "load_model": (model,)}
            async with Server(site / "models", **options) as server:
                await asyncio.wait_for(check_engine(server, model, max_tokens=max_tokens), 20)

        asyncio.run(main())

    return check


@pytest.mark.parametrize("model", ["thread", "process"])
def test_an_engine_that_keeps_the_contract_passes(check: Callable[..., None], model: str) -> None:
    check(model, max_tokens=2 * UNREAD)  # so a slow reader gets the rest joined


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("in request.sampling.more", "in ()", "an unknown sampling parameter must be an InvalidArgument"),
        ("if stop in held", "if not stop", "with the stop string"),
        ("place + 1 == request.max_tokens", "place == request.max_tokens", "num_output_tokens must be at most 12"),
        ('reason, cut = "length"', 'reason, cut = "eos"', "the last finish_reason must be one of"),
        ("held = held[cut:]", 'held = "" if request.stream else held', "but .* in a stream"),
    ],
)
def test_an_engine_that_breaks_it_fails(check: Callable[..., None], old: str, new: str, text: str) -> None:
    with pytest.raises(AssertionError, match=text):
        check("thread", old, new)


def test_the_engine_of_the_readme_passes(check: Callable[..., None]) -> None:
    code = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[0]
    check("thread", code=code.replace('name = "words"', 'name = "echo"'))
