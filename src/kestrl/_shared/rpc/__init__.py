"""gRPC servers and clients with credentials, deadlines, trace context and typed errors.

Domain code never sees `grpc`: a server's handlers raise `KestrlError`, which travels as a status plus the `Failure`
message in trailing metadata; `call` and `stream` raise it again as `FailureError` on the other side. Every call carries
a deadline, the W3C trace context and the credential for calls of this caller to this callee
(`kestrl._shared.credentials`).
"""

from kestrl._shared.rpc.bundle import Bundle
from kestrl._shared.rpc.client import Channel, call, channel, connected, stream
from kestrl._shared.rpc.server import serve

__all__ = ["Bundle", "Channel", "call", "channel", "connected", "serve", "stream"]
