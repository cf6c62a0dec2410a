"""The routes in OpenAPI: members of bodies that most callers send, and the form of answers and errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Schema = Mapping[str, Any]

TEXT: Schema = {"type": "string"}
NUMBER: Schema = {"type": "number"}
WHOLE: Schema = {"type": "integer"}
FLAG: Schema = {"type": "boolean"}
OBJECT: Schema = {"type": "object"}
MODEL: Schema = {"type": "string", "description": "The name of a model, as in `GET /v1/models`"}
_ERROR: Schema = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {"message": TEXT, "type": TEXT, "param": {"type": ["string", "null"]}, "code": {}},
        }
    },
}


def array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def one_of(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def describe(
    properties: Mapping[str, Schema],
    required: Sequence[str],
    answer: str,
    example: Mapping[str, Any] | None = None,
    form: str = "application/json",
    streams: bool = False,
) -> dict[str, Any]:
    """Return the members of an operation: its body with these ``properties``, and its answers."""
    schema = {"type": "object", "required": [*required], "properties": dict(properties)}
    content: dict[str, Any] = {"schema": schema}
    if example is not None:
        content["example"] = example
    answers: dict[str, Any] = {"application/json": {"schema": OBJECT}}
    if streams:
        answers["text/event-stream"] = {"schema": TEXT}
    return {
        "requestBody": {"required": True, "content": {form: content}},
        "responses": {
            "200": {"description": answer, "content": answers},
            "default": {"description": "An error", "content": {"application/json": {"schema": _ERROR}}},
        },
    }


_SAMPLING: dict[str, Schema] = {
    "temperature": NUMBER,
    "top_p": NUMBER,
    "seed": WHOLE,
    "stop": one_of(TEXT, array(TEXT)),
    "stream": FLAG,
    "n": WHOLE,
}
_MESSAGE: Schema = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"type": "string", "enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": one_of(TEXT, array(OBJECT)),
    },
}
CHAT = describe(
    {
        "model": MODEL,
        "messages": array(_MESSAGE),
        "max_completion_tokens": WHOLE,
        "tools": array(OBJECT),
        "tool_choice": one_of(TEXT, OBJECT),
        "response_format": OBJECT,
        **_SAMPLING,
    },
    ["model", "messages"],
    "The message; or chunks of it, as server-sent events",
    {"model": "llama", "messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_completion_tokens": 64},
    streams=True,
)
COMPLETION = describe(
    {"model": MODEL, "prompt": one_of(TEXT, array(TEXT), array(WHOLE)), "max_tokens": WHOLE, **_SAMPLING},
    ["model", "prompt"],
    "The text; or chunks of it, as server-sent events",
    {"model": "llama", "prompt": "The sky is", "max_tokens": 16},
    streams=True,
)
RESPONSE = describe(
    {
        "model": MODEL,
        "input": one_of(TEXT, array(OBJECT)),
        "instructions": TEXT,
        "max_output_tokens": WHOLE,
        "tools": array(OBJECT),
        "text": OBJECT,
        "stream": FLAG,
    },
    ["model", "input"],
    "The response; or its events, as server-sent events",
    {"model": "llama", "input": "Why is the sky blue?"},
    streams=True,
)
EMBEDDINGS = describe(
    {
        "model": MODEL,
        "input": one_of(TEXT, array(TEXT), array(WHOLE), array(array(WHOLE))),
        "encoding_format": {"type": "string", "enum": ["float", "base64"]},
        "dimensions": WHOLE,
    },
    ["model", "input"],
    "A vector for each text",
    {"model": "embed", "input": ["The cat sleeps.", "A kitten is napping."]},
)
RERANK = describe(
    {
        "model": MODEL,
        "query": TEXT,
        "documents": array(one_of(TEXT, OBJECT)),
        "top_n": WHOLE,
        "return_documents": FLAG,
    },
    ["model", "query", "documents"],
    "The documents, the most relevant one first",
    {"model": "rerank", "query": "What is a cat?", "documents": ["A dog.", "An animal that purrs."]},
)
TRANSCRIPTION = describe(
    {
        "model": MODEL,
        "file": {"type": "string", "contentMediaType": "application/octet-stream"},
        "response_format": {"type": "string", "enum": ["json", "text", "verbose_json", "srt", "vtt"]},
        "language": TEXT,
        "prompt": TEXT,
        "temperature": NUMBER,
        "stream": FLAG,
    },
    ["model", "file"],
    "The text; or its parts, as server-sent events",
    form="multipart/form-data",
    streams=True,
)
