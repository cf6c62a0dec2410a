"""The class that a backend's conformance test subclasses."""

from __future__ import annotations

from headrace.testing.checks.answers import Answers
from headrace.testing.checks.loading import Loading
from headrace.testing.checks.protocols import Protocols
from headrace.testing.checks.requests import Requests


class BackendConformance(Loading, Answers, Requests, Protocols):
    """Every check of the kit. A subclass sets ``plugin`` and ``backend``, says what it claims (see
    `Subject`), and gives the fixture ``example``, an `Example`.

    The example's answers should come from elsewhere than the backend: from arithmetic, from the
    engine called directly, better from another engine. Most checks drive the backend directly, on
    threads of their own; those about queues and protocols run a server in this process.
    """
