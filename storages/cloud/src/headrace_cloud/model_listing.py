"""The models of a repository and their files, by as few listings as possible, and no half-copied model.

A poll of the server reads the models, then the files of each, from one listing of the whole prefix. The first read of
the files of a model removes them from the listing; a further read lists the model again.

A model that is being copied to the bucket has missing files. Two rules keep it from being loaded:

- With ``--cloud-ready-file``, a model is complete when it has that file, and no file is newer.
- Without it, if the server polls, a change counts when the model has not changed for ``--cloud-settle-s``. At a load by
  a command, or at start without polling, the current files count.

Until then, the former files count.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from headrace import LoadError, Unavailable, one_line
from headrace_cloud.stored_objects import InvalidKey, ObjectStore, StoredObject

log = logging.getLogger(__name__)

#: A listing that is older answers no further question.
_FRESH_S = 30.0
#: A larger repository is refused: its listing would fill the memory.
MAX_OBJECTS = 1_000_000

Files = Mapping[str, StoredObject]


@dataclass(frozen=True, slots=True)
class Completeness:
    """The rule by which a model is complete: the name of its ready file, or the seconds without a change. See above."""

    ready_file: str = ""
    settle_s: float = 0.0


@dataclass(slots=True)
class _Change:
    """The tags of a model that has changed, and since when it has had them, by the monotonic clock."""

    tags: Mapping[str, str]
    since: float


class ModelListing:
    """The models in ``store``. Any thread. Methods block, and raise `HeadraceError` if the storage fails."""

    def __init__(self, store: ObjectStore, completeness: Completeness) -> None:
        self._store, self._completeness = store, completeness
        self._lock = threading.Lock()
        #: The lock of a listing, the number of started listings, and the number of the last successful one.
        self._listing_lock = threading.Lock()
        self._started = self._succeeded = 0
        self._names: list[str] = []
        self._was_empty = False
        #: The warning of the last listing, which is not logged at every poll.
        self._warning = ""
        #: The files of the last listing that were not read yet, and its start time.
        self._fresh: dict[str, Files | LoadError] = {}
        self._listed_at = 0.0
        #: The files of each model that counted last, and changes that do not count yet.
        self._counting: dict[str, Files] = {}
        #: The last results of `files`.
        self._answered: dict[str, Files] = {}
        self._changes: dict[str, _Change] = {}

    def models(self) -> list[str]:
        """List the repository. Return the names of its models, of which at least one file counts.

        Callers that wait for a running listing share the one after it.
        """
        wanted = self._started + 1
        with self._listing_lock:
            if self._succeeded < wanted:
                self._started += 1
                began = time.monotonic()
                self._names = self._update(self._list(), began)
                self._succeeded = self._started
            return self._names

    def _update(self, listed: Mapping[str, Files | LoadError], began: float) -> list[str]:
        """Make ``listed`` the last listing. Return the names of its models."""
        found = {name: files for name, files in listed.items() if files}  # an empty folder is no model
        with self._lock:
            for name in {*self._counting, *self._changes, *self._answered} - found.keys():
                self._remove(name)
            counting = {
                name: files if isinstance(files, LoadError) else self._count(name, files)
                for name, files in found.items()
            }
            self._fresh = {name: files for name, files in counting.items() if files is not None}
            self._listed_at = began
            return list(self._fresh)

    def files(self, model: str) -> Files:
        """Return the files of ``model`` that count, from the last listing if they were not read since."""
        with self._lock:
            taken = self._fresh.pop(model, None) if time.monotonic() - self._listed_at < _FRESH_S else None
        if taken is None:
            taken = self._list_one(model)
            if not isinstance(taken, LoadError):
                with self._lock:
                    taken = (self._count(model, taken) if taken else self._remove(model)) or {}
        if isinstance(taken, LoadError):
            raise taken
        with self._lock:
            self._answered[model] = taken
        return taken

    def last(self, model: str) -> Files:
        """Return what `files` has returned last, or what it returns now."""
        with self._lock:
            found = self._answered.get(model)
        return self.files(model) if found is None else found

    def _remove(self, model: str) -> Files:
        for known in (self._counting, self._changes, self._answered):
            known.pop(model, None)
        return {}

    def _list(self) -> dict[str, Files | LoadError]:
        objects: dict[str, list[StoredObject]] = {}
        try:
            for each in self._objects():
                name, slash, _ = each.path.partition("/")
                if slash and name and not name.startswith(".") and "\0" not in name:
                    objects.setdefault(name, []).append(each)
        except InvalidKey as error:
            if error.message != self._warning:
                self._warning = error.message
                log.warning("%s; listing each model by itself", error.message)
            return {name: self._list_one(name) for name in self._store.folders() if not name.startswith(".")}
        self._warning = ""
        if not objects:
            self._check_empty()
            if not self._was_empty:
                log.warning("'%s' has no models: it is empty", self._store.identity)
        self._was_empty = not objects
        return {name: self._checked(name, found) for name, found in objects.items()}

    def _objects(self, folder: str = "") -> Iterator[StoredObject]:
        """Yield the objects below ``folder``. Raises `LoadError` if there are more than `MAX_OBJECTS`."""
        for number, each in enumerate(self._store.objects(folder)):
            if number == MAX_OBJECTS:
                raise LoadError(f"the model repository has more than {MAX_OBJECTS} objects")
            yield each

    def _check_empty(self) -> None:
        """Raise `Unavailable` if an object is still there: some other server, such as a proxy, has answered.

        Without this, its answer would unload all models.
        """
        with self._lock:
            known = next((each for files in self._counting.values() for each in files.values()), None)
        if known is not None and self._store.exists(known):
            raise Unavailable(f"the storage answers with an empty listing, and '{known.path}' is still there")

    def _list_one(self, name: str) -> Files | LoadError:
        return self._checked(name, self._objects(name))

    def _checked(self, name: str, objects: Iterable[StoredObject]) -> Files | LoadError:
        try:
            return files_of(objects, len(name) + 1)
        except InvalidKey as error:
            return error

    def _count(self, name: str, files: Files) -> Files | None:
        """Return the files of ``name`` that count: ``files`` or the former ones. None if there are no former ones."""
        before = self._counting.get(name)
        tags = {path: each.tag for path, each in files.items()}
        change = self._changes.get(name)
        is_new = change is None or change.tags != tags
        if change is None or is_new:
            change = _Change(tags, time.monotonic())
        if self._is_complete(files, before, change):
            self._changes.pop(name, None)
            self._counting[name] = before = _without(files, self._completeness.ready_file)
        else:
            self._changes[name] = change
            if is_new:
                log.info("model '%s' is being copied to the repository: waiting until it is complete", name)
        return before

    def _is_complete(self, files: Files, before: Files | None, change: _Change) -> bool:
        ready = self._completeness.ready_file
        if ready:
            mark = files.get(ready)
            return mark is not None and all(each.modified_s <= mark.modified_s for each in files.values())
        settle_s = self._completeness.settle_s
        if not settle_s or (before is not None and change.tags == {path: each.tag for path, each in before.items()}):
            return True
        newest = max(each.modified_s for each in files.values())
        has_lost = before is not None and not before.keys() <= files.keys()
        if newest and not has_lost and time.time() - newest >= settle_s:
            return True
        return time.monotonic() - change.since >= settle_s


def files_of(objects: Iterable[StoredObject], start: int) -> Files:
    """Return the files of a model by their paths, which begin at ``start`` in the paths of its ``objects``.

    An empty object above others is a folder that a console has created. If nothing is below it, its name decides if it
    is the folder of a version. Raises `InvalidKey` for a key that cannot be a path.
    """
    files: dict[str, StoredObject] = {}
    folders: set[str] = set()
    for each in objects:
        path = each.path[start:]
        if not path:
            continue
        parts = path.removesuffix("/").split("/")
        if not {"", ".", ".."}.isdisjoint(parts) or "\0" in path:
            raise InvalidKey(f"the key '{one_line(each.path)}' cannot be the path of a file")
        for end in range(1, len(parts)):
            folders.add("/".join(parts[:end]))
        if path not in files or each.size:
            files[path] = each
    for path in [path for path in files if path.removesuffix("/") in folders]:
        if files.pop(path).size:
            raise InvalidKey(f"the key '{one_line(path)}' is a file, and a folder with others")
    for path in [path for path, each in files.items() if path.isdecimal() and not each.size]:
        files[f"{path}/"] = files.pop(path)
    return files


def _without(files: Files, name: str) -> Files:
    return {path: each for path, each in files.items() if path != name}
