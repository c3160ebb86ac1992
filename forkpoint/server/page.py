"""The chat page. Its files are sent again to a browser only where they have changed."""

from __future__ import annotations

import mimetypes
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.staticfiles import StaticFiles

FOLDER: Final = "/static/"


class PageFiles(StaticFiles):
    def file_response(self, *args: Any, **options: Any) -> Response:
        """With headers of which the last one is for the page: what else it may do is said in itself."""
        response = super().file_response(*args, **options)
        response.headers["Cache-Control"] = "no-cache"  # to be kept, and asked for again with If-None-Match
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Content-Security-Policy"] = "frame-ancestors 'none'"
        return response


def add_page(app: FastAPI) -> None:
    mimetypes.add_type("text/javascript", ".js")  # some systems have its older name
    files = PageFiles(packages=[("forkpoint.server", "static")])

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    @app.api_route(FOLDER + "{name}", methods=["GET", "HEAD"], include_in_schema=False)
    async def page(request: Request, name: str = "index.html") -> Response:
        return await files.get_response(name, request.scope)
