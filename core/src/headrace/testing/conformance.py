"""The classes that conformance tests subclass, one for each kind of part."""

from __future__ import annotations

from headrace.testing.checks.answers import Answers
from headrace.testing.checks.frontends import FrontendChecks
from headrace.testing.checks.loading import Loading
from headrace.testing.checks.protocols import Protocols
from headrace.testing.checks.requests import Requests
from headrace.testing.checks.scheduled_answers import ScheduledAnswers
from headrace.testing.checks.scheduled_calls import ScheduledCalls
from headrace.testing.checks.scheduled_service import ScheduledService
from headrace.testing.checks.scheduled_times import ScheduledTimes


class BackendConformance(Loading, Answers, Requests, Protocols):
    """Every check of the kit. A subclass sets ``plugin`` and ``backend``, says what it claims (see
    `Subject`), and gives the fixture ``example``, an `Example`.

    The example's answers should come from elsewhere than the backend: from arithmetic, from the
    engine called directly, better from another engine. Most checks drive the backend directly, on
    threads of their own; those about queues and protocols run a server in this process.
    """


class SchedulerConformance(ScheduledAnswers, ScheduledTimes, ScheduledCalls, ScheduledService):
    """Every check of schedulers. A subclass sets ``plugin`` and ``scheduler``, and says what it claims (see
    `ScheduledSubject`); one that has several ways to run is tested by several subclasses, each with its ``config``.

    The kernel is the real one. Time stands still until a check turns it, so that nothing sleeps, and a delay is
    kept to the microsecond or not at all.
    """


class FrontendConformance(FrontendChecks):
    """Every check of frontends. A subclass sets ``plugin`` and ``frontend``, and says how to have it listen and how to
    ask it (see `FrontendChecks`). The server is a real one in this process, and so are the sockets.
    """
