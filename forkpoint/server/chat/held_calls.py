"""The grammar of an answer whose calls match the schemas of strict tools and the grammars of custom ones."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from forkpoint.params import CallsParams, StructuredOutputsParams
from forkpoint.server.calls.call_formats import CallFormats, Format, call_formats, holds
from forkpoint.server.chat.body import ChatBody
from forkpoint.server.chat.tools import ToolPlan
from forkpoint.server.protocol import MAX_SHOWN
from forkpoint.server.texts import Texts


@dataclass(frozen=True, slots=True)
class Constraint:
    """What an answer has to match: as a whole, or its calls alone."""

    structured: StructuredOutputsParams | None
    calls: CallsParams | None = None


def constraint_of(texts: Texts, body: ChatBody, plan: ToolPlan) -> Constraint:
    """Return the constraint for the plan and its rules about calls. The log says which rules nothing enforces."""
    structured, notation = plan.structured, texts.notation_name
    if plan.forced or (structured is not None and body.response_format is None):
        return Constraint(structured)  # one call, or an answer that follows `structured_outputs` and has none
    rules = [rule for rule in plan.rules if rule.schema is not None]
    if not rules or texts.config.tool_call_parser == "none":
        return Constraint(structured)
    formats = call_formats(notation, plan.rules)
    if formats is not None and structured is None:  # in free text, only a token shows that a call begins
        backend = texts.require_tokenizer().backend
        formats = formats if backend.token_to_id(formats.opening) is not None else None
    held = [rule for rule in rules if formats is not None and holds(notation, rule)]
    for rule in rules:
        if rule not in held:
            shown = rule.name[:MAX_SHOWN]
            texts.notices.add(
                f"the tool {shown!r} is strict or has a grammar, which only forced calls of it match: no grammar can "
                "enforce it in this model's notation of calls"
            )
    if formats is None or not held:
        return Constraint(structured)
    if structured is None:
        return Constraint(None, CallsParams(opening=formats.opening, structure=_structure(formats.after_opening())))
    return Constraint(_content_or_calls(structured, formats))


def _content_or_calls(structured: StructuredOutputsParams, formats: CallFormats) -> StructuredOutputsParams:
    """Return the grammar of an answer that is JSON, or calls. Other forms stay as they are, without calls."""
    if structured.json is None and not structured.json_object:
        return structured
    schema: Any = {"type": "object"} if structured.json is None else structured.json
    content = {"type": "json_schema", "json_schema": json.loads(schema) if isinstance(schema, str) else schema}
    return _structure({"type": "or", "elements": [content, formats.alone()]})


def _structure(given: Format) -> StructuredOutputsParams:
    tag = {"type": "structural_tag", "format": given}
    return StructuredOutputsParams(structural_tag=tag, disable_any_whitespace=True)
