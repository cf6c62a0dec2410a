"""``headrace traffic``, against a real server."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from headrace import Server
from headrace_router.traffic_command import TrafficCommand
from headrace_testing import CommandConformance
from headrace_testing.serving import serve

from .conftest import identity, router, write
from .test_served import targets


class TestTraffic(CommandConformance):
    plugin, command = "headrace_router", "traffic"
    bad = ("show", "canary", "--url", "ftp://127.0.0.1")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("models")
    write(repository, "m", identity(more="version_policy { all { } }"), (1, 2))
    write(repository, "canary", router("m:1 = 3, m:2 = 1", shadow="m = 0.25", rules="parameter:beta -> m:2"))
    with serve(repository, listen=True) as server:
        yield server


def run(server: Server, *words: str) -> int:
    command = TrafficCommand()
    return command.run(command.parse([*words, "--url", f"http://127.0.0.1:{server.options.http_port}"]))


def test_show_draws_the_split(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    targets(server, "canary", 8)
    assert run(server, "show", "canary") == 0
    head, _, first, second, shadow, *rest = capsys.readouterr().out.splitlines()
    assert head == "canary version 1: 8 requests; parameter:beta -> m:2"
    assert first == "--+--> m:1  75.00 %  ######################"
    assert second == "  +--> m:2  25.00 %  ########"
    assert shadow == "  `..> m    25.00 %  ........  copies"
    assert any(line.startswith("| m:1    | 3      | 6") for line in rest)
    assert any(line.startswith("Copies to 'm': ") for line in rest)


def test_set_changes_weights_and_the_shadow(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(server, "set", "canary", "m:1=0", "m:2=2.5", "--shadow", "1", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert [target["weight"] for target in document["targets"]] == [0, 2.5]
    assert document["shadow"]["fraction"] == 1
    assert targets(server, "canary", 3) == {"m:2": 3}
    assert run(server, "set", "canary", "m:1=3", "m:2=1", "--version", "1") == 0


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("show", "m"), "model 'm' is no router"),
        (("show", "gone"), "Request for unknown model: 'gone' is not found"),
        (("set", "canary", "m:1=0", "m:2=0"), "all weights are 0"),
        (("set", "canary", "m:1=nan", "m:2=1"), "the weight of 'm:1' is NaN"),
        (("set", "canary", "m:1=1"), "'m:2' has no weight"),
        (("set", "canary", "m:1=1", "m:1=2"), "a target is named twice"),
        (("set", "canary"), "'set' needs a weight for each target"),
        (("show", "canary", "m:1=1"), "'show' changes nothing"),
        (("set", "canary", "--shadow", "2"), "the fraction is 2.0; expected a number from 0 to 1"),
    ],
)
def test_wrong_requests_are_refused(
    words: tuple[str, ...], why: str, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(server, *words) == 1
    assert why in capsys.readouterr().err


@pytest.mark.parametrize("words", [("set", "canary", "m"), ("set", "canary", "=1"), ("set", "canary", "m=x"), ("put",)])
def test_invalid_values_are_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit):
        TrafficCommand().parse(words)


def test_an_unreachable_server_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    command = TrafficCommand()
    assert command.run(command.parse(["show", "canary", "--url", "http://127.0.0.1:9"])) == 1
    assert "cannot ask http://127.0.0.1:9 about 'canary'" in capsys.readouterr().err
