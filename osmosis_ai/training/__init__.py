"""Train a model on the repository: the runtime rolls out and scores, and a trainer in its own environment learns.

The two talk over HTTP on loopback (`contract`). The trainer serves the policy that it trains. The rollouts of each step
are an ordinary run in the store, whose model is called with tokens (`models.policy`).
"""
