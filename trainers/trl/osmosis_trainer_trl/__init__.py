"""The trainer that `osmosis train run` starts: TRL's GRPO on rollouts that the runtime runs and scores.

Trainer and runtime are separate processes in separate environments, and talk over HTTP only; docs/training-protocol.md
specifies how. `__main__` is the process, `job` reads the job file, `settings` maps it to TRL's options, `runtime` is
the client of the runtime, `policy` serves the model in training, `sampling` samples it, and `training` runs GRPO.
"""
