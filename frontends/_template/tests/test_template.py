import json
import socket
from typing import Any

import numpy as np

import headrace_template_frontend as template
from headrace_testing import FrontendConformance


class TestTemplate(FrontendConformance):
    plugin, frontend = "headrace_template_frontend", "template"

    def options(self, port: int) -> dict[str, Any]:
        return {"plugin_options": [template.TemplateOptions(enabled=True, address="127.0.0.1", port=port)]}

    def infer(self, connection: socket.socket, model: str, x: Any) -> Any:
        connection.sendall(json.dumps({"model": model, "inputs": {"x": x.tolist()}}).encode() + b"\n")
        answer = json.loads(connection.makefile("rb").readline())
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return np.array(answer["y"], np.float32)
