from . import length
