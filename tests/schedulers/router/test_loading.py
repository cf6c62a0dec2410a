"""Loads of routers: after their targets, again after a change of these, and not without them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import HeadraceError, Inspector, Server, ServerOptions
from headrace_router import Traffic
from headrace_router.board import Change
from headrace_router.router_scheduler import RouterState
from headrace_testing.serving import on_loop, serve

from .conftest import identity, router, write
from .test_served import ROW, call, targets


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[Server]:
    write(repository, "m", identity())
    with serve(repository, listen=True, model_control_mode="explicit") as server:
        yield server


def load(server: Server, name: str) -> None:
    on_loop(server, server.load(name))


def until_loaded_again(server: Server, name: str, before: object) -> None:
    """Wait until the router ``name`` is loaded again after its target, in the background."""

    async def check() -> None:
        while server.served(name)[0] is before:
            await asyncio.sleep(0)

    on_loop(server, check())


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (router("m = 1, gone = 1"), "router r contains models that are not available or ambiguous: gone"),
        (router("m:9 = 1"), "router 'r' depends on 'm' whose required version 9 is not loaded."),
        (router("r2 = 1"), "circular dependency between routers: "),
        (router("r = 1"), "'r' is the router itself"),
        (router("m = nan"), "the weight of 'm' is NaN"),
        (router("m = 0"), "all weights are 0"),
        (router("m = 1", wieghts="3"), "unknown parameter 'wieghts'"),
        (
            router("m = 1", max_p99_ratio="0.5"),
            "'scheduler.max_p99_ratio' is '0.5': expected a number from 1 to 1,000",
        ),
        (router("m = 1", min_requests="many"), "'many': expected a number from 1 to 1,000,000"),
        (router("m = 1", shadow="m = 2"), "the fraction is 2.0; expected a number from 0 to 1"),
        (router("m = 1", shadow="gone = 1"), "router r contains models that are not available or ambiguous: gone"),
        (router("m = 1", 'input { name: "x" data_type: TYPE_INT32 dims: [-1] }'), "input 'x' is TYPE_INT32 [-1], and"),
    ],
)
def test_a_wrong_router_is_not_loaded_and_affects_no_other_model(
    text: str, why: str, server: Server, repository: Path
) -> None:
    write(repository, "r2", router("r = 1"))
    write(repository, "r", text)
    load(server, "m")
    with pytest.raises(HeadraceError) as caught:
        load(server, "r")
    assert why in caught.value.message
    np.testing.assert_array_equal(np.asarray(server.infer("m", {"x": ROW}).outputs["y"]), ROW)


def test_a_load_loads_the_targets(server: Server, repository: Path) -> None:
    write(repository, "late", identity())
    write(repository, "first", router("m = 1, late = 1"))
    load(server, "first")
    assert set(targets(server, "first", 10)) == {"m", "late"}


def test_changed_weights_outlive_a_load_until_the_config_changes(server: Server, repository: Path) -> None:
    write(repository, "one", identity())
    write(repository, "two", identity())
    write(repository, "kept", router("one = 1, two = 0"))
    load(server, "kept")
    path = "/v2/models/kept/traffic"
    assert call(server, "PUT", path, json.dumps({"weights": {"one": 0, "two": 1}}))[0] == 200
    before = server.served("kept")[0]
    write(repository, "two", identity(4))
    load(server, "two")
    until_loaded_again(server, "kept", before)
    assert targets(server, "kept", 5) == {"two": 5}
    assert call(server, "GET", path)[1]["targets"][0]["weight"] == 0
    write(repository, "kept", router("one = 3, two = 0"))
    load(server, "kept")
    assert targets(server, "kept", 5) == {"one": 5}, "a changed config wins"
    before = server.served("kept")[0]
    write(repository, "two", identity(8))
    load(server, "two")
    until_loaded_again(server, "kept", before)
    assert targets(server, "kept", 5) == {"one": 5}


def test_a_change_for_other_targets_is_not_applied(server: Server, repository: Path) -> None:
    """As by a worker that still serves the router's former config."""
    write(repository, "moved", router("m = 3"))
    load(server, "moved")
    state: RouterState = {"weights": [5.0], "shadow": None, "rolled_back": {}}
    for table, weight in (("m = 1, late = 1", 3), ("m = 3", 5)):
        change: Change = {"model": "moved", "version": "1", "table": table, "state": state}
        on_loop(server, Traffic(server.engine).apply(change))
        assert call(server, "GET", "/v2/models/moved/traffic")[1]["targets"][0]["weight"] == weight


def test_two_servers_of_one_process_do_not_mix(server: Server, repository: Path, tmp_path: Path) -> None:
    write(repository, "both", router("m = 1"))
    load(server, "both")
    write(tmp_path, "m", identity())
    write(tmp_path, "both", router("m = 1"))
    with serve(tmp_path, listen=True) as other:
        assert call(other, "PUT", "/v2/models/both/traffic", '{"weights": {"m": 5}}')[0] == 200
        assert call(server, "GET", "/v2/models/both/traffic")[1]["targets"][0]["weight"] == 1
        load(server, "both")
        assert call(server, "GET", "/v2/models/both/traffic")[1]["targets"][0]["weight"] == 1


def test_check_finds_the_same_errors_without_a_load(tmp_path: Path) -> None:
    write(tmp_path, "a", identity())
    write(tmp_path, "b", identity(datatype="INT32"))
    write(tmp_path, "good", router("a = 1"))
    write(tmp_path, "apart", router("a = 1, b = 1"))
    write(tmp_path, "lost", router("a = 1, gone = 1"))
    write(tmp_path, "wrong", router("a = 1, a = 2", sticky="user"))
    found: dict[str, Any] = {}
    with Inspector(ServerOptions(model_repository=(str(tmp_path),))) as inspector:
        for name in inspector.models():
            with inspector.open(name) as model:
                found[name] = [problem.message for problem in model.check(has_engines=True).problems]
    assert found["good"] == []
    assert [each[:53] for each in found["apart"]] == ["router 'apart': target 'b' cannot stand for 'a': inpu"]
    assert found["lost"] == ["router lost contains models that are not available or ambiguous: gone"]
    assert [each.split(":")[0] for each in found["wrong"]] == ["router 'wrong'"] * 2
