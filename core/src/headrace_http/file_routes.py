"""Routes that answer with a file of a plugin's package: a page for a browser, its script, its style."""

from __future__ import annotations

from importlib.resources import files
from pathlib import PurePosixPath
from typing import ClassVar

from headrace_http.message import HttpReply
from headrace_http.plugin_routes import HttpCall, HttpRoute

_TYPES = {
    ".html": b"text/html; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".svg": b"image/svg+xml",
}
#: A browser validates its copy each time, and treats the file as its declared type only.
_HEADERS = ((b"X-Content-Type-Options", b"nosniff"), (b"Cache-Control", b"no-cache"))
#: A page loads only from its own server, and images that its script creates. No other page may frame it.
_PAGE_POLICY = (
    b"Content-Security-Policy",
    b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' blob:; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
)


class FileRoute(HttpRoute):
    """Answers with a file of the package that defines the route. The file is read once, when the plugin is found.

    A page in HTML is answered with a policy for browsers: it may load from and send to its own server only.
    """

    #: The path of the file in its package, such as "page/index.html". It ends in .html, .js, .css or .svg.
    file: ClassVar[str]
    _reply: ClassVar[HttpReply]

    async def answer(self, call: HttpCall) -> HttpReply:
        return self._reply

    @classmethod
    def check(cls) -> None:
        super().check()
        package, kind = cls.__module__.partition(".")[0], PurePosixPath(cls.file).suffix
        if kind not in _TYPES:
            raise TypeError(f"the file '{cls.file}' of route '{cls.name}' ends in '{kind}'; it is {', '.join(_TYPES)}")
        try:
            content = files(package).joinpath(cls.file).read_bytes()
        except OSError as error:
            raise TypeError(f"the file '{cls.file}' of route '{cls.name}': {error.strerror}") from error
        policy = (_PAGE_POLICY,) if kind == ".html" else ()
        cls._reply = HttpReply(200, ((b"Content-Type", _TYPES[kind]), *_HEADERS, *policy), (content,))
