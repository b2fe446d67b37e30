"""Rollouts of a repository's own rollout server, driven over HTTP.

The worker starts the server (`server_process`) in the environment that the rollout declares (`environments`), sends it
rollouts (`wire`), and listens on loopback (`listener`) for what the server reports (`callbacks`) and for the rollouts'
model calls (`bridge`).
"""
