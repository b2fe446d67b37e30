"""What is in a repository, read from disk without running any of it."""

from osmosis_ai.discovery.repository import McpSource, Repository, find_repository, parse_mcp_source
from osmosis_ai.discovery.scan import (
    Component,
    Problem,
    ScanResult,
    discovered_refs,
    resolve_function,
    scan_functions,
    scan_tools,
)

__all__ = [
    "Component",
    "McpSource",
    "Problem",
    "Repository",
    "ScanResult",
    "discovered_refs",
    "find_repository",
    "parse_mcp_source",
    "resolve_function",
    "scan_functions",
    "scan_tools",
]
