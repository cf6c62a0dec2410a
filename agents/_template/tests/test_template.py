import io
import tarfile
from collections.abc import Mapping

from headrace_testing import AgentConformance


class TestTemplate(AgentConformance):
    plugin, agent = "headrace_template_agent", "template"

    def prepare(self, files: Mapping[str, bytes]) -> tuple[Mapping[str, bytes], Mapping[str, str]]:
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            for file, content in files.items():
                info = tarfile.TarInfo(file)
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
        return {"model.tar": packed.getvalue()}, {}

    def wrong_parameters(self) -> Mapping[str, str]:
        return {"archive": "../other/model.tar"}
