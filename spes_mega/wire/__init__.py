"""What hub and node both speak: messages, frames, payloads, and which tensor travels in what codec."""

import os

# The system's resolver: gRPC's own takes one address of a name in /etc/hosts, and knows no other services of names.
# gRPC reads this when it is imported.
os.environ.setdefault("GRPC_DNS_RESOLVER", "native")
