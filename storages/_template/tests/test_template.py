from collections.abc import Mapping
from pathlib import Path
from zipfile import ZipFile

import pytest

from headrace_testing import StorageConformance


class TestTemplate(StorageConformance):
    plugin, storage = "headrace_template_storage", "template"

    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path) -> None:
        self.path = tmp_path / "models.zip"

    def store(self, models: Mapping[str, Mapping[str, bytes]]) -> str:
        with ZipFile(self.path, "w") as archive:
            for model, files in models.items():
                for file, content in files.items():
                    archive.writestr(f"{model}/{file}", content)
        return f"template://{self.path}"
