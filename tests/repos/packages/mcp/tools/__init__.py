from .math import multiply
from .text import reverse

__all__ = ["multiply", "reverse"]
