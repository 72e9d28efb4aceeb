"""Who a caller is, by its token and certificate."""

import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc

from spes_mega.errors import AccessError, HubRefusedError
from spes_mega.security.keys import HubKeys, node_name, token_hash

ANYONE = "anyone"
"""The caller by a token that all nodes share."""


@dataclass(frozen=True)
class Guard:
    """Who may speak to a hub, and how the line is protected."""

    callers: Mapping[bytes, str] = field(default_factory=dict)
    """SHA-256 of a token -> the caller that it belongs to; without any, everybody may call."""
    keys: HubKeys | None = None
    mutual: bool = False
    """Callers have to show a certificate too."""

    @classmethod
    def of(cls, keys: HubKeys | None, shared_token: str | None, mutual: bool) -> "Guard":
        """A shared token takes the place of the tokens in `keys`. Raises AccessError: mutual TLS without keys."""
        if mutual and keys is None:
            raise AccessError("--mutual-tls needs the certificates of --keys DIR (`spes-mega keys new` makes them)")
        if shared_token is not None:
            return cls({token_hash(shared_token): ANYONE}, keys, mutual)
        return cls(keys.callers if keys else {}, keys, mutual)

    def credentials(self) -> Any:
        """gRPC's credentials of the port; None for plaintext."""
        if self.keys is None:
            return None
        pair = [(self.keys.key, self.keys.certificate)]
        return grpc.ssl_server_credentials(pair, self.keys.ca, require_client_auth=self.mutual)

    def caller(self, metadata: Any) -> str | None:
        """Whose token a call carries; None if it is nobody's. Takes as long for a wrong token as for a right one."""
        if not self.callers:
            return ANYONE
        given = dict(metadata).get("authorization", "")
        given = given if isinstance(given, str) else given.decode("ascii", "replace")
        shown, found = token_hash(given.removeprefix("Bearer ")), None
        for known, caller in self.callers.items():
            if hmac.compare_digest(known, shown):
                found = caller
        return found

    def check_node(self, node: int, context: Any) -> None:
        """Raises HubRefusedError unless token and certificate of a call are those of `node`."""
        caller = self.caller(context.invocation_metadata())
        if caller not in (ANYONE, node_name(node)):
            raise HubRefusedError(
                f"the token is that of {caller}, and the caller says that it is node {node}: give each node the keys "
                f"of its own number (--keys DIR/{node_name(node)})"
            )
        if self.mutual and (names := _certificate_names(context)) != [node_name(node)]:
            raise HubRefusedError(
                f"the certificate is that of {', '.join(names) or 'nobody'}, and the caller says that it is node "
                f"{node}: give each node the keys of its own number (--keys DIR/{node_name(node)})"
            )


def _certificate_names(context: Any) -> list[str]:
    return [name.decode(errors="replace") for name in context.auth_context().get("x509_common_name", [])]
