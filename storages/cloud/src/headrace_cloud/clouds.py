"""Objects in S3, Google Cloud Storage and Azure Storage, by obstore.

obstore is used directly and not through its store for fsspec. That lists folder by folder, has no times, cannot request
a range of exactly the listed object, and copies the content.

obstore follows redirects, and has no setting for that. `_checked` accepts an object only with the ETag of the listing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from headrace import HeadraceError
from headrace_cloud.azure_credentials import azure_credentials
from headrace_cloud.cloud_options import CloudStorageOptions
from headrace_cloud.google_credentials import google_credentials
from headrace_cloud.s3_credentials import s3_credentials
from headrace_cloud.store_clients import connect
from headrace_cloud.store_errors import answer_of, failure
from headrace_cloud.stored_objects import PART_BYTES, InvalidKey, NoRanges, ObjectChanged, ObjectStore, StoredObject
from headrace_cloud.urls import parse_url

if TYPE_CHECKING:
    from obstore import GetOptions, GetResult
    from obstore.store import ObjectStore as Client

_PAGE = 1000
#: A response slower than this many bytes per second fails, except in `CloudStore.stream`.
_LEAST_RATE = 1 << 16
_DAY_S = 86_400.0
#: Small objects that are read at once. More than parts of large ones: each waits for an answer, and not for bytes.
_AT_ONCE = 64
#: The tag of an object that a listing has without an ETag, followed by its version and time.
_UNTAGGED = "untagged"
_BAD_KEY = "Encountered object with invalid path: "
#: The module of the exception for a panic.
_PANICS = "pyo3_runtime"
#: In obstore's error for an answer with the status 200, and not 206, to a request for a part.
_NOT_PARTIAL = "Received non-partial response"


class CloudStore(ObjectStore):
    """The objects below ``url`` of one of the three clouds. Raises `ConfigError`. Blocks for about a second at most."""

    def __init__(self, url: str, options: CloudStorageOptions) -> None:
        location = parse_url(url)
        scheme = location.scheme
        if scheme == "s3":
            credentials = s3_credentials(url, location)
        elif scheme == "gs":
            credentials = google_credentials(url)
        else:
            credentials = azure_credentials(url, location.account)
        self._location = location
        answer_s = (
            options.timeout_s + PART_BYTES / _LEAST_RATE
        )  # the longest are parts of objects, and pages of listings
        self._client, endpoint = connect(location, credentials, options, answer_s)
        #: Without a timeout for the whole response: an object may have any size.
        self._streaming, _ = connect(location, credentials, options, _DAY_S)
        self.identity = f"{scheme}://{endpoint}/{location.bucket}/{location.prefix}"
        region = f", region {credentials.region}" if credentials.region else ""
        named = "container" if scheme == "as" else "bucket"
        self._place = (
            f"It was asked at {endpoint} for {named} '{location.bucket}'{region}, with credentials from "
            f"{credentials.source}"
        )

    def objects(self, folder: str = "") -> Iterator[StoredObject]:
        import obstore

        above = self._location.prefix
        start = len(above) + 1 if above else 0
        prefix = self._location.key(folder) if folder else above
        with self._converted_errors(f"listing '{prefix}'"):
            for page in obstore.list(self._client, prefix=prefix or None, chunk_size=_PAGE):
                for found in page:
                    tag = found["e_tag"] or f"{_UNTAGGED} {found['version']} {found['last_modified']}"
                    yield StoredObject(found["path"][start:], found["size"], tag, found["last_modified"].timestamp())

    def folders(self) -> list[str]:
        import obstore

        prefix = self._location.prefix
        with self._converted_errors(f"listing '{prefix}'"):
            found = obstore.list_with_delimiter(self._client, prefix=prefix or None)
        return [path.rstrip("/").rpartition("/")[2] for path in found["common_prefixes"]]

    def exists(self, each: StoredObject) -> bool:
        import obstore

        key = self._location.key(each.path)
        with self._converted_errors(f"asking for '{key}'"):
            try:
                obstore.head(self._client, key)
            except FileNotFoundError:
                return False
        return True

    def read(self, each: StoredObject, start: int, end: int) -> memoryview:
        with self._reading(each):
            part = None if end - start == each.size else (start, end)
            read = memoryview(self._get(self._client, each, part).bytes())
        if len(read) != end - start:
            raise ObjectChanged(f"'{each.path}' has not the size of the listing, {each.size}")
        return read

    def read_many(self, objects: Sequence[StoredObject]) -> Iterator[tuple[StoredObject, memoryview]]:
        for start in range(0, len(objects), _AT_ONCE):
            batch = objects[start : start + _AT_ONCE]
            yield from zip(batch, asyncio.run(self._read_all(batch)), strict=True)

    async def _read_all(self, objects: Sequence[StoredObject]) -> list[memoryview]:
        return await asyncio.gather(*map(self._read_one, objects))

    async def _read_one(self, each: StoredObject) -> memoryview:
        import obstore

        with self._reading(each):
            key, options = self._location.key(each.path), _options(each, None)
            found = _checked(each, await obstore.get_async(self._client, key, options=options))
            read = memoryview(await found.bytes_async())
        if len(read) != each.size:
            raise ObjectChanged(f"'{each.path}' has not the size of the listing, {each.size}")
        return read

    def stream(self, each: StoredObject) -> Iterator[memoryview]:
        count = 0
        with self._reading(each):
            for part in self._get(self._streaming, each, None).stream(min_chunk_size=PART_BYTES):
                count += len(part)
                yield memoryview(part)
        if count != each.size:
            raise ObjectChanged(f"'{each.path}' has {count} bytes, and {each.size} in the listing")

    def _get(self, client: Client, each: StoredObject, part: tuple[int, int] | None) -> GetResult:
        """Ask for an object or a part of it, if it is still the one of the listing."""
        import obstore

        return _checked(each, obstore.get(client, self._location.key(each.path), options=_options(each, part)))

    @contextmanager
    def _reading(self, each: StoredObject) -> Iterator[None]:
        from obstore.exceptions import PreconditionError

        with self._converted_errors(f"reading '{self._location.key(each.path)}'"):
            try:
                yield
            except (PreconditionError, FileNotFoundError):
                raise ObjectChanged(f"'{each.path}' has changed since it was listed") from None
            except Exception as error:
                if _NOT_PARTIAL in str(error):
                    raise NoRanges(f"the server does not send parts of '{each.path}'") from None
                raise

    @contextmanager
    def _converted_errors(self, what: str) -> Iterator[None]:
        """Convert errors of obstore to a `HeadraceError`. A panic of its Rust code is no `Exception`."""
        from obstore.exceptions import InvalidPathError

        try:
            yield
        except HeadraceError:
            raise
        except InvalidPathError as error:
            reason = answer_of(error)[1].removeprefix(_BAD_KEY)
            raise InvalidKey(f"{what} failed: a key cannot be the path of a file: {reason}") from None
        except BaseException as error:
            if isinstance(error, Exception) or type(error).__module__ == _PANICS:
                raise failure(what, error, self._place) from None
            raise


def _options(each: StoredObject, part: tuple[int, int] | None) -> GetOptions:
    """Return the options of a request for ``each``, or a part of it, if it is still the one of the listing."""
    options: GetOptions = {}
    if part is not None:
        options["range"] = part
    if each.tag.startswith(('"', "W/")):
        options["if_match"] = each.tag
    return options


def _checked(each: StoredObject, found: GetResult) -> GetResult:
    tag = found.meta["e_tag"]
    # A response without a tag is refused, too: a redirect may have led to another server.
    is_another = not each.tag.startswith(_UNTAGGED) and _bare(tag or "") != _bare(each.tag)
    if is_another or found.meta["size"] != each.size:
        raise ObjectChanged(f"'{each.path}' has changed since it was listed")
    return found


def _bare(tag: str) -> str:
    """Return an ETag without its quotes: rclone's S3 has them in answers, and not in listings."""
    return tag.removeprefix("W/").strip('"')
