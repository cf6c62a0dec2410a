"""Decides which models of the repository are loaded: by name, or as the repository changes.

Loading and unloading by name is allowed in control mode ``explicit`` (docs/spec/behaviours.md sections 5.2 to 5.5). In
mode ``poll``, and with ``--dev``, a `Watcher` polls the repository. The two differ:

| | mode ``poll`` | ``--dev`` |
|---|---|---|
| a change counts | at once | when two polls in a row find the same, because files are being saved |
| a failed load is tried again | at every poll | when the files have changed |
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol, TypeAlias

from headrace.config.option_parts import ControlOptions
from headrace.errors import HeadraceError, InvalidArgument, Unavailable, Unsupported
from headrace.models.control_mode import ControlMode
from headrace.models.lifecycle import Lifecycle
from headrace.models.states import IndexEntry, State, index_of, poll_failure
from headrace.storage.repositories import Entry, Fingerprint, Repositories
from headrace.storage.sent_files import parse_overrides
from headrace.telemetry.log_limits import logger_without_repeats, without_repeats

log = logger_without_repeats(__name__)

#: Means all models in ``--load-model``.
ALL = "*"
DEV_INTERVAL_S = 0.5

#: The result of a poll: by name, every model and its fingerprint in each repository, or why that cannot be read.
Fingerprints: TypeAlias = "dict[str, tuple[Entry, tuple[Fingerprint, ...] | str]]"


class Relay(Protocol):
    """Loads and unloads in several servers. Each method raises their error, also if only some of them failed."""

    async def load(self, name: str, parameters: Mapping[str, str | bytes]) -> bool:
        """Return `Control.load_here` of any server."""

    async def unload(self, name: str, unload_dependents: bool) -> None: ...


class Control:
    """Decides which models are loaded, and from which repository. Event loop only."""

    def __init__(
        self,
        options: ControlOptions,
        lifecycle: Lifecycle,
        repositories: Repositories,
        mode: ControlMode | None = None,
    ) -> None:
        """``mode`` is the control mode of a plugin, if the options choose one: it then decides."""
        self._mode = mode
        self._options = options
        self._lifecycle = lifecycle
        self._repositories = repositories
        self._watcher = self._make_watcher()
        #: The running loads of models with dead instances, in a mode without loads by name.
        self._revivals: dict[str, asyncio.Future[None]] = {}
        #: Repeats loads and unloads by name in all servers that share the ports. None for a single server.
        self.relay: Relay | None = None

    async def start(self) -> list[HeadraceError]:
        """Load the models that the control mode loads at start, and start to watch. Return the failures."""
        await asyncio.to_thread(self._repositories.sweep)
        if self._mode is not None:
            return await self._mode.start()
        if self._watcher is None:
            return await self._load_first()
        await self._watcher.prepare()
        failures = await self._load_first()
        self._watcher.start()
        return failures

    def retry(self, loaded: Callable[[], None]) -> None:
        """After a `start` that has raised: if the repository is polled, load its models when it can be read, and call
        ``loaded`` then."""
        if self._watcher is not None and not self.is_explicit:
            self._watcher.start(loaded)

    async def _load_first(self) -> list[HeadraceError]:
        entries = await asyncio.to_thread(self._repositories.scan)
        if not self.is_explicit or self._options.load_model == (ALL,):
            return await self._lifecycle.load_all(entries.values())
        names = dict.fromkeys(self._options.load_model)
        why = "no model repository has it"
        missing: list[HeadraceError] = [poll_failure(name, why) for name in names if name not in entries]
        for error in missing:
            log.error("%s", error.message)
        return missing + await self._lifecycle.load_all(entries[name] for name in names if name in entries)

    @property
    def is_explicit(self) -> bool:
        return self._options.model_control_mode == "explicit"

    async def load(self, name: str, parameters: Mapping[str, str | bytes]) -> None:
        """Load or reload a model. Return when it serves. Raises `HeadraceError`; the old versions then stay.

        A model with a dead instance may be loaded again in every mode, as it is in the repository.
        """
        if self._mode is not None:
            if parameters:
                raise Unsupported(
                    f"a load with parameters is not allowed in model control mode '{self._mode.name}': it loads models "
                    "as the repository has them"
                )
            await self._mode.load(checked_name(name))
            return
        if parameters:
            self._require_explicit()
        if self.is_explicit:
            name = checked_name(name)
        load = self.load_here if self.relay is None else self.relay.load
        if not await load(name, parameters):
            self._require_explicit()

    async def load_here(self, name: str, parameters: Mapping[str, str | bytes]) -> bool:
        """`load` in this server only. In a mode without loads by name, return False unless an instance has died here.

        In such a mode, callers share the outcome of a running load.
        """
        if self.is_explicit:
            await self._load(name, parameters)
            return True
        running = self._revivals.get(name)
        if running is None:
            if not self._lifecycle.has_died(name):
                return False
            running = self._revivals[name] = self._lifecycle.background.start(self._load(name, {}))
            running.add_done_callback(lambda _: self._revivals.pop(name))
        await asyncio.shield(running)
        return True

    async def _load(self, name: str, parameters: Mapping[str, str | bytes]) -> None:
        await self._lifecycle.load(await asyncio.to_thread(self._find, name, parameters))

    async def unload(self, name: str, unload_dependents: bool = False) -> None:
        """Take ``name`` out of service. Returns at once.

        A name that is unknown, not loaded or invalid is no error. With ``unload_dependents``, also unload the models
        that only ``name`` needed and that were not loaded by name.
        """
        if self._mode is not None:
            await self._mode.unload(name)
            return
        self._require_explicit()
        if self.relay is not None:
            await self.relay.unload(name, unload_dependents)
        else:
            await self.unload_here(name, unload_dependents)

    async def unload_here(self, name: str, unload_dependents: bool) -> None:
        """`unload` in this server only."""
        await self._lifecycle.unload(name, unload_dependents)

    async def register(self, url: str, names: Mapping[str, str]) -> None:
        """Add a repository, from which models may be loaded then (docs/spec/behaviours.md section 5.9)."""
        self._require_registration()
        await asyncio.to_thread(self._repositories.add, url, names)

    async def unregister(self, url: str) -> None:
        """Remove a repository of `register`. Its loaded models stay loaded; the others are removed from the index."""
        self._require_registration()
        self._lifecycle.forget(await asyncio.to_thread(self._repositories.remove, url))

    def _require_registration(self) -> None:
        if not self.is_explicit:
            raise Unsupported("repository registration is not allowed if model control mode is not EXPLICIT")
        if self.relay is not None:
            raise Unsupported("repository registration is not allowed with --workers: one worker only would have it")

    async def index(self, ready_only: bool) -> list[IndexEntry]:
        """Return the index: every known model version, then the models of the repository that were never loaded; by
        name."""
        lines = [line for record in self._lifecycle.records.values() for line in index_of(record, ready_only)]
        if (self.is_explicit or self._mode is not None) and not ready_only:
            entries = await asyncio.to_thread(self._repositories.scan)
            lines += [IndexEntry(name) for name in entries if name not in self._lifecycle.records]
        if self._mode is not None:
            lines = [self._with_reason(line, self._mode) for line in lines]
        return sorted(lines, key=lambda line: line.name)  # stable: versions stay in order

    def _with_reason(self, line: IndexEntry, mode: ControlMode) -> IndexEntry:
        """Return ``line`` with the memory of a version that serves, or with the reason why it does not."""
        record = self._lifecycle.records.get(line.name)
        version = record.versions.get(int(line.version)) if record is not None and line.version else None
        if version is not None and version.served is not None:
            return replace(line, memory_bytes=version.served.memory_bytes)
        if line.state in (State.LOADING.value, State.UNLOADING.value):
            return line
        return replace(line, state=State.UNAVAILABLE.value, reason=mode.why_not_served(line.name))

    def stop(self) -> None:
        """Stop watching."""
        if self._mode is not None:
            self._mode.stop()
        if self._watcher is not None:
            self._watcher.stop()

    def close(self) -> None:
        """Close the storages and remove their temporary files. Blocks."""
        self._repositories.close()

    def _make_watcher(self) -> Watcher | None:
        """Return the watcher of ``--dev`` or mode ``poll``, or None."""
        options = self._options
        is_polling = options.model_control_mode == "poll" and options.repository_poll_secs > 0
        if not (options.dev or is_polling):
            return None
        interval_s = DEV_INTERVAL_S if options.dev else float(options.repository_poll_secs)
        return Watcher(self._repositories, self._lifecycle, interval_s, dev=options.dev, known_only=self.is_explicit)

    def _require_explicit(self) -> None:
        if self.is_explicit:
            return
        if self._options.model_control_mode == "poll":
            raise Unavailable("explicit model load / unload is not allowed if polling is enabled")
        raise Unavailable(
            "explicit model load / unload is not allowed in model control mode 'none'; start the server with "
            "--model-control-mode=explicit"
        )

    def _find(self, name: str, parameters: Mapping[str, str | bytes]) -> Entry:
        """Return the entry of ``name`` in the repositories. Blocks. Raises `HeadraceError`."""
        try:
            overrides = parse_overrides(parameters)
        except HeadraceError as error:
            raise poll_failure(name, error.message, is_override=True) from error
        if overrides.files:
            return self._repositories.sent(name, overrides)
        entry = self._repositories.find(name)
        if entry is None:
            raise poll_failure(name)
        return replace(entry, config=overrides.config)


def checked_name(name: str) -> str:
    """Return ``name`` without surrounding blanks. Raises `InvalidArgument` if it is invalid.

    Source: docs/spec/behaviours.md section 5.3.
    """
    name = name.strip(" \t\n\v\f\r")
    if not name:
        raise InvalidArgument("Model name cannot be empty. Please enter a valid name to deploy.")
    if name in (".", "..") or "/" in name or "\0" in name:
        shown = name.replace("\0", "\\0")
        raise InvalidArgument(f"invalid model name '{shown}', model name must not contain path traversal characters")
    return name


class Watcher:
    """Keeps the models of ``lifecycle`` as they are in ``repositories``. Event loop only.

    With ``known_only``, models that are not served are ignored.
    """

    def __init__(
        self, repositories: Repositories, lifecycle: Lifecycle, interval_s: float, *, dev: bool, known_only: bool
    ) -> None:
        self._repositories = repositories
        self._lifecycle = lifecycle
        self._interval_s = interval_s
        self._dev = dev
        self._known_only = known_only
        self._handled: Fingerprints = {}
        #: Models whose load is tried again at every poll: the files of the last try, and its log lines.
        self._failed: dict[str, tuple[object, set[str]]] = {}
        #: Why the last poll failed.
        self._complaint = ""
        self._task: asyncio.Task[None] | None = None

    async def prepare(self) -> None:
        """Record the state of the repository before it is loaded, to find later changes."""
        self._handled = await asyncio.to_thread(read_fingerprints, self._repositories)

    def start(self, loaded: Callable[[], None] = lambda: None) -> None:
        """Start to watch. Call ``loaded`` once, when all that the repository has was loaded."""
        self._task = asyncio.ensure_future(self._watch(loaded))

    def stop(self) -> None:
        """Stop polling. Running loads go on."""
        if self._task is not None:
            self._task.cancel()

    async def _watch(self, loaded: Callable[[], None]) -> None:
        before, is_first = self._handled, True
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                now = await asyncio.to_thread(read_fingerprints, self._repositories)
                await self._follow({name for name in {*now, *self._handled} if self._is_due(name, before, now)}, now)
                if is_first and (now == before or not self._dev):
                    is_first = False
                    loaded()
                if self._complaint:
                    log.info("the repository can be read again")
                before, self._complaint = now, ""
            except HeadraceError as error:
                if error.message != self._complaint:
                    self._complaint = error.message
                    log.error("cannot poll the repository: %s", error.message)
            except Exception:
                log.exception("cannot poll the repository")

    def _is_due(self, name: str, before: Mapping[str, object], now: Mapping[str, object]) -> bool:
        """True if ``name`` has changed, and (with ``--dev``) has not changed since the poll before."""
        return now.get(name) != self._handled.get(name) and not (self._dev and now.get(name) != before.get(name))

    async def _follow(self, names: set[str], now: Fingerprints) -> None:
        if self._known_only:
            names = {name for name in names if self._lifecycle.is_served(name)}
        await asyncio.gather(*(self._follow_one(name, now) for name in sorted(names)))

    async def _follow_one(self, name: str, now: Fingerprints) -> None:
        if name not in now:
            log.info("'%s' was removed from the repository: unloading it", name)
            await self._lifecycle.remove(name)
            del self._handled[name]
            self._failed.pop(name, None)
            return
        entry = now[name][0]
        if entry.is_duplicate and not self._known_only:  # a model loaded by name would not be loaded again by itself
            await self._lifecycle.remove(name)
        seen, logged = self._failed.pop(name, (None, set[str]()))
        with without_repeats(logged if seen == now[name] else (logged := set())):
            change = "has changed" if name in self._handled else "is new in the repository"
            log.info("'%s' %s: loading it", name, change)
            failures = await self._lifecycle.load_all([entry])
        if self._dev or not failures or entry.is_duplicate:
            self._handled[name] = now[name]
        else:
            self._failed[name] = now[name], logged


def read_fingerprints(repositories: Repositories) -> Fingerprints:
    """Return the present state of ``repositories``. Blocks. Raises `HeadraceError` if one cannot be read."""
    return {name: (entry, _fingerprints(entry)) for name, entry in repositories.scan().items()}


def _fingerprints(entry: Entry) -> tuple[Fingerprint, ...] | str:
    """Return the fingerprints of ``entry``, or the error. A load of this model fails with it; others are not affected.

    Blocks.
    """
    try:
        return entry.fingerprints()
    except HeadraceError as error:
        return error.message
