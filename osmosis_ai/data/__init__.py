"""Read dataset rows from any supported file format."""
