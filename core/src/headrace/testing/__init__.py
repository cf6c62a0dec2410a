"""The conformance kit: tests that every part of a kind passes, for the authors of plugins.

For a backend, subclass `BackendConformance`, name the plugin, and give one example of a model with its answers::

    class TestLightGBM(BackendConformance):
        plugin, backend, heavy = "headrace_lightgbm", "lightgbm", ("lightgbm",)

        @pytest.fixture
        def example(self, tmp_path):
            ...  # write a model file into tmp_path
            return Example(tmp_path, {"features": rows}, {"scores": expected}, damage="model.txt")

For a scheduler, subclass `SchedulerConformance`, and say what it promises::

    class TestShortest(SchedulerConformance):
        plugin, scheduler = "headrace_shortest", "shortest"

For a frontend, subclass `FrontendConformance`, and say how to have it listen and how to ask it::

    class TestLines(FrontendConformance):
        plugin, frontend = "headrace_lines", "lines"

        def options(self, port): ...  # fields of ServerOptions
        def infer(self, connection, model, x): ...  # over a socket

The plugin must be installed (``pip install -e .`` is enough): the kit finds it by its entry point,
as a server does. Checks of what the part does not claim are skipped, and the summary says so.
pytest loads `headrace.testing.plugin` by itself: the fixtures ``write_model``, ``headrace_server``
and ``infer`` serve any test.
"""

from __future__ import annotations

from headrace.testing.conformance import BackendConformance, FrontendConformance, SchedulerConformance
from headrace.testing.example import Example

__all__ = ["BackendConformance", "Example", "FrontendConformance", "SchedulerConformance"]
