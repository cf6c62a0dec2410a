from pathlib import Path

import pytest

import headrace_template_command as template
from headrace_testing import CommandConformance


class TestTemplate(CommandConformance):
    plugin, command = "headrace_template_command", "template"
    good, bad = (str(Path(__file__).parent),), ("nowhere",)

    def test_each_model_is_listed_with_its_backend(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        for name in ("first", "second"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "config.pbtxt").write_text('backend: "identity"')
        command = template.Template()
        assert command.run(command.parse([str(tmp_path)])) == 0
        _, _, _, *rows, _ = capsys.readouterr().out.splitlines()
        assert [row.split()[1::2] for row in rows] == [["first", "identity"], ["second", "identity"]]
