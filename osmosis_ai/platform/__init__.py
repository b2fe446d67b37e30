"""The self-hosted platform: a server that runs submitted evaluations and training runs, and its client."""
