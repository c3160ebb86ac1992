"""Serves the chat page. Browsers fetch a file again only after it has changed."""

from __future__ import annotations

import mimetypes
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.staticfiles import StaticFiles

FOLDER: Final = "/static/"


class PageFiles(StaticFiles):
    """The files of the chat page, with headers for caching and security."""

    def file_response(self, *args: Any, **options: Any) -> Response:
        """Return the response for a file. The rest of the content security policy is in the page itself."""
        response = super().file_response(*args, **options)
        response.headers["Cache-Control"] = "no-cache"  # keep the file, and ask with If-None-Match before using it
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Content-Security-Policy"] = "frame-ancestors 'none'"
        return response


def add_page(app: FastAPI) -> None:
    mimetypes.add_type("text/javascript", ".js")  # some systems map .js to a type that browsers refuse
    files = PageFiles(packages=[("forkpoint.server", "static")])

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    @app.api_route(FOLDER + "{name:path}", methods=["GET", "HEAD"], include_in_schema=False)
    async def page(request: Request, name: str = "index.html") -> Response:
        return await files.get_response(name, request.scope)
