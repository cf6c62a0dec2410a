"""Sends the same requests to two servers, and collects what differs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace_compare.answer_differences import (
    ABSENT,
    IDENTITY,
    NOTHING,
    AnswerDifference,
    Tolerances,
    compare_documents,
    compare_streams,
    shape_of,
)
from headrace_compare.answers import NO_ANSWER, ComparedServer, Unreachable
from headrace_compare.documented import page_of, page_of_absent_statistics
from headrace_compare.request_sources import ComparedRequest, completed

#: The maximum number of stored differences. The rest is counted.
MAX_KEPT = 10_000
#: Requests in a row that neither server answers, after which the comparison ends.
_MAX_UNANSWERED = 5


@dataclass(frozen=True, slots=True)
class Found:
    """A difference and its place. ``docs`` is the page that documents it, or empty."""

    model: str
    place: str
    difference: AnswerDifference
    docs: str = ""


@dataclass(slots=True)
class Comparison:
    """The result. ``latencies_ns`` has the latencies of both servers.

    ``kinds`` counts undocumented differences by kind, ``documented`` counts documented ones by page.
    """

    found: list[Found] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    documented: Counter[str] = field(default_factory=Counter)
    requests: Counter[str] = field(default_factory=Counter)
    latencies_ns: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))
    notes: list[str] = field(default_factory=list)

    def add(self, model: str, place: str, differences: Iterable[AnswerDifference], page: str = "") -> int:
        """Add ``differences``, which ``page`` documents if it is not empty. Return the number of undocumented ones."""
        count = 0
        for each in differences:
            docs = page or page_of(each)
            if docs:
                self.documented[docs] += 1
            else:
                count += 1
                self.kinds[each.kind] += 1
            if len(self.found) < MAX_KEPT:
                self.found.append(Found(model, place, each, docs))
        return count


@dataclass(frozen=True, slots=True)
class ModelDocuments:
    """The first server's description of a model."""

    metadata: Mapping[str, Any]
    config: Mapping[str, Any]

    @property
    def is_decoupled(self) -> bool:
        policy = self.config.get("model_transaction_policy")
        return bool(isinstance(policy, Mapping) and policy.get("decoupled"))


