"""The trainer that `osmosis train run` starts: TRL's GRPO over rollouts which the runtime makes and scores.

The two are processes in environments of their own and meet over HTTP only; docs/training-protocol.md is their contract.
`__main__` is the process, `job` what it is told, `settings` what TRL is told, `runtime` the client of the runtime,
`policy` the server of the model in training, `sampling` its tokens, and `training` the GRPO run.
"""
