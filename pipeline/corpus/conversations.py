"""Conversations as corpora spell them → messages as chat templates expect them.

Read are lists of messages with `role` and `content`, ShareGPT's `from` and `value`, and either as a JSON string. What is
the same in another spelling becomes equal: nulls that Arrow puts into structs, Arrow's maps, calls and tools as JSON
strings, parts of text. Everything else stays as it is, for the template to see.
"""

from __future__ import annotations

import json
from typing import Any

from pipeline.corpus.chat_spans import FLAGS, Message
from pipeline.corpus.dropped import Dropped

SHAREGPT_ROLES = {
    "human": "user", "user": "user", "system": "system", "gpt": "assistant", "chatgpt": "assistant", "bard": "assistant",
    "bing": "assistant", "model": "assistant", "assistant": "assistant", "function_call": "assistant", "tool": "tool",
    "observation": "tool", "function_response": "tool",
}  # fmt: skip
_TEXTS = frozenset({"text", "input_text", "output_text"})
_THOUGHTS = frozenset({"thinking", "reasoning"})  # parts that some templates print
_MEDIA = ("image", "video", "audio")
_MEDIA_COLUMNS = (*_MEDIA, *(f"{kind}s" for kind in _MEDIA))


def read_messages(value: Any, name: str, row: dict[str, Any], *, arrow: bool = False) -> list[Message]:
    """Return the messages that the column `name` of a row holds.

    arrow: the row comes from Arrow, whose structs have a null for every key that some other row has. Raises Dropped:
    `wrong_type`, `empty`, `invalid_utf8`, or `content_image` (video, audio, part) for what no text teacher reads.
    """
    value = _parsed(value, name)
    if arrow:
        value = without_arrow(value)
    if not isinstance(value, list):
        raise Dropped("wrong_type", f"{name} should be a list of messages, found {type(value).__name__}")
    if not value:
        raise Dropped("empty")
    messages = [_message(item, name) for item in value]
    system = row.get("system")
    if _is_sharegpt(value[0]) and isinstance(system, str) and system.strip() and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    for column in _MEDIA_COLUMNS:
        if row.get(column) and column != name:
            kind = column.removesuffix("s")
            if any(f"<{kind}>" in m["content"] for m in messages if isinstance(m.get("content"), str)):
                raise Dropped(f"content_{kind}", f"the column {column} belongs to the conversation")
    return messages


def read_tools(value: Any, name: str, *, arrow: bool = False) -> list[Any] | None:
    """Return the tools of a conversation: JSON schemas, in a list. Raises Dropped("wrong_type")."""
    value = _parsed(value, name) if value != "" else None
    if isinstance(value, list):
        value = [_parsed(tool, name) for tool in value]
    if arrow:
        value = without_arrow(value)
    if isinstance(value, dict):
        value = [value]
    if value is not None and not (isinstance(value, list) and all(isinstance(tool, dict) for tool in value)):
        raise Dropped("wrong_type", f"{name} should be a list of JSON schemas, or that as a JSON string")
    return value or None


def without_arrow(value: Any) -> Any:
    """Return a value without the nulls of Arrow's structs, and with its maps (lists of pairs) as dicts."""
    if isinstance(value, dict):
        return {k: without_arrow(v) for k, v in value.items() if v is not None or (k == "content" and "role" in value)}
    if isinstance(value, list):
        if value and all(isinstance(item, tuple) and len(item) == 2 for item in value):
            return {k: without_arrow(v) for k, v in value if v is not None}
        return [without_arrow(item) for item in value]
    return value


def _parsed(value: Any, name: str) -> Any:
    """Return a value, or what its JSON string spells."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise Dropped("wrong_type", f"{name} is a string that is not JSON") from None


def _is_sharegpt(message: Any) -> bool:
    return isinstance(message, dict) and "role" not in message and "from" in message


def _message(value: Any, name: str) -> Message:
    value = _parsed(value, name)
    if _is_sharegpt(value):
        value = _from_sharegpt(value)
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise Dropped("wrong_type", f"{name} should be a list of messages with a role")
    message = {k: v for k, v in value.items() if v is not None or k == "content"}
    if message["role"] == "function":  # as OpenAI once spelt it
        message["role"] = "tool"
    if isinstance(message.get("tool_calls"), str):
        message["tool_calls"] = _parsed(message["tool_calls"], "tool_calls")
    if isinstance(message.get("function_call"), dict) and not message.get("tool_calls"):
        message["tool_calls"] = [{"type": "function", "function": message.pop("function_call")}]
    calls = message.get("tool_calls", [])
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise Dropped("wrong_type", "tool_calls should be a list of calls")
    if not isinstance(message.get("loss", False), bool):  # a figure about the turn, no flag
        del message["loss"]
    for flag in FLAGS:
        if message.get(flag, 1) not in (0, 1):
            raise Dropped("wrong_type", f"{flag} {message[flag]!r} of a turn: only 0 and 1 are known")
    for column in _MEDIA_COLUMNS:
        if message.get(column):
            raise Dropped(f"content_{column.removesuffix('s')}", f"a message holds {column}")
    content = message.get("content")
    if isinstance(content, list):
        message["content"] = [_part(part) for part in content]
    elif content is not None:
        check_text(content, "content")
    return message


def _from_sharegpt(value: dict[str, Any]) -> Message:
    role = SHAREGPT_ROLES.get(str(value["from"]))
    if role is None:
        raise Dropped("wrong_type", f"from {value['from']!r} is no known role: {', '.join(SHAREGPT_ROLES)}")
    rest = {k: v for k, v in value.items() if k not in ("from", "value")}
    content = value.get("value", rest.get("content"))
    if value["from"] != "function_call":
        return {"role": role, **rest, "content": content}
    calls = _parsed(content, "a function_call")
    calls = calls if isinstance(calls, list) else [calls]
    if not calls or not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise Dropped("wrong_type", "a function_call should be JSON with a name and arguments")
    made = [{"type": "function", "function": {**call, "arguments": call.get("arguments", {})}} for call in calls]
    return {"role": role, **rest, "content": "", "tool_calls": made}


def _part(part: Any) -> dict[str, Any]:
    """Return one part of a content. Raises Dropped for parts that are no text."""
    if isinstance(part, str):
        part = {"type": "text", "text": part}
    if not isinstance(part, dict):
        raise Dropped("wrong_type", "content should be a string or a list of parts")
    kind = str(part.get("type", "text"))
    if kind in _TEXTS:
        check_text(part.get("text"), "content")
        return {**part, "type": "text"}
    if kind in _THOUGHTS:
        return part
    medium = next((m for m in _MEDIA if m in kind), "part")
    raise Dropped(f"content_{medium}", f"a message has a part of the type {kind[:40]!r}, which is no text")


def check_text(value: Any, name: str) -> str:
    """Return a string. Raises Dropped: `wrong_type`, or `invalid_utf8` for half of a surrogate pair, which JSON may spell."""
    if not isinstance(value, str):
        raise Dropped("wrong_type", f"{name} is {type(value).__name__}, expected a string")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise Dropped("invalid_utf8", name) from None
    return value
