"""What agent loops are made of: the base class, its context, the protocol's schemas, the errors."""
