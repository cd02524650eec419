"""The API's own description: OpenAPI 3.1 from the models that parse the requests, and a plain page of it."""

from __future__ import annotations

import html
from typing import Any

from serve_app.ingress.schema.base import Schema
from serve_app.ingress.schema.chat import ChatRequest
from serve_app.ingress.schema.completion import CompletionRequest
from serve_app.ingress.schema.responses import ResponsesRequest
from serve_app.ingress.schema.tokens import DetokenizeRequest, TokenizeRequest

Json = dict[str, Any]

REQUESTS: dict[str, tuple[type[Schema], str]] = {
    "/v1/chat/completions": (ChatRequest, "Answer a conversation"),
    "/v1/completions": (CompletionRequest, "Continue texts or token ids"),
    "/v1/responses": (ResponsesRequest, "Answer a conversation (OpenAI's newer shape)"),
    "/tokenize": (TokenizeRequest, "Token ids of a prompt or a conversation"),
    "/detokenize": (DetokenizeRequest, "Text of token ids"),
}
GETS = {
    "/v1/models": "What is served",
    "/health": "Alive: this process answers",
    "/ready": "A model replica answers and makes progress",
    "/version": "What is running",
}
STREAMS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
REFUSALS = {
    "400": "A field is wrong; `param` names it",
    "404": "No such model",
    "408": "The body did not arrive in time",
    "413": "The body is too large",
    "415": "The body is not UTF-8",
    "429": "Busy; see Retry-After",
    "500": "This request failed",
    "504": "Not done in time",
    "503": "No model replica can serve; with Retry-After if one is being started",
}
REFERENCES = "#/components/schemas/{model}"


def describe(version: str) -> Json:
    """The whole API as an OpenAPI document."""
    schemas: Json = {"Error": _error_schema()}
    paths: Json = {path: {"get": {"summary": summary, "responses": _answers(path, {})}} for path, summary in GETS.items()}
    for path, (kind, summary) in REQUESTS.items():
        schema = kind.model_json_schema(ref_template=REFERENCES, mode="validation")
        schemas.update(schema.pop("$defs", {}))
        schemas[kind.__name__] = schema
        body = {"required": True, "content": {"application/json": {"schema": _reference(kind.__name__)}}}
        paths[path] = {"post": {"summary": summary, "requestBody": body, "responses": _answers(path, REFUSALS)}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "serve_app", "version": version},
        "paths": paths,
        "components": {"schemas": schemas},
    }


def _answers(path: str, refusals: dict[str, str]) -> Json:
    content: Json = {"application/json": {"schema": {"type": "object"}}}
    if path in STREAMS:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    if path == "/ready":
        refusals = {"503": REFUSALS["503"]}
    answers: Json = {"200": {"description": "OK", "content": content}}
    for status, meaning in refusals.items():
        answers[status] = {"description": meaning, "content": {"application/json": {"schema": _reference("Error")}}}
    return answers


def _reference(name: str) -> Json:
    return {"$ref": REFERENCES.format(model=name)}


def _error_schema() -> Json:
    optional = {"type": ["string", "null"]}
    fields = {"message": {"type": "string"}, "type": {"type": "string"}, "param": optional, "code": optional}
    error = {"type": "object", "required": list(fields), "properties": fields}
    return {"type": "object", "required": ["error"], "properties": {"error": error}}


def page(document: Json) -> str:
    """The document as one HTML page without scripts."""
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><title>serve_app API</title><style>",
        "body{font:16px/1.5 system-ui;max-width:70rem;margin:2rem auto;padding:0 1rem;color-scheme:light dark}",
        "table{border-collapse:collapse;width:100%}td,th{border:1px solid #8886;padding:.3rem .5rem;text-align:left;",
        "vertical-align:top}code{font-size:.9em}</style>",
        f"<h1>serve_app {_text(document['info']['version'])}</h1>",
        "<p>For machines: <a href=openapi.json>openapi.json</a></p>",
    ]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            parts.append(f"<h2><code>{method.upper()} {_text(path)}</code></h2><p>{_text(operation['summary'])}</p>")
            if "requestBody" in operation:
                parts.append(_fields(document["components"]["schemas"][REQUESTS[path][0].__name__]))
    return "".join(parts) + "</html>"


def _fields(schema: Json) -> str:
    rows = []
    for name, field in schema["properties"].items():
        mark = " (required)" if name in schema.get("required", ()) else ""
        meaning = _text(field.get("description", ""))
        rows.append(f"<tr><td><code>{_text(name)}</code>{mark}<td><code>{_text(_type(field))}</code><td>{meaning}")
    return f"<table><tr><th>field<th>type<th>meaning{''.join(rows)}</table>"


def _type(field: Json) -> str:
    if "anyOf" in field:
        return " | ".join(dict.fromkeys(_type(option) for option in field["anyOf"]))
    if "$ref" in field:
        return str(field["$ref"]).rpartition("/")[2]
    if "const" in field or "enum" in field:
        return " | ".join(repr(value) for value in field.get("enum", [field.get("const")]))
    name = str(field.get("type", "any"))
    if name == "array" and isinstance(field.get("items"), dict):
        name = f"{_type(field['items'])}[]"
    bounds = [f"{sign} {field[key]}" for key, sign in BOUNDS.items() if key in field]
    return f"{name} ({', '.join(bounds)})" if bounds else name


BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "maxLength": "length <=", "maxItems": "items <="}


def _text(value: str) -> str:
    return html.escape(value)
