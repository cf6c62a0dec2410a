from collections.abc import Mapping, Sequence
from typing import Any

import headrace_template_interceptor as template
from headrace import Operation, Unauthenticated
from headrace_testing import InterceptorConformance, RefusedOperation


class TestTemplate(InterceptorConformance):
    plugin, interceptor = "headrace_template_interceptor", "template"

    def options(self) -> Mapping[str, Any]:
        return {"plugin_options": [template.TemplateOptions(key="s3cret")]}

    def headers(self) -> Mapping[str, str]:
        return {"authorization": "Bearer s3cret"}

    def refusals(self) -> Sequence[RefusedOperation]:
        return [
            RefusedOperation(Unauthenticated),
            RefusedOperation(Unauthenticated, {"authorization": "Bearer guess"}),
            RefusedOperation(Unauthenticated, operation=Operation.UNLOAD),
        ]