class Comparer:
    """Compares ``first`` and ``second`` into ``result``. Methods block, and raise `Unreachable`."""

    def __init__(
        self, first: ComparedServer, second: ComparedServer, tolerances: Tolerances, ignored: Iterable[str]
    ) -> None:
        self._targets, self._tolerances, self._ignored = (first, second), tolerances, tuple(ignored)
        self._same_protocol = first.protocol == second.protocol
        self._documents: dict[str, ModelDocuments] = {}
        self._unanswered = 0
        self.result = Comparison()
        if not self._same_protocol:
            note = "one server is asked over HTTP and one over gRPC: status, headers and documents are not compared"
            self.result.notes.append(note)

    def models(self) -> list[str]:
        """Return the models that are ready on both servers. A model of only one server is a difference."""
        indices = [self._ready(target) for target in self._targets]
        one, other = indices
        for name in sorted({*one, *other}):
            states = one.get(name, "absent"), other.get(name, "absent")
            if states[0] != states[1]:
                self.result.add(name, "index", [AnswerDifference("index", "versions that are ready", *states)])
        return sorted({*one} & {*other})

    @staticmethod
    def _ready(target: ComparedServer) -> dict[str, str]:
        status, index = target.document("index")
        entries = index.get("models", []) if isinstance(index, Mapping) else index
        if not isinstance(entries, list):
            raise Unreachable(f"{target.url} answers the index with {status}: name models by --model")
        ready = dict[str, list[str]]()
        for each in entries:
            if each.get("state") == "READY":
                ready.setdefault(each["name"], []).append(each.get("version", ""))
        return {name: ", ".join(sorted(versions)) for name, versions in ready.items()}

    def compare_servers(self) -> None:
        """Compare the metadata of the servers. Names and versions are notes, not differences."""
        (_, one), (_, other) = (target.document("server") for target in self._targets)
        for target, each in zip(self._targets, (one, other), strict=True):
            if not isinstance(each, Mapping) or "name" not in each:
                raise Unreachable(f"{target.url} is no server of the v2 protocol")
            self.result.notes.append(f"{target.url} is {each['name']} {each.get('version', '')}")
        if self._same_protocol:
            extensions = [sorted(each.get("extensions", ())) for each in (one, other)]
            for document in (one, other):
                for key in (*IDENTITY, "extensions"):
                    document.pop(key, None)
            self._add("", "server", compare_documents(one, other, "server"))
            only = [", ".join(sorted({*extensions[at]} - {*extensions[1 - at]})) or NOTHING for at in (0, 1)]
            if extensions[0] != extensions[1]:
                difference = AnswerDifference("extensions", "extensions that the other server lacks", only[0], only[1])
                self._add("", "server", [difference])

    def compare_model(self, model: str) -> ModelDocuments:
        """Compare metadata, config and fields of the statistics of ``model``, once. Return the first server's."""
        if model in self._documents:
            return self._documents[model]
        found = dict[str, Any]()
        for kind in ("metadata", "config", "statistics"):
            (status, one), (other_status, other) = (target.document(kind, model) for target in self._targets)
            found[kind] = one if isinstance(one, Mapping) and "error" not in one else {}
            if not self._same_protocol:
                continue
            if status != other_status:
                self._add(model, kind, [AnswerDifference("status", f"{kind}: status", status, other_status)])
            if kind != "statistics":
                self._add(model, kind, compare_documents(one, other, kind, f"{kind} "))
        self._documents[model] = ModelDocuments(found["metadata"], found["config"])
        return self._documents[model]

    def compare_statistics(self) -> None:
        """Compare which fields the statistics have, after the requests."""
        for model, documents in self._documents.items() if self._same_protocol else ():
            found = [target.document("statistics", model)[1] for target in self._targets]
            one, other = map(shape_of, found)
            for path in sorted(one ^ other):
                has = ("present", ABSENT) if path in one else (ABSENT, "present")
                page = page_of_absent_statistics(path, documents.config, found[path in one])
                self._add(model, "statistics", [AnswerDifference("statistics", path, *has)], page)

    def compare(self, request: ComparedRequest) -> int:
        """Send ``request`` to both servers. Return the number of differences. Raises `BadRequests`, too."""
        documents = self.compare_model(request.model)
        if documents.is_decoupled and not self._same_protocol:
            note = f"'{request.model}' is decoupled: HTTP and gRPC answer it in other ways, so it is left out"
            self.result.notes += [note] if note not in self.result.notes else []
            return 0
        request = completed(request, documents.metadata, documents.config)
        answers = []
        for target, times in zip(self._targets, self.result.latencies_ns, strict=True):
            begin = time.monotonic_ns()
            answers.append(target.infer(request, is_stream=documents.is_decoupled))
            times.append(time.monotonic_ns() - begin)
        silent = sum(any(each.status == NO_ANSWER for each in answer) for answer in answers)
        self._unanswered = self._unanswered + 1 if silent == len(answers) else 0
        if self._unanswered >= _MAX_UNANSWERED:
            raise Unreachable(f"neither server answers: {answers[0][0].error}")
        self.result.requests[request.model] += 1
        differences = compare_streams(answers[0], answers[1], self._tolerances, same_protocol=self._same_protocol)
        return self._add(request.model, request.place, differences)

    def _add(self, model: str, place: str, differences: Iterable[AnswerDifference], page: str = "") -> int:
        return self.result.add(model, place, self._without_ignored(differences), page)

    def _without_ignored(self, differences: Iterable[AnswerDifference]) -> Iterator[AnswerDifference]:
        for each in differences:
            if not any(each.field.startswith(ignored) for ignored in self._ignored):
                yield each


#: Called with the number of requests so far, and the number of those that differ.
Progress = Callable[[int, int], None]


def compare_all(comparer: Comparer, requests: Iterable[ComparedRequest], progress: Progress) -> None:
    """Compare every request, then the statistics."""
    differing = 0
    for number, request in enumerate(requests, 1):
        differing += bool(comparer.compare(request))
        progress(number, differing)
    comparer.compare_statistics()
