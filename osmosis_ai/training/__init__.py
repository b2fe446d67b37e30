"""Train a model on the repository: rollouts and scores are ours, and a trainer in an environment of its own learns.

The two talk over HTTP on loopback (`contract`). The trainer serves the policy that it trains; the rollouts of each step
are a run of the store like any other, called with tokens (`models.policy`).
"""
