"""The parts of agent loops: the base class, its context, the protocol's schemas, the errors."""
