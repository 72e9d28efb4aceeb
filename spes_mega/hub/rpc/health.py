"""The health service: whether the hub is there, and whether it takes part in rounds."""

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthServicer

SERVICE = "spes_mega.hub.v1.Hub"
"""Serves until the hub drains; the process as a whole, whose name is empty, serves until its end."""
CHECK = "/grpc.health.v1.Health/Check"
"""The one method that is there: `Watch` would hold a thread, and a name of any length, for as long as a peer likes."""


class Health(HealthServicer):
    """Answers for these two names. Needs no token."""

    def __init__(self) -> None:
        self._serving = dict.fromkeys(("", SERVICE), False)

    def set(self, serving: bool, *names: str) -> None:
        self._serving.update(dict.fromkeys(names, serving))

    def Check(self, request: HealthCheckRequest, context: grpc.ServicerContext) -> HealthCheckResponse:
        serving = self._serving.get(request.service)
        if serving is None:
            context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        return HealthCheckResponse(status=HealthCheckResponse.SERVING if serving else HealthCheckResponse.NOT_SERVING)
