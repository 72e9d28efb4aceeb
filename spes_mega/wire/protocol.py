"""What both sides of the protocol agree on beside the messages themselves."""

from typing import Any

from google.protobuf.message import Message

from spes_mega.quoting import printable

PROTOCOL = 3
TOKENS_KEY = "tokens"
"""Key in a push's metadata: how many tokens the node trained on in the round."""


def as_dict(message: Message) -> dict[str, Any]:
    """All fields of a message as plain values, defaults too; an optional field that is not set is None.

    Texts are safe to show.
    """
    return {field.name: _value(message, field) for field in message.DESCRIPTOR.fields}


def _value(message: Message, field: Any) -> Any:
    value = getattr(message, field.name)
    if field.is_repeated:
        return [_plain(item) for item in value]
    if field.has_presence and not message.HasField(field.name):
        return None
    return _plain(value)


def _plain(value: Any) -> Any:
    if isinstance(value, Message):
        return as_dict(value)
    return printable(value) if isinstance(value, str) else value
