from pathlib import Path

import pytest

from headrace_testing import CacheConformance


class TestTemplate(CacheConformance):
    plugin, cache = "headrace_template_cache", "template"

    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path) -> None:
        self.path = tmp_path / "answers"

    def settings(self) -> dict[str, str]:
        return {"path": str(self.path)}
