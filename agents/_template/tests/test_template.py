import io
import zipfile
from collections.abc import Mapping

from headrace_testing import AgentConformance


class TestTemplate(AgentConformance):
    plugin, agent = "headrace_template_agent", "template"

    def prepare(self, files: Mapping[str, bytes]) -> tuple[Mapping[str, bytes], Mapping[str, str]]:
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w") as archive:
            for file, content in files.items():
                archive.writestr(file, content)
        return {"model.zip": packed.getvalue()}, {}

    def wrong_parameters(self) -> Mapping[str, str]:
        return {"archive": "../other/model.zip"}
