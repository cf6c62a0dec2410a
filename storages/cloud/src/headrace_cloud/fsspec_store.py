"""Objects in other stores of fsspec, such as ``hf://`` and ``https://``, by an installed driver.

A redirect of an HTTP server is not followed, because it could lead to a server that only this machine can reach.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime
from typing import Any
from urllib.parse import quote, unquote

from headrace import ConfigError, HeadraceError, LoadError, Unavailable, one_line
from headrace_cloud.cloud_options import CloudStorageOptions
from headrace_cloud.stored_objects import PART_BYTES, NoRanges, ObjectChanged, ObjectStore, StoredObject

#: Remote schemes of fsspec that need only a URL.
SCHEMES = (
    *("abfs", "az", "box", "dbfs", "dropbox", "dvc", "ftp", "gcs", "gdrive", "github", "hdfs", "hf", "http", "https"),
    *("lakefs", "memory", "oci", "oss", "sftp", "smb", "tos", "wandb", "webdav", "webhdfs"),
)
#: The names of a content tag and of a time in drivers, in order of preference.
_TAGS = ("ETag", "etag", "e_tag", "blob_id", "sha", "sha256", "md5Hash", "md5", "content_md5", "checksum")
_TIMES = ("LastModified", "last_modified", "mtime", "modified", "modify", "updated", "created")
_LONGEST = 300
_AT_ONCE = 8
_WEB = ("http", "https")
#: Each is listed by a request. A web server that has the same links on every page would have no end.
MAX_FOLDERS = 10_000


class FsspecStore(ObjectStore):
    """The objects below ``url``. Raises `ConfigError` if its driver is not installed."""

    def __init__(self, url: str, options: CloudStorageOptions) -> None:
        scheme, _, rest = url.partition("://")
        scheme = scheme.lower()
        if "::" in url:
            raise ConfigError(f"'{url}' has '::', by which fsspec opens one URL through another; this is not allowed")
        self._is_web = scheme in _WEB
        user, at, _ = rest.partition("/")[0].rpartition("@")
        if at and (self._is_web or ":" in user):  # the URL is not repeated
            raise ConfigError(
                f"the URL of a model repository in '{scheme}' has a user or a password, which do not belong there"
            )
        if self._is_web and not {"?", "#"}.isdisjoint(rest):
            raise ConfigError(f"the URL of a model repository in '{scheme}' has a query or a fragment; it is a folder")
        import fsspec

        try:
            self._files, root = fsspec.core.url_to_fs(
                f"{scheme}://{rest}", use_listings_cache=False, skip_instance_cache=True, **_settings(scheme, options)
            )
        except (ImportError, ValueError) as error:
            raise ConfigError(f"'{scheme}://' cannot be read: {_short(error)}") from error
        except Exception as error:
            raise Unavailable(f"'{url}' cannot be reached: {_short(error)}") from error
        self._url, self._root = url, str(root).rstrip("/")
        self.identity = f"{scheme}://{self._root}"

    def objects(self, folder: str = "") -> Iterator[StoredObject]:
        with self._converted_errors(f"listing '{folder}'"):
            self._files.invalidate_cache()
            try:
                first = self._list(self._name_of(folder) if folder else self._root)
            except FileNotFoundError:
                if folder:
                    return
                raise
            # Not by ``find`` of fsspec, which leaves out the folders that it fails to list.
            waiting, count = [first], 0
            while waiting:
                for info in waiting.pop():
                    name = info["name"].rstrip("/")
                    if info["type"] == "directory":
                        waiting.append(self._list(name))
                        count += 1
                        if count > MAX_FOLDERS:
                            raise LoadError(f"'{self._url}' has more than {MAX_FOLDERS} folders")
                    else:
                        yield self._object(name, info)

    def _list(self, folder: str) -> list[Mapping[str, Any]]:
        """Return the entries of ``folder``."""
        # A web server redirects to the path with a slash at its end from the one without.
        found = self._files.ls(f"{folder}/" if self._is_web else folder, detail=True)
        below = [info for info in found if info["name"].startswith(f"{folder}/") and info["name"] != f"{folder}/"]
        # Apache's pages have links that sort them, such as '?C=M;O=A'.
        return [info for info in below if not self._is_web or {"?", "#"}.isdisjoint(info["name"])]

    def _path_of(self, name: str) -> str:
        """Return the path below the repository of the file that the driver calls ``name``."""
        path = name[len(self._root) + 1 :]
        return unquote(path) if self._is_web else path

    def _name_of(self, path: str) -> str:
        return f"{self._root}/{quote(path) if self._is_web else path}"

    def _object(self, name: str, info: Mapping[str, Any]) -> StoredObject:
        if info.get("size") is None:
            info = self._files.info(name)
        if info.get("size") is None:
            raise LoadError(f"'{name}' has no size: the server does not send a Content-Length")
        time = next((info[key] for key in _TIMES if info.get(key)), None)
        tag = next((info[key] for key in _TAGS if info.get(key)), time)
        if tag is None:  # nothing else changes with the content
            tag = sorted((key, repr(value)) for key, value in info.items())
        return StoredObject(self._path_of(name), int(info["size"]), str(tag), _seconds(time))

    def folders(self) -> list[str]:
        with self._converted_errors("listing ''"):
            self._files.invalidate_cache()
            found = self._list(self._root)
        return [self._path_of(each["name"].rstrip("/")) for each in found if each["type"] == "directory"]

    def exists(self, each: StoredObject) -> bool:
        with self._converted_errors(f"asking for '{each.path}'"):
            return bool(self._files.exists(self._name_of(each.path)))

    def read(self, each: StoredObject, start: int, end: int) -> memoryview:
        is_whole = end - start == each.size
        with self._converted_errors(f"reading '{each.path}'"):
            if self._is_web:
                read = b"".join(self.stream(each)) if is_whole else self._read_part(each, start, end)
            else:
                part = {} if is_whole else {"start": start, "end": end}
                read = self._files.cat_file(self._name_of(each.path), **part)
        if len(read) != end - start:
            raise _another_size(each)
        return memoryview(read)

    def _read_part(self, each: StoredObject, start: int, end: int) -> bytes:
        """Read a part from a web server.

        If the server does not support ranges, fsspec's ``cat_file`` would read the whole file into memory for each
        part.
        """
        with self._files.open(self._name_of(each.path), "rb", size=each.size, cache_type="none") as file:
            file.seek(start)
            try:
                read: bytes = file.read(end - start)
            except ValueError:
                raise NoRanges(f"the server does not send parts of '{each.path}'") from None
        return read

    def read_many(self, objects: Sequence[StoredObject]) -> Iterator[tuple[StoredObject, memoryview]]:
        def one(each: StoredObject) -> memoryview:
            return self.read(each, 0, each.size)

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            yield from zip(objects, pool.map(one, objects), strict=True)

    def stream(self, each: StoredObject) -> Iterator[memoryview]:
        count = 0
        name, settings = self._name_of(each.path), {"size": each.size, "block_size": 0} if self._is_web else {}
        with self._converted_errors(f"reading '{each.path}'"), self._files.open(name, "rb", **settings) as file:
            while count <= each.size and (part := file.read(PART_BYTES)):
                count += len(part)
                yield memoryview(part)
        if count != each.size:
            raise _another_size(each)

    @contextmanager
    def _converted_errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except HeadraceError:
            raise
        except FileNotFoundError as error:
            raise LoadError(f"{what} of '{self._url}' failed: it does not exist") from error
        except Exception as error:
            raise Unavailable(f"{what} of '{self._url}' failed: {_short(error)}") from error


def _another_size(each: StoredObject) -> ObjectChanged:
    return ObjectChanged(f"'{each.path}' has not the size of the listing, {each.size}")


def _settings(scheme: str, options: CloudStorageOptions) -> dict[str, Any]:
    """Return the settings of a driver: for HTTP, a limit of time, and no redirects."""
    if scheme not in _WEB:
        return {}
    from aiohttp import ClientTimeout

    timeout = ClientTimeout(sock_connect=options.timeout_s, sock_read=options.timeout_s)
    return {"client_kwargs": {"timeout": timeout}, "allow_redirects": False}


def _seconds(time: Any) -> float:
    """Return a time of a driver in seconds since 1970; 0 if it is not known."""
    if isinstance(time, datetime):
        return time.timestamp()
    return float(time) if isinstance(time, int | float) else 0.0


def _short(error: BaseException) -> str:
    text = one_line(str(error).replace("\n", " ")) or type(error).__name__
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
