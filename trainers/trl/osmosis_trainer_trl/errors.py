"""Errors that end a training run early.

TrainerError
├── JobError        the job can't be trained as written
├── ProtocolError   the runtime refused a request, went away, or broke the contract in its answer
└── Stopped         the runtime reports that the run was stopped, which isn't a failure
"""


class TrainerError(Exception):
    """Ends the run; its message is the last line of the log."""


class JobError(TrainerError):
    pass


class ProtocolError(TrainerError):
    pass


class Stopped(TrainerError):  # noqa: N818 - it is no error
    pass
