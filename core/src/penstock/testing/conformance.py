"""The class that a backend's conformance test subclasses."""

from __future__ import annotations

from abc import abstractmethod

from penstock.testing.checks.answers import Answers
from penstock.testing.checks.loading import Loading
from penstock.testing.checks.protocols import Protocols
from penstock.testing.checks.requests import Requests
from penstock.testing.example import Example


class BackendConformance(Loading, Answers, Requests, Protocols):
    """Every check of the kit. A subclass sets ``plugin`` and ``backend``, gives the fixture
    ``example``, and says what else it claims; see `penstock.testing` and `Subject`.

    Most checks drive the backend directly, on threads of their own, and fail on what they catch;
    those about queues and protocols run a server in this process.
    """

    @abstractmethod
    def example(self) -> Example:
        """A pytest fixture. Its answers should come from elsewhere than this backend: from
        arithmetic, from the engine called directly, better from another engine."""
