"""Find API keys in source files. Findings show a key's kind and place, never the key."""

from __future__ import annotations

import ast
import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from osmosis_ai.discovery.source import UnreadableError, parse_file, python_files, read_file
from osmosis_ai.discovery.source import relative_to_root as shown
from osmosis_ai.validate.findings import Finding, Place, finding

__all__ = ["check_secrets", "kind_of_secret", "kind_of_value", "secret_finding"]

MIN_LENGTH = 20
MIN_ENTROPY = 3.5
"""Bits per character; English words have about 3, random hex digits 4."""

# Published key prefixes, each with the characters that follow. Order matters: OpenAI's pattern matches those above it.
_KINDS = (
    ("an Anthropic key", re.compile(r"\bsk-ant-[A-Za-z0-9_-]{20,}")),
    ("an OpenRouter key", re.compile(r"\bsk-or-[A-Za-z0-9_-]{20,}")),
    ("an OpenAI key", re.compile(r"\bsk-(?:proj-|svcacct-|admin-)?[A-Za-z0-9_-]{20,}")),
    ("an AWS access key", re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b")),
    ("a GitHub token", re.compile(r"\b(?:gh[pousr]_[A-Za-z0-9]{30,}|github_pat_[A-Za-z0-9_]{40,})")),
    ("an xAI key", re.compile(r"\bxai-[A-Za-z0-9]{20,}")),
    ("a Google key", re.compile(r"\bAIza[0-9A-Za-z_-]{35}")),
    ("a Hugging Face token", re.compile(r"\bhf_[A-Za-z0-9]{30,}")),
    ("a Slack token", re.compile(r"\bxox[abprs]-[A-Za-z0-9-]{20,}")),
    ("a private key", re.compile(r"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY-----")),
)
_SECRET_NAME = re.compile(r"(key|token|secret|password|passwd|passphrase|credential)s?$", re.IGNORECASE)
_PLACEHOLDER = re.compile(
    r"your|example|dummy|placeholder|changeme|replace|xxxx|\.\.\.|…|<|>|\$\{|test|fake", re.IGNORECASE
)


def check_secrets(folder: Path, root: Path) -> Iterator[Finding]:
    """Check the Python files of a folder for keys."""
    for path in python_files(folder, root, []):
        try:
            text = read_file(path)
            lines = _named_constants(parse_file(path))
        except UnreadableError:
            continue  # the scan reports it
        said: set[int] = set()
        for number, line in enumerate(text.splitlines(), 1):
            kind = kind_of_secret(line)
            if kind is not None:
                said.add(number)
                yield secret_finding(kind, Place(shown(path, root), number))
        for name, value, number in lines:
            # A known prefix on the same line already says more than "a key, in NAME".
            if number not in said and (kind := kind_of_value(name, value)) is not None:
                said.add(number)
                yield secret_finding(kind, Place(shown(path, root), number))


def kind_of_secret(text: str) -> str | None:
    """Return the kind of known key that a text contains; None if it contains none, or only a placeholder."""
    for kind, pattern in _KINDS:
        for found in pattern.finditer(text):
            # Low entropy means a placeholder such as sk-aaaa….
            if kind == "a private key" or (not _PLACEHOLDER.search(found[0]) and _entropy(found[0]) > 3):
                return kind
    return None


def kind_of_value(name: str, value: str) -> str | None:
    """Return the kind of key that the value of a secret-like name is; None if it looks like no key or a placeholder."""
    return kind_of_secret(value) or (f"a key, in {name}" if _looks_random(value) else None)


def secret_finding(kind: str, at: Place) -> Finding:
    """Return the finding for a key in a file, without the key."""
    hint = "Revoke it, and read it from an environment variable or a platform secret instead."
    return finding("OSM208", f"the file contains what looks like {kind}", at, hint)


def _named_constants(tree: ast.Module) -> list[tuple[str, str, int]]:
    """Return string constants assigned to a variable, keyword argument or dict key with a secret-like name."""
    found: list[tuple[str, str, int]] = []

    def note(name: str, value: ast.expr | None) -> None:
        if _SECRET_NAME.search(name) and isinstance(value, ast.Constant) and isinstance(value.value, str):
            found.append((name, value.value, value.lineno))

    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                note(_target_name(target), node.value)
        elif isinstance(node, ast.AnnAssign):
            note(_target_name(node.target), node.value)
        elif isinstance(node, ast.keyword) and node.arg:
            note(node.arg, node.value)
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(key.value, str):
                    note(key.value, value)
    return found


def _target_name(target: ast.expr) -> str:
    if isinstance(target, ast.Name):
        return target.id
    if isinstance(target, ast.Attribute):
        return target.attr
    if isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant):
        return str(target.slice.value)
    return ""


def _looks_random(value: str) -> bool:
    return (
        len(value) >= MIN_LENGTH
        and not re.search(r"\s", value)
        and bool(re.search(r"\d", value))
        and bool(re.search(r"[A-Za-z]", value))
        and not _PLACEHOLDER.search(value)
        and not value.startswith(("http://", "https://", "/"))
        and _entropy(value) >= MIN_ENTROPY
    )


def _entropy(text: str) -> float:
    """Return the Shannon entropy of a text in bits per character."""
    counts = Counter(text).values()
    return -sum(count / len(text) * math.log2(count / len(text)) for count in counts)
