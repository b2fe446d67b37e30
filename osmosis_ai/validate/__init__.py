"""Checks of a repository, one module per area. None of them imports its code into this process."""

from osmosis_ai.validate.findings import CODES, Code, Finding, Place, Severity, examples, finding

__all__ = ["CODES", "Code", "Finding", "Place", "Severity", "examples", "finding"]
