"""What is wrong with a repository. One module per area; nothing here runs the repository's code."""

from osmosis_ai.validate.findings import CODES, Code, Finding, Place, Severity, finding

__all__ = ["CODES", "Code", "Finding", "Place", "Severity", "finding"]
