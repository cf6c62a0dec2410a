"""Invalid arguments: every command reports them in the same form, with a hint, and exits with 1 as Triton does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.config.options import ServerOptions
from headrace.errors import ConfigError, HeadraceError
from headrace.plugins import Plugins
from headrace_cli import main
from headrace_cli.inspection.inspector import Inspector


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return stderr. stdout must be empty."""
    try:
        code = main(words)
    except SystemExit as stop:
        code = int(str(stop.code))
    output = capsys.readouterr()
    assert (code, output.out) == (1, "")
    return output.err


@pytest.mark.parametrize(
    ("words", "usage", "text"),
    [
        (
            ["serve", "models"],
            "serve [options]",
            "Unexpected argument: models; did you mean --model-repository=models?",
        ),
        (
            ["serve", "--modl-repository=x"],
            "serve [options]",
            "'--modl-repository'; did you mean '--model-repository'?",
        ),
        (["serve"], "serve [options]", "--model-repository must be specified"),
        (["plugins", "all"], "plugins [options]", "Unexpected argument: all"),
        (["plugins", "--jsn=1"], "plugins [options]", "unrecognized option '--jsn'; did you mean '--json'?"),
    ],
)
def test_each_command_names_the_word_that_it_cannot_read(
    words: list[str], usage: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    first, blank, *rest = refused(capsys, *words).splitlines()
    assert first == f"Usage: headrace {usage}   (headrace {words[0]} --help lists them)"
    assert blank == ""
    assert text in "\n".join(rest)


@pytest.mark.parametrize(
    ("flag", "distribution"), [("--audit-log-file", "headrace-logging"), ("--openai-port", "headrace-openai")]
)
def test_a_flag_of_a_plugin_that_is_not_installed_is_refused_with_the_command_that_installs_it(
    flag: str, distribution: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    only_core = Plugins.discover(())
    monkeypatch.setattr(Plugins, "discover", lambda *_: only_core)
    assert refused(capsys, "serve", f"{flag}=x").endswith(
        f"unrecognized option '{flag}'. It comes with the distribution {distribution}: pip install {distribution}\n"
    )


def test_an_unknown_command_exits_with_the_same_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no plugin provides command 'sreve'; did you mean 'serve'?" in refused(capsys, "sreve")
    assert "Usage: headrace <command>" in refused(capsys)


@pytest.fixture
def installed(site: Path, distribute: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a plugin that this process finds: the session `core` has none but core's own."""
    distribute("measuring", "")
    monkeypatch.syspath_prepend(str(site))
    return "measuring"


def test_a_plugin_that_is_not_installed_is_refused(
    tmp_path: Path, installed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = refused(capsys, "serve", f"--model-repository={tmp_path}", "--plugins=measurin")
    reason, _, names = text.partition("? installed: ")
    assert reason.endswith(f"--plugins: no plugin 'measurin' is installed; did you mean '{installed}'")
    assert {"builtins", installed} <= {*names.strip().split(", ")}
    with pytest.raises(ConfigError, match="no plugin 'nobody' is installed"):
        Plugins.discover([installed, "nobody"])


def test_plugins_are_named_by_themselves_or_by_their_distribution(installed: str) -> None:
    for name in (installed, f"headrace-{installed}"):
        assert [info.name for info in Plugins.discover([name]).plugins] == [
            *("builtins", "commands", "grpc", "http", "processes"),
            installed,
        ]


@pytest.mark.parametrize("address", ["s3://bucket/models", "gs://bucket/models", "as://account/models"])
def test_a_repository_in_a_cloud_is_named_by_its_url(
    address: str,
) -> None:
    with (
        pytest.raises(HeadraceError) as refusal,
        Inspector(ServerOptions(model_repository=(address,), plugins=())) as inspector,
    ):
        inspector.models()
    assert refusal.value.message == (
        f"repository '{address}' cannot be read: Repositories in '{address[:2]}' need the distribution "
        f"headrace-cloud: pip install headrace-cloud; no plugin provides storage '{address[:2]}'; installed: file"
    )
