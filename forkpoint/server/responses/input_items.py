"""GET /v1/responses/ID/input_items: the items that a stored response answers, page by page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, Field

from forkpoint.server.errors import HTTPError
from forkpoint.server.protocol import MAX_SHOWN, ReplyModel
from forkpoint.server.responses.store import NAME_TAIL
from forkpoint.server.texts import Texts


class ItemsQuery(BaseModel):
    """The page of a list that a client asks for. `after` is the id of the last item of the page before."""

    limit: int = Field(20, ge=1, le=100)
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None


class ItemsReply(ReplyModel):
    """A page of the items that a response answers. Without items it has no `first_id` and no `last_id`."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


def named(items: Sequence[dict[str, Any]], response: str) -> list[dict[str, Any]]:
    """Return the items of a conversation with an id each. Items without an id get one that contains `response`'s.

    So do items with the id of an earlier item: an id is the place where the next page begins.
    """
    ids = set[str]()
    found = []
    for number, item in enumerate(items):
        name = item.get("id")
        if not isinstance(name, str) or name in ids:
            name = f"in_{response[-NAME_TAIL:]}_{number}"
        ids.add(name)
        found.append({**item, "id": name})
    return found


def page_of_items(texts: Texts, data: bytes, *, query: ItemsQuery) -> ItemsReply:
    """Return the page of the JSON list `data` that `query` asks for. Runs in a reader's process.

    Raises HTTPError 404 if no item has the id `query.after`.
    """
    items = json.loads(data)
    if query.order == "desc":
        items.reverse()
    start = 0
    if query.after is not None:
        ids = [item["id"] for item in items]
        if query.after not in ids:
            text = f"the response has no input item {query.after[:MAX_SHOWN]!r}; give the last_id of the page before"
            raise HTTPError(404, text, "not_found_error", param="after")
        start = ids.index(query.after) + 1
    end = start + query.limit
    page = [_shown(item) for item in items[start:end]]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return ItemsReply(data=page, first_id=first, last_id=last, has_more=end < len(items))


def _shown(item: dict[str, Any]) -> dict[str, Any]:
    """Return an item with the fields that clients may have left out. A message's text becomes a part."""
    whole = {"type": "message", "status": "completed", **item}
    if whole["type"] == "message" and isinstance(text := item.get("content"), str):
        part: dict[str, Any] = {"type": "input_text", "text": text}
        if item.get("role") == "assistant":
            part = {"type": "output_text", "text": text, "annotations": []}
        whole["content"] = [part]
    return whole
