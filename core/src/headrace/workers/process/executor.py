"""The main thread of a child: it loads the instance, then runs batch after batch."""

from __future__ import annotations

import logging
import os
import traceback
from importlib import import_module
from typing import NoReturn

from headrace.backends.base import AnyInstance, BaseInstance
from headrace.backends.services import Services
from headrace.errors import Code, HeadraceError, summary
from headrace.ipc.channel import FramedSocket, FrameSender
from headrace.ipc.codec import Decoder, ReceivedRequest
from headrace.ipc.framing import VERSION, Frame, Kind
from headrace.ipc.json_parts import json_frame
from headrace.ipc.replies import AnswerStatus, Reply, Times, reply_of
from headrace.messages.response import Answer
from headrace.messages.ticket import Ticket
from headrace.telemetry import log_output
from headrace.telemetry.log_output import speak_for_all
from headrace.workers.instance import close_instance, run_batch, runner_for
from headrace.workers.process.handshake import ChildKind
from headrace.workers.process.instance_spec import InstanceSpec
from headrace.workers.runner import LATER, Later, Runner

log = logging.getLogger(__name__)


class Executor:
    """Drives the instance of a child; the `headrace.workers.runner.AnswerSink` of its runner.

    ``open`` has the tickets of the requests without their last answer, by call.
    """

    def __init__(self, work: FramedSocket, decoder: Decoder, sender: FrameSender, services: Services) -> None:
        self.instance: AnyInstance
        self.open: dict[int, Ticket] = {}
        self._work, self._decoder, self._sender, self._services = work, decoder, sender, services
        self._name = self._version = ""
        self._spec: InstanceSpec | None = None

    def work(self) -> NoReturn:
        """Do what the server says, until it says close."""
        frames = self._work.frames()
        runner = self._load(next(frames))
        for message in frames:
            if message.kind == Kind.REQUESTS:
                self._run(runner, message)
            elif message.kind == ChildKind.CLOSE:
                self._close(runner)
        raise AssertionError("unreachable")

    def send(self, ticket: Ticket, answer: Answer, final: bool) -> None:
        """Pass on what a batch did not answer. Any thread."""
        request = ticket.request
        assert isinstance(request, ReceivedRequest)
        if final:
            self.open.pop(request.call, None)
        self._sender.answer([reply_of(request.call, answer, final)])
        self._sender.release()

    def _load(self, message: Frame) -> Runner:
        try:
            self._spec = spec = InstanceSpec.from_json(message.text, self._services)
            speak_for_all(spec.name)
            module, _, name = spec.entry.partition(":")
            self.instance = getattr(import_module(module), name)(spec)
            schema = spec.schema()
            self._name, self._version = spec.name, str(spec.version)
        except BaseException as error:  # SystemExit of a model is a failure to load, too
            self._fail(error)
        try:
            runner = runner_for(self.instance, schema)
        except BaseException as error:
            close_instance(self.instance, spec.instance_name)
            self._fail(error)
        runner.connect(self)
        checks = type(self.instance).is_ready is not BaseInstance.is_ready
        self._work.send(json_frame(ChildKind.LOADED, {"has_check": checks, "version": VERSION}))
        return runner

    def _fail(self, error: BaseException) -> NoReturn:
        code = error.code if isinstance(error, HeadraceError) else Code.INTERNAL
        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        self._clean_up()
        failure = {"message": summary(error), "code": code.value, "traceback": trace}
        self._work.send(json_frame(ChildKind.FAILED, failure))
        log_output.flush_prints()
        os._exit(1)

    def _run(self, runner: Runner, message: Frame) -> None:
        requests = self._decoder.requests(message, model_name=self._name, model_version=self._version)
        tickets = [self._ticket(request) for request in requests]
        self._work.is_hurried = len(requests) == 1  # the callers of many take their time to come back
        answers, times = run_batch(runner, tickets)
        replies = [_reply(request, answer) for request, answer in zip(requests, answers, strict=True)]
        for reply in replies:
            if reply.final:
                self.open.pop(reply.call, None)
        spans = Times(times.start_ns, times.input_end_ns, times.infer_end_ns, times.end_ns)
        self._sender.answer(replies, spans)
        del requests, tickets, answers, replies, message  # so that what only they held is released now
        self._sender.release()

    def _ticket(self, request: ReceivedRequest) -> Ticket:
        self.open[request.call] = ticket = Ticket(request, _nobody)
        ticket.rows, ticket.pinned = request.rows, request.pinned
        return ticket

    def _close(self, runner: Runner) -> NoReturn:
        assert self._spec is not None
        runner.close()
        close_instance(self.instance, self._spec.instance_name)
        self._clean_up()
        log_output.flush_prints()
        os._exit(0)

    def _clean_up(self) -> None:
        try:
            if self._spec is not None:
                self._spec.cleanup.close()
        except BaseException:
            log.exception("what an instance had used could not be released")


def _reply(request: ReceivedRequest, answer: Answer | Later) -> Reply:
    if answer is LATER:
        return Reply(request.call, AnswerStatus.LATER, False, None)
    return reply_of(request.call, answer, True)


def _nobody(answer: Answer, final: bool) -> None:
    """Answers of a child leave through its runner."""
