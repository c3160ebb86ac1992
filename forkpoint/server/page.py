"""Serves the chat page. A browser gets a file again only after the file changed."""

from __future__ import annotations

import mimetypes
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.staticfiles import StaticFiles

FOLDER: Final = "/static/"


class PageFiles(StaticFiles):
    def file_response(self, *args: Any, **options: Any) -> Response:
        """Add headers to a file. The page itself states the rest of its content security policy."""
        response = super().file_response(*args, **options)
        response.headers["Cache-Control"] = "no-cache"  # the browser keeps it and asks with If-None-Match
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Content-Security-Policy"] = "frame-ancestors 'none'"
        return response


def add_page(app: FastAPI) -> None:
    mimetypes.add_type("text/javascript", ".js")  # some systems map it to an older type
    files = PageFiles(packages=[("forkpoint.server", "static")])

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    @app.api_route(FOLDER + "{name:path}", methods=["GET", "HEAD"], include_in_schema=False)
    async def page(request: Request, name: str = "index.html") -> Response:
        return await files.get_response(name, request.scope)
