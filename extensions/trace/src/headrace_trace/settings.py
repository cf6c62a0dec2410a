"""Triton's trace settings: of the whole server and of single models, with their fall-back, checks and sampling.

Source: docs/spec/behaviours.md section 12.1, and what Triton 2.51 answers. Event loop only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from headrace import InvalidArgument

#: More requests than there will be.
_EVER = 1 << 62
LEVELS = ("TIMESTAMPS", "TENSORS")
#: A number at the start of a text, as the C library's ``stoi`` reads it.
_NUMBER = re.compile(r"[ \t\n\v\f\r]*([+-]?[0-9]+)")
#: The largest value that each setting has according to Triton's text.
_RANGES = {"trace_rate": (0, 2**32 - 1), "trace_count": (-1, 2**31 - 1), "log_frequency": (0, 2**32 - 1)}


@dataclass(frozen=True)
class Changes:
    """Settings; None for those that are not set."""

    level: tuple[str, ...] | None = None
    rate: int | None = None
    count: int | None = None
    log_frequency: int | None = None


@dataclass(frozen=True)
class TraceSettings:
    """All settings of a server or of a model. ``count`` -1 is no limit. Without ``file``, no trace file is written."""

    level: tuple[str, ...] = ()
    rate: int = 1000
    count: int = -1
    log_frequency: int = 0
    file: str = ""
    mode: str = "triton"

    def check(self) -> None:
        """Raise `InvalidArgument` if requests could not be traced by these settings."""
        if self.level and not self.rate:
            raise _invalid("sample rate must be non-zero")
        if self.level and self.mode == "triton" and not self.file:
            raise _invalid("trace file name is not given")

    def with_changes(self, changes: Changes) -> TraceSettings:
        return replace(self, **{name: value for name, value in vars(changes).items() if value is not None})


def _invalid(reason: str) -> InvalidArgument:
    return InvalidArgument(f"Attempting to set invalid trace setting :{reason}")


class Sampler:
    """Decides which requests are traced by ``settings``. ``left`` more are traced, -1: any number."""

    __slots__ = ("_seen", "collected", "left", "rate", "settings", "started", "takes_tensors", "takes_timestamps")

    def __init__(self, settings: TraceSettings, left: int | None = None) -> None:
        self.settings = settings
        self.left = settings.count if left is None else left
        self.takes_tensors = "TENSORS" in settings.level and settings.mode == "triton"
        self.takes_timestamps = "TIMESTAMPS" in settings.level
        #: The number of started traces, and of ended ones.
        self.started = self.collected = settings.count - self.left
        #: Every ``rate``-th request is traced; 0: none.
        self.rate = settings.rate if settings.level and self.left != 0 else 0
        self._seen = 0

    def sample(self, is_forced: bool = False) -> bool:
        """True if this request is traced. If ``is_forced``, the rate is ignored."""
        if not self.rate:
            return False
        if not is_forced:
            self._seen += 1
            if self._seen < self.rate:
                return False
            self._seen = 0
        self.started += 1
        if self.left > 0:
            self.left -= 1
            if not self.left:
                self.rate = 0
        return True

    def spare(self) -> int:
        """Return the number of following requests that are not traced, and count them as seen."""
        if not self.rate:
            return _EVER
        number = self.rate - 1 - self._seen
        self._seen += number
        return number

    @property
    def is_exhausted(self) -> bool:
        """True if all traces that ``count`` allows are over."""
        return self.settings.count > 0 and self.collected >= self.settings.count


class SettingsTable:
    """The settings of a server. ``start`` are those of its command line. ``changed`` is called after each change."""

    def __init__(self, start: TraceSettings, changed: Callable[[], None] = lambda: None) -> None:
        self._changed = changed
        self._start, self._changes = start, Changes()
        self.whole = Sampler(start)
        #: The settings of models with their own.
        self.models: dict[str, Sampler] = {}
        self._of_models: dict[str, Changes] = {}

    def of(self, model: str) -> Sampler:
        """Return the sampler for a model."""
        return self.models.get(model, self.whole)

    def merged(self, model: str, fields: Mapping[str, Any]) -> Changes:
        """Return the settings of ``model``, empty for the server, that are set after ``fields`` is changed.

        ``fields`` has None for a setting that falls back. Raises `InvalidArgument` if requests could not be traced
        then.
        """
        changes = replace(self._of_models.get(model, Changes()) if model else self._changes, **fields)
        self._samplers(model, changes)
        return changes

    def apply(self, model: str, changes: Changes, counts_anew: bool = True) -> None:
        """Set exactly ``changes`` for ``model`` (empty: the server). Raises as `merged`, and then changes nothing.

        Settings of the server apply to each model without its own. Unless ``counts_anew``, requests that were traced
        before are part of the count.
        """
        samplers = self._samplers(model, changes, counts_anew)
        if not model:
            self._changes, self.whole = changes, samplers.pop("")
        elif changes == Changes():
            self._of_models.pop(model, None)
            self.models.pop(model, None)
        else:
            self._of_models[model] = changes
        for name, sampler in samplers.items():
            known = self.models.get(name)
            if name in self._of_models and (known is None or name == model or known.settings != sampler.settings):
                self.models[name] = sampler
        self._changed()

    def _samplers(self, model: str, changes: Changes, counts_anew: bool = True) -> dict[str, Sampler]:
        """Return a new sampler for each model that ``changes`` may concern; for the server under the empty name."""
        if model:
            return {model: self._made(model, self._whole(self._changes).with_changes(changes), counts_anew)}
        whole = self._whole(changes)
        made = {
            name: self._made(name, whole.with_changes(own), counts_anew and own.count is None)
            for name, own in self._of_models.items()
        }
        return {**made, "": self._made("", whole, counts_anew)}

    def _whole(self, changes: Changes) -> TraceSettings:
        return self._start.with_changes(changes)

    def _made(self, model: str, settings: TraceSettings, counts_anew: bool) -> Sampler:
        settings.check()
        before = self.of(model)
        return Sampler(settings, None if counts_anew or before.settings.count != settings.count else before.left)


def read_level(names: Iterable[str]) -> tuple[str, ...] | None:
    """Return the levels in ``names``, or None without any. Unknown names are ignored, as in Triton.

    Raises `InvalidArgument` for OFF beside others.
    """
    levels = list(names)
    if "OFF" in levels:
        if len(levels) > 1:
            raise InvalidArgument("Expect only one trace level 'OFF' is specified")
        return ()
    return tuple(level for level in LEVELS if level in levels) or None


def read_number(name: str, text: str, blank: str = "") -> int:
    """Return the number at the start of ``text`` for the setting ``name``. Raises `InvalidArgument`, in Triton's words.

    ``blank`` is what follows "got:" in Triton's text for a negative count: it differs by protocol.
    """
    found = _NUMBER.match(text)
    if found is None:
        raise InvalidArgument(f"Unable to parse '{name}', got: {text}")
    lowest, highest = _RANGES[name]
    number = int(found[1]) if len(found[1]) < 40 else 2**40
    if not -(2**31) <= number < 2**31:  # Triton reads an int
        raise InvalidArgument(f"Unable to parse '{name}', value is out of range [ {lowest}, {highest} ], got: {text}")
    if number < lowest:
        if name == "trace_count":
            raise InvalidArgument(f"Unable to parse '{name}'. Expecting value >= -1, got:{blank}{text}")
        number += 2**32
    return number
