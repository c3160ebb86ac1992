"""Requests to every endpoint that takes a body, with wild values in the fields that /openapi.json names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from scripts.fuzz.values import TEXTS, Raw, dumps, structured, wild, wild_leaf, wild_schema

MESSAGE = {"role": "user", "content": "Hello"}
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {}}}
GOOD: Mapping[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [MESSAGE], "max_tokens": 4},
    "/v1/completions": {"prompt": "Hello", "max_tokens": 4},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 4},
    "/v1/messages": {"model": "", "messages": [MESSAGE], "max_tokens": 4},
    "/v1/messages/count_tokens": {"model": "", "messages": [MESSAGE]},
    "/tokenize": {"prompt": "Hello"},
    "/detokenize": {"tokens": [1, 2, 3]},
}
MAX_TOKENS = 8  # of what a wild request may make the engine do, so that it costs no more than a good one


@dataclass(frozen=True, slots=True)
class Wild:
    """One request. `fields` are those with wild values. The client leaves after `leaves` seconds without an answer."""

    path: str
    fields: tuple[str, ...]
    body: bytes
    headers: Mapping[str, str]
    leaves_s: float | None


class Bodies:
    """Draws requests. `num_drawn` counts how often each field of each endpoint had a wild value."""

    def __init__(self, openapi: Mapping[str, Any], model: str, seed: int) -> None:
        self._random = Random(seed)
        self._model = model
        self._openapi = openapi
        self._fields = {path: _fields(openapi, path) for path in GOOD if path in openapi["paths"]}
        self.num_drawn = {(path, name): 0 for path, names in self._fields.items() for name in names}

    def draw(self) -> Wild:
        random = self._random
        path = random.choice(sorted(self._fields))
        body = dict(GOOD[path])
        if "model" in body:
            body["model"] = self._model
        names = self._least_drawn(path)
        for name in names:
            self.num_drawn[path, name] += 1
            body[name] = self._value(path, name, body.get(name))
        if not {"max_tokens", "max_output_tokens", "max_completion_tokens"} & set(names):
            body |= {name: random.randrange(1, MAX_TOKENS) for name in body if name.startswith("max_")}
        if random.random() < 0.3 and "stream" not in names:
            body["stream"] = True
        leaves_s = random.choice((0.0, 0.05, 0.5)) if random.random() < 0.1 else None
        return Wild(path, names, self._bytes(body), self._headers(), leaves_s)

    def _least_drawn(self, path: str) -> tuple[str, ...]:
        """Return one to four fields: those that were drawn least, and random ones."""
        names = list(self._fields[path])
        self._random.shuffle(names)
        names.sort(key=lambda name: self.num_drawn[path, name])
        others = self._random.sample(names, min(self._random.choice((0, 0, 0, 1, 3)), len(names)))
        return tuple(dict.fromkeys([names[0], *others]))

    def _value(self, path: str, name: str, good: Any) -> Any:
        """Return any value, a value of the field's type, or a value of about the right form."""
        random = self._random
        kind = random.random()
        if kind < 0.25:
            return wild(random)
        if kind < 0.6:
            return typed(self._openapi, self._fields[path][name], random)
        match name:
            case "structured_outputs":
                return structured(random)
            case "response_format" | "text" | "output_config":
                schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": wild_schema(random)}}
                return {"format": {"type": "json_schema", "name": "x", "schema": wild_schema(random)}, **schema}
            case "messages" | "input":
                part = random.choice(("role", "content", "tool_calls", "function_call", "name"))
                return [{**MESSAGE, part: wild(random)}] * random.choice((1, 3))
            case "tools" | "functions":
                part = random.choice(("name", "parameters", "description"))
                function = {**FUNCTION, part: wild_schema(random)}
                if name == "functions":
                    return [function]
                return [{"type": "function", "function": function, "input_schema": wild_schema(random), "name": "f"}]
            case "prompt":
                return random.choice(("Hi", [5] * 5, [wild_leaf(random)] * 5, [[1, 2], [3]], "x" * 100_000, [1] * 5000))
            case "logit_bias":
                return {str(random.choice((0, 5, 1535, 1536, -1, "a"))): random.choice((0, 100, -100, 1e308, None))}
            case "stop" | "stop_token_ids" | "bad_words" | "allowed_token_ids" | "stop_sequences":
                return [random.choice((wild_leaf(random), "a", 5)) for _ in range(random.choice((1, 4, 500)))]
            case _ if isinstance(good, dict):
                return {**good, random.choice(sorted(good)): wild(random)}
            case _:
                return random.choice((0, 1, 2, 0.5, True, "auto", "low", None, [], {}, wild_leaf(random)))

    def _bytes(self, body: dict[str, Any]) -> bytes:
        data = dumps(body)
        match self._random.randrange(40):
            case 0:
                return data[: self._random.randrange(len(data))]
            case 1:
                return data + data
            case 2:
                return bytes(self._random.randrange(256) for _ in range(50))
            case 3:
                return dumps(Raw("[" * 5000))
            case _:
                return data

    def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json"}
        match self._random.randrange(40):
            case 0:
                headers["Content-Type"] = "text/plain"
            case 1:
                headers["X-Request-Id"] = "\xe9" + "x" * 300
            case 2:
                headers["Authorization"] = "Bearer " + "k" * 3000
        return headers


def typed(openapi: Mapping[str, Any], schema: Mapping[str, Any], random: Random, depth: int = 0) -> Any:
    """Return a value of the type that `schema` names, at its bounds if it has any."""
    if "$ref" in schema:
        schema = _at(openapi, schema["$ref"])
    choices = schema.get("anyOf") or schema.get("oneOf")
    if choices:
        return typed(openapi, random.choice(choices), random, depth)
    if "const" in schema or "enum" in schema:
        return random.choice(schema.get("enum") or [schema["const"]])
    match schema.get("type"):
        case "integer":
            low, high = schema.get("minimum", 0), schema.get("maximum", 2**63 - 1)
            return random.choice((low, high, low - 1, high + 1, 1, 2))
        case "number":
            low, high = schema.get("minimum", 0.0), schema.get("maximum", 1.0)
            return random.choice((low, high, 0.5, 1e-300, -0.0))
        case "string":
            return random.choice(TEXTS)
        case "boolean":
            return random.random() < 0.5
        case "array" if depth < 3:
            return [typed(openapi, schema.get("items", {}), random, depth + 1) for _ in range(random.randrange(4))]
        case "object" if depth < 3:
            properties = schema.get("properties", {})
            required = set(schema.get("required", ()))
            names = [name for name in properties if name in required or random.random() < 0.3]
            return {name: typed(openapi, properties[name], random, depth + 1) for name in names}
        case _:
            return None


def _fields(openapi: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return the schema of each field of the endpoint's body."""
    found: dict[str, Any] = {}
    todo = [openapi["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]]
    while todo:
        part = todo.pop()
        if "$ref" in part:
            part = _at(openapi, part["$ref"])
        found |= part.get("properties", {})
        todo += [*part.get("anyOf", ()), *part.get("allOf", ())]
    return found


def _at(openapi: Mapping[str, Any], reference: str) -> Any:
    place: Any = openapi
    for part in reference.removeprefix("#/").split("/"):
        place = place[part]
    return place
