"""Drive a repository's own rollout server over HTTP.

The worker starts the server (`server_process`) in the environment that the rollout declares (`environments`) and sends
it rollouts (`wire`). On loopback (`listener`), it receives the server's reports (`callbacks`) and the rollouts' model
calls (`bridge`).
"""
