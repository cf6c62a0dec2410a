import json

from headrace_testing import ExtensionConformance, ServedExtension


class TestTemplate(ExtensionConformance):
    plugin, extension = "headrace_template_extension", "template"

    def ask(self, served: ServedExtension) -> None:
        status, _, body = served.http("POST", "/v2/models/doubles/template", b'{"x": [[1, 2]]}')
        assert (status, json.loads(body)) == (200, {"y": [[2, 4]]})
        request = {"model": "doubles", "inputs": {"x": [[3, 4]]}}
        (answer,) = served.grpc("/headrace.Template/Ask", json.dumps(request).encode())
        assert json.loads(answer) == {"y": [[6, 8]]}
        status, _, _ = served.http("POST", "/v2/models/doubles/template", b"[" * 100_000)
        assert status == 400
