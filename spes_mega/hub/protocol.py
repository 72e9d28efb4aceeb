"""What both sides of the protocol agree on beside the messages themselves."""

from typing import Any

from google.protobuf.message import Message

PROTOCOL = 3
TOKENS_KEY = "tokens"
"""Key in a push's metadata: how many tokens the node trained on in the round."""


def as_dict(message: Message) -> dict[str, Any]:
    """All fields of a message as plain values, defaults too; an optional field that is not set is None."""
    return {field.name: _value(message, field) for field in message.DESCRIPTOR.fields}


def _value(message: Message, field: Any) -> Any:
    value = getattr(message, field.name)
    if field.is_repeated:
        return [as_dict(item) if isinstance(item, Message) else item for item in value]
    if field.has_presence and not message.HasField(field.name):
        return None
    return as_dict(value) if isinstance(value, Message) else value
