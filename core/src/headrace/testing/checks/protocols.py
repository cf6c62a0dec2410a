"""The same answer whichever way the request came."""

from __future__ import annotations

import pytest

from headrace.messages.tensor import data_type
from headrace.testing.comparison import assert_same
from headrace.testing.example import NAME, Example
from headrace.testing.serving import NOT_IN_JSON, WAYS, Way, infer
from headrace.testing.subject import Subject


class Protocols(Subject):
    """Python, HTTP with JSON, HTTP with binary tensors, gRPC."""

    @pytest.mark.parametrize("over", WAYS)
    def test_the_answer_is_the_same_over(
        self, over: Way, example: Example, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        tensors = [*example.given.values(), *example.expected.values()]
        if over == "http-json" and any(data_type(tensor) in NOT_IN_JSON for tensor in tensors):
            self.not_claimed("JSON does not carry FP16 and BF16")
        repository = tmp_path_factory.mktemp("repository")
        with self.serving(example, repository, listen=over != "python") as server:
            found = infer(server, NAME, example.given, over)
        assert_same(found, example.expected, example.tolerance, f"over {over}")
