"""How long gRPC alone takes for the bytes of a round: no files, no checksums, no weights.

Every node streams its push to the hub, and when all have, every node is streamed its pull: as in a round, in messages
of the hub's chunk size, which all are the same bytes.
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

import grpc

_TIMES = 3


def seconds(nodes: int, up: int, down: int, chunk: int) -> float:
    """Median of a few rounds in which each of the nodes, a process of its own, sends `up` and receives `down` bytes."""
    server = _server(down, chunk)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    command = [sys.executable, __file__, f"127.0.0.1:{port}", str(up), str(chunk)]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(nodes)
    ]
    try:
        _await(processes)
        return median(_round(processes) for _ in range(_TIMES))
    finally:
        for process in processes:
            process.kill()
            process.wait()
        server.stop(None)


def _round(processes: list[Any]) -> float:
    started = time.perf_counter()
    for what in ("push", "pull"):
        for process in processes:
            process.stdin.write(what + "\n")
            process.stdin.flush()
        _await(processes)
    return time.perf_counter() - started


def _await(processes: list[Any]) -> None:
    for process in processes:
        assert process.stdout.readline(), "the process has ended"


def _messages(size: int, chunk: int) -> Iterator[bytes]:
    message = bytes(chunk)
    for _ in range(size // chunk):
        yield message


def _server(down: int, chunk: int) -> grpc.Server:
    def push(messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        return str(sum(map(len, messages))).encode()

    def pull(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        return _messages(down, chunk)

    methods = {
        "Push": grpc.stream_unary_rpc_method_handler(push),
        "Pull": grpc.unary_stream_rpc_method_handler(pull),
    }
    server = grpc.server(ThreadPoolExecutor())
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Alone", methods),))
    return server


def _node(address: str, up: int, chunk: int) -> None:
    channel = grpc.insecure_channel(address)
    push, pull = channel.stream_unary("/Alone/Push"), channel.unary_stream("/Alone/Pull")
    push(iter([b""]), wait_for_ready=True)
    print("ready", flush=True)
    for line in sys.stdin:
        if line.strip() == "push":
            push(_messages(up, chunk))
        else:
            for _ in pull(b""):
                pass
        print("done", flush=True)


if __name__ == "__main__":
    _node(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
