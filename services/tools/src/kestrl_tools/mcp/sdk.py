"""What the MCP SDK has in private modules only; nothing else imports from these."""

from mcp.client._transport import TransportStreams
from mcp.shared._httpx_utils import create_mcp_http_client

__all__ = ["TransportStreams", "create_mcp_http_client"]
