"""The hub: holds the global weights, takes what the nodes push, and closes the rounds of a run."""

import os

# The system's resolver: gRPC's own takes one address of a name in /etc/hosts, and knows no other services of names.
# gRPC reads this when it is imported.
os.environ.setdefault("GRPC_DNS_RESOLVER", "native")
