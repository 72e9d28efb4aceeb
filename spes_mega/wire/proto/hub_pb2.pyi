from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Caller(_message.Message):
    __slots__ = ("protocol", "node", "digest", "session")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    node: int
    digest: str
    session: str
    def __init__(self, protocol: _Optional[int] = ..., node: _Optional[int] = ..., digest: _Optional[str] = ..., session: _Optional[str] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("caller",)
    CALLER_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ...) -> None: ...

class JoinReply(_message.Message):
    __slots__ = ("round", "num_rounds", "pushed", "absent")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    NUM_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    PUSHED_FIELD_NUMBER: _ClassVar[int]
    ABSENT_FIELD_NUMBER: _ClassVar[int]
    round: int
    num_rounds: int
    pushed: bool
    absent: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, round: _Optional[int] = ..., num_rounds: _Optional[int] = ..., pushed: _Optional[bool] = ..., absent: _Optional[_Iterable[int]] = ...) -> None: ...

class OfferRequest(_message.Message):
    __slots__ = ("caller", "round", "payload", "total_bytes")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    round: int
    payload: str
    total_bytes: int
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ..., round: _Optional[int] = ..., payload: _Optional[str] = ..., total_bytes: _Optional[int] = ...) -> None: ...

class OfferReply(_message.Message):
    __slots__ = ("offset", "chunk_bytes", "complete")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    offset: int
    chunk_bytes: int
    complete: bool
    def __init__(self, offset: _Optional[int] = ..., chunk_bytes: _Optional[int] = ..., complete: _Optional[bool] = ...) -> None: ...

class PushOpening(_message.Message):
    __slots__ = ("caller", "round", "total_bytes", "payload", "offset")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    round: int
    total_bytes: int
    payload: str
    offset: int
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ..., round: _Optional[int] = ..., total_bytes: _Optional[int] = ..., payload: _Optional[str] = ..., offset: _Optional[int] = ...) -> None: ...

class PushReply(_message.Message):
    __slots__ = ("repeated",)
    REPEATED_FIELD_NUMBER: _ClassVar[int]
    repeated: bool
    def __init__(self, repeated: _Optional[bool] = ...) -> None: ...

class PullRequest(_message.Message):
    __slots__ = ("caller", "have_round", "part", "part_bytes")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    HAVE_ROUND_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    PART_BYTES_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    have_round: int
    part: str
    part_bytes: int
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ..., have_round: _Optional[int] = ..., part: _Optional[str] = ..., part_bytes: _Optional[int] = ...) -> None: ...

class PullOpening(_message.Message):
    __slots__ = ("round", "total_bytes", "full", "absent", "payload", "offset")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    FULL_FIELD_NUMBER: _ClassVar[int]
    ABSENT_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    round: int
    total_bytes: int
    full: bool
    absent: _containers.RepeatedScalarFieldContainer[int]
    payload: str
    offset: int
    def __init__(self, round: _Optional[int] = ..., total_bytes: _Optional[int] = ..., full: _Optional[bool] = ..., absent: _Optional[_Iterable[int]] = ..., payload: _Optional[str] = ..., offset: _Optional[int] = ...) -> None: ...

class WaitRequest(_message.Message):
    __slots__ = ("caller", "round", "timeout_s")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    round: int
    timeout_s: float
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ..., round: _Optional[int] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class WaitReply(_message.Message):
    __slots__ = ("round", "absent", "lacks_push")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ABSENT_FIELD_NUMBER: _ClassVar[int]
    LACKS_PUSH_FIELD_NUMBER: _ClassVar[int]
    round: int
    absent: _containers.RepeatedScalarFieldContainer[int]
    lacks_push: bool
    def __init__(self, round: _Optional[int] = ..., absent: _Optional[_Iterable[int]] = ..., lacks_push: _Optional[bool] = ...) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("caller",)
    CALLER_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ...) -> None: ...

class LeaveReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class NodeStatus(_message.Message):
    __slots__ = ("node", "state", "last_pushed_round", "bytes_up", "bytes_down", "absent", "experts", "update_norm")
    NODE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LAST_PUSHED_ROUND_FIELD_NUMBER: _ClassVar[int]
    BYTES_UP_FIELD_NUMBER: _ClassVar[int]
    BYTES_DOWN_FIELD_NUMBER: _ClassVar[int]
    ABSENT_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    UPDATE_NORM_FIELD_NUMBER: _ClassVar[int]
    node: int
    state: str
    last_pushed_round: int
    bytes_up: int
    bytes_down: int
    absent: bool
    experts: _containers.RepeatedScalarFieldContainer[int]
    update_norm: float
    def __init__(self, node: _Optional[int] = ..., state: _Optional[str] = ..., last_pushed_round: _Optional[int] = ..., bytes_up: _Optional[int] = ..., bytes_down: _Optional[int] = ..., absent: _Optional[bool] = ..., experts: _Optional[_Iterable[int]] = ..., update_norm: _Optional[float] = ...) -> None: ...

class RoundStatus(_message.Message):
    __slots__ = ("round", "step", "nodes", "seconds", "bytes_up", "bytes_down", "tokens", "merge_alpha", "absent", "similarity")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    BYTES_UP_FIELD_NUMBER: _ClassVar[int]
    BYTES_DOWN_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    MERGE_ALPHA_FIELD_NUMBER: _ClassVar[int]
    ABSENT_FIELD_NUMBER: _ClassVar[int]
    SIMILARITY_FIELD_NUMBER: _ClassVar[int]
    round: int
    step: int
    nodes: _containers.RepeatedScalarFieldContainer[int]
    seconds: float
    bytes_up: int
    bytes_down: int
    tokens: int
    merge_alpha: float
    absent: _containers.RepeatedScalarFieldContainer[int]
    similarity: float
    def __init__(self, round: _Optional[int] = ..., step: _Optional[int] = ..., nodes: _Optional[_Iterable[int]] = ..., seconds: _Optional[float] = ..., bytes_up: _Optional[int] = ..., bytes_down: _Optional[int] = ..., tokens: _Optional[int] = ..., merge_alpha: _Optional[float] = ..., absent: _Optional[_Iterable[int]] = ..., similarity: _Optional[float] = ...) -> None: ...

class RejectionStatus(_message.Message):
    __slots__ = ("node", "round", "reason")
    NODE_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    node: int
    round: int
    reason: str
    def __init__(self, node: _Optional[int] = ..., round: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("name", "digest", "round", "num_rounds", "step", "steps", "merges", "waiting_for", "round_seconds", "nodes", "rounds", "rejected", "trouble")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    NUM_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    MERGES_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    ROUND_SECONDS_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: str
    round: int
    num_rounds: int
    step: int
    steps: int
    merges: int
    waiting_for: _containers.RepeatedScalarFieldContainer[int]
    round_seconds: float
    nodes: _containers.RepeatedCompositeFieldContainer[NodeStatus]
    rounds: _containers.RepeatedCompositeFieldContainer[RoundStatus]
    rejected: _containers.RepeatedCompositeFieldContainer[RejectionStatus]
    trouble: str
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[str] = ..., round: _Optional[int] = ..., num_rounds: _Optional[int] = ..., step: _Optional[int] = ..., steps: _Optional[int] = ..., merges: _Optional[int] = ..., waiting_for: _Optional[_Iterable[int]] = ..., round_seconds: _Optional[float] = ..., nodes: _Optional[_Iterable[_Union[NodeStatus, _Mapping]]] = ..., rounds: _Optional[_Iterable[_Union[RoundStatus, _Mapping]]] = ..., rejected: _Optional[_Iterable[_Union[RejectionStatus, _Mapping]]] = ..., trouble: _Optional[str] = ...) -> None: ...
