"""A page to chat with a model that generates text. Its requests pass admission like those of any client."""

from __future__ import annotations

from headrace import ExtensionOperation, FileRoute

#: Reads a page, which is the same for all servers: `--access-open=health,dashboard` opens all pages here.
PAGE = ExtensionOperation("dashboard", "metadata")


class ChatPageRoute(FileRoute):
    """A page that talks to a model, for a browser"""

    name, file, operation = "GET /dashboard/chat", "page/chat.html", PAGE


class ChatPageStyle(FileRoute):
    """The style of the page that talks to a model"""

    name, file, operation = "GET /dashboard/chat.css", "page/chat.css", PAGE


class ChatPageScript(FileRoute):
    """The script of the page that talks to a model"""

    name, file, operation = "GET /dashboard/chat.js", "page/chat.js", PAGE


CHAT_ROUTES = (ChatPageRoute, ChatPageStyle, ChatPageScript)
