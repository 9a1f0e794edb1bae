"""One row of a corpus, in whatever shape people have it, as a conversation; or the reason why not."""

import json
from dataclasses import dataclass, field
from typing import Any

from infra.provenance import canonical_json, sha256_hex
from pipeline.config import FieldsConfig

ROLES = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant",
    "tool": "tool", "function": "tool", "observation": "tool", "function_response": "tool",
}  # fmt: skip
MESSAGES = ("messages", "conversations", "conversation")
PROMPT = ("prompt", "instruction", "question", "query", "text", "problem")
INPUT = ("input", "context")
RESPONSE = ("response", "output", "answer", "completion", "solution")
SYSTEM = ("system", "system_prompt")
EXTRA_KEYS = ("tool_calls", "reasoning_content", "name", "tool_call_id")


class BadRow(Exception):
    """The row cannot be used; the message is the reason in the rejects table."""


@dataclass(frozen=True)
class Conversation:
    """Turns in order, each with `role`, `content` and what the template may need (`tool_calls`, ...).

    Attributes:
        key: digest of turns and tools.
        split: "train" or "heldout".
        file, line: where it was read; lines (rows) count from 1.
    """

    key: str
    messages: tuple[dict[str, Any], ...]
    source: str
    split: str
    file: str
    line: int
    tools: Any = None


@dataclass(frozen=True)
class Reject:
    """A row that was left out, at which stage and why."""

    source: str
    file: str
    line: int
    stage: str
    reason: str
    key: str = field(default="")


def content_key(messages: Any, tools: Any = None) -> str:
    return sha256_hex(canonical_json([messages, tools]))[:32]


def parse_row(row: Any, fields: FieldsConfig) -> tuple[tuple[dict[str, Any], ...], Any]:
    """(messages, tools) of a row.

    Raises:
        BadRow: no known shape, unknown role, no text, no user turn, or two things that exclude each other.
    """
    if not isinstance(row, dict):
        raise BadRow(f"a row must be an object with named fields, this is {type(row).__name__}")
    tools = _decoded(_column(row, fields.tools, ("tools",)), "tools")
    turns = _decoded(_column(row, fields.messages, MESSAGES), "messages")
    if turns is not None:
        if not isinstance(turns, list) or not turns:
            raise BadRow(
                "the list of turns is empty" if turns == [] else f"the turns are a {type(turns).__name__}, not a list"
            )
        messages = [_turn(t, i) for i, t in enumerate(turns)]
        system = _column(row, fields.system, SYSTEM)
        if system and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": _text(system, "system text")})
    else:
        messages = _pair(row, fields)
    if not any(m["role"] == "user" for m in messages):
        raise BadRow("no user turn")
    return tuple(messages), tools


def _pair(row: dict[str, Any], fields: FieldsConfig) -> list[dict[str, Any]]:
    prompt = _column(row, fields.prompt, PROMPT)
    if prompt is None:
        wanted = fields.prompt or f"one of {', '.join(MESSAGES + PROMPT)}"
        raise BadRow(f"no field {wanted}; fields are {', '.join(map(str, row)) or 'none'}")
    messages = []
    if system := _column(row, fields.system, SYSTEM):
        messages.append({"role": "system", "content": _text(system, "system text")})
    text = _text(prompt, "prompt")
    if more := _column(row, fields.input, INPUT):
        text += "\n\n" + _text(more, "input")
    if not text.strip():
        raise BadRow("the prompt is empty")
    messages.append({"role": "user", "content": text})
    response = _column(row, fields.response, RESPONSE)
    if response is not None:
        messages.append({"role": "assistant", "content": _text(response, "response")})
    return messages


def _turn(turn: Any, i: int) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise BadRow(f"turn {i} is a {type(turn).__name__}, not an object")
    role = turn.get("role", turn.get("from"))
    if role not in ROLES:
        raise BadRow(f"turn {i} has the unknown role {role!r}; known are {', '.join(ROLES)}")
    content = turn.get("content", turn.get("value"))
    if isinstance(content, list):  # OpenAI's parts
        if any(not isinstance(p, dict) or p.get("type") != "text" for p in content):
            raise BadRow(f"turn {i} has parts that are not text")
        content = "".join(p.get("text", "") for p in content)
    extra = {k: _decoded(turn[k], k) if k == "tool_calls" else turn[k] for k in EXTRA_KEYS if turn.get(k)}
    if content is None and "tool_calls" not in extra:
        raise BadRow(f"turn {i} has no content")
    text = _text(content if content is not None else "", f"turn {i}")
    if role in ("user", "human") and not text.strip():
        raise BadRow(f"turn {i} of the user is empty")
    return {"role": ROLES[role], "content": text, **extra}


def _column(row: dict[str, Any], name: str | None, usual: tuple[str, ...]) -> Any:
    if name is not None:
        return row.get(name)
    return next((row[n] for n in usual if row.get(n) is not None), None)


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise BadRow(f"{what} is a {type(value).__name__}, not text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise BadRow(f"{what} has half of a surrogate pair, which is no valid text") from None
    return value


def _decoded(value: Any, what: str) -> Any:
    """Lists that a column of Parquet keeps as JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as e:
        raise BadRow(f"{what} is text that is not JSON ({e.msg})") from None
