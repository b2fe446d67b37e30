"""The self-hosted platform: a server that runs what is submitted to it, and the client of its commands."""
