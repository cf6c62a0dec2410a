"""One listing per poll, no half-copied model, and keys that no file can have."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

import pytest

from headrace import LoadError
from headrace_cloud import model_listing
from headrace_cloud.model_listing import Completeness, ModelListing
from headrace_cloud.stored_objects import InvalidKey, ObjectStore, StoredObject
from tests.storages.cloud.conftest import Bucket
from tests.storages.cloud.opened_storage import open_storage


class Kept(ObjectStore):
    """Objects in memory: by path, a tag, a size and a time. It counts the listings."""

    identity = "kept"

    def __init__(self, *paths: str, modified_s: float = 1.0) -> None:
        self.stored = {path: StoredObject(path, 1, "tag", modified_s) for path in paths}
        self.listings: list[str] = []
        self.gate = threading.Event()
        self.gate.set()

    def change(self, path: str, tag: str = "new", modified_s: float = 1.0, size: int = 1) -> None:
        self.stored[path] = StoredObject(path, size, tag, modified_s)

    def _below(self, folder: str) -> list[StoredObject]:
        return [each for path, each in self.stored.items() if not folder or path.startswith(f"{folder}/")]

    def folders(self) -> list[str]:
        return sorted({path.partition("/")[0] for path in self.stored if "/" in path})

    def exists(self, each: StoredObject) -> bool:
        return each.path in self.stored

    def read(self, each: StoredObject, start: int, end: int) -> memoryview:
        raise NotImplementedError

    def read_many(self, objects: Sequence[StoredObject]) -> Iterator[tuple[StoredObject, memoryview]]:
        raise NotImplementedError

    def stream(self, each: StoredObject) -> Iterator[memoryview]:
        raise NotImplementedError

    def objects(self, folder: str = "") -> Iterator[StoredObject]:
        self.listings.append(folder)
        self.gate.wait()
        for each in self._below(folder):
            if "//" in each.path:
                raise InvalidKey(f"the key '{each.path}' is invalid")
            yield each


def _listing(store: Kept, ready_file: str = "", settle_s: float = 0.0) -> ModelListing:
    return ModelListing(store, Completeness(ready_file, settle_s))


def test_a_poll_lists_the_repository_once() -> None:
    store = Kept(*(f"m{number}/1/weights" for number in range(50)))
    listing = _listing(store)
    for _ in range(3):
        for name in listing.models():
            assert list(listing.files(name)) == ["1/weights"]
    assert store.listings == ["", "", ""]


def test_a_second_fingerprint_lists_the_model_again() -> None:
    store = Kept("m/1/weights")
    listing = _listing(store)
    listing.models()
    listing.files("m")
    store.change("m/1/weights")
    assert listing.files("m")["1/weights"].tag == "new"
    assert store.listings == ["", "m"]


def test_the_files_of_a_load_match_its_fingerprint() -> None:
    store = Kept("m/1/weights")
    listing = _listing(store)
    listing.models()
    listing.files("m")
    store.change("m/1/weights")
    listing.models()  # another model is loaded
    assert listing.last("m")["1/weights"].tag == "tag"
    listing.files("m")
    assert listing.last("m")["1/weights"].tag == "new"


def test_waiting_callers_share_one_listing() -> None:
    store = Kept("m/1/weights")
    listing = _listing(store)
    store.gate.clear()
    with ThreadPoolExecutor(8) as pool:
        listings = [pool.submit(listing.models) for _ in range(8)]
        store.gate.set()
        assert [each.result() for each in listings] == [["m"]] * 8
    assert 1 <= len(store.listings) < 8
    listing.models()  # no call waits: the answer is not from the past
    count = len(store.listings)
    listing.models()
    assert len(store.listings) == count + 1


def test_a_changing_model_is_loaded_when_it_is_stable() -> None:
    store = Kept("m/1/weights", "m/config.pbtxt")
    listing = _listing(store, settle_s=5)
    assert listing.models() == ["m"]
    store.change("m/1/weights", modified_s=time.time())  # config.pbtxt is still on its way
    store.change("n/1/weights", modified_s=time.time())
    assert listing.models() == ["m"]
    assert listing.files("m")["1/weights"].tag == "tag"
    store.change("m/1/weights", modified_s=time.time() - 6)
    store.change("n/1/weights", modified_s=time.time() - 6)
    assert listing.models() == ["m", "n"]
    assert listing.files("m")["1/weights"].tag == "new"


@pytest.mark.parametrize("modified_s", [0.0, time.time() + 3600], ids=["no clock", "another clock"])
def test_without_a_common_clock_a_change_counts_after_it_is_stable(
    modified_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    store = Kept("m/1/weights", modified_s=modified_s)
    listing = _listing(store, settle_s=5)
    assert listing.models() == []
    now += 4
    store.change("m/config.pbtxt", modified_s=modified_s)
    assert listing.models() == []
    now += 4
    assert listing.models() == []  # it has changed 4 s ago
    now += 2
    assert listing.models() == ["m"]


def test_a_model_that_lost_a_file_is_listed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    store = Kept("m/1/weights", "m/config.pbtxt")
    listing = _listing(store, settle_s=5)
    listing.models()
    del store.stored["m/config.pbtxt"]  # files are removed one by one
    listing.models()
    assert set(listing.files("m")) == {"1/weights", "config.pbtxt"}
    now += 6
    listing.models()
    assert set(listing.files("m")) == {"1/weights"}


def test_a_model_is_complete_when_its_ready_file_is_the_newest() -> None:
    store = Kept("m/1/weights")
    listing = _listing(store, ready_file="_READY")
    assert listing.models() == []
    store.change("m/_READY", modified_s=1.0)
    assert listing.models() == ["m"]
    assert list(listing.files("m")) == ["1/weights"]  # its own changes load nothing
    store.change("m/1/weights", modified_s=2.0)
    listing.models()
    assert listing.files("m")["1/weights"].tag == "tag"
    store.change("m/_READY", modified_s=3.0)
    listing.models()
    assert listing.files("m")["1/weights"].tag == "new"
    del store.stored["m/_READY"]
    assert listing.models() == ["m"]
    del store.stored["m/1/weights"]
    assert listing.models() == []


def test_a_bad_key_fails_its_model_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    store = Kept("a/1/w", "m/1//w", "n/1/w")
    listing = _listing(store)
    assert listing.models() == ["a", "m", "n"]
    assert list(listing.files("n")) == ["1/w"]
    with pytest.raises(LoadError, match="the key 'm/1//w' is invalid"):
        listing.files("m")
    assert store.listings == ["", "a", "m", "n"]
    listing.models()
    assert [each.message for each in caplog.records] == ["the key 'm/1//w' is invalid; listing each model by itself"]


@pytest.mark.parametrize("settle_s", [0.0, 5.0], ids=["none", "poll"])
def test_an_empty_folder_beside_a_bad_key_is_no_model(settle_s: float) -> None:
    store = Kept("m/1//w", "n/1/w", "o/")  # the last one is what a console makes
    listing = _listing(store, settle_s=settle_s)
    assert listing.models() == ["m", "n"]


@pytest.mark.parametrize("path", ["m/../w", "m/./w", "m/1/..", "m/a\0b"])
def test_a_key_outside_its_model_is_refused(path: str) -> None:
    listing = _listing(Kept(path, "n/w"))
    assert "n" in listing.models()
    with pytest.raises(LoadError, match="cannot be the path of a file"):
        listing.files("m")


def test_a_file_and_folder_of_one_name_are_refused_unless_the_file_is_empty() -> None:
    store = Kept("m/1", "m/1/w", "n/1/w")
    store.change("n/1", size=0)
    store.change("o/config.pbtxt")
    store.change("o/1", size=0)
    listing = _listing(store)
    listing.models()
    with pytest.raises(LoadError, match="'1' is a file, and a folder"):
        listing.files("m")
    assert set(listing.files("n")) == {"1/w"}
    assert set(listing.files("o")) == {"config.pbtxt", "1/"}


def test_files_beside_the_models_and_hidden_folders_are_no_models() -> None:
    assert _listing(Kept("README", ".git/config", "../x/w", "./w", "/w", "a\0b/w", "m/1/w")).models() == ["m"]


def test_too_many_objects_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_listing, "MAX_OBJECTS", 2)
    assert _listing(Kept("m/1", "m/2")).models() == ["m"]
    for paths in (("m/1", "m/2", "m/3"), ("m/1", "m/2", "m/3", "n//w")):
        with pytest.raises(LoadError, match="has more than 2 objects"):
            _listing(Kept(*paths)).files("m")
        with pytest.raises(LoadError, match="has more than 2 objects"):
            _listing(Kept(*reversed(paths))).models()


@pytest.mark.usefixtures("s3_keys")
@pytest.mark.parametrize("key", ["m/1//w", "m/../w", "m/./w"])
def test_a_bad_key_of_s3_fails_its_model_and_no_other(key: str, bucket: Bucket) -> None:
    prefix = uuid4().hex
    url = bucket.store(prefix, {"a": {"1/w": b"a"}, "n": {"1/w": b"n"}, "m": {"1/back\\slash": b"m"}})
    storage = open_storage(url)
    assert sorted(storage.models()) == ["a", "m", "n"]
    assert set(storage.fingerprint("m")) == {"1/back\\slash"}
    assert storage.size("m", ["1/back\\slash"]) == 1
    bucket.put(f"{prefix}/{key}", b"bad")
    assert sorted(storage.models()) == ["a", "m", "n"]
    assert set(storage.fingerprint("n")) == {"1/w"}
    with pytest.raises(LoadError, match="cannot be the path of a file"):
        storage.fingerprint("m")
