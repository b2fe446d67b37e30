"""Clients for the models that a run calls. `engines` lists them; importing this package loads none."""
